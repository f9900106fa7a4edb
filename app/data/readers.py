"""Input files cut into pieces of a few MiB that workers read on their own, and the rows of a piece.

The cuts depend on the files alone, never on the number of workers."""
import codecs
import contextlib
import json
import os
import re
import sys
from collections import namedtuple

import strict_json
from errors import DataError, Unreadable, refuse_irregular
from tools import of_table

LONGEST_TEXT = 16 << 20  # a longer text file becomes several documents, cut at line ends
STREAM_END = b"\xff" * 4 + bytes(4)  # of an Arrow stream
BLOCK_BYTES = 1 << 22
BETWEEN_ELEMENTS = re.compile(r"[ \t\r\n,]*")
FORMATS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "array",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
# Data in a form that is not read; of other endings it is not known that they hold data.
UNREAD = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4", ".7z", ".tar", ".tgz", ".csv", ".tsv")
CARDS = (  # files that a data set has beside its data, or that say which these are
    "readme.md",
    "dataset_infos.json",
    "dataset_info.json",
    "dataset_dict.json",
    "state.json",
)
SPLITS = ("train", "training", "validation", "valid", "val", "test", "testing", "dev", "eval")

# begin and end: bytes (lines, array, text), row groups (parquet), record batches (arrow)
Piece = namedtuple("Piece", "format path begin end size")


