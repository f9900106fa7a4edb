"""Applies metrics.py to one run: per rank and step times, POP, rings, micro-batches, plans, memory,
regions."""
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

import batches
import metrics
import prediction
import ring
import scalars
import starts
from load import BESIDE, HEAD_PATTERNS, KINDS, USEFUL, code, codes, parse_deck, step_plans

# Step-time split: category -> kinds, by exclusive time, in the order of stacking.
CATEGORIES = {
    "attention": ["attention_forward", "attention_backward"],
    "indexing": ["indexing"],
    "budget tuning": ["tuning"],
    "planning": ["planning"],
    "rest of forward and backward": [
        "forward",
        "recompute",
        "backward",
        "backward_input",
        "backward_weight",
        "layer_forward",
        "layer_backward",
        "head",
    ],
    "ring wait": ["ring_wait"],
    "sequence exchange": ["sequence_exchange"],
    "pipeline transfer": ["send", "recv"],
    "host copies": ["copy_wait", "offload", "fetch"],
    "gradient reduction": ["gradient_reduce", "parameter_gather"],
    "optimizer": ["optimizer"],
    "data": ["data"],
    "checkpoint": ["checkpoint"],
    "validation": ["validation"],
    "other": [],  # kinds of a newer program
    "idle": ["step", "idle"],
}


def category_of_kind():
    """Index into CATEGORIES for every kind."""
    names = list(CATEGORIES)
    table = np.full(len(KINDS), names.index("other"))
    for i, kinds in enumerate(CATEGORIES.values()):
        for kind in kinds:
            if kind in KINDS:
                table[code(kind)] = i
    return table


@dataclass
class Analysis:
    run: object
    ranks: list = field(default_factory=list)
    steps: np.ndarray = None  # steps shown, ascending
    session: np.ndarray = None  # [step] number of the session that ran it
    members: np.ndarray = None  # [rank, step] the rank took part in that session
    complete: np.ndarray = None  # [step] all of these that left a trace have a whole step
    unplaced: np.ndarray = None  # starts.unplaced_steps
    shown: np.ndarray = None  # [step] complete, or every step where none is
    worlds: list = field(default_factory=list)  # starts.World
    step_seconds: np.ndarray = None  # [rank, step], NaN where absent
    useful: np.ndarray = None  # [rank, step], NaN where absent
    worked: np.ndarray = None  # [rank, step] the part of it in micro-batches, NaN where absent
    split: np.ndarray = None  # [rank, step, category] seconds inside the step
    between: np.ndarray = None  # likewise of what bears its number and lies outside: checkpoints
    exclusive: dict = field(default_factory=dict)  # rank -> exclusive seconds of its events
    runtime: float = 0.0
    pop: tuple = (1.0, 1.0, 1.0)
    ring: dict = field(default_factory=dict)  # "forward", "backward", "all" -> dict of metrics
    ring_times: dict = field(
        default_factory=dict
    )  # direction -> (workers, ring steps, compute, wait)
    imbalance: float = 1.0
    bubble_ratio: float = 0.0
    batch: dict = field(default_factory=dict)  # dbr, abr, pr, cr, ave_t; empty without batch plans
    segment_tokens: np.ndarray = None
    budgets: np.ndarray = (
        None  # [choice]: base budget, final budget, coverage loss (dynamic sparsity tuning)
    )
    micro_batch_tokens: np.ndarray = None
    sparse: dict = field(
        default_factory=dict
    )  # (step, layer, head) -> [budget sum, rows, computed pairs, visible pairs, overflow]
    pairs: np.ndarray = field(default_factory=lambda: np.zeros(2))  # computed, visible, all steps
    kinds: dict = field(
        default_factory=dict
    )  # (layer, head) -> [HEAD_PATTERNS] choices, where heads differ
    # rows of the plans "recall" and "coverage" (app/observe/recall_rows.hpp), None without any
    recall: np.ndarray = None
    coverage: np.ndarray = None
    # [row of coverage, 2]: queries that it speaks of, and those of them that recall measures
    coverage_queries: np.ndarray = None
    drift: np.ndarray = None  # step, layer, head, queries, recall now, recall of the index before
    memory: dict = field(default_factory=dict)  # category -> [rank] bytes
    overheads: dict = field(
        default_factory=dict
    )  # dst_overhead_share, sab_overhead_share, where the run has them
    regions: list = field(default_factory=list)
    prediction: object = None  # prediction.Prediction, None without predicted ops
    scalars: dict = field(default_factory=dict)  # name -> (steps, values)
    verdict: object = None  # verdict.Verdict


