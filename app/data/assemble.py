"""The HDF5 file that data.source = "hdf5" reads, from shards in their order: contiguous data sets,
written under another name and renamed last."""
import errno
import os

import h5py
import numpy as np

from errors import UnclosedFile
from masks import ROLES
from recipe import digest
from shards import INDEX_COLUMNS, MESSAGE_COLUMNS, PARTS, path_of

BLOCK = 1 << 22  # numbers copied at once
STRUCTURE = 1 << 14  # bytes that a file takes at most beside its data sets

DESCRIPTIONS = {
    "tokens": "token ids of all documents, one after another",
    "offsets": "documents + 1 positions in /tokens: where each document begins",
    "loss_mask": "1 where a token is a target, 0 where it is not",
    "rows": "row of the input that a document comes from; pieces of one row have the same",
    "messages/offsets": (
        "documents + 1 positions in /messages/begin: first message of each document"
    ),
    "messages/begin": "token of its document with which a message begins",
    "messages/role": "who speaks",
    "lengths/edges": "upper edges of the bins, inclusive (tokens)",
    "lengths/counts": "documents in each bin",
}


def lengths_histogram(lengths):
    """(edges, counts) in powers of two."""
    if len(lengths) == 0:
        return np.zeros(0, "<i8"), np.zeros(0, "<i8")
    last = max(int(lengths.max()) - 1, 1).bit_length()
    first = max(min(int(lengths.min()) - 1, 1 << 60), 1).bit_length()
    edges = np.array([1 << e for e in range(first, last + 1)], "<i8")
    counts = np.bincount(np.searchsorted(edges, lengths), minlength=len(edges))
    return edges, counts.astype("<i8")


class Part:
    """The same part of all shards, block by block."""

    def __init__(self, folder, records, part):
        self.paths = [path_of(folder, record["shard"], part) for record in records]
        self.type = np.dtype(PARTS[part])

    def blocks(self, columns=1):
        for path in self.paths:
            with open(path, "rb") as stream:
                while len(block := np.fromfile(stream, self.type, BLOCK * columns)):
                    yield block.reshape(-1, columns) if columns > 1 else block


def create(file, name, count, dtype):
    dataset = file.create_dataset(name, (count,), dtype, track_times=False)
    dataset.attrs["description"] = DESCRIPTIONS[name]
    return dataset


def copy(dataset, blocks):
    at = 0
    for block in blocks:
        dataset[at : at + len(block)] = block
        at += len(block)


def running_sums(dataset, blocks):
    total, at = 0, 1
    for block in blocks:
        dataset[at : at + len(block)] = total + np.cumsum(block)
        total += int(block.sum())
        at += len(block)


def rows_of(folder, records):
    """Rows of documents counted through all shards."""
    first = 0
    for record in records:
        for block in Part(folder, [record], "index").blocks(INDEX_COLUMNS):
            yield first + block[:, 2]
        first += record["rows"]


def statistics(folder, records):
    lengths = [b[:, 0] for b in Part(folder, records, "index").blocks(INDEX_COLUMNS)]
    return np.concatenate(lengths) if lengths else np.zeros(0, "<i8")


def masked(total):
    """Whether a token other than the first of a document carries no loss."""
    return total["loss"] < total["tokens"] - total["documents"]


def require_space(part, total):
    """Empties the file.  Errors: OSError where its disk has no room for the data sets: HDF5 itself
    meets a full disk with many lines."""
    open(part, "wb").close()
    size = (5 if masked(total) else 4) * total["tokens"]
    size += 24 * total["documents"] + 9 * total["messages"] + STRUCTURE
    disk = os.statvfs(part)
    if disk.f_bavail * disk.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), part)


def write(path, folder, records, recipe):
    """Writes PATH from the shards of `records`, ascending.  Returns the documents' lengths.

    Errors: OSError of a file that cannot be made, as on a full disk; UnclosedFile of one that
    cannot be written."""
    lengths = statistics(folder, records)
    part = path + ".part"
    total = {k: sum(r[k] for r in records) for k in ("tokens", "documents", "messages", "loss")}
    require_space(part, total)
    try:
        with h5py.File(part, "w") as file:
            fill(file, folder, records, total, lengths)
            describe(file, recipe, total, lengths)
    except (OSError, RuntimeError) as error:  # h5py raises either
        raise UnclosedFile from error
    with open(part, "rb") as stream:
        os.fsync(stream.fileno())
    os.rename(part, path)
    return lengths


def fill(file, folder, records, total, lengths):
    blocks = lambda part, columns=1: Part(folder, records, part).blocks(columns)
    index = lambda column: (b[:, column] for b in blocks("index", INDEX_COLUMNS))
    message = lambda column: (b[:, column] for b in blocks("messages", MESSAGE_COLUMNS))
    copy(create(file, "tokens", total["tokens"], "<i4"), blocks("tokens"))
    running_sums(create(file, "offsets", total["documents"] + 1, "<i8"), index(0))
    if masked(total):
        copy(create(file, "loss_mask", total["tokens"], "u1"), blocks("mask"))
    copy(create(file, "rows", total["documents"], "<i8"), rows_of(folder, records))
    running_sums(create(file, "messages/offsets", total["documents"] + 1, "<i8"), index(1))
    copy(create(file, "messages/begin", total["messages"], "<i8"), message(0))
    roles = h5py.enum_dtype({name: i for i, name in enumerate(ROLES)}, "u1")
    copy(create(file, "messages/role", total["messages"], roles), message(1))
    for name, values in zip(("edges", "counts"), lengths_histogram(lengths)):
        create(file, f"lengths/{name}", len(values), "<i8")[:] = values


def describe(file, recipe, total, lengths):
    file.attrs["format"] = "ballast tokens"
    file.attrs["format_version"] = 1
    file.attrs["tokenizer"] = np.bytes_(
        os.fsencode(os.path.basename(os.path.abspath(recipe["tokenizer"])))
    )
    file.attrs["tokenizer_tokens"] = np.int64(recipe["tokenizer_tokens"])
    file.attrs["tokenizer_crc32"] = np.uint64(recipe["tokenizer_crc32"])
    file.attrs["recipe_crc32"] = np.uint64(digest(recipe))
    if recipe["pairs"]:  # documents 2 i and 2 i + 1: the chosen and the rejected answer
        file.attrs["pairs"] = np.int64(1)
    file.attrs["max_tokens"] = np.int64(recipe["max_tokens"])
    file.attrs["loss_tokens"] = np.int64(total["loss"])
    for name, value in (
        ("shortest", lengths.min(initial=1 << 60)),
        ("longest", lengths.max(initial=0)),
    ):
        file.attrs[f"{name}_tokens"] = np.int64(value)
    file.attrs["mean_tokens"] = float(lengths.mean()) if len(lengths) else 0.0
