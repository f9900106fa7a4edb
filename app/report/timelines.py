"""Figures of a step over time: what every rank did, and its schedule as simulated and as run."""
import numpy as np

import metrics
from analysis import CATEGORIES, category_of_kind, nesting
from batches import SCHEDULE_OPS
from load import BESIDE, KINDS, code
from plot import of_ranks, some, stepped
from style import CATEGORY_COLOURS, INK, seconds_unit

TIMELINE = (
    "Upper lane of a rank: operations of the schedule with their micro-batch (F forward, R"
    " recompute, B backward, W its weight half). Lower lane: what the rank was doing. The slider"
    " leads through steps; of more than 32 ranks the slowest, the fastest and some between are"
    " drawn."
)
PREDICTION = (
    "Upper lane of a stage: its operations as the simulator times them with profile.table; lower"
    " lane: as they ran (F forward, R recompute, B backward or its input half, W weight half)."
    " Receives last until the message is there."
)
MOST_LANES, MOST_STEPS, MOST_BARS = 32, 12, 60000

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


class Bars:
    """Bars over time, gathered by name into one trace each."""

    def __init__(self, factor, unit):
        self.factor, self.unit, self.traces = factor, unit, {}

    def add(self, name, colour, lane, rank, begin, end, text, place, letters=""):
        """`place`: (offset, width) of the bar in its lane."""
        trace = self.traces.setdefault((name, colour), {"rows": []})
        row = (lane, rank, begin * self.factor, (end - begin) * self.factor, text, *place, letters)
        trace["rows"].append(row)

    def data(self, by_rank=True):
        out = []
        for (name, colour), trace in self.traces.items():
            lane, rank, begin, length, text, offset, width, letters = map(list, zip(*trace["rows"]))
            bar = {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": lane,
                "base": begin,
                "x": length,
                "offset": offset,
                "width": width,
                "customdata": text,
                "hovertemplate": (
                    f"%{{customdata}}<br>%{{base}} to %{{x}} {self.unit}<extra></extra>"
                ),
                "marker": {"color": colour, "line": {"width": 0.4, "color": "white"}},
            }
            fields = ["y", "base", "x", "offset", "width", "customdata"]
            if any(letters):
                bar.update(text=letters, textposition="inside", insidetextanchor="middle")
                bar.update(insidetextfont={"color": INK, "size": 9}, constraintext="inside")
                bar["textangle"] = 0
                fields.append("text")
            out.append(of_ranks(bar, rank, *fields) if by_rank else bar)
        return out


def steps_shown(a):
    """Complete steps, as indices into a.steps."""
    shown = np.flatnonzero(
        a.complete if a.complete.any() else ~np.isnan(a.step_seconds).all(axis=0)
    )
    return some(shown.tolist(), MOST_STEPS)


def ranks_shown(a, steps):
    """All, or the slowest, the fastest and some between, and of every step without these, which
    fewer ranks may have run, its first ones; ascending."""
    if len(a.ranks) <= MOST_LANES:
        return list(a.ranks)
    order = np.argsort(np.nansum(a.useful, axis=1), kind="stable").tolist()
    quarter = MOST_LANES // 4
    between = some(order[quarter:-quarter], MOST_LANES - 2 * quarter)
    shown = set(order[:quarter] + between + order[-quarter:])
    for s in steps:
        there = np.flatnonzero(~np.isnan(a.step_seconds[:, s])).tolist()
        if not shown.intersection(there):
            shown.update(there[:quarter])
    return sorted(a.ranks[r] for r in shown)


def timeline(a):
    """Per step and rank the schedule's operations (upper lane), and what the rank was doing at each
    moment (lower lane)."""
    steps = steps_shown(a)
    if not steps:
        return None
    ranks = ranks_shown(a, steps)
    frames, factor, unit = [], None, None
    for s in steps:
        chosen = {}
        for rank in ranks:
            events = a.run.traces[rank].events
            here = events[events["step"] == a.steps[s]]
            if len(here):
                chosen[rank] = here[nesting(here)]
        origin, last = _extent(chosen.values())
        if factor is None:
            factor, unit = seconds_unit(last - origin)
        bars = Bars(factor, unit)
        finest = (last - origin) * max(1 / 3000, len(chosen) * len(steps) / MOST_BARS)
        for rank, events in chosen.items():
            _add_categories(bars, rank, events, origin, last, finest)
            _add_schedule(bars, rank, events, origin, last)
        frames.append((f"step {a.steps[s]}", bars.data()))
    title = "Timeline" + ("" if len(ranks) == len(a.ranks) else f" of {len(ranks)} ranks")
    return [
        stepped(
            title,
            frames,
            x=f"time since the step began ({unit})",
            y="rank",
            height=int(np.clip(150 + 34 * len(ranks), 260, 1000)),
            barmode="overlay",
            yaxis={"type": "category", "autorange": "reversed"},
        )
    ]


