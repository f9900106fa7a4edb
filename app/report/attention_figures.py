"""Figures of attention: ring steps, recall and coverage, sparsity and budgets."""
import numpy as np

import metrics
from load import HEAD_PATTERNS, rows_by
from plot import bars, heat, line, names, of_ranks, panel, some, stepped
from style import MUTED, SERIES, seconds_unit, series

RING = (
    "Mean computation, and mean wait for the hops, of each context-parallel worker at each ring"
    " step."
)
RECALL = (
    "Share of the exact attention that lies on computed pairs, from sampled queries of the measured"
    " steps: by layer and head, over the run with its 95 % interval, and which pairs hold it. C(k),"
    " where budgets are tuned: share that a pattern of budget k holds of the observed queries'"
    " attention. Rows: recall_rows.csv, coverage.csv."
)
SPARSITY = (
    "Share of the causal pairs that sparse attention leaves out (MTraining Figure 3). Budgets of"
    " every layer, head and step: budgets.csv; where heads differ, how often each computed which"
    " pattern: head_patterns.csv."
)
BUDGETS = (
    "Dynamic sparsity tuning: what every layer chose for every micro-batch. Negative losses are"
    " coverage gained."
)
CATEGORY_AXIS = {"type": "category"}
DOWNWARD = {"type": "category", "autorange": "reversed"}
PARTS = ("sink block", "own block", "other blocks and slashes", "columns")


def ring(a):
    """Mean computation and wait at each ring step, per worker."""
    directions = [d for d in ("forward", "backward") if d in a.ring_times]
    if not directions:
        return None
    longest = max((a.ring_times[d][2] + a.ring_times[d][3]).max() for d in directions)
    factor, unit = seconds_unit(longest)
    panels = []
    for direction in directions:
        workers, ring_steps, compute, wait = a.ring_times[direction]
        two_levels = len({o for o, _ in ring_steps}) > 1
        labels = [f"{max(o, 0)}.{max(i, 0)}" if two_levels else str(i) for o, i in ring_steps]
        for what, values in (("computation", compute), ("wait", wait)):
            cells = heat(
                labels,
                names(workers),
                values * factor,
                unit,
                zmin=0,
                zmax=longest * factor,
            )
            panels.append(
                panel(
                    f"Ring attention, {direction}: {what}",
                    [of_ranks(cells, workers, "y", "z")],
                    "ring step" + (" (outer.inner)" if two_levels else ""),
                    "rank",
                    height=int(np.clip(150 + 22 * len(workers), 240, 600)),
                    xaxis=CATEGORY_AXIS,
                    yaxis=DOWNWARD,
                )
            )
    return panels


def recall(a):
    """Recall by layer and head, by step with its 95 % interval, its parts, and coverage curves."""
    if a.recall is None:
        return None
    layers, heads = (np.unique(a.recall[:, i]) for i in (3, 4))
    by_step = rows_by(a.recall[:, 0], a.recall)
    steps = list(by_step)
    shown = [("mean over steps", a.recall)]
    shown += [(f"step {int(s)}", by_step[s]) for s in some(steps, 30)]
    frames = [(label, [_by_head(rows, layers, heads)]) for label, rows in shown]
    mean, interval = np.array([metrics.recall(rows) for rows in by_step.values()]).T
    curve = line("recall", steps, mean, SERIES[0], marks=True)
    curve["error_y"] = {"type": "data", "array": interval, "thickness": 1}
    panels = [
        stepped(
            "Recall by layer and head",
            frames,
            x="head",
            y="layer",
            yaxis=DOWNWARD,
            xaxis=CATEGORY_AXIS,
        ),
        panel("Recall by step, 95 % interval", [curve], "step", "recall", showlegend=False),
        panel(
            "What holds it, mean of each layer",
            _parts(a.recall, layers),
            "layer",
            "share of attention",
            barmode="stack",
            xaxis=CATEGORY_AXIS,
        ),
    ]
    return panels + _coverage(a)


def _by_head(rows, layers, heads):
    table = np.full((len(layers), len(heads)), np.nan)
    for i, j in np.ndindex(table.shape):
        mine = rows[(rows[:, 3] == layers[i]) & (rows[:, 4] == heads[j])]
        if len(mine):
            table[i, j] = metrics.recall(mine)[0]
    return heat(names(heads.astype(int)), names(layers.astype(int)), table, "recall", zmax=1)


