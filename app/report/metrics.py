"""Imbalance metrics, one definition each: the twins of core/observe/metrics.cpp, and tested
against it.  Times in seconds."""
import numpy as np

FORMULAS = {
    "pop": (
        "load balance = mean useful / max useful over ranks; communication efficiency = max useful"
        " / runtime; parallel efficiency = load balance \u00d7 communication efficiency = mean"
        " useful / runtime. Useful: model arithmetic, indexing, budget tuning, recomputation and"
        " optimizer, without waits and transfers. Runtime: wall time with at least one rank inside"
        " a training step. Where the number of ranks changed, each of the three is a quotient of"
        " rank-seconds: useful, ranks \u00d7 max useful and ranks \u00d7 runtime, summed over the"
        " starts; a rank's row is about the steps that it ran."
    ),
    "ring": (
        "worker imbalance = max / mean of computation time over the context-parallel workers at a"
        " ring step, averaged over ring steps; step imbalance = max / mean over ring steps at a"
        " worker, averaged over workers; computation ratio = computation time / ring-step wall"
        " time, averaged over workers and ring steps. Each is taken for one pass (one layer of one"
        " micro-batch, one direction) and averaged over passes, weighted by computation time."
    ),
    "sparsity": (
        "sparsity ratio = 1 - computed pairs / pairs that dense causal attention computes; budget"
        " in the pattern's unit a query (vertical_slash: slashes + columns / 64; moba, xattention:"
        " blocks), mean over micro-batches, heads and steps; overflow: columns and slashes that the"
        " caps left out, all steps and heads."
    ),
    "recall": (
        "recall = share of the exact softmax over all visible keys that lies on pairs which the"
        " index computes, of sampled queries; parts (sink block, own block, other blocks and"
        " slashes, columns) add up to it. Means over micro-batches, heads and steps, weighted by"
        " queries; \u00b1: half the 95 % interval, 1.96 standard errors. 10th percentile: the"
        " lowest of a head and step. C(k): what the budget's pattern holds, of the observed queries"
        " (vertical_slash), or of routing mass (moba)."
    ),
    "drift": (
        "Of one held-out sample at every measured step: recall of the index that the present"
        " weights choose, and of the one that those of the measurement before chose, on the present"
        " attention; drift is their difference. Means over heads and steps, weighted by queries."
    ),
    "batch": (
        "dbr = sum (T_max - T_i) / (T_max N) with T_i the tokens of data-parallel rank i; abr: the"
        " same with A_i, the sum of squared segment lengths; pr = sum (t_max - t_i) / (t_max B)"
        " with t_i the tokens of pack i and t_max its capacity; cr = tokens in micro-batches that"
        " several ranks share (sp \u00d7 cp > 1) / tokens; ave_t = tokens / (steps N). Means over"
        " steps, each on the mesh of its plan."
    ),
    "step": (
        "imbalance = max T_i / mean T_i over the micro-batches of a step, T_i averaged over the"
        " ranks that run micro-batch i, mean over steps (SparseBalance Equation 11); bubble ratio ="
        " 1 - forward and backward time / (stages \u00d7 schedule time), recomputation, transfers"
        " and waits counted as bubble."
    ),
    "prediction": (
        "Predicted: the executed schedule simulated over the times of profile.table; measured: its"
        " ops in the trace, from the first begin to the last end over all ranks, the mean of a"
        " stage's ranks. wait = step time - busy (forward, backward and its halves, recompute);"
        " bubble ratio as above, over whole ops. Prediction error: median over steps of |predicted"
        " / measured step time - 1|."
    ),
    "overhead": (
        "dst_overhead_share = time of budget tuning (coverage, choice) / step time;"
        " sab_overhead_share = time of planning the batch / step time; of a step the rank that"
        " spends most counts, and the first step is left out where there are others."
    ),
    "regions": (
        "exclusive = time in the region outside the regions nested in it; per rank that enters it,"
        " summed over steps; imbalance = max / mean over all ranks, a rank that never enters"
        " counted as 0."
    ),
}


def mean_of_known(values, axis):
    """Mean of the values that are no NaN; NaN where all are."""
    known = ~np.isnan(values)
    count = known.sum(axis=axis)
    total = np.where(known, values, 0).sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def sparsity_ratio(computed, visible):
    """1 - computed / visible pairs; 0 where nothing is visible."""
    visible = np.asarray(visible, dtype=float)
    return 1 - np.divide(computed, visible, out=np.ones_like(visible), where=visible > 0)


def recall(rows):
    """Mean of rows of the trace's plan "recall", weighted by queries, and half of its 95 %
    interval.  Heads of a layer are measured on the same queries: their errors move together."""
    queries, means, errors = rows[:, 6:9].T
    heads = len(np.unique(rows[:, 4]))
    spread = np.sqrt(heads * np.sum((queries * errors) ** 2)) / queries.sum()
    return float(np.sum(queries * means) / queries.sum()), float(1.96 * spread)


def imbalance_degree(values):
    """max / mean; 1 for an empty or all-zero input."""
    values = np.asarray(values, dtype=float)
    mean = values.mean() if values.size else 0.0
    return float(values.max() / mean) if mean > 0 else 1.0


def _table(times):
    if not isinstance(times, np.ndarray):
        if len({len(row) for row in times}) > 1:
            raise ValueError("workers have different numbers of ring steps")
        times = np.array([list(row) for row in times], dtype=float)
    return times if times.size else np.zeros((0, 0))


def _mean_degree(rows):
    """Mean of imbalance_degree over the rows of a table."""
    mean = rows.mean(axis=1)
    return float(np.where(mean > 0, rows.max(axis=1) / np.where(mean > 0, mean, 1.0), 1.0).mean())


