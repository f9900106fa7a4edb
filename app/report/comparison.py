"""Several runs side by side: step by step, and their metrics."""
import numpy as np

from analysis import CATEGORIES, step_seconds, summary
from plot import bars, line, panel
from style import CATEGORY_COLOURS, loss_unit, seconds_unit, series
from tables import COMPARED, Table


def steps(analyses):
    """Step time and loss of every run by step, and the difference to the first run."""
    times = [step_seconds(a) for a in analyses]
    factor, unit = seconds_unit(max((max(t.values()) for t in times if t), default=1))
    panels = [
        panel(
            "Step time, slowest rank",
            [_by_step(a, t, i, factor) for i, (a, t) in enumerate(zip(analyses, times))],
            "step",
            f"time ({unit})",
            hovermode="x unified",
        )
    ]
    differences = []
    for i, (a, t) in enumerate(zip(analyses[1:], times[1:]), 1):
        common = {s: t[s] - times[0][s] for s in t if s in times[0]}
        differences.append(bars(a.run.name, *_columns(common, factor), series(i)))
    if any(d["x"] for d in differences):
        title = f"Step time, difference to {analyses[0].run.name}"
        panels.append(panel(title, differences, "step", f"time ({unit})", barmode="group"))
    losses = [
        line(a.run.name, *a.scalars["loss"], series(i))
        for i, a in enumerate(analyses)
        if "loss" in a.scalars
    ]
    if losses:
        units = {loss_unit(a.run.deck) for a in analyses if "loss" in a.scalars}
        axis = "loss ({})".format(", ".join(sorted(units)))
        panels.append(panel("Loss", losses, "step", axis, hovermode="x unified"))
    return panels


def _columns(values, factor):
    return list(values), [v * factor for v in values.values()]


def _by_step(a, times, i, factor):
    return line(a.run.name, *_columns(times, factor), series(i), marks=len(times) <= 60)


def where(analyses):
    """Mean step time by category, and POP efficiencies."""
    labels = [a.run.name for a in analyses]
    means = [a.split[~np.isnan(a.step_seconds)] for a in analyses]
    means = np.array([m.mean(axis=0) if len(m) else np.zeros(len(CATEGORIES)) for m in means])
    factor, unit = seconds_unit(max(means.sum(axis=1).max(), 1e-9))
    data = [
        bars(name, labels, means[:, c] * factor, CATEGORY_COLOURS[name])
        for c, name in enumerate(CATEGORIES)
        if means[:, c].any()
    ]
    pop = [
        bars(name, labels, [a.pop[i] for a in analyses], series(i))
        for i, name in enumerate(
            ("load balance", "communication efficiency", "parallel efficiency")
        )
    ]
    time = panel("Step time, mean over ranks and steps", data, y=f"time ({unit})", barmode="stack")
    return [time, panel("POP efficiencies", pop, barmode="group", yaxis={"range": [0, 1.02]})]


FIGURES = (
    (
        "steps",
        steps,
        "All runs step by step; differences are over the steps that both have.",
    ),
    (
        "where",
        where,
        (
            "Where the time of a step goes in each run (without checkpoints and validation between"
            " steps), and how well ranks are used."
        ),
    ),
)

# Name of each table -> how its CSV file begins.
HEADINGS = {"comparison": "metric", "comparison_steps": "step"}


def metrics_table(analyses):
    """A row a metric, a column a run."""
    summaries = [summary(a) for a in analyses]
    rows, formats = [], []
    for key, label, spec in COMPARED:
        values = [s.get(key) for s in summaries]
        if any(v is not None for v in values):
            values = [v / 2**20 if key == "peak_bytes" and v is not None else v for v in values]
            rows.append([label] + ["" if v is None else v for v in values])
            formats.append(spec)
    return Table(
        "comparison",
        "Metrics",
        ["metric"] + [a.run.name for a in analyses],
        rows,
        row_formats=tuple(formats),
    )


def steps_table(analyses):
    """A row a step: seconds of each run, differences to the first, losses."""
    times = [step_seconds(a) for a in analyses]
    losses = [
        dict(zip(*map(np.ndarray.tolist, a.scalars["loss"]))) if "loss" in a.scalars else {}
        for a in analyses
    ]
    rows = []
    for step in sorted(set().union(*times)):
        here = [t.get(step, np.nan) for t in times]
        rows.append(
            [step, *here, *(t - here[0] for t in here[1:])]
            + [values.get(step, np.nan) for values in losses]
        )
    names = [a.run.name for a in analyses]
    return Table(
        "comparison_steps",
        "Step by step",
        ["step", *(f"{n} (s)" for n in names)]
        + [f"{n} - {names[0]} (s)" for n in names[1:]]
        + [f"{n}, loss" for n in names],
        rows,
        formats=("",) + (".4f",) * (3 * len(names) - 1),
    )
