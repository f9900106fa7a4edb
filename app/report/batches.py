"""Micro-batches of a run: their imbalance, the bubbles of their schedules, and the balance of the
executed batch plans."""
from collections import defaultdict

import numpy as np

import metrics
import starts
from load import USEFUL, code, codes, parse_deck, step_plans

SCHEDULE_OPS = ["forward", "recompute", "backward", "backward_input", "backward_weight"]


def analyse(a):
    _micro_batches(a)
    _plans(a)


def _micro_batches(a):
    """Equation 11 over micro-batches, and the bubble ratio of the schedules."""
    useful_codes = codes(USEFUL - {"optimizer"})
    op_codes, recompute = codes(SCHEDULE_OPS), code("recompute")
    places = numbers(a)
    times = defaultdict(list)  # (session, step, micro-batch) -> seconds of each rank
    spans = defaultdict(
        lambda: [np.inf, -np.inf, 0.0, 0]
    )  # (session, step, pipeline) -> begin, end, useful, stages
    for rank in a.ranks:
        trace, seconds = a.run.traces[rank], a.exclusive[rank]
        events = trace.events
        for number, session in enumerate(trace.sessions):
            mine = (
                (events["session"] == number) & (events["step"] >= 0) & (events["micro_batch"] >= 0)
            )
            e, x = events[mine], seconds[mine]
            busy = np.isin(e["kind"], useful_codes)
            told = busy & ~np.isin(e["step"], a.unplaced)
            for step, mb, value in _sums(e["step"][told], e["micro_batch"][told], x[told]):
                place = session.at.get("dp", 0), mb
                times[session.number, step, places.get((step, *place), place)].append(value)
            ops = np.isin(e["kind"], op_codes)
            if not ops.any():
                continue
            counts = (
                busy & _inside(e, ops) & ~_inside(e, e["kind"] == recompute)
            )  # recomputation is a bubble; what precedes the ops is outside the wall
            pipeline = (session.number,) + tuple(
                session.at.get(c, 0) for c in ("dp", "cp_outer", "cp_inner", "sp", "tp")
            )
            for step in np.unique(e["step"][ops]).tolist():
                spans[pipeline + (step,)][3] += 1
            for step, begin, end in zip(
                e["step"][ops].tolist(), e["begin_s"][ops].tolist(), e["end_s"][ops].tolist()
            ):
                span = spans[pipeline + (step,)]
                span[0], span[1] = min(span[0], begin), max(span[1], end)
            for step, _, value in _sums(e["step"][counts], 0 * e["step"][counts], x[counts]):
                spans[pipeline + (step,)][2] += value
    per_step = defaultdict(list)
    for (session, step, _), values in times.items():
        per_step[session, step].append(np.mean(values))
    degrees = [metrics.imbalance_degree(v) for v in per_step.values()] + _recorded_degrees(a)
    if degrees:
        a.imbalance = float(np.mean(degrees))
    wall = sum((s[1] - s[0]) * s[3] for s in spans.values())
    a.bubble_ratio = 1 - sum(s[2] for s in spans.values()) / wall if wall > 0 else 0.0


def _recorded_degrees(a):
    """The program's own imbalance of the steps whose micro-batches cannot be told apart here."""
    for rank in a.ranks:
        steps = a.run.traces[rank].steps
        values = steps.get("imbalance", np.zeros(0))
        if np.isfinite(values).any():
            return values[np.isin(steps["step"], a.unplaced) & np.isfinite(values)].tolist()
    return []


def numbers(a):
    """(step, data-parallel rank, place in its list) -> number of the micro-batch in the plan: one
    that several data-parallel ranks share stands in the list of each.  Old plans have no lists."""
    return {
        (step, dp, place): number
        for step, plan in step_plans(a.run.traces).items()
        for dp, lane in enumerate(plan.get("lanes", []))
        for place, number in enumerate(lane["micro_batches"])
    }


def _sums(first, second, values):
    """(first, second, sum of the values) of every pair of keys."""
    keys, at = np.unique(np.stack([first, second]), axis=1, return_inverse=True)
    sums = np.bincount(at.reshape(-1), weights=values, minlength=keys.shape[1])
    return zip(*keys.tolist(), sums.tolist()) if len(values) else ()


