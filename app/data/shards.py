"""Numbered shards and the journal that lists those that are whole.

A shard is four files of plain numbers, renamed when they are on disk; its line in the journal
comes after that.  So whatever a killed run leaves is either whole and listed, or made anew."""
import fcntl
import json
import os
import re

import numpy as np

from errors import DataError
from masks import ROLES
from recipe import difference

# File of a shard -> its type.  index: for each document tokens, messages, row within the shard.
PARTS = {"tokens": "<i4", "mask": "u1", "index": "<i8", "messages": "<i8"}
INDEX_COLUMNS, MESSAGE_COLUMNS = 3, 2
JOURNAL = "journal.jsonl"
OWN_FILE = re.compile(rf"{re.escape(JOURNAL)}|\d{{6,}}\.({'|'.join(PARTS)})(\.part)?")
NUMBERS = {role: number for number, role in enumerate(ROLES)}


def path_of(folder, number, part):
    return os.path.join(folder, f"{number:06}.{part}")


def sync(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def clear(folder):
    """Removes what builds write in a folder, and nothing else.  The journal goes first, so that
    what a kill leaves of the shards is not listed."""
    for name in sorted(filter(OWN_FILE.fullmatch, os.listdir(folder)), reverse=True):
        os.remove(os.path.join(folder, name))


class ShardWriter:
    """Appends documents, so that a shard of any size needs no memory."""

    def __init__(self, folder, number):
        self.folder, self.number = folder, number
        self.files = {p: open(path_of(folder, number, p) + ".part", "wb") for p in PARTS}
        self.record = {"shard": number, "documents": 0, "tokens": 0, "messages": 0, "loss": 0}

    def add(self, documents):
        """Appends [(document, row)]."""
        if not documents:
            return
        index, messages = [], []
        for document, row in documents:
            index += len(document.tokens), len(document.begins), row
            for begin, role in document.begins:
                messages += begin, NUMBERS.get(role, NUMBERS["other"])
            # The first token is nobody's target.
            self.record["loss"] += int(np.count_nonzero(document.mask[1:]))
        tokens = np.concatenate([d.tokens for d, _ in documents])
        self.write("tokens", tokens)
        self.write("mask", np.concatenate([d.mask for d, _ in documents]))
        self.write("index", index)
        self.write("messages", messages)
        self.record["documents"] += len(documents)
        self.record["tokens"] += len(tokens)
        self.record["messages"] += len(messages) // MESSAGE_COLUMNS

    def write(self, part, values):
        """Unlike ndarray.tofile, which loses the end of what a full disk does not take."""
        self.files[part].write(np.ascontiguousarray(values, PARTS[part]).data)

    def close(self):
        for part, stream in self.files.items():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
            os.rename(stream.name, path_of(self.folder, self.number, part))
        sync(self.folder)
        return self.record


def expected_bytes(record):
    return {
        "tokens": 4 * record["tokens"],
        "mask": record["tokens"],
        "index": 8 * INDEX_COLUMNS * record["documents"],
        "messages": 8 * MESSAGE_COLUMNS * record["messages"],
    }


def is_whole(folder, record):
    """Whether the files of a journal's record have the sizes that it states."""
    for part, size in expected_bytes(record).items():
        path = path_of(folder, record["shard"], part)
        if not os.path.isfile(path) or os.path.getsize(path) != size:
            return False
    return True


class Journal:
    """FOLDER/journal.jsonl: the recipe, then a line for every shard that is whole.  restart: what
    is there of another run is removed."""

    def __init__(self, folder, recipe, restart=False):
        self.folder, self.records = folder, {}
        path = os.path.join(folder, JOURNAL)
        os.makedirs(folder, exist_ok=True)
        self.lock()
        if restart:  # behind the lock: the shards may be those of a run that is at work
            clear(folder)
        known = os.path.isfile(path) and self.read(path, recipe)
        self.stream = open(path, "a" if known else "w", encoding="utf-8")
        if not known:
            self.write({"recipe": recipe})
            sync(folder)

    def lock(self):
        """Errors: another run that is at work on the same file."""
        self.handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{self.folder}: another ballast-data is at work here") from error
        # The lock is this process's alone: it must not outlast it in a worker.
        os.register_at_fork(after_in_child=lambda: os.close(self.handle))

    def read(self, path, recipe):
        """Whether the file lists a shard; keeps its records.  A line that a kill cut
        short is cut off.  Errors: another recipe."""
        with open(path, "rb") as stream:
            raw = stream.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            begun = lines[0]["recipe"] if lines else None
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path} is no journal of ballast-data; --restart removes it, or --out names"
                " another file"
            ) from error
        if len(lines) < 2:  # nothing is made yet, so nothing can contradict
            return False
        if changed := difference(begun, recipe):
            raise DataError(
                f"{self.folder} was begun with other {', '.join(changed)}; --restart begins anew"
            )
        os.truncate(path, len(whole))
        self.records = {
            record["shard"]: record for record in lines[1:] if is_whole(self.folder, record)
        }
        return True

    def remove(self):
        """Removes the shards, and the folder unless it holds more.  Returns lines on what stays."""
        self.stream.close()
        clear(self.folder)
        if left := sorted(os.listdir(self.folder)):
            return [f"{self.folder} stays: it holds {', '.join(left)[:200]}, which no build wrote"]
        if not os.path.islink(self.folder):
            os.rmdir(self.folder)
        return []

    def add(self, record):
        self.records[record["shard"]] = record
        self.write(record)

    def write(self, line):
        self.stream.write(json.dumps(line) + "\n")
        self.stream.flush()
        os.fsync(self.stream.fileno())