def analyse(run):
    a = Analysis(run)
    a.ranks = sorted(run.traces)
    for rank, trace in run.traces.items():
        a.exclusive[rank] = _exclusive_by_session(trace)
    _times(a)
    a.unplaced = starts.unplaced_steps(a)
    if a.unplaced.size:
        a.run.notes.append(
            f"{a.unplaced.size} of {len(a.steps)} steps hold no plan (trace.plans_every) and may"
            " have had micro-batches that data-parallel ranks shared: figures of rings, heads and"
            " budgets leave them out, imbalance is as the program recorded it"
        )
    a.ring, a.ring_times = ring.analyse(run.traces, a.unplaced)
    batches.analyse(a)
    _budgets(a)
    _sparse(a)
    a.recall, a.coverage, a.drift = (
        _plan_rows(a, kind) for kind in ("recall", "coverage", "drift")
    )
    a.coverage_queries = _coverage_queries(a)
    _window_notes(a)
    _overheads(a)
    _memory(a)
    _regions(a)
    a.scalars = scalars.read(a)
    scalars.note_lost_losses(a)
    a.prediction = prediction.compare(run)
    return a


def nesting(events):
    """Which events nest; the others run beside them."""
    return ~np.isin(events["kind"], codes(BESIDE))


def _exclusive_by_session(trace):
    """Clocks of different sessions have nothing to do with one another; what runs beside the others
    has no time of its own."""
    events, seconds = trace.events, np.zeros(len(trace.events))
    for session in np.unique(events["session"]):
        mine = np.flatnonzero((events["session"] == session) & nesting(events))
        seconds[mine] = metrics.exclusive_seconds(events["begin_s"][mine], events["end_s"][mine])
    return seconds


def _times(a):
    step_kind = code("step")
    traces = a.run.traces
    with_span = [
        t.events["step"][(t.events["kind"] == step_kind) & (t.events["step"] >= 0)]
        for t in traces.values()
    ]
    any_step = [t.events["step"][t.events["step"] >= 0] for t in traces.values()]
    spans = np.unique(np.concatenate(with_span)) if with_span else np.zeros(0, int)
    a.steps = spans if spans.size else np.unique(np.concatenate(any_step))
    shape = (len(a.ranks), len(a.steps))
    a.step_seconds, a.useful, a.worked = (np.full(shape, np.nan) for _ in range(3))
    a.split, a.between = np.zeros((2, *shape, len(CATEGORIES)))
    a.session = np.zeros(len(a.steps), int)
    windows = defaultdict(list)  # (session, step) -> (begin, end) of every rank
    for r, rank in enumerate(a.ranks if len(a.steps) else []):
        own = _times_of_rank(a, r, traces[rank], step_kind if spans.size else None)
        for s, (begin, end, session) in own.items():
            number = traces[rank].sessions[session].number
            windows[number, s].append((begin, end))
            a.session[s] = max(a.session[s], number)
    a.members = starts.members(a)
    a.complete = (~np.isnan(a.step_seconds) | ~a.members).all(axis=0) & a.members.any(axis=0)
    if len(a.steps) and not a.complete.all():
        partial = a.steps[~a.complete]
        a.run.notes.append(
            f"{len(partial)} step{'s' if len(partial) > 1 else ''} ({_listed(partial)}) were not"
            " recorded to the end by every rank and are left out of the POP table"
        )
    a.shown = a.complete if a.complete.any() else np.ones(len(a.steps), bool)
    a.worlds = starts.worlds(a, windows)
    starts.note(a)
    a.runtime = float(sum(w.runtime for w in a.worlds))
    a.pop = metrics.pop_of_worlds([(starts.useful_by_rank(a, w), w.runtime) for w in a.worlds])