def _inside(events, outer):
    """Which events lie within one of the events marked in `outer` (which do not overlap)."""
    order = np.argsort(events["begin_s"][outer], kind="stable")
    begin, end = events["begin_s"][outer][order], events["end_s"][outer][order]
    if not begin.size:
        return np.zeros(len(events), bool)
    at = np.searchsorted(begin, events["begin_s"], side="right") - 1
    return (at >= 0) & (events["end_s"] <= end[np.maximum(at, 0)])


def _pack_length(deck, lengths):
    """Tokens of a micro-batch without padding left to fill: its group's, the capacity of a pack or
    of a chunk, or that of samples padded to the longest."""
    method, longest = deck.get("batching.method", "none"), max(lengths)
    if method in ("none", "sorted"):
        return longest * len(lengths)
    if method == "hbp":
        return min((g for g in deck.get("batching.groups", []) if g >= longest), default=longest)
    if method == "chunkflow":  # chunks are the packs
        return deck.get("chunk.tokens", 0) or sum(lengths)
    return deck.get("batching.micro_batch_tokens", 0) or sum(lengths)


def _deck(a, session):
    """What the session ran; the newest one's is the run's."""
    newest = session.number == a.run.first_trace.last.number or not session.deck
    return a.run.deck if newest else parse_deck(session.deck)


def micro_batches(plan):
    """[(first data-parallel rank, ranks, [(begin, end) of a segment])] of a step's plan."""
    return [
        (m["first"], m.get("ranks", 1), [(s[1], s[2]) for s in m["segments"]])
        for m in plan["micro_batches"]
    ]


def _plans(a):
    used = [(step, plan) for step, plan in step_plans(a.run.traces).items() if micro_batches(plan)]
    if not used:
        return
    planned, shown = {step for step, _ in used}, set(a.steps[a.shown].tolist())
    if shown - planned:
        a.run.notes.append(
            f"{len(planned & shown)} of {len(shown)} steps hold a batch plan (trace.plans_every):"
            " dbr, abr, pr, cr, ave_t and segments are theirs"
        )
    decks = {}
    dbr, abr, pr, ave_t, segments, packs = [], [], [], [], [], []
    shared_tokens = all_tokens = 0
    for step, plan in used:
        batch, session = micro_batches(plan), starts.session_of_step(a, step)
        mesh = plan.get("mesh") or session.mesh  # old plans have none
        shared = mesh.get("cp_outer", 1) * mesh.get("cp_inner", 1) * mesh.get("sp", 1) > 1
        if session.number not in decks:
            decks[session.number] = _deck(a, session)
        dp = max(mesh.get("dp", 1), 1 + max(d for d, _, _ in batch))
        tokens, squares, sizes, padding, communicated = np.zeros(dp), np.zeros(dp), [], [], 0
        for d, sp, ranges in batch:
            lengths = [end - begin for begin, end in ranges]
            tokens[d : d + sp] += sum(lengths) / sp
            squares[d : d + sp] += sum(end**2 - begin**2 for begin, end in ranges) / sp
            sizes.append(sum(lengths))
            most = _pack_length(decks[session.number], lengths)
            padding.append(
                metrics.padding_ratio(np.minimum(sizes[-1:], most), most)
            )  # a longer sample has a pack of its own
            communicated += sum(lengths) if sp > 1 or shared else 0
            segments += lengths
        packs += sizes
        dbr.append(metrics.balance_ratio(tokens))
        abr.append(metrics.balance_ratio(squares))
        pr.append(np.mean(padding))
        shared_tokens += communicated
        all_tokens += tokens.sum()
        ave_t.append(tokens.mean())
    a.batch = {
        "dbr": np.mean(dbr),
        "pr": np.mean(pr),
        "abr": np.mean(abr),
        "cr": shared_tokens / max(all_tokens, 1),
        "ave_t": np.mean(ave_t),
    }
    a.batch = {k: float(v) for k, v in a.batch.items()}
    a.segment_tokens, a.micro_batch_tokens = np.array(segments), np.array(packs)
