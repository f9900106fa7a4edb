"""Files that the report writes.  Errors name the file: the system says of a file that it cannot
open which one it is, but not of a disk that is full.  Nothing is replaced but earlier outputs."""
import contextlib
import os
from pathlib import Path

from load import ReportError

# How an earlier output of a kind begins.
JSON, PAGE = (b"{", b"["), (b"<!doctype html",)
# What a run writes for itself, and reads when it goes on.
RUN_FILES = ("log.txt", "deck.toml", "status.json", "steps.jsonl")
RUN_FOLDERS = ("trace", "checkpoints")


@contextlib.contextmanager
def writing(path, **keywords):
    """The file, open for text in UTF-8.  Errors: OSError that names it."""
    try:
        # Half of a surrogate pair, as a JSON file may hold it, becomes a question mark.
        with open(path, "w", encoding="utf-8", errors="replace", **keywords) as out:
            yield out
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_text(path, text):
    with writing(path) as out:
        out.write(text)


def refuse_foreign(path, begins):
    """Errors: ReportError where a file is there that is neither empty nor begins as an earlier
    output of its kind does.  Devices and pipes take what is written, and keep nothing."""
    if not os.path.isfile(path) or not os.path.getsize(path):
        return
    with open(path, "rb") as file:
        head = file.read(4096).lstrip(b" \t\r\n\xef\xbb\xbf").lower()
    if not head.startswith(begins):
        raise ReportError(
            f"{path} is there and was not written by ballast-report, so it is not replaced; name"
            " another place (--out, --json, --perfetto), or remove it"
        )


def refuse_of_run(path, runs):
    """Errors: ReportError where a path is a run's own file, or lies in a folder of its own."""
    place = Path(path).resolve()
    for run in runs:
        inside = (run / "trace").is_dir() or run.resolve().name != "trace"
        root = run if inside else run.resolve().parent  # a run may be named by its trace
        for folder in (root / name for name in RUN_FOLDERS):
            own = folder.resolve()
            # The report on a folder of traces lies in it, as that on a run does.
            if own in (place, *place.parents) and own != run.resolve():
                raise ReportError(
                    f"{path} lies in {folder}, which holds the run's own files; name another place"
                    " (--out, --json, --perfetto)"
                )
        _refuse_run_files(path, root)
    if (place.parent / "deck.toml").is_file():  # a run that is not reported on
        _refuse_run_files(path, place.parent)


def _refuse_run_files(path, root):
    for file in (root / name for name in RUN_FILES):
        there = os.path.exists(path) and file.exists()
        if Path(path).resolve() == file.resolve() or (there and os.path.samefile(path, file)):
            raise ReportError(
                f"{path} is {file.name} of the run {root}, which is never replaced; name another"
                " file"
            )


def refuse_targets(folder, runs, metrics=None, timeline=None):
    """Checks outputs before the first is written: report.html and metrics.json of the folder, and
    the files of --json and --perfetto.  Errors: ReportError."""
    refuse_of_run(folder, runs)
    page, beside = folder / "report.html", folder / "metrics.json"
    refuse_foreign(page, PAGE)
    asked = [file for file in (metrics, timeline) if file]
    for file in (beside, *asked):
        refuse_of_run(file, runs)
        refuse_foreign(file, JSON)
    # --json may name the metrics.json that is written anyway.
    _refuse_shared(metrics, (page,))
    _refuse_shared(timeline, (page, beside, metrics))


def refuse_tables(files, metrics=None, timeline=None):
    """The same of tables, {path: how one that is there may begin}."""
    for path, begins in files.items():
        refuse_foreign(path, begins)
    for asked in (metrics, timeline):
        _refuse_shared(asked, files)


def _refuse_shared(asked, others):
    if asked and os.path.realpath(asked) in [os.path.realpath(o) for o in others if o]:
        raise ReportError(f"{asked}: two outputs have this place; give each a file of its own")