def _times_of_rank(a, r, trace, span_kind):
    """Fills row `r` of split, step_seconds and useful; returns {step: (begin, end, session)} from
    the events of `span_kind`, or from all events."""
    events, seconds = trace.events, a.exclusive[a.ranks[r]]
    known = np.isin(events["step"], a.steps)
    at = np.searchsorted(a.steps, events["step"])
    span = known if span_kind is None else known & (events["kind"] == span_kind)
    own = {}
    columns = (at, events["begin_s"], events["end_s"], events["session"])
    for s, begin, end, session in zip(*(column[span].tolist() for column in columns)):
        before = own.get(s, (begin, end))
        own[s] = (min(begin, before[0]), max(end, before[1]), session)
    begins, ends = np.full((2, len(a.steps)), np.nan)
    for s, (begin, end, _) in own.items():
        begins[s], ends[s] = begin, end
    a.step_seconds[r] = ends - begins
    category, s = category_of_kind()[events["kind"][known]], at[known]
    outside = (events["begin_s"][known] >= ends[s]) | (events["end_s"][known] <= begins[s])
    for table, mine in ((a.split, ~outside), (a.between, outside)):
        np.add.at(table[r], (s[mine], category[mine]), seconds[known][mine])
    useful = known & np.isin(events["kind"], codes(USEFUL))
    # Targets of budgets and the update are every rank's, whatever it holds.
    worked = useful & (events["micro_batch"] >= 0) & (events["kind"] != code("optimizer"))
    for table, mine in ((a.useful, useful), (a.worked, worked)):
        table[r] = np.bincount(at[mine], weights=seconds[mine], minlength=len(a.steps))
        table[r, np.isnan(a.step_seconds[r])] = np.nan
    return own


def _listed(values, limit=6):
    text = ", ".join(str(v) for v in values[:limit])
    return text + (" ..." if len(values) > limit else "")


def _budgets(a):
    """Choices of all ranks; those of a ring's ranks are alike."""
    rows = [
        (base, budget, loss)
        for rank in a.ranks
        for choices in a.run.traces[rank].executed("budgets")
        for _, _, base, budget, loss in choices
    ]
    a.budgets = np.array(rows) if rows else None


def _sparse(a):
    """Budgets and pairs by step, layer and head, over micro-batches and ranks.  Ranks of one ring
    hold equal budgets and overflows, and each its own queries' pairs."""
    table = defaultdict(lambda: np.zeros(5))
    plans, unplaced = step_plans(a.run.traces), set(a.unplaced.tolist())
    firsts = {}
    for rank in a.ranks:
        for ring, place, _ in _ring_places(a, a.run.traces[rank], plans)[0]:
            firsts[ring] = min(place, firsts.get(ring, place))
    for rank in a.ranks:
        trace = a.run.traces[rank]
        rows = trace.budgets
        known = rows[rows["step"] >= 0]
        a.pairs += (known["computed_pairs"].sum(), known["visible_pairs"].sum())
        heads, counted = _heads(a, trace, plans, firsts)
        names = ("step", "layer", "budget", "overflow", "computed_pairs", "visible_pairs")
        columns = (rows[n].tolist() for n in names)
        for head, counts, step, layer, budget, overflow, computed, visible in zip(
            heads, counted, *columns
        ):
            if step >= 0 and step not in unplaced:
                alike = (counts * budget, counts) if counts else (0, 0)
                table[step, layer, head] += (*alike, computed, visible, counts * overflow)
        if "kind" in (rows.dtype.names or ()):
            kinds = (rows[n].tolist() for n in ("step", "layer", "kind"))
            for head, step, layer, kind in zip(heads, *kinds):
                if kind >= 0 and step not in unplaced:
                    a.kinds.setdefault((layer, head), [0] * len(HEAD_PATTERNS))[kind] += 1
    a.sparse = dict(table)


def _heads(a, trace, plans, firsts):
    """Of every row of a rank's budgets: the head among those of all ranks, and whether the rank is
    the first of its ring that left a trace, which counts what all of them have alike."""
    rows = trace.budgets
    rings, of_row = _ring_places(a, trace, plans)
    held = np.zeros(len(rings), int)  # heads of the rank, by micro-batch
    np.maximum.at(held, of_row, rows["head"].astype(int) + 1)
    shares = np.array([share for _, _, share in rings], int)
    first = np.array([place == firsts[ring] for ring, place, _ in rings], int)
    heads = rows["head"].astype(int) + (held * shares)[of_row]
    return heads.tolist(), first[of_row].tolist()


def _ring_places(a, trace, plans):
    """Of every micro-batch of a rank's budgets: its ring, the rank's place there, and its place
    among those that share the heads; and of every row which micro-batch it is of."""
    rows = trace.budgets
    numbers = starts.session_numbers(a, rows["step"])
    keys = np.stack([numbers, rows["step"], rows["micro_batch"]], axis=1)
    groups, of_row = np.unique(keys, axis=0, return_inverse=True)
    rings = []
    for number, step, place in groups.tolist():
        at = starts.session_of_rank(trace, number).at
        shared, heads, ring = _place_in_group(plans.get(step), at, place)
        rings.append(((number, step, at.get("pp", 0), shared, heads), ring, heads))
    return rings, of_row.reshape(-1)


