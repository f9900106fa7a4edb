"""Plotly figures as plain values: page.js draws them.

A panel is {"title", "data", "layout", "height"}, or with "by_step": [[label, data]] in place of
"data" one that a slider leads through the steps.  A trace whose meta is {"ranks": [rank of each
entry], "fields": [names of its lists of that length]} follows the page's choice of ranks.
"""
import math

import numpy as np

from style import HEAT

DIGITS = 6


def plain(value):
    """JSON of a panel: NaN is null, numbers have DIGITS digits."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (float, np.floating)):
        value = float(value)
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return value.item() if isinstance(value, np.generic) else value


def panel(title, data, x="", y="", height=320, **layout):
    """A panel; `layout` has Plotly's names, axes are merged with their titles."""
    for name, text in (("xaxis", x), ("yaxis", y)):
        layout[name] = {"title": {"text": text}, **layout.get(name, {})}
    if x == "step" and layout["xaxis"].get("type") != "category":
        layout["xaxis"]["tickformat"] = "d"
        if max((len(trace["x"]) for trace in data), default=0) <= 12:
            layout["xaxis"]["dtick"] = 1
    return {"title": title, "data": data, "layout": layout, "height": height}


def stepped(title, by_step, **rest):
    """A panel with a slider; `by_step`: [(label, data)]."""
    made = panel(title, [], **rest)
    del made["data"]
    return {**made, "by_step": [[str(label), data] for label, data in by_step]}


def of_ranks(trace, ranks, *fields):
    """The trace, following the choice of ranks in the lists named."""
    return {**trace, "meta": {"ranks": list(ranks), "fields": list(fields)}}


def names(values):
    """Labels of a category axis."""
    return [str(v) for v in values]


def bars(name, x, y, colour=None, **more):
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour}, **more}


def line(name, x, y, colour=None, marks=False, **more):
    mode = "lines+markers" if marks else "lines"
    colours = {"line": {"color": colour, **more.pop("line", {})}, "marker": {"color": colour}}
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **colours, **more}


def stack(name, x, y, colour, many):
    """A part of a stack over x: columns, or areas where there are many."""
    if not many:
        return bars(name, x, y, colour)
    area = {"stackgroup": "all", "fillcolor": colour, "line": {"width": 0, "shape": "hvh"}}
    return line(name, x, y, colour, **area)


def heat(x, y, z, unit, **more):
    return {
        "type": "heatmap",
        "x": x,
        "y": y,
        "z": z,
        "colorscale": HEAT,
        "hoverongaps": False,
        "colorbar": {"title": {"text": unit}, "thickness": 12, "outlinewidth": 0},
        **more,
    }


def some(items, most):
    """At most `most` of them, evenly spread, first and last among them."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]
