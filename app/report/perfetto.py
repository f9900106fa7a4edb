"""Chrome / Perfetto trace (JSON): a process a rank, an event a region, identifiers as arguments."""
import json

import numpy as np

from load import BESIDE, KINDS, code

IDS = ("step", "micro_batch", "chunk", "layer", "stage", "outer", "inner")


def write(runs, path):
    """Streams the events, so that a large trace needs no second copy in memory.  Ranks of the i-th
    run have pid 100000 i + rank."""
    with open(path, "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for r, run in enumerate(runs):
            prefix = f"{run.name}: " if len(runs) > 1 else ""
            begins = _begins_of_sessions(run)
            for rank, trace in sorted(run.traces.items()):
                pid = 100000 * r + rank
                for part in (_names(trace, rank, pid, prefix), _events(trace, pid, begins)):
                    for event in part:
                        out.write(separator + json.dumps(event, separators=(",", ":")))
                        separator = ",\n"
        out.write("\n]}\n")


def _begins_of_sessions(run):
    """Session -> what to subtract from its times: every session follows the one before, the first
    begins at 0."""
    begins, end = {}, 0.0
    for number in sorted({s.number for t in run.traces.values() for s in t.sessions}):
        times = [
            (t.events["begin_s"][m].min(), t.events["end_s"][m].max())
            for t in run.traces.values()
            for i, s in enumerate(t.sessions)
            if s.number == number and (m := t.events["session"] == i).any()
        ]
        if times:
            begins[number] = min(t[0] for t in times) - end
            end = max(t[1] for t in times) - begins[number]
    return begins


def _lanes():
    """Kinds with threads of their own: they overlap the others."""
    return [code(kind) for kind in sorted(BESIDE)]


def _metadata(name, pid, value, tid=None):
    thread = {} if tid is None else {"tid": tid}
    kind = "sort_index" if name.endswith("sort_index") else "name"
    return {"name": name, "ph": "M", "pid": pid, **thread, "args": {kind: value}}


def _names(trace, rank, pid, prefix):
    """Names of the rank's process and its threads."""
    at = " ".join(f"{k} {v}" for k, v in trace.last.at.items() if trace.last.mesh.get(k, 1) > 1)
    label = f"rank {rank}" + (f" ({at})" if at else "")
    yield _metadata("process_name", pid, prefix + label)
    yield _metadata("process_sort_index", pid, pid)
    yield _metadata("thread_name", pid, trace.last.host or "host", tid=0)
    lanes = _lanes()
    for kind in np.unique(trace.events["kind"]):
        if kind in lanes:
            yield _metadata("thread_name", pid, KINDS[kind], tid=1 + lanes.index(kind))


def _events(trace, pid, begins):
    lanes = _lanes()
    columns = (
        trace.events[name].tolist()
        for name in ("session", "kind", "begin_s", "end_s", "flops", "bytes", *IDS)
    )
    for session, kind, begin, end, flops, size, *ids in zip(*columns):
        args = {name: value for name, value in zip(IDS, ids) if value >= 0}
        if flops > 0:
            args["flops"] = flops
        if size > 0:
            args["bytes"] = size
        yield {
            "name": KINDS[kind],
            "cat": "ballast",
            "ph": "X",
            "pid": pid,
            "tid": 1 + lanes.index(kind) if kind in lanes else 0,
            "ts": round((begin - begins[trace.sessions[session].number]) * 1e6, 3),
            "dur": round((end - begin) * 1e6, 3),
            "args": args,
        }