def arrow():
    """pyarrow, needed for Parquet and Arrow files alone."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "Parquet and Arrow files need pyarrow, which is not installed here"
            f" ({error}); jobs/setup.sh installs it, or: pip install pyarrow"
        ) from error
    return pyarrow


def damage():
    """What is raised over files that hold other than they should."""
    kinds = (OSError, ValueError, KeyError, NotImplementedError, RecursionError)
    return (*kinds, sys.modules["pyarrow"].ArrowException) if "pyarrow" in sys.modules else kinds


@contextlib.contextmanager
def named(path):
    """Errors: DataError that names the file, of what a library says without a name."""
    try:
        yield
    except damage() as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: {said}; is it damaged?") from error


def files(inputs, split):
    """(paths, notes): the files of files and folders, in order."""
    found, notes = [], []
    for path in inputs:
        if os.path.isdir(path):
            listed = in_folder(path, split, notes)
            if not listed:
                raise DataError(
                    f"{path}: no regular file of {', '.join(FORMATS)} is in this folder"
                )
            found += listed
        elif os.path.exists(path):
            found.append(path)
        else:
            raise DataError(f"{path}: no such file or folder")
    for path in found:
        refuse_irregular(path, "copy what it holds to a file")
        if os.path.splitext(path)[1] not in FORMATS:
            raise DataError(f"{path}: not one of {', '.join(FORMATS)} (compressed: unpack it)")
    return found, notes


def in_folder(folder, split, notes):
    """Files of a folder: written by datasets.save_to_disk, or as it lies on the hub, or any."""
    names = os.path.join(folder, "dataset_dict.json")
    if os.path.isfile(names):
        splits = described(names, "splits", str)
        taken = split or "train"
        if taken not in splits:
            raise DataError(f"{folder} has the splits {', '.join(splits)}; name one with --split")
        notes.append(f"{folder}: split {taken} of {', '.join(splits)}")
        folder = os.path.join(folder, taken)
    state = os.path.join(folder, "state.json")
    if os.path.isfile(state):
        told = described(state, "_data_files", dict)
        with named(state):
            return [os.path.join(folder, str(f["filename"])) for f in told]
    refuse_configurations(folder)
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        found += [os.path.join(place, n) for n in sorted(names)]
    found = regular(folder, found, notes)
    refuse_unread(folder, [p for p in found if not is_card(p)])
    known = [p for p in found if os.path.splitext(p)[1] in FORMATS]
    rows = [p for p in known if not is_text(p) and not is_card(p)]
    # Of a folder of texts the cards below it are texts too.
    known = [p for p in known if not is_card(p) or (not rows and os.path.dirname(p) != folder)]
    data = rows or known
    if len(data) < len(known):
        left = ", ".join(os.path.relpath(p, folder) for p in known if is_text(p))
        if len(known) > 2 * len(data):
            raise DataError(
                f"{folder}: {len(known) - len(data)} texts ({shortened(left)}) lie beside"
                f" {len(data)} file(s) of rows; name the files themselves, or move one kind away"
            )
        notes.append(f"{folder}: texts beside files of rows are left out: {shortened(left)}")
    taken = one_split(folder, data, split, notes)
    places = sorted({os.path.dirname(os.path.relpath(p, folder)) or "." for p in taken})
    if rows and len(places) > 1:  # pieces of a split as a rule, at times a language each
        notes.append(
            f"{folder}: rows of {len(places)} folders together: {shortened(', '.join(places))}"
        )
    return taken


def regular(folder, paths, notes):
    """The paths without FIFOs, sockets and devices; those named as data are told.  A link to
    nothing stays, so that what is missing is refused later."""
    kept, left = [], []
    for path in paths:
        odd = os.path.exists(path) and not os.path.isfile(path)
        (left if odd else kept).append(path)
    if named_as_data := [p for p in left if os.path.splitext(p)[1].lower() in (*FORMATS, *UNREAD)]:
        listed = ", ".join(os.path.relpath(p, folder) for p in named_as_data)
        notes.append(f"{folder}: left out as no regular files: {shortened(listed)}")
    return kept


def described(path, key, kind):
    """The list `key` of a JSON file of datasets.save_to_disk."""
    with named(path), open(path, encoding="utf-8") as stream:
        found = json.load(stream)
    told = found.get(key) if isinstance(found, dict) else None
    if not isinstance(told, list) or not all(isinstance(entry, kind) for entry in told):
        raise DataError(f"{path}: no list {key!r} is in it; is it damaged?")
    return told


def refuse_unread(folder, paths):
    """Errors: DataError where data lie in files that would be passed over without a word."""
    rows = any(os.path.splitext(p)[1] in FORMATS and not is_text(p) for p in paths)
    unread = []
    for path in paths:
        ending = os.path.splitext(path)[1]
        other_case = ending not in FORMATS and ending.lower() in FORMATS
        if ending.lower() in UNREAD or (other_case and not (rows and is_text(path))):
            unread.append(os.path.relpath(path, folder))
    if unread:
        raise DataError(
            f"{folder}: cannot read {shortened(', '.join(unread))}; unpack them, convert them to"
            f" one of {', '.join(FORMATS)} (in small letters), or move them away"
        )


def card_configurations(folder):
    """Names of the configurations in the front matter of a data set's card."""
    card = os.path.join(folder, "README.md")
    if not os.path.isfile(card):
        return []
    with open(card, encoding="utf-8", errors="replace") as stream:
        front = re.match(r"\ufeff?---[ \t]*\n(.*?)^---", stream.read(), re.M | re.S)
    # The key of the front matter ends where a line begins with the next one.
    listed = front and re.search(
        r"""^["']?configs["']?:(.*?)(?=^[^\s-]|\Z)""",
        re.sub(r"^\s*#.*\n", "", front[1], flags=re.M),
        re.M | re.S,
    )
    names = r"""\bconfig_name["']?\s*:\s*["']?([^"',}#\n]+)"""
    return [name.strip() for name in re.findall(names, listed[1])] if listed else []


def refuse_configurations(folder):
    """Errors: DataError where a folder holds several data sets, such as one a language."""
    if len(names := sorted(set(card_configurations(folder)))) > 1:
        raise DataError(
            f"{folder}: README.md lists several configurations: {shortened(', '.join(names))}; name"
            " the folder or the files of the one that is wanted, or of each of them"
        )


def is_card(path):
    """Whether a file of a folder tells of the data set: its card, its licence, its descriptions."""
    name = os.path.basename(path).lower()
    return name in CARDS or os.path.splitext(name)[0] in ("license", "licence", "copying", "notice")


def is_text(path):
    return FORMATS.get(os.path.splitext(path)[1].lower()) == "text"


