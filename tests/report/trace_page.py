"""docs/trace.md: its tables come from a trace's own attributes.

python3 tests/report/trace_page.py     writes them into the page (BALLAST_REPORT_HELPER names the
                                       helper program)
"""
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py

import synthetic

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trace.md"
BEGIN, END = "<!-- from the file: begin -->\n", "<!-- from the file: end -->\n"


def text(value):
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def table(heads, rows):
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def type_name(dtype):
    if h5py.check_enum_dtype(dtype):
        return "enumeration"
    return f"text of {dtype.itemsize}" if dtype.kind == "S" else str(dtype)


def of_columns(attribute, dtype=None):
    rows = []
    for name, units, meaning in attribute:
        kind = [type_name(dtype[text(name)])] if dtype is not None else []
        rows.append([f"`{text(name)}`", *kind, text(units), text(meaning)])
    return table(["name", *(["type"] if dtype is not None else []), "unit", "meaning"], rows)


def render(path):
    """The tables of the page, from a file whose scalars are those that the writer knows."""
    out = []
    with h5py.File(path, "r") as file:
        for name in file["rows"].dtype.names:
            dataset = file[name]
            out.append(f"### /{name}\n\n{text(dataset.attrs['description'])}.\n")
            if "columns" in dataset.attrs:
                out.append(of_columns(dataset.attrs["columns"], dataset.dtype))
        sessions = file["sessions"]
        out.append(f"### /sessions/NNN\n\n{text(sessions.attrs['description'])}.\n")
        out.append(of_columns(sessions.attrs["columns"]))
        kinds = file["events"].attrs["kinds"]
        flags = {key: text(file["events"].attrs[key]).split() for key in ("useful", "beside")}
        rows = [
            [f"`{text(n)}`", text(m), ", ".join(f for f in flags if text(n) in flags[f])]
            for n, m in kinds
        ]
        out.append("### Kinds of events\n")
        out.append(table(["kind", "meaning", "counts as"], rows))
    return "\n".join(out)


def write_trace(folder):
    """A rank's trace with every scalar that the writer knows."""
    known = subprocess.run([synthetic.HELPER, "scalars"], check=True, capture_output=True)
    rank = synthetic.Rank(0, 1)
    rank.event("step", 0, 1, step=0)
    rank.step(0, **{name: 1.0 for name in known.stdout.decode().split()})
    return synthetic.write(Path(folder), [rank]) / "trace" / "trace_00000.h5"


def split(page):
    """What stands before, between and after the marks."""
    head, _, rest = page.partition(BEGIN)
    middle, _, tail = rest.partition(END)
    return head, middle, tail


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tables = render(write_trace(folder))
    head, _, tail = split(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(head + BEGIN + tables + END + tail, encoding="utf-8")
    sys.exit(0)
