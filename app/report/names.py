"""Names of runs and of their tables' files, so that no two are one and none is the page's own."""
from itertools import count

import comparison
import tables


def distinct(names):
    """The names; one that stands before it as well gets a number, which makes no other's name."""
    found = []
    for name in names:
        if name in found:
            numbered = (f"{name} ({number})" for number in count(2))
            name = next(n for n in numbered if n not in found and n not in names)
        found.append(name)
    return found


def file_prefixes(names):
    """What the names of each run's tables begin with: of one run nothing, of several its name, with
    a number behind it where a table would have the name of an earlier run's or of the page's."""
    if len(names) == 1:
        return [""]
    plain = ["".join(c if c.isalnum() or c in "-_." else "_" for c in name) for name in names]
    wanted = {file for name in plain for file in _files(f"{name}_")}
    prefixes, taken = [], set(comparison.HEADINGS)
    for name in plain:
        prefix = f"{name}_"
        if taken & _files(prefix):
            numbered = (f"{name}-{number}_" for number in count(2))
            prefix = next(p for p in numbered if not _files(p) & (taken | wanted))
        taken |= _files(prefix)
        prefixes.append(prefix)
    return prefixes


def _files(prefix):
    # Of all tables, those that the run does not have too: the names stay when it goes on.
    return {prefix + table for table in tables.HEADINGS}


def table_files(folder, prefixes):
    """{path: how a table that is there may begin} of all tables that a report can have."""
    files = set().union(*map(_files, prefixes))
    if len(prefixes) > 1:
        files |= set(comparison.HEADINGS)
    return {folder / f"{file}.csv": _begins(file) for file in sorted(files)}


def _begins(file):
    """An earlier report may have been of other runs: moba_ring_steps.csv has the ring steps of a
    run moba or the steps of a run moba_ring."""
    every = {**tables.HEADINGS, **comparison.HEADINGS}
    ours = (table for table in every if file == table or file.endswith(f"_{table}"))
    return tuple(every[table].encode() for table in ours)