def shortened(text, most=300):
    return text if len(text) <= most else text[:most] + " ..."


def split_name(folder, path, asked):
    """(full name, split) of the nearest part of a path that begins with a split, or ends with one
    behind a - or a dot, or has the one that is `asked` for as a word: such as (train_sft, train) of
    data/train_sft-00000-of-00002.parquet; or (None, None).  Texts have whole names alone: others
    begin with such words by chance."""
    stem = os.path.splitext(os.path.relpath(path, folder))[0]
    for part in reversed(stem.split(os.sep)):
        # Numbers of pieces, and the hash that older writers put behind them, name no split.
        full = re.sub(r"(-of-\d+)-[0-9a-f]{16}$", r"\1", part)
        full = re.sub(r"([-._ ](of[-._ ])?(part|shard|chunk)?\d+[a-z]?)+$", "", full)
        full = re.sub(r"[-._ ][a-z]{2}$", "", full)
        words = re.split(r"[-._ 0-9]+", part) + re.split(r"[-._ ]+", part)
        if asked and (asked == full or asked in words):
            return (asked if full.rstrip("0123456789") == asked else full), asked
        ends = (words[0], re.split(r"[-.]", full)[-1], full)
        for split in SPLITS:
            if split == full or (not is_text(path) and split in ends):
                return (split if full.rstrip("0123456789") == split else full), split
    return None, None


def one_split(folder, paths, split, notes):
    """The files of one split where names tell splits apart (train-00000-of-00001.parquet).

    Errors: DataError where names leave open what belongs together."""
    told = {path: split_name(folder, path, split) for path in paths}
    fulls = sorted({full for full, _ in told.values() if full})
    listed = f"{folder}: its files are of the splits {shortened(', '.join(fulls))}"
    remedy = "; name one with --split NAME, or name the files themselves"
    bare = [os.path.relpath(path, folder) for path in paths if not told[path][0]]
    # A page of a manual may be called train, or its folder dev.
    by_chance = all(map(is_text, paths)) and (bare or "train" not in fulls or len(fulls) < 2)
    if not split and (not fulls or by_chance):
        return paths
    if bare and not split:
        raise DataError(f"{listed}, and of none: {shortened(', '.join(bare))}{remedy}")
    of_split = {kind for _, kind in told.values()}
    taken = split or next((s for s in SPLITS if s in of_split), None)
    if not split and not taken.startswith("train") and taken not in fulls:
        raise DataError(f"{listed}, none of them train{remedy}")
    chosen = {full for full, kind in told.values() if taken in (full, kind)}
    if split in chosen:
        chosen = {split}
    if not chosen:
        raise DataError(f"{folder}: no file's name says split {split}" + (remedy if fulls else ""))
    if len(chosen) > 1:
        raise DataError(f"{listed}; {', '.join(sorted(chosen))} are each a {taken}{remedy}")
    if len(fulls) > 1 or bare:
        notes.append(f"{folder}: split {min(chosen)} of {', '.join(fulls)}")
    return [path for path in paths if told[path][0] in chosen]


def pieces(paths, piece_bytes):
    """Groups of pieces of about `piece_bytes`, one group a shard."""
    groups, size = [[]], 0
    for path in paths:
        for piece in pieces_of(path, piece_bytes):
            if size and size + piece.size > piece_bytes:
                groups.append([])
                size = 0
            groups[-1].append(piece)
            size += piece.size
    return [group for group in groups if group]


def pieces_of(path, piece_bytes):
    with named(path):
        yield from cut(path, piece_bytes)


def cut(path, piece_bytes):
    kind = FORMATS[os.path.splitext(path)[1]]
    size = os.path.getsize(path)
    if kind == "array" and first_character(path) == "{":
        kind = "lines"
        refuse_one_object(path)
    if kind == "array":
        yield from array_pieces(path, piece_bytes)
    elif kind == "lines" or (kind == "text" and size > LONGEST_TEXT):
        step = piece_bytes if kind == "lines" else LONGEST_TEXT
        for begin in range(0, size, step):
            end = min(size, begin + step)
            yield Piece(kind, path, begin, end, end - begin)
    elif kind == "text":
        yield Piece(kind, path, 0, size, size)
    elif kind == "parquet":
        meta = arrow().parquet.ParquetFile(path).metadata
        for g in range(meta.num_row_groups):
            yield Piece(kind, path, g, g + 1, meta.row_group(g).total_byte_size)
    else:
        yield from arrow_pieces(path, piece_bytes)


