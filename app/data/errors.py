"""Errors that a user can act on."""
import os


class DataError(Exception):
    """Ends the program with its text."""


class UnclosedFile(Exception):
    """Why HDF5 could not write a file.  It holds the file, and crashes where Python ends in the
    usual way: the process must leave at once."""


class RowError(Exception):
    """A row that cannot become a sample; the reader adds its place."""


LFS_POINTER = b"version https://git-lfs.github.com/spec"


def refuse_pointer(path, first):
    """Errors: DataError where the file's first bytes are those of a Git LFS pointer.  Twin:
    core/base/lfs_pointer.cpp."""
    if first.startswith(LFS_POINTER):
        raise DataError(
            f"{path}: is a Git LFS pointer, not the file itself; `git lfs pull` there fetches it"
        )


def refuse_irregular(path, remedy):
    """Errors: DataError of a FIFO, a socket or a device, since opening one may wait forever."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise DataError(f"{path} is no regular file; {remedy}")


class Unreadable:
    """Stands for a row that could not be read, so that it can be skipped as a bad row."""

    def __init__(self, reason):
        self.reason = reason
