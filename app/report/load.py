"""Reads run folders: RUN/trace/trace_*.h5 (layout: io/trace/trace_writer.hpp), RUN/deck.toml,
RUN/log.txt.

A rank whose file is missing, truncated or damaged costs a note and not the report, also where the
damage brings the HDF5 library down."""
import json
import math
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

import apart
import old_plans
from style import number_ranges

# 1 has no budgets, 2 no predicted ops; up to 3 plans are prose and kinds carry no flags; up to 4
# steps count from 0.
FORMAT_VERSIONS = (1, 2, 3, 4, 5)
FROM_0 = 4
# What the files read so far say of event kinds: their names, in the order of first sight; those
# whose exclusive time is useful computation (POP); those that run beside the others, take no time
# from them, and cost what copy_wait says.
KINDS, USEFUL, BESIDE = [], set(), set()
MOST_RANKS = 1 << 20  # more is damage
# What a head computes where heads differ, as column kind of budgets counts
# (core/plan/attention/head_rules).
HEAD_PATTERNS = ("dense", "a_shape", "vertical_slash", "block_sparse")
BUDGETS = [
    ("step", "i4"),
    ("micro_batch", "i4"),
    ("chunk", "i4"),
    ("layer", "i4"),
    ("head", "i4"),
    ("budget", "f8"),
    ("computed_pairs", "f8"),
    ("visible_pairs", "f8"),
    ("overflow", "i8"),
]
COORDINATES = ("dp", "pp", "cp_outer", "cp_inner", "sp", "tp")


@dataclass
class Session:
    """One start or restart of one rank."""

    rank: int
    ranks: int
    segment: int
    started: float
    host: str = ""
    device: str = ""
    git_hash: str = ""
    deck: str = ""
    mesh: dict = field(default_factory=dict)
    at: dict = field(default_factory=dict)
    first: dict = field(default_factory=dict)  # table -> first row
    number: int = 0  # common to all ranks, set by Run


@dataclass
class RankTrace:
    rank: int
    path: Path
    sessions: list
    events: np.ndarray  # structured; kind as an index into KINDS
    steps: dict  # scalar name -> array, "step" among them
    plans: list  # (kind, hash, the plan as loaded from JSON)
    plan_steps: np.ndarray  # step, plan
    budgets: np.ndarray  # fields of BUDGETS
    # as events: simulated ops of the rank's stage, seconds since the step's schedule begins
    predicted: np.ndarray
    version: int = FORMAT_VERSIONS[-1]  # of the file's format

    @property
    def last(self):
        return self.sessions[-1]

    def executed(self, kind):
        """The plans of a kind, one a step that executed it."""
        return [plan for _, plan in self.executed_by_step(kind)]

    def executed_by_step(self, kind):
        """[(step, plan)] of the plans of a kind."""
        rows = zip(self.plan_steps["step"].tolist(), self.plan_steps["plan"].tolist())
        return [(step, self.plans[p][2]) for step, p in rows if self.plans[p][0] == kind]


@dataclass
class Run:
    path: Path
    name: str
    traces: dict  # rank -> RankTrace
    ranks: int  # of the newest session
    deck_text: str
    deck: dict  # "block.key" -> value
    log: list  # one dict a step line
    notes: list  # what is missing or odd, for the reader

    @property
    def first_trace(self):
        """Of the lowest rank that took part in the newest session."""
        newest = min(self.traces, key=lambda rank: (-self.traces[rank].last.number, rank))
        return self.traces[newest]


class ReportError(Exception):
    """A problem that the user can mend."""


def code(kind):
    """Number of an event kind by its name; -1 where no file knows it."""
    return KINDS.index(kind) if kind in KINDS else -1


def codes(kinds):
    return np.array([code(k) for k in kinds], dtype=int)


