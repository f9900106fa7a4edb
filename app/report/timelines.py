"""Figures of one step over time: what every rank did, and its schedule as simulated and as run."""
import numpy as np
from matplotlib.patches import Patch

import metrics
from analysis import CATEGORIES, SCHEDULE_OPS, category_of_kind, nesting
from load import BESIDE, KINDS, code
from style import (
    CATEGORY_COLOURS,
    INK,
    MUTED,
    WIDTH,
    plt,
    rank_height,
    rank_ticks,
    seconds_unit,
)

OP_COLOURS = {
    "forward": "#8fb8de",
    "recompute": "#edae49",
    "backward": "#5b9a68",
    "backward_input": "#5b9a68",
    "backward_weight": "#a8cfb2",
    "offload": "#8a7f6a",
    "fetch": "#c2b8a3",
    "recv": "#f0dfe2",
}
LIGHT_COLOURS = {"forward": "#c7dcf1", "recompute": "#f5dfae"}
OP_LETTERS = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "backward_input": "B",
    "backward_weight": "W",
}


def timeline_step(a):
    """The complete step of median length: index into a.steps."""
    shown = np.flatnonzero(
        a.complete if a.complete.any() else ~np.isnan(a.step_seconds).all(axis=0)
    )
    if not shown.size:
        return None
    longest = np.nanmax(a.step_seconds[:, shown], axis=0)
    return int(shown[np.argsort(longest)[len(shown) // 2]])


def timeline(a):
    """One step: per rank the schedule ops (upper lane) and what the rank was doing at each moment
    (lower lane)."""
    s = timeline_step(a)
    if s is None:
        return None
    chosen = {}
    for rank in a.ranks:
        events = a.run.traces[rank].events
        if (here := events["step"] == a.steps[s]).any():
            chosen[rank] = events[here]
    origin, last = _extent(chosen.values())
    factor, unit = seconds_unit(last - origin)
    figure, ax = plt.subplots(figsize=(WIDTH, rank_height(len(a.ranks), per=0.62, most=11) + 0.4))
    used, names = set(), list(CATEGORIES)
    for row, rank in enumerate(a.ranks):
        if rank not in chosen:
            continue
        events = chosen[rank][nesting(chosen[rank])]
        used |= _draw_categories(ax, row, events, origin, last, factor)
        _draw_schedule(ax, row, events, origin, last, factor)
    ax.set_ylim(len(a.ranks) - 0.45, -0.6)
    ax.set_xlim(0, (last - origin) * factor)
    rank_ticks(ax, a.ranks)
    ax.grid(axis="y", visible=False)
    ax.set(
        xlabel=f"time since the step began ({unit})",
        ylabel="rank",
        title=f"Timeline of step {a.steps[s]}",
    )
    _legend_below(ax, {names[c]: CATEGORY_COLOURS[names[c]] for c in sorted(used)})
    return figure


def _extent(events_of_ranks):
    """Begin and end of the step: of its own events where they are there, else of all."""
    step_kind = code("step")
    inside = [
        e[e["kind"] == step_kind] if (e["kind"] == step_kind).any() else e for e in events_of_ranks
    ]
    return min(e["begin_s"].min() for e in inside), max(e["end_s"].max() for e in inside)


def _draw_categories(ax, row, events, origin, last, factor):
    """The lower lane of a rank; returns the categories drawn."""
    category, names, least = category_of_kind(), list(CATEGORIES), (last - origin) / 3000
    spans = {}
    for begin, end, event in metrics.innermost_intervals(events["begin_s"], events["end_s"]):
        begin, end = max(begin, origin), min(end, last)
        if end <= begin:
            continue
        drawn = spans.setdefault(category[events["kind"][event]], [])
        if drawn and begin - drawn[-1][1] < least and end - begin < least:
            drawn[-1][1] = end  # hair lines run together
        else:
            drawn.append([begin, end])
    for c in sorted(spans, reverse=True):
        drawn = [((b - origin) * factor, max(e - b, least) * factor) for b, e in spans[c]]
        ax.broken_barh(drawn, (row - 0.12, 0.5), color=CATEGORY_COLOURS[names[c]], linewidth=0)
    return set(spans)


def _draw_schedule(ax, row, events, origin, last, factor):
    """The upper lane of a rank."""
    op_codes = {code(k): k for k in SCHEDULE_OPS}
    for e in events[np.isin(events["kind"], list(op_codes))]:
        kind, begin = op_codes[int(e["kind"])], (e["begin_s"] - origin) * factor
        length = (e["end_s"] - e["begin_s"]) * factor
        ax.broken_barh(
            [(begin, length)],
            (row - 0.4, 0.24),
            facecolor=LIGHT_COLOURS.get(kind, "#cfe3d3"),
            edgecolor="white",
            linewidth=0.8,
        )
        if length > 0.024 * (last - origin) * factor:
            _name_op(ax, kind, e, begin + length / 2, row - 0.275, 7.5)


def _name_op(ax, kind, event, x, y, size):
    text = f"{OP_LETTERS[kind]}{event['micro_batch']}"
    ax.text(x, y, text, ha="center", va="center", fontsize=size, color=INK)


def _legend_below(ax, colours):
    ax.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.55 / (ax.figure.get_figheight() - 0.9)),
        ncol=6,
        handlelength=1.2,
        columnspacing=1.4,
    )


def prediction(a):
    """The step of median length: per stage the simulated ops over the measured ones."""
    p = a.prediction
    if p is None:
        return None
    step = p.steps[int(np.argsort(p.measured_s)[len(p.steps) // 2])]
    lanes = p.lanes[step]
    origin = min(m["begin_s"].min() for _, m in lanes.values())
    last = max(max(q["end_s"].max(), m["end_s"].max() - origin) for q, m in lanes.values())
    factor, unit = seconds_unit(last)
    figure, ax = plt.subplots(figsize=(WIDTH, rank_height(len(lanes), per=0.8, most=12) + 0.4))
    used, names, several = {}, [], len({d for d, _ in lanes}) > 1
    for row, ((dp, stage), sides) in enumerate(sorted(lanes.items())):
        names.append(f"dp {dp}, stage {stage}" if several else f"stage {stage}")
        for side, ops in enumerate(sides):
            low = row + (-0.38, 0.03)[side]
            used |= _draw_ops(ax, low, ops, origin if side else 0.0, last, factor)
            ax.text(
                1.005,
                low + 0.175,
                ("predicted", "measured")[side],
                transform=ax.get_yaxis_transform(),
                va="center",
                fontsize=7.5,
                color=MUTED,
            )
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, last * factor)
    rank_ticks(ax, names)
    ax.grid(axis="y", visible=False)
    ax.set(
        xlabel=f"time since the schedule began ({unit})",
        title=f"Schedule of step {step}, simulated and as it ran",
    )
    _legend_below(ax, {kind.replace("_", " "): colour for kind, colour in used.items()})
    return figure


def _draw_ops(ax, low, ops, zero, last, factor):
    """One lane of a stage; returns {kind: colour} of the ops drawn, in their order."""
    used = {}
    for e in ops:
        kind = KINDS[e["kind"]]
        length = (e["end_s"] - e["begin_s"]) * factor
        if kind not in OP_COLOURS or length <= 0:
            continue
        used[kind] = OP_COLOURS[kind]
        begin = (e["begin_s"] - zero) * factor
        aside = kind in BESIDE  # a strip over the ops beside which it runs
        ax.broken_barh(
            [(begin, length)],
            (low, 0.06 if aside else 0.35),
            facecolor=OP_COLOURS[kind],
            edgecolor="white",
            linewidth=0.5,
            zorder=3 if aside else 1,
        )
        if length > 0.02 * last * factor and kind in OP_LETTERS:
            _name_op(ax, kind, e, begin + length / 2, low + 0.175, 6.5)
    return used
