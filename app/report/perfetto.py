"""Chrome / Perfetto trace (JSON): a process a rank, an event a region, identifiers as arguments,
and arrows from each send between stages to its receive and along each hop of a ring."""
import json
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from load import BESIDE, KINDS, code
from output import writing

PIDS = 100000  # from one run's first process to the next one's
IDS = ("step", "micro_batch", "chunk", "layer", "stage", "outer", "inner")


def write(runs, path):
    """Streams the events, so that a large trace needs no second copy in memory.  Ranks of the i-th
    run have pid PIDS i + rank."""
    with writing(path) as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for r, run in enumerate(runs):
            prefix = f"{run.name}: " if len(runs) > 1 else ""
            begins = _begins_of_sessions(run)
            for event in _of_run(run, PIDS * r, prefix, begins):
                out.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        out.write("\n]}\n")


def _of_run(run, first_pid, prefix, begins):
    for rank, trace in sorted(run.traces.items()):
        yield from _names(trace, rank, first_pid + rank, prefix)
        yield from _events(trace, first_pid + rank, begins)
    yield from _arrows(run, first_pid, begins)


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


def transfers(run):
    """Matched transfers between pipeline stages: (sending rank, send event, receiving rank, receive
    event).  Of a micro-batch and chunk a stage sends on, then back, and receives likewise; the
    first stage sends nothing back and the last nothing on."""
    sides = {True: defaultdict(list), False: defaultdict(list)}
    kinds = {code("send"): True, code("recv"): False}
    for rank, trace in sorted(run.traces.items()):
        events = trace.events[np.isin(trace.events["kind"], list(kinds))]
        for event in events[np.argsort(events["begin_s"], kind="stable")]:
            session = trace.sessions[event["session"]]
            place = tuple(sorted((k, v) for k, v in session.at.items() if k != "pp"))
            work = tuple(event[["step", "micro_batch", "chunk"]].tolist())
            key = (session.number, place, work, session.at.get("pp", 0), session.mesh.get("pp", 1))
            sides[kinds[int(event["kind"])]][key].append((rank, event))
    received = {}
    for key, found in sides[False].items():
        *where, stage, stages = key
        onward = _onward(len(found), first=stage == stages - 1, last=stage == 0)
        for i, (rank, event) in enumerate(found):
            received[(*where, stage, i < onward, i % max(onward, 1))] = (rank, event)
    for key, found in sides[True].items():
        *where, stage, stages = key
        onward = _onward(len(found), first=stage == 0, last=stage == stages - 1)
        for i, (rank, event) in enumerate(found):
            to = (*where, stage + (1 if i < onward else -1), i < onward, i % max(onward, 1))
            if to in received:
                yield (rank, event, *received[to])


def _onward(count, first, last):
    """How many of a stage's transfers of one kind go in the direction of forward."""
    return count if first else 0 if last else (count + 1) // 2


HOPS = ("kv_inner", "kv_outer", "dkv_inner", "dkv_outer")


def _ring_plans(trace):
    """Session -> the rank's plan of ring steps in it, which its first step stores."""
    sessions = dict(zip(trace.events["step"].tolist(), trace.events["session"].tolist()))
    plans = {}
    for step, plan in trace.executed_by_step("ring"):
        if step in sessions and all(
            isinstance(plan.get(key), list) for key in ("forward", "backward")
        ):
            plans.setdefault(sessions[step], plan)
    return plans


@dataclass
class _Pass:
    """Events of one pass round a ring by (outer, inner)."""

    direction: str = ""
    attention: dict = field(default_factory=dict)
    waits: dict = field(default_factory=dict)

    def add(self, at, direction, event):
        self.direction = self.direction or direction
        (self.attention if direction else self.waits)[at] = event


def _passes(trace):
    """{(session, step, micro-batch, chunk, layer): the passes round the ring of each layer, in
    order}."""
    directions = {code("attention_forward"): "forward", code("attention_backward"): "backward"}
    wait = code("ring_wait")
    events = trace.events[
        np.isin(trace.events["kind"], [*directions, wait]) & (trace.events["inner"] >= 0)
    ]
    found = defaultdict(list)
    for event in events[np.argsort(events["begin_s"], kind="stable")]:
        number = trace.sessions[event["session"]].number
        key = (number, *event[["step", "micro_batch", "chunk", "layer"]].tolist())
        at = (int(event["outer"]), int(event["inner"]))
        direction = directions.get(int(event["kind"]), "")
        # A forward begins with its own shard, a backward with the wait for the first hop.
        if not found[key] or at == (0, 0) and (direction or at in found[key][-1].waits):
            found[key].append(_Pass())
        found[key][-1].add(at, direction, event)
    return found


def hops(run):
    """Hops of ring attention: (sending rank, the attention that it posts the hop with, where it
    computes none the wait, receiving rank, the wait that ends with its arrival).  Both ends run the
    same passes in the same order."""
    rings = defaultdict(dict)  # of a group in a session: place in the ring -> (rank, plan, passes)
    for rank, trace in sorted(run.traces.items()):
        passes = _passes(trace)
        for i, plan in _ring_plans(trace).items():
            at, number = trace.sessions[i].at.items(), trace.sessions[i].number
            group = tuple(sorted((k, v) for k, v in at if k not in ("cp_outer", "cp_inner")))
            mine = {key: found for key, found in passes.items() if key[0] == number}
            rings[number, group][plan["rank"]] = (rank, plan, mine)
    for members in rings.values():
        for rank, plan, passes in members.values():
            for key, mine in passes.items():
                for i, found in enumerate(mine):
                    steps = plan.get(found.direction, ())
                    if not found.attention.keys() <= {(s["outer"], s["inner"]) for s in steps}:
                        continue  # round a longer ring, of joined data-parallel ranks
                    for t, step in enumerate(steps):
                        at = (step["outer"], step["inner"])
                        send = found.attention.get(at, found.waits.get(at))
                        for kind in HOPS if send is not None else ():
                            hop = step.get(kind)
                            if hop is None or hop["to"] not in members:
                                continue
                            other, its_plan, theirs = members[hop["to"]]
                            arrival = _arrival(its_plan, theirs.get(key, ()), i, t, kind)
                            if arrival is not None:
                                yield rank, send, other, arrival


def _arrival(plan, passes, number, t, kind):
    """The wait in which a rank completes the hop that both ends post at step t of a pass."""
    if number >= len(passes):
        return None
    steps = plan.get(passes[number].direction, ())
    hop = steps[t].get(kind) if t < len(steps) else None
    if hop is None or hop["complete"] >= len(steps):
        return None
    end = steps[hop["complete"]]
    return passes[number].waits.get((end["outer"], end["inner"]))


def _arrows(run, first_pid, begins):
    """Ends of all arrows.  An event of a send spans the wait for a transfer under way, which may
    begin after the receive has ended; its arrow begins there, as viewers draw none back in time."""
    named = [("transfer", t) for t in transfers(run)] + [("hop", h) for h in hops(run)]
    for number, (name, (sender, send, receiver, receive)) in enumerate(named):
        for phase, rank, event, at in (
            ("s", sender, send, min(send["begin_s"], receive["end_s"])),
            ("f", receiver, receive, receive["end_s"]),
        ):
            begin = begins[run.traces[rank].sessions[event["session"]].number]
            yield {
                "name": name,
                "cat": name,
                "ph": phase,
                **({"bp": "e"} if phase == "f" else {}),
                "id": first_pid + number,
                "pid": first_pid + rank,
                "tid": 0,
                "ts": round(float(at - begin) * 1e6, 3),
            }