def rows_by(keys, rows):
    """Key -> its rows in their order, keys ascending."""
    order = np.argsort(keys, kind="stable")
    found, begins = np.unique(keys[order], return_index=True)
    return dict(zip(found.tolist(), np.split(rows[order], begins[1:])))


def step_plans(traces):
    """Step -> the plan that it executed, ascending: all ranks that ran the step store the same."""
    plans = {}
    for rank in sorted(traces):
        for step, plan in traces[rank].executed_by_step("step"):
            plans.setdefault(step, plan)
    return dict(sorted(plans.items()))


def _text(value):
    return (
        value.decode("utf-8", "replace").rstrip("\0")
        if isinstance(value, bytes)
        else str(value).rstrip("\0")
    )


def _require(sound, problem):
    if not sound:
        raise OSError(problem)


def _used(file, rows, table):
    """Rows in use of a table, 0 where the format has none of the name."""
    used = int(rows[table]) if table in file else 0
    _require(not used or 0 < used <= len(file[table]), f"it lacks rows of its {table}")
    return used


def _sessions(file):
    sessions = []
    for key in sorted(file["sessions"], key=int):
        group = file["sessions"][key]
        a = group.attrs
        deck = group["deck"][()] if "deck" in group else b""
        session = Session(
            int(a["rank"]),
            int(a["ranks"]),
            int(a["segment"]),
            float(a["started_unix_s"]),
            _text(a["host"]),
            _text(a["device"]),
            _text(a["git_hash"]),
            _text(deck),
        )
        for key_, value in a.items():
            if key_.startswith("mesh."):
                session.mesh[key_[5:]] = int(value)
            elif key_.startswith("at."):
                session.at[key_[3:]] = int(value)
            elif key_.startswith("first_"):
                session.first[key_[6:]] = int(value)
        sessions.append(session)
    return sessions


def _require_sound_sessions(sessions, rank, rows):
    """`rows`: table -> rows in use."""
    _require(sessions, "no session")
    for s in sessions:
        _require(
            s.rank == rank
            and 0 <= s.rank < s.ranks <= MOST_RANKS
            and math.prod(s.mesh.values()) == s.ranks
            and all(0 <= place < s.mesh[degree] for degree, place in s.at.items()),
            "its rank, number of ranks and mesh contradict each other",
        )
        _require(math.isfinite(s.started), "a session has no time")
    for table, used in rows.items():
        firsts = [s.first.get(table, 0) for s in sessions]
        in_order = firsts[0] == 0 and firsts == sorted(firsts) and firsts[-1] <= used
        _require(in_order, f"its sessions contradict the rows of its {table}")


def _events(file, rows, table="events"):
    dataset = file[table]
    dtype = dataset.dtype
    names = {value: name for name, value in h5py.check_enum_dtype(dtype["kind"]).items()}
    flagged = "useful" in dataset.attrs
    USEFUL.update(_text(dataset.attrs["useful"]).split() if flagged else old_plans.USEFUL)
    BESIDE.update(_text(dataset.attrs["beside"]).split() if flagged else old_plans.BESIDE)
    events = dataset[:rows] if rows else np.empty(0, dtype)
    lookup = np.full(max(names, default=0) + 1, -1)
    for value, name in names.items():
        if name not in KINDS:
            KINDS.append(name)
        lookup[value] = code(name)
    kind = events["kind"].astype(int)
    _require(np.isin(kind, list(names)).all(), "event kinds out of range")
    fields = [
        (name, dtype[name].base if name != "kind" else np.dtype("i4")) for name in dtype.names
    ]
    plain = np.empty(events.shape, dtype=fields)
    for name, _ in fields:
        plain[name] = lookup[kind] if name == "kind" else events[name]
    sound = (
        np.isfinite(plain["begin_s"])
        & np.isfinite(plain["end_s"])
        & (plain["end_s"] >= plain["begin_s"])
    )
    return plain, sound


