"""Errors that a user can act on."""


class DataError(Exception):
    """Ends the program with its text."""


class RowError(Exception):
    """A row that cannot become a sample; the reader adds its place."""


class Unreadable:
    """Stands for a row that could not be read, so that it can be skipped as a bad row."""

    def __init__(self, reason):
        self.reason = reason
