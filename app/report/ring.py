"""Ring attention of a run: its events grouped into passes, the balance of a pass, and the mean
times of the ring steps."""
from collections import defaultdict

import numpy as np

import metrics
from load import code, step_plans

FIELDS = ("step", "micro_batch", "chunk", "layer", "outer", "inner", "kind")
DIRECTIONS = {"attention_forward": "forward", "attention_backward": "backward"}
NAMES = ("worker_imbalance", "step_imbalance", "computation_ratio")


def analyse(traces, unplaced=()):
    """direction -> metrics, and direction -> (workers, ring steps, compute, wait); of all steps but
    `unplaced` (starts.unplaced_steps)."""
    sums = defaultdict(lambda: np.zeros(4))
    cells = defaultdict(lambda: defaultdict(lambda: np.zeros(3)))
    for (*_, direction, _), workers in _passes(traces, unplaced).items():
        if len(workers) < 2:
            continue
        ring_steps = sorted({t for steps in workers.values() for t in steps})
        table = np.array(
            [[steps.get(t, (0.0, 0.0)) for t in ring_steps] for steps in workers.values()]
        )
        weighted = _balance(table[..., 0], table[..., 1])
        sums[direction] += weighted
        sums["all"] += weighted
        for worker, row in zip(workers, table):
            for t, (c, w) in zip(ring_steps, row):
                cells[direction][worker, t] += (c, w - c, 1)
    balance = {
        name: dict(zip(NAMES, (total[:3] / total[3]).tolist()))
        for name, total in sums.items()
        if total[3] > 0
    }
    return balance, {direction: _means(sums) for direction, sums in cells.items()}


def _balance(compute, wall):
    """Metrics of a pass [worker, ring step], weighted by its computation, and the weight."""
    weight = compute.sum()
    return weight * np.array(
        [
            metrics.worker_imbalance(compute),
            metrics.step_imbalance(compute),
            metrics.computation_ratio(compute, wall),
            1.0,
        ]
    )


def _means(cells):
    """(workers, ring steps, mean compute, mean wait) of {(worker, ring step): sums}."""
    workers, ring_steps = sorted({w for w, _ in cells}), sorted({t for _, t in cells})
    compute, wait = np.zeros((2, len(workers), len(ring_steps)))
    for (worker, t), (c, w, n) in cells.items():
        compute[workers.index(worker), ring_steps.index(t)] = c / n
        wait[workers.index(worker), ring_steps.index(t)] = w / n
    return workers, ring_steps, compute, wait


def _passes(traces, unplaced):
    """Attention events by pass, which is one layer of one micro-batch in one direction over the
    workers of a ring: (..., direction, turn) -> worker -> ring step -> [compute, wall]."""
    passes = defaultdict(lambda: defaultdict(dict))
    joined = _joined(traces)
    for rank in sorted(traces):
        trace = traces[rank]
        groups = [
            (s.number,) + tuple(s.at.get(c, 0) for c in ("dp", "pp", "sp", "tp"))
            for s in trace.sessions
        ]
        for session, place, direction, turn, t, entry in _ring_steps(
            trace.events[~np.isin(trace.events["step"], unplaced)]
        ):
            number, dp, *others = groups[session]
            step, micro_batch, *layer = place
            ring = joined.get((step, dp, micro_batch), (dp, micro_batch))
            passes[(number, ring, *others, step, *layer, direction, turn)][rank][t] = entry
    return passes


def _joined(traces):
    """Rings of micro-batches that several data-parallel ranks share: (step, data-parallel rank,
    place in its list) -> what the ranks of one ring have in common.  Heads are shared by
    adjacent ranks of a group, a ring goes round the others."""
    rings = {}
    for step, plan in step_plans(traces).items():
        own_sp = plan.get("mesh", {}).get("sp", 1)
        for dp, lane in enumerate(plan.get("lanes", [])):
            for place, number in enumerate(lane["micro_batches"]):
                m = plan["micro_batches"][number]
                if m.get("ranks", 1) > 1:
                    # Plans state no split where all ranks of a group share heads.
                    heads = m.get("split", [m["ranks"]])[0] // own_sp
                    ring = (m["first"], number, (dp - m["first"]) % heads)
                    rings[step, dp, place] = ring
    return rings


def _ring_steps(events):
    """(session, place, direction, turn, ring step, [compute, wall]) of every attention event of a
    rank; a recomputed layer runs the same pass in another turn."""
    kinds = {code(kind): direction for kind, direction in DIRECTIONS.items()}
    wait_kind = code("ring_wait")
    mine = np.isin(events["kind"], [*kinds, wait_kind])
    mine = events[mine & ((events["outer"] >= 0) | (events["inner"] >= 0))]
    mine = mine[np.lexsort((mine["begin_s"], mine["session"]))]
    columns = (mine[name].tolist() for name in ("session", "begin_s", "end_s", *FIELDS))
    found, turns, current = [], defaultdict(int), None
    for session, begin, end, *place, outer, inner, kind in zip(*columns):
        at = (session, *place, outer, inner)
        if kind == wait_kind:
            # The wait that ends a ring step belongs to the computation before it.
            if current and current[0] == at:
                current[1][1] = end - current[2]
            continue
        turns[at, kind] += 1
        entry = [end - begin, end - begin]
        found.append((session, tuple(place), kinds[kind], turns[at, kind], (outer, inner), entry))
        current = (at, entry, begin)
    return found