def _plans(file, rows):
    """Plans by kind and hash; of formats that held prose the same values."""
    if not rows["plans"]:
        return []
    stored = file["plan_text"][: rows["plan_text"]].tobytes()
    plans = []
    for p in file["plans"][: rows["plans"]]:
        text = stored[int(p["begin"]) : int(p["begin"]) + int(p["bytes"])]
        kind, number = _text(p["kind"]), int(p["hash"])
        if "text_bytes" in p.dtype.names:
            plans.append((kind, number, json.loads(zlib.decompress(text))))
        else:
            plans.append((*old_plans.read(kind, number, text.decode("utf-8", "replace")),))
    return plans


def _count_from_1(*tables):
    for table in tables:
        if isinstance(table, dict) and "step" not in table:
            continue
        table["step"][table["step"] >= 0] += 1


def _count_plans_from_1(plans):
    for kind, _, value in plans:
        if kind in ("recall", "coverage", "drift"):
            for row in value:
                row[0] += 1
        elif isinstance(value, dict) and "step" in value:
            value["step"] += 1


def read_rank(path):
    """One file.  Returns (RankTrace, notes); raises OSError, KeyError or ValueError when it cannot
    be read."""
    path = Path(path)
    _require(path.is_file(), "no regular file")  # opening a FIFO waits forever
    notes = []
    with h5py.File(path, "r") as file:
        _require(_text(file.attrs.get("format", "")) == "ballast-trace", "not a Ballast trace")
        version = int(file.attrs["format_version"])
        _require(
            version in FORMAT_VERSIONS,
            (
                f"format version {version}, this report reads versions"
                f" {', '.join(map(str, FORMAT_VERSIONS))}"
            ),
        )
        stored = file["rows"][()]
        rows = {table: _used(file, stored, table) for table in stored.dtype.names}
        sessions = _sessions(file)
        own = int(path.stem.partition("_")[2])
        _require_sound_sessions(sessions, own, rows)
        events, sound = _events(file, rows["events"])
        if not sound.all():
            notes.append(
                f"{path.name}: {int((~sound).sum())} events without sound times are left out"
            )
        predicted = events[:0]
        if rows.get("predicted"):
            predicted, timed = _events(file, rows["predicted"], "predicted")
            _require(timed.all(), "simulated ops without sound times")
        table = file["steps"][: rows["steps"]]
        steps = {name: table[name] for name in table.dtype.names}
        plans = _plans(file, rows)
        plan_steps = file["plan_steps"][: rows["plan_steps"]]
        named = (plan_steps["plan"] >= 0) & (plan_steps["plan"] < len(plans))
        _require(named.all(), "steps name plans that it does not hold")
        budgets = np.zeros(0, BUDGETS)
        if rows.get("budgets"):
            budgets = file["budgets"][: rows["budgets"]]
        if "kind" in budgets.dtype.names:
            known = (budgets["kind"] >= -1) & (budgets["kind"] < len(HEAD_PATTERNS))
            _require(known.all(), "budgets of unknown patterns")
        if version <= FROM_0:
            _count_from_1(events, predicted, steps, plan_steps, budgets)
            _count_plans_from_1(plans)
    tables = (events, steps, plans, plan_steps, budgets, predicted)
    trace = RankTrace(sessions[-1].rank, path, sessions, *tables, version)
    trace.events = _with_session(trace, events)[sound]
    return trace, notes


def _with_session(trace, events):
    """Adds the column `session` (index into trace.sessions) to events."""
    wide = np.empty(events.shape, dtype=events.dtype.descr + [("session", "i4")])
    for name in events.dtype.names:
        wide[name] = events[name]
    wide["session"] = session_of(trace, "events", len(events))
    return wide


def session_of(trace, table, rows):
    firsts = [s.first.get(table, 0) for s in trace.sessions]
    return np.searchsorted(firsts, np.arange(rows), side="right") - 1


