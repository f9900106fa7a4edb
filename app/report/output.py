"""Files that the report writes, so that an error names the file: the system says of a file that it
cannot open which one it is, but not of a disk that is full."""
import contextlib


@contextlib.contextmanager
def writing(path, **keywords):
    """The file, open for text in UTF-8.  Errors: OSError that names it."""
    try:
        with open(path, "w", encoding="utf-8", **keywords) as out:
            yield out
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_text(path, text):
    with writing(path) as out:
        out.write(text)