def _place_in_group(plan, at, place):
    """What tells a micro-batch from others of its step, a rank's place among those that share its
    heads, and in their ring: data-parallel ranks that share one are neighbours in heads, and the
    ring goes round the others."""
    heads, ring = at.get("sp", 0), (0, at.get("cp_outer", 0), at.get("cp_inner", 0))
    own_one = at.get("dp", 0), place
    if place < 0:
        return own_one, heads, ring
    try:
        number = plan["lanes"][at.get("dp", 0)]["micro_batches"][place]
        m = plan["micro_batches"][number]
    except (TypeError, KeyError, IndexError):
        return own_one, heads, ring
    if m.get("ranks", 1) == 1:
        return own_one, heads, ring
    own = plan.get("mesh", {}).get("sp", 1)
    joined = max(1, m.get("split", [own * m["ranks"]])[0] // own)
    along = at.get("dp", 0) - m["first"]
    return number, along % joined * own + heads, (along // joined, *ring[1:])


def sparsity(a):
    """Sparsity ratio, mean budget and overflow of a run; empty without sparse attention."""
    if not a.pairs[1]:
        return {}
    result = {"sparsity_ratio": metrics.sparsity_ratio(*a.pairs)}
    if not a.sparse:
        return result
    total = np.sum(list(a.sparse.values()), axis=0)
    result["budget_overflow"] = float(total[4])
    if np.isfinite(total[0]):
        result["mean_budget"] = float(total[0] / total[1])
    return result


def _plan_rows(a, kind):
    """Rows of a kind of plan that is a list of rows, of all steps and ranks; None without any."""
    rows = [row for rank in a.ranks for plan in a.run.traces[rank].executed(kind) for row in plan]
    return np.array(rows, float) if rows else None


def _coverage_queries(a):
    """Of every row of a.coverage: the queries of its micro-batch, as the step's plan has them, and
    those that recall measures, which leaves out segments that are dense whatever the budget."""
    if a.coverage is None:
        return None
    plans, rows = step_plans(a.run.traces), []
    tokens = {
        place: sum(s[2] - s[1] for s in plans[place[0]]["micro_batches"][number]["segments"])
        for place, number in batches.numbers(a).items()
    }
    for rank in a.ranks:
        trace = a.run.traces[rank]
        recalls = trace.executed("recall")
        measured = {tuple(row[:4]): row[6] for recall in recalls for row in recall}
        for step, choices in trace.executed_by_step("coverage"):
            (session,) = starts.session_numbers(a, [step])
            dp = starts.session_of_rank(trace, session).at.get("dp", 0)
            for row in choices:
                known, place = measured.get(tuple(row[:4]), 0), (step, dp, row[1])
                rows.append((max(known, tokens.get(place, 0)), known))
    return np.array(rows, float)


def _told(a, chosen):
    """Coverage of these rows over the queries that recall measures: the dense ones of a micro-batch
    are told as 1.  NaN without any."""
    queries, measured = a.coverage_queries[chosen].T
    held = a.coverage[chosen, 5] * queries - (queries - measured)
    return held.sum() / measured.sum() if measured.any() else np.nan


def _window_notes(a):
    """Layers whose observed queries do not speak for the whole segments."""
    if (
        a.recall is None
        or a.coverage is None
        or a.run.deck.get("attention.pattern") != "vertical_slash"
    ):
        return
    for layer in np.unique(a.recall[:, 3]):
        mine = a.recall[a.recall[:, 3] == layer]
        told = _told(a, (a.coverage[:, 3] == layer) & (a.coverage[:, 6] == 1))
        held = metrics.recall(mine)[0]
        if abs(told - held) > 0.05:
            a.run.notes.append(
                f"layer {int(layer)}: the budgets' patterns hold {told:.3f} of the observed"
                f" queries' attention, and {held:.3f} of all queries'"
            )


def recall(a):
    """Mean recall and half its 95 % interval; empty where it was not measured."""
    if a.recall is None:
        return {}
    mean, interval = metrics.recall(a.recall)
    return {"recall": mean, "recall_interval": interval}


def _overheads(a):
    """Shares of budget tuning and of planning, of a run that in any of its sessions tunes budgets
    or batches by predicted latency (sab) or length (lbb)."""
    shown = np.flatnonzero(a.shown)
    if not shown.size:
        return
    slowest = np.nanmax(a.step_seconds[:, shown], axis=0)
    decks = [parse_deck(s.deck) for s in a.run.first_trace.sessions] + [a.run.deck]
    dst = any(str(deck.get("dst.enabled")).lower() == "true" for deck in decks)
    sab = any(deck.get("batching.method") in ("sab", "lbb") for deck in decks)
    for key, kind, wanted in (
        ("dst_overhead_share", "tuning", dst),
        ("sab_overhead_share", "planning", sab),
    ):
        seconds = np.zeros((len(a.ranks), len(a.steps)))
        for r, rank in enumerate(a.ranks):
            events = a.run.traces[rank].events
            events = events[(events["kind"] == code(kind)) & np.isin(events["step"], a.steps)]
            np.add.at(
                seconds[r],
                np.searchsorted(a.steps, events["step"]),
                events["end_s"] - events["begin_s"],
            )
        if wanted and seconds.any():
            a.overheads[key] = metrics.overhead_share(seconds.max(axis=0)[shown], slowest)


def _memory(a):
    names = sorted(
        {
            n[len("peak_bytes_") :]
            for t in a.run.traces.values()
            for n in t.steps
            if n.startswith("peak_bytes_")
        }
    )
    for name in names:
        peaks = []
        for rank in a.ranks:
            values = a.run.traces[rank].steps.get("peak_bytes_" + name, np.zeros(0))
            values = values[~np.isnan(values)]
            peaks.append(float(values.max()) if values.size else np.nan)
        a.memory[name] = np.array(peaks)


def _regions(a):
    """Every kind that any rank entered, so that what rank 0 never does is not lost."""
    for code, kind in enumerate(KINDS):
        seconds, inclusive, count, entered = np.zeros(len(a.ranks)), np.zeros(len(a.ranks)), 0, []
        for r, rank in enumerate(a.ranks):
            events = a.run.traces[rank].events
            mine = events["kind"] == code
            if mine.any():
                seconds[r] = a.exclusive[rank][mine].sum()
                inclusive[r] = (events["end_s"][mine] - events["begin_s"][mine]).sum()
                count += int(mine.sum())
                entered.append(rank)
        if entered:
            a.regions.append(
                {
                    "region": kind,
                    "ranks": entered,
                    "events": count,
                    "exclusive": seconds,
                    "inclusive": inclusive,
                    "imbalance": metrics.imbalance_degree(seconds),
                }
            )


def step_seconds(a):
    """step -> seconds of the slowest rank."""
    known = ~np.isnan(a.step_seconds).all(axis=0)
    slowest = np.nanmax(a.step_seconds[:, known], axis=0) if known.any() else np.zeros(0)
    return dict(zip(a.steps[known].tolist(), slowest.tolist()))


def mean_step_seconds(a):
    """Mean over steps of the slowest rank's step time."""
    times = a.step_seconds[:, a.shown]
    return float(np.mean(np.nanmax(times, axis=0))) if times.size else 0.0


def summary(a):
    """The numbers of metrics.json: names of the metrics at top level."""
    shown, rank_seconds = a.shown, starts.rank_seconds(a)
    result = {
        "run": a.run.name,
        "ranks": a.run.ranks,
        "ranks_read": len(a.ranks),
        "steps": int(shown.sum()),
        "runtime_s": a.runtime,
        "step_time_s": mean_step_seconds(a),
        "load_balance": a.pop[0],
        "communication_efficiency": a.pop[1],
        "parallel_efficiency": a.pop[2],
        "imbalance": a.imbalance,
        "bubble_ratio": a.bubble_ratio,
    }
    result.update(a.ring.get("all", {}))
    result.update(a.batch)
    result.update(sparsity(a))
    result.update(recall(a))
    result.update(prediction.summary(a.prediction))
    result.update(a.overheads)
    result.update(scalars.summary(a))
    if "tokens" in a.scalars and rank_seconds > 0:
        steps, tokens = a.scalars["tokens"]
        result["tokens_per_s_per_rank"] = float(
            tokens[np.isin(steps, a.steps[shown])].sum() / rank_seconds
        )
    if "total" in a.memory and not np.isnan(a.memory["total"]).all():
        result["peak_bytes"] = float(np.nanmax(a.memory["total"]))
    here = ~np.isnan(a.step_seconds) & shown
    for key, table in (("step_split_s", a.split), ("between_steps_s", a.between)):
        means = table[here].mean(axis=0) if here.any() else []
        result[key] = {name: float(v) for name, v in zip(CATEGORIES, means) if v > 0}
    result["ring"] = a.ring
    result["per_rank"] = [
        {
            "rank": rank,
            "useful_s": float(np.nansum(a.useful[r, shown])),
            **{f"peak_bytes_{n}": float(v[r]) for n, v in a.memory.items() if not np.isnan(v[r])},
        }
        for r, rank in enumerate(a.ranks)
    ]
    result["notes"] = list(a.run.notes)
    return result