def _alike(sessions):
    """(first step, number of ranks) -> indices of the starts that have them, in their order."""
    found = {}
    for i, session in enumerate(sessions):
        found.setdefault((session.segment, session.ranks), []).append(i)
    return found


def _number_sessions(traces):
    """Sessions of different ranks belong together when they have the same first step and number of
    ranks.  Where a rank has as many such starts as the rank with most sessions, the first is the
    first; else a start is the one nearest in time, by as much as the other pairs say that the
    rank's clock is ahead."""
    reference = max(traces.values(), key=lambda t: (len(t.sessions), -t.rank)).sessions
    known = _alike(reference)
    for trace in traces.values():
        paired = {}
        for key, own in _alike(trace.sessions).items():
            if len(own) == len(known.get(key, [])):
                paired |= zip(own, known[key])
        ahead = [trace.sessions[i].started - reference[j].started for i, j in paired.items()]
        offset = float(np.median(ahead)) if ahead else 0.0
        for i, session in enumerate(trace.sessions):
            others = known.get((session.segment, session.ranks)) or range(len(reference))
            session.number = paired.get(
                i, min(others, key=lambda j: abs(reference[j].started + offset - session.started))
            )


def _keep_latest(traces, notes):
    """A restart goes back to a checkpoint: from its first step on, what earlier sessions recorded
    was given up and is not shown."""
    numbers = {rank: np.array([s.number for s in t.sessions]) for rank, t in traces.items()}
    count = 1 + max(int(n.max()) for n in numbers.values())
    first = np.full(count, np.inf)  # first step of each session
    for rank, trace in traces.items():
        in_step = trace.events["step"] >= 0
        np.minimum.at(
            first, numbers[rank][trace.events["session"][in_step]], trace.events["step"][in_step]
        )
    # A session ends where the earliest later one begins.
    end = np.append(np.minimum.accumulate(first[::-1])[::-1][1:], np.inf)
    given_up = set()
    for rank, trace in traces.items():
        keep = trace.events["step"] < end[numbers[rank][trace.events["session"]]]
        given_up |= set(trace.events["step"][~keep].tolist())
        trace.events = trace.events[keep]
        if "step" in trace.steps:
            ends = end[numbers[rank][session_of(trace, "steps", len(trace.steps["step"]))]]
            # Where steps counted from 0, scalars of the state between two of them (held-out loss)
            # stood in the row of the next one.
            rows = trace.steps["step"] < ends + (trace.version <= FROM_0)
            trace.steps = _merge_steps({name: values[rows] for name, values in trace.steps.items()})
        rows = (
            trace.plan_steps["step"]
            < end[numbers[rank][session_of(trace, "plan_steps", len(trace.plan_steps))]]
        )
        trace.plan_steps = trace.plan_steps[rows]
        trace.predicted = trace.predicted[
            trace.predicted["step"]
            < end[numbers[rank][session_of(trace, "predicted", len(trace.predicted))]]
        ]
        trace.budgets = trace.budgets[
            trace.budgets["step"]
            < end[numbers[rank][session_of(trace, "budgets", len(trace.budgets))]]
        ]
    if given_up:
        notes.append(
            f"{len(given_up)} step{'s' if len(given_up) > 1 else ''} from {min(given_up)} to"
            f" {max(given_up)} ran before a restart from an earlier checkpoint; only the run after"
            " it is shown"
        )


def _merge_steps(columns):
    """One row a step: the latest value of each scalar."""
    steps = np.unique(columns["step"])
    merged = {"step": steps}
    for name, values in columns.items():
        if name == "step":
            continue
        out = np.full(len(steps), np.nan)
        known = ~np.isnan(values)
        out[np.searchsorted(steps, columns["step"][known])] = values[
            known
        ]  # assigned in row order: the last one stays
        merged[name] = out
    return merged