def worker_imbalance(times):
    """times[worker][ring step]: over workers at a step, averaged over steps."""
    times = _table(times)
    return _mean_degree(times.T) if times.size else 1.0


def step_imbalance(times):
    """times[worker][ring step]: over steps at a worker, averaged over workers."""
    times = _table(times)
    return _mean_degree(times) if times.size else 1.0


def computation_ratio(compute, wall):
    """Computation / wall time of a ring step, mean over workers and steps; steps without wall time
    are left out."""
    compute, wall = _table(compute), _table(wall)
    if compute.shape != wall.shape:
        raise ValueError("computation and wall times must have the same workers and ring steps")
    ran = wall > 0
    return float(np.mean(compute[ran] / wall[ran])) if ran.any() else 1.0


def balance_ratio(values):
    """sum (max - x_i) / (max N): DBR and ABR."""
    values = np.asarray(values, dtype=float)
    return padding_ratio(values, values.max()) if values.size else 0.0


def padding_ratio(pack_tokens, capacity):
    pack_tokens = np.asarray(pack_tokens, dtype=float)
    return (
        float((capacity - pack_tokens.mean()) / capacity)
        if pack_tokens.size and capacity > 0
        else 0.0
    )


def pop(useful, runtime):
    """(load balance, communication efficiency, parallel efficiency) from useful seconds per rank
    and the run time."""
    return pop_of_worlds([(useful, runtime)])


def pop_of_worlds(worlds):
    """The same of [(useful seconds per rank, run time)] of steps that ran on different ranks:
    means, maxima and run times weigh as many rank-seconds as they stand for."""
    worlds = [(np.asarray(useful, dtype=float), runtime) for useful, runtime in worlds]
    useful = sum(float(seconds.sum()) for seconds, _ in worlds)
    most = sum(len(seconds) * float(seconds.max(initial=0)) for seconds, _ in worlds)
    whole = sum(len(seconds) * runtime for seconds, runtime in worlds)
    if most <= 0 or whole <= 0:
        return 1.0, 1.0, 1.0
    return useful / most, most / whole, useful / whole


def _begin_order(begin, end):
    return np.lexsort(
        (-end, begin)
    )  # stable: ties keep the order of recording, which is that of nesting


def exclusive_seconds(begin, end):
    """Seconds of each event that no later-begun event of the same rank covers."""
    begin, end = np.asarray(begin, dtype=float), np.asarray(end, dtype=float)
    nested = _exclusive_of_nested(begin, end)
    return _exclusive_of_any(begin, end) if nested is None else nested


def _exclusive_of_nested(begin, end):
    """The same where every event lies inside or outside each other one: its length less those of
    the events directly inside it.  None where two overlap by halves."""
    seconds = end - begin
    some = np.flatnonzero(seconds > 0)  # the others cover nothing
    order = some[_begin_order(begin[some], end[some])]
    b, e = begin[order], end[order]
    # As many are open when one begins as began before it and did not end until then.
    depth = np.arange(len(order)) - np.searchsorted(np.sort(e), b, side="right")
    out = seconds.copy()
    for level in range(1, int(depth.max(initial=0)) + 1):
        inside, around = np.flatnonzero(depth == level), np.flatnonzero(depth == level - 1)
        parent = around[np.searchsorted(around, inside) - 1]
        if (parent > inside).any() or (e[inside] > e[parent]).any():
            return None
        np.subtract.at(out, order[parent], e[inside] - b[inside])
    return out


def _exclusive_of_any(begin, end):
    seconds = (end - begin).tolist()
    order = _begin_order(begin, end).tolist()
    begins, ends = begin.tolist(), end.tolist()
    open_events = []
    for i in order:
        at, until = begins[i], ends[i]
        while open_events and ends[open_events[-1]] <= at:
            open_events.pop()
        for outer in reversed(open_events):
            to = min(until, ends[outer])
            if to > at:
                seconds[outer] -= to - at
                at = to
            if at >= until:
                break
        open_events.append(i)
    return np.array(seconds)


def innermost_intervals(begin, end):
    """Disjoint intervals (begin, end, event) in which each event is the innermost one, ascending:
    the exclusive times laid out."""
    begin, end = np.asarray(begin, dtype=float), np.asarray(end, dtype=float)
    intervals, open_events, at = [], [], -np.inf

    def advance(to):
        nonlocal at
        while open_events and at < to:
            top = open_events[-1]
            until = min(end[top], to)
            if until > at:
                intervals.append((at, until, top))
                at = until
            if end[top] <= at:
                open_events.pop()
        at = max(at, to) if np.isfinite(to) else at

    for i in _begin_order(begin, end).tolist():
        advance(begin[i])
        open_events.append(i)
    advance(np.inf)
    return intervals


def overhead_share(most, steps):
    """Seconds of the rank that spends most in each step over the steps' times, both summed; the
    first step is left out where there are others."""
    most, steps = np.asarray(most, dtype=float), np.asarray(steps, dtype=float)
    first = 1 if len(steps) > 1 else 0
    whole = steps[first:].sum()
    return float(most[first:].sum() / whole) if whole > 0 else 0.0


def union_seconds(begin, end):
    """Length of the union of intervals."""
    begin, end = np.asarray(begin, dtype=float), np.asarray(end, dtype=float)
    order = np.argsort(begin)
    total, reached = 0.0, -np.inf
    for b, e in zip(begin[order], end[order]):
        total += max(0.0, e - max(b, reached))
        reached = max(reached, e)
    return float(total)
