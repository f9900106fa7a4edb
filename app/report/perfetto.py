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

        def emit(event):
            nonlocal separator
            out.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"

        for r, run in enumerate(runs):
            starts = {}  # every session begins at 0 and follows the one before
            for number in sorted({s.number for t in run.traces.values() for s in t.sessions}):
                times = [
                    (t.events["begin_s"][m].min(), t.events["end_s"][m].max())
                    for t in run.traces.values()
                    for i, s in enumerate(t.sessions)
                    if s.number == number and (m := t.events["session"] == i).any()
                ]
                if times:
                    shift = max((end for _, end in starts.values()), default=0.0)
                    origin = min(t[0] for t in times)
                    starts[number] = (origin - shift, max(t[1] for t in times) - origin + shift)
            for rank, trace in sorted(run.traces.items()):
                pid = 100000 * r + rank
                at = " ".join(
                    f"{k} {v}" for k, v in trace.last.at.items() if trace.last.mesh.get(k, 1) > 1
                )
                label = f"rank {rank}" + (f" ({at})" if at else "")
                emit(
                    {
                        "name": "process_name",
                        "ph": "M",
                        "pid": pid,
                        "args": {"name": f"{run.name}: {label}" if len(runs) > 1 else label},
                    }
                )
                emit(
                    {
                        "name": "process_sort_index",
                        "ph": "M",
                        "pid": pid,
                        "args": {"sort_index": pid},
                    }
                )
                emit(
                    {
                        "name": "thread_name",
                        "ph": "M",
                        "pid": pid,
                        "tid": 0,
                        "args": {"name": trace.last.host or "host"},
                    }
                )
                lanes = [
                    code(kind) for kind in sorted(BESIDE)
                ]  # threads of their own: they overlap the others
                for kind in np.unique(trace.events["kind"]):
                    if kind in lanes:
                        emit(
                            {
                                "name": "thread_name",
                                "ph": "M",
                                "pid": pid,
                                "tid": 1 + lanes.index(kind),
                                "args": {"name": KINDS[kind]},
                            }
                        )
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
                    emit(
                        {
                            "name": KINDS[kind],
                            "cat": "ballast",
                            "ph": "X",
                            "pid": pid,
                            "tid": 1 + lanes.index(kind) if kind in lanes else 0,
                            "ts": round(
                                (begin - starts[trace.sessions[session].number][0]) * 1e6, 3
                            ),
                            "dur": round((end - begin) * 1e6, 3),
                            "args": args,
                        }
                    )
        out.write("\n]}\n")