def first_character(path):
    with open(path, "rb") as stream:
        return stream.read(4096).lstrip(b" \t\r\n\xef\xbb\xbf")[:1].decode("latin-1")


def refuse_one_object(path):
    """A .json file of objects has one a line, or is one object that is no row."""
    with open(path, "rb") as stream:
        lines = (line.strip(b" \t\r\n\xef\xbb\xbf") for line in stream)
        first = next((line for line in lines if line), b"")
    if not first.endswith(b"}"):
        raise DataError(
            f"{path}: one JSON object over several lines; rows are the elements of an array"
            " ([...]), or objects of one line each"
        )


def record_batches(path):
    """Record batches of an Arrow file, mapped: a stream (datasets) or a file with a footer."""
    pa = arrow()
    with open(path, "rb") as stream:
        head = stream.read(6)
        stream.seek(-min(8, os.path.getsize(path)), os.SEEK_END)
        tail = stream.read()
    footed = head == b"ARROW1"
    # Before Arrow 0.15 messages, and so the end, began with no FF FF FF FF.
    if not footed and not tail.endswith(STREAM_END if head[:4] == STREAM_END[:4] else bytes(4)):
        raise DataError(
            f"{path}: the mark at the end of an Arrow stream is missing: the file was cut off, or"
            " its writer never closed it; fetch or write it again"
        )
    source = pa.memory_map(path)
    if not footed:
        yield from pa.ipc.open_stream(source)
        return
    reader = pa.ipc.open_file(source)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def arrow_pieces(path, piece_bytes):
    begin, size, number = 0, 0, 0
    for number, batch in enumerate(record_batches(path), 1):
        size += batch.nbytes
        if size >= piece_bytes:
            yield Piece("arrow", path, begin, number, size)
            begin, size = number, 0
    if begin < number:
        yield Piece("arrow", path, begin, number, size)


def array_pieces(path, piece_bytes):
    """Byte ranges of a JSON array, each of whole elements; read a few MiB at a time."""
    decoder = json.JSONDecoder()
    # Latin-1 keeps a character a byte, so positions are offsets; strings need no meaning here.
    with open(path, encoding="latin-1", newline="") as stream:
        text, base = stream.read(BLOCK_BYTES), 0
        at = array_begin(path, text)
        begin = at
        while True:
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            if at < len(text) and text[at] == "]":
                if begin < at:
                    yield Piece("array", path, base + begin, base + at, at - begin)
                refuse_after_array(path, text[at + 1 :], base + at + 1, stream)
                return
            try:
                at = decoder.raw_decode(text, at)[1]
                if at - begin >= piece_bytes:
                    yield Piece("array", path, base + begin, base + at, at - begin)
                    begin = at
            except RecursionError as error:
                raise DataError(f"{path}: no JSON at byte {base + at}: {error}") from error
            except ValueError as error:
                rest = stream.read(max(BLOCK_BYTES, len(text) - at))
                if not rest:
                    raise DataError(f"{path}: no JSON at byte {base + at}: {error}") from error
                if begin < at:
                    yield Piece("array", path, base + begin, base + at, at - begin)
                text, base, begin, at = text[at:] + rest, base + at, 0, 0


def array_begin(path, text):
    """Where the elements of an array begin."""
    begun = text.removeprefix("\xef\xbb\xbf").lstrip(" \t\r\n")
    if not begun.startswith("["):
        raise DataError(
            f"{path}: begins with {begun[:20]!r}, not as a JSON array; rows are the elements of one"
            " array ([...]), or objects of one line each"
        )
    return len(text) - len(begun) + 1