def parse_deck(text):
    """ "block.key" -> value of an effective deck.  Reads what the program writes, where tomllib
    (Python 3.11) is absent too."""
    try:
        import tomllib

        return {
            f"{block}.{key}": value
            for block, keys in tomllib.loads(text).items()
            if isinstance(keys, dict)
            for key, value in keys.items()
        }
    except (ImportError, ValueError):
        pass
    values, block = {}, ""
    for line in text.splitlines():
        if match := re.match(r"\s*\[(\w+)\]", line):
            block = match[1]
        elif match := re.match(r"\s*(\w+)\s*=\s*(.*)", line):
            try:  # what the program writes on one line is JSON too
                value, _ = json.JSONDecoder().raw_decode(match[2])
            except ValueError:
                value = match[2].partition("#")[0].strip()
            values[f"{block}.{match[1]}"] = value
    return values


def parse_log(text):
    """Step lines of the log as dictionaries of numbers."""
    lines = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        fields = {}
        for part in line.split():
            key, _, value = part.partition("=")
            try:
                fields[key] = float(value)
            except ValueError:
                continue
        if "step" in fields:
            lines.append(fields)
    return lines


def _read_text(path, notes):
    """Text of a file, "" where there is none; one that is no regular file is noted, since opening
    a FIFO waits forever."""
    if path.exists() and not path.is_file():
        notes.append(f"{path.name} is no regular file and is left out")
        return ""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def shown(text):
    """A name with what is no UTF-8 in it replaced, so that it can stand on a page."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _read(path):
    """(the rank's trace or None, notes, KINDS, USEFUL, BESIDE): what another process needs."""
    try:
        trace, notes = read_rank(path)
    except Exception as error:  # h5py raises many kinds; one file costs that file
        trace, notes = None, [f"{path.name} cannot be read and is left out: {error}"]
    return trace, notes, KINDS, USEFUL, BESIDE


def load_run(path):
    path = Path(path)
    if not path.is_dir():
        raise ReportError(f"{path}: no such run folder")
    folder = path / "trace" if (path / "trace").is_dir() else path
    files = sorted(folder.glob("trace_*.h5"))
    notes, traces = [], {}
    for file, read in apart.each(_read, files):
        if isinstance(read, apart.Death):
            notes.append(
                f"{file.name} cannot be read and is left out: reading it brought its process down"
                f" ({read.reason})"
            )
            continue
        trace, more, kinds, useful, beside = read
        notes += more
        KINDS[:] = kinds
        USEFUL.update(useful)
        BESIDE.update(beside)
        if trace:
            traces[trace.rank] = trace
    for file in sorted(folder.glob("trace_*.damaged")):
        notes.append(f"{file.name} was damaged when the run restarted; its events are not shown")
    if not traces:
        reason = "; ".join(notes) or "switch the trace on with trace.enabled=true"
        raise ReportError(f"{path}: no readable trace in {folder} ({reason})")
    _number_sessions(traces)
    newest = max((t.last for t in traces.values()), key=lambda s: s.number)
    current = {rank: t for rank, t in traces.items() if t.last.number == newest.number}
    missing = sorted(set(range(newest.ranks)) - set(current))
    if missing:
        notes.append(
            f"rank{'s' if len(missing) > 1 else ''} {number_ranges(missing)} of"
            f" {newest.ranks} left no readable trace; every figure and metric covers the others"
            " only"
        )
    _keep_latest(traces, notes)
    gone = sorted(set(traces) - set(current))
    if gone:
        many = len(gone) > 1
        notes.append(
            f"rank{'s' * many} {number_ranges(gone)} belong{'s' * (not many)} to an earlier"
            " start on another number of ranks"
        )
    log = parse_log(_read_text(path / "log.txt", notes))
    deck_text = _read_text(path / "deck.toml", notes) or newest.deck
    name = path.resolve().name if path.name != "trace" else path.resolve().parent.name
    return Run(
        path,
        shown(name),
        traces,
        newest.ranks,
        deck_text,
        parse_deck(deck_text),
        log,
        [shown(note) for note in notes],
    )
