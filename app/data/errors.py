"""Errors that a user can act on."""


class DataError(Exception):
    """Ends the program with its text."""


class RowError(Exception):
    """A row that cannot become a sample; the reader adds its place."""