def _extent(events_of_ranks):
    """Begin and end of the step: of its own events where they are there, else of all."""
    step_kind = code("step")
    inside = [
        e[e["kind"] == step_kind] if (e["kind"] == step_kind).any() else e for e in events_of_ranks
    ]
    return min(e["begin_s"].min() for e in inside), max(e["end_s"].max() for e in inside)


def _add_categories(bars, rank, events, origin, last, finest):
    """The lower lane of a rank."""
    category, names = category_of_kind(), list(CATEGORIES)
    spans = {}
    for begin, end, event in metrics.innermost_intervals(events["begin_s"], events["end_s"]):
        begin, end = max(begin, origin), min(end, last)
        if end <= begin:
            continue
        kind = int(events["kind"][event])
        drawn = spans.setdefault(category[kind], [])
        if drawn and begin - drawn[-1][1] < finest and end - begin < finest:
            drawn[-1][1] = end  # hair lines run together
        else:
            drawn.append([begin, end, _place(events[event])])
    for c in sorted(spans):
        for begin, end, text in spans[c]:
            end = max(end, begin + finest / 4)
            where = (begin - origin, end - origin)
            bars.add(
                names[c], CATEGORY_COLOURS[names[c]], str(rank), rank, *where, text, (-0.1, 0.5)
            )


def _add_schedule(bars, rank, events, origin, last):
    """The upper lane of a rank."""
    op_codes = {code(k): k for k in SCHEDULE_OPS}
    for e in events[np.isin(events["kind"], list(op_codes))]:
        kind = op_codes[int(e["kind"])]
        begin, end = e["begin_s"] - origin, e["end_s"] - origin
        colour = LIGHT_COLOURS.get(kind, "#cfe3d3")
        letters = f"{OP_LETTERS[kind]}{e['micro_batch']}"
        wide = end - begin > 0.012 * (last - origin)
        bars.add(
            f"{kind} op",
            colour,
            str(rank),
            rank,
            begin,
            end,
            _place(e),
            (-0.4, 0.26),
            letters if wide else "",
        )


def _place(event):
    """Kind and identifiers of an event."""
    text = KINDS[int(event["kind"])]
    for name in ("micro_batch", "chunk", "layer"):
        if event[name] >= 0:
            text += f", {name.replace('_', '-')} {event[name]}"
    return text


def prediction(a):
    """Per stage the simulated operations over the measured ones, a step at a time."""
    p = a.prediction
    if p is None:
        return None
    several = len({d for lanes in p.lanes.values() for d, _ in lanes}) > 1
    frames, rows = [], 1
    factor, unit = seconds_unit(float(max(p.measured_s.max(), p.predicted_s.max())))
    for step in some(p.steps, MOST_STEPS):
        lanes = dict(sorted(p.lanes[step].items())[: MOST_LANES // 2])
        rows = max(rows, len(lanes))
        origin = min(m["begin_s"].min() for _, m in lanes.values())
        bars = Bars(factor, unit)
        for (dp, stage), sides in lanes.items():
            name = f"dp {dp}, stage {stage}" if several else f"stage {stage}"
            for side, ops in zip(("predicted", "measured"), sides):
                zero = origin if side == "measured" else 0.0
                _add_ops(bars, f"{name}, {side}", ops, zero, p.measured_s.max())
        frames.append((f"step {step}", bars.data(by_rank=False)))
    return [
        stepped(
            "Schedule, simulated and as it ran",
            frames,
            x=f"time since the schedule began ({unit})",
            height=int(np.clip(140 + 62 * rows, 260, 1000)),
            barmode="overlay",
            yaxis={"type": "category", "autorange": "reversed", "automargin": True},
        )
    ]


def _add_ops(bars, lane, ops, zero, longest):
    for e in ops:
        kind = KINDS[e["kind"]]
        begin, end = e["begin_s"] - zero, e["end_s"] - zero
        if kind not in OP_COLOURS or end <= begin:
            continue
        # a strip over the ops beside which it runs
        place = (-0.4, 0.14) if kind in BESIDE else (-0.4, 0.8)
        wide = kind in OP_LETTERS and end - begin > 0.02 * longest
        letters = f"{OP_LETTERS[kind]}{e['micro_batch']}" if wide else ""
        name = kind.replace("_", " ")
        bars.add(name, OP_COLOURS[kind], lane, 0, begin, end, _place(e), place, letters)