def _parts(rows, layers):
    """Mean parts of recall, weighted by queries."""
    data = []
    for p, name in enumerate(PARTS):
        values = []
        for layer in layers:
            mine = rows[rows[:, 3] == layer]
            values.append(np.sum(mine[:, 6] * mine[:, 10 + p]) / np.sum(mine[:, 6]))
        data.append(bars(name, names(layers.astype(int)), values, series(p)))
    return data


def _coverage(a):
    if a.coverage is None:
        return []
    data = []
    for i, layer in enumerate(np.unique(a.coverage[:, 3])):
        mine = a.coverage[:, 3] == layer
        budgets = np.unique(a.coverage[mine, 4])
        values = [_mean_coverage(a, mine & (a.coverage[:, 4] == k)) for k in budgets]
        data.append(line(f"layer {int(layer)}", budgets, values, series(i), marks=True))
    return [panel("Coverage C(k)", data, "budget k", "share of attention")]


def _mean_coverage(a, rows):
    """Weighted by queries; plain where the trace does not tell them."""
    weights = a.coverage_queries[rows, 0]
    return np.average(a.coverage[rows, 5], weights=weights if weights.any() else None)


def sparsity(a):
    """Sparsity ratio by layer and head, and by step: mean and range over layers and heads."""
    if not a.sparse:
        return None
    steps, layers, heads = (sorted({key[i] for key in a.sparse}) for i in range(3))
    table = np.full((len(steps), len(layers), len(heads)), np.nan)
    place = [{value: i for i, value in enumerate(values)} for values in (steps, layers, heads)]
    for (step, layer, head), v in a.sparse.items():
        at = place[0][step], place[1][layer], place[2][head]
        table[at] = metrics.sparsity_ratio(v[2], v[3])
    rows = [layer if layer >= 0 else "all" for layer in layers]
    limits = {"zmin": np.nanmin(table), "zmax": np.nanmax(table)}
    frames = [("mean over steps", metrics.mean_of_known(table, axis=0))]
    frames += [(f"step {steps[s]}", table[s]) for s in some(range(len(steps)), 30)]
    cells = [
        (label, [heat(names(heads), names(rows), values, "ratio", **limits)])
        for label, values in frames
    ]
    flat = table.reshape(len(steps), -1)
    low = line("least", steps, np.nanmin(flat, axis=1), MUTED, line={"width": 0})
    high = line("most", steps, np.nanmax(flat, axis=1), MUTED, line={"width": 0}, fill="tonexty")
    mean = line(
        "mean", steps, metrics.mean_of_known(flat, axis=1), SERIES[0], marks=len(steps) <= 60
    )
    return [
        stepped(
            "Sparsity ratio by layer and head",
            cells,
            x="head",
            y="layer",
            yaxis=DOWNWARD,
            xaxis=CATEGORY_AXIS,
        ),
        panel("Sparsity ratio by step, range over layers and heads", [low, high, mean], "step"),
    ] + _head_patterns(a)


def _head_patterns(a):
    """Where heads differ: how often each computes which pattern."""
    if not a.kinds:
        return []
    layers, heads = (sorted({key[i] for key in a.kinds}) for i in range(2))
    counts = np.zeros((len(layers), len(heads), len(HEAD_PATTERNS)))
    for (layer, head), chosen in a.kinds.items():
        counts[layers.index(layer), heads.index(head)] = chosen
    share = counts / np.maximum(1, counts.sum(axis=2, keepdims=True))
    frames = [
        (name, [heat(names(heads), names(layers), share[:, :, k], "share", zmin=0, zmax=1)])
        for k, name in enumerate(HEAD_PATTERNS)
        if counts[:, :, k].any()
    ]
    return [
        stepped(
            "Share of micro-batches in which a head computes a pattern",
            frames,
            x="head",
            y="layer",
            yaxis=DOWNWARD,
            xaxis=CATEGORY_AXIS,
        )
    ]


def budgets(a):
    """Final budgets and coverage losses of dynamic sparsity tuning."""
    if a.budgets is None:
        return None
    base, chosen, loss = a.budgets.T
    values, counts = np.unique(chosen, return_counts=True)
    told = ", ".join(f"{b:.0f}" for b in np.unique(base))
    shares, edges = np.histogram(loss, 30)
    count = "layers \u00d7 micro-batches"
    return [
        panel(
            f"Attention budgets (base {told})",
            [bars("choices", names(np.round(values).astype(int)), counts, SERIES[0])],
            "final budget (key blocks a query)",
            count,
            xaxis=CATEGORY_AXIS,
        ),
        panel(
            "Coverage lost against the base budget",
            [bars("choices", (edges[:-1] + edges[1:]) / 2, shares, SERIES[2])],
            "coverage lost",
            count,
        ),
    ]