def refuse_after_array(path, text, at, stream):
    """Errors: DataError where more than white space comes after the array's end."""
    while text:
        if more := text.lstrip(" \t\r\n"):
            raise DataError(
                f"{path}: {more[:20]!r} comes after the end of the array, at byte"
                f" {at + len(text) - len(more)}; make one array of all, or a file of each"
            )
        at += len(text)
        text = stream.read(BLOCK_BYTES)


def rows(piece):
    """(place, row) of every row of a piece."""
    with named(piece.path):
        yield from READERS[piece.format](piece)


def line_rows(piece):
    with open(piece.path, "rb") as stream:
        if piece.begin:
            # A line belongs to the piece in which it begins.
            stream.seek(piece.begin - 1)
            stream.readline()
        while (at := stream.tell()) < piece.end:
            line = stream.readline()
            if line.strip():
                yield (piece.path, at), parsed(line)


class RepeatedKey(Unreadable):
    """A row, or a piece of an array, in which an object has a key twice."""


def parsed(raw):
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return Unreadable("no UTF-8 but UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
    try:
        # Of bytes, json would guess the encoding of every line on its own.
        return strict_json.loads(raw.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except strict_json.RepeatedKey as error:
        return RepeatedKey(str(error))
    except (ValueError, RecursionError) as error:
        return Unreadable(f"no JSON: {error}")


def array_rows(piece):
    with open(piece.path, "rb") as stream:
        stream.seek(piece.begin)
        raw = stream.read(piece.end - piece.begin).strip(b" \t\r\n,")
    found = parsed(b"[" + raw + b"]")
    if isinstance(found, RepeatedKey):
        found = one_by_one(raw.decode("utf-8"))
    if isinstance(found, Unreadable):
        raise DataError(f"{piece.path}, from byte {piece.begin}: {found.reason}")
    for number, row in enumerate(found):
        yield (piece.path, f"byte {piece.begin}, element {number}"), row


def one_by_one(text):
    """Elements of a piece of an array, each parsed alone: one with a key twice is a bad row."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        end = decoder.raw_decode(text, at)[1]
        found.append(parsed(text[at:end].encode()))
        at = BETWEEN_ELEMENTS.match(text, end).end()
    return found


def text_rows(piece):
    with open(piece.path, "rb") as stream:
        if piece.begin:
            stream.seek(piece.begin - 1)
            stream.readline()
        begin = stream.tell()
        text = stream.read(max(0, piece.end - begin))
        if text and not text.endswith(b"\n"):
            text += stream.readline()
    if text:
        try:
            decoded = text.decode("utf-8")
            row = {"text": decoded if begin else decoded.removeprefix("\ufeff")}
        except UnicodeDecodeError as error:
            row = Unreadable(f"no UTF-8: {error.reason} at byte {begin + error.start}")
        yield (piece.path, f"byte {begin}"), row


def parquet_rows(piece):
    source = arrow().parquet.ParquetFile(piece.path, page_checksum_verification=True)
    number = 0
    for batch in source.iter_batches(batch_size=256, row_groups=[piece.begin]):
        batch.validate(full=True)
        for row in batch.to_pylist():
            yield (piece.path, f"row group {piece.begin}, row {number}"), of_table(row)
            number += 1


def arrow_rows(piece):
    for number, batch in enumerate(record_batches(piece.path)):
        if number >= piece.end:
            return
        if number >= piece.begin:
            batch.validate(full=True)
            for row, value in enumerate(batch.to_pylist()):
                yield (piece.path, f"record batch {number}, row {row}"), of_table(value)


READERS = {
    "lines": line_rows,
    "array": array_rows,
    "text": text_rows,
    "parquet": parquet_rows,
    "arrow": arrow_rows,
}


def place(where):
    """Words for a place; lines are counted only here, where something is wrong."""
    path, at = where
    if isinstance(at, str):
        return f"{path}, {at}"
    with open(path, "rb") as stream:
        line, left = 1, at
        while left > 0:
            block = stream.read(min(left, 1 << 20))
            line += block.count(b"\n")
            left -= len(block) or left
    return f"{path}:{line}"
