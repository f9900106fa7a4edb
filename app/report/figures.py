"""One function a figure: takes an Analysis, returns its panels (plot.py), or None where the run has
nothing to show."""
import re

import numpy as np

import attention_figures
import timelines
from analysis import CATEGORIES
from plot import bars, heat, line, names, of_ranks, panel, some, stack, stepped
from style import (
    CATEGORY_COLOURS,
    INK,
    MEMORY_COLOURS,
    SERIES,
    bytes_unit,
    loss_unit,
    seconds_unit,
    series,
)

MANY_RANKS = 128  # columns become areas
MOST_CELLS = 300000  # numbers of one panel


def loss(a):
    if "loss" not in a.scalars:
        return None
    steps, values = a.scalars["loss"]
    data = [line("training", steps, values, SERIES[0], marks=len(steps) <= 60)]
    if "validation_loss" in a.scalars:
        held = line("held out", *a.scalars["validation_loss"], SERIES[1])
        data.append(
            {**held, "mode": "markers", "marker": {"color": SERIES[1], "symbol": "diamond"}}
        )
    return [panel("Loss", data, "step", f"loss ({loss_unit(a.run.deck)})")]


def preferences(a):
    """DPO: rewards of chosen and rejected answers, their margin, and how often it is right."""
    if "rewards_margin" not in a.scalars:
        return None
    rewards = [
        line(label, *a.scalars[name], SERIES[i])
        for i, (label, name) in enumerate(
            (
                ("chosen", "rewards_chosen"),
                ("rejected", "rewards_rejected"),
                ("margin", "rewards_margin"),
            )
        )
        if name in a.scalars
    ]
    accuracy = [line("training", *a.scalars["rewards_accuracy"], SERIES[0])]
    for name, data in (("margin", rewards), ("accuracy", accuracy)):
        if f"validation_rewards_{name}" in a.scalars:
            held = line("held out", *a.scalars[f"validation_rewards_{name}"], SERIES[4])
            label = "margin, held out" if name == "margin" else "held out"
            data.append({**held, "name": label, "mode": "markers"})
    return [
        panel("Rewards", rewards, "step", "reward (beta x nats)"),
        panel("Accuracy", accuracy, "step", "share of pairs", yaxis={"range": [-0.02, 1.02]}),
    ]


_CELL = re.compile(r"needle_accuracy\.length\.(\d+)\.depth\.(\d+)$")
_LENGTH = re.compile(r"needle_accuracy\.length\.(\d+)$")


def needle(a):
    """Accuracy over the run, and by length and depth at its last evaluation."""
    if "needle_accuracy" not in a.scalars:
        return None
    lengths = sorted({int(m[1]) for m in map(_LENGTH.match, a.scalars) if m})
    data = [
        line(f"{n} tokens", *a.scalars[f"needle_accuracy.length.{n}"], series(i), marks=True)
        for i, n in enumerate(lengths)
    ]
    data.append(line("all", *a.scalars["needle_accuracy"], INK, line={"dash": "dash"}))
    found = {
        (int(m[1]), int(m[2])): float(a.scalars[m[0]][1][-1])
        for m in map(_CELL.match, a.scalars)
        if m
    }
    depths = 1 + max((d for _, d in found), default=0)
    table = [[found.get((n, d), np.nan) for d in range(depths)] for n in lengths]
    shares = [f"{100 * d // depths}-{100 * (d + 1) // depths} %" for d in range(depths)]
    cells = heat(shares, names(lengths), table, "accuracy", zmin=0, zmax=1)
    return [
        panel("Needle accuracy", data, "step", "accuracy", yaxis={"range": [-0.02, 1.02]}),
        panel(
            "At the last evaluation",
            [cells],
            "depth of the pair",
            "length (tokens)",
            yaxis={"type": "category"},
        ),
    ]


def split(a):
    """Step-time split: by rank (mean over steps, and each step), and by step (mean over ranks)."""
    whole = a.split + a.between
    if not whole.any():
        return None
    here = ~np.isnan(a.step_seconds)
    by_rank = np.array([_mean(whole[r, here[r]]) for r in range(len(a.ranks))])
    by_step = (whole * here[..., None]).sum(axis=0) / np.maximum(here.sum(axis=0), 1)[:, None]
    factor, unit = seconds_unit(max(by_rank.sum(axis=1).max(), by_step.sum(axis=1).max()))
    used = [c for c in range(len(CATEGORIES)) if by_rank[:, c].any() or by_step[:, c].any()]
    most = max(1, min(40, MOST_CELLS // (len(a.ranks) * len(used))))
    frames = [("mean over steps", by_rank)]
    frames += [(f"step {a.steps[s]}", whole[:, s]) for s in some(range(len(a.steps)), most)]
    ranks = names(a.ranks)
    shown = [
        (label, [_of_rank(a, ranks, c, factor * values[:, c]) for c in used])
        for label, values in frames
    ]
    steps = [
        stack(list(CATEGORIES)[c], a.steps, factor * by_step[:, c], _colour(c), len(a.steps) > 120)
        for c in used
    ]
    time = f"time ({unit})"
    column = {"type": "category"}
    return [
        stepped("Step time by rank", shown, x="rank", y=time, barmode="stack", xaxis=column),
        panel("Step time by step, mean over ranks", steps, "step", time, barmode="stack"),
    ]


def _colour(category):
    return CATEGORY_COLOURS[list(CATEGORIES)[category]]


def _of_rank(a, ranks, category, values):
    name = list(CATEGORIES)[category]
    trace = stack(name, ranks, values, _colour(category), len(a.ranks) > MANY_RANKS)
    return of_ranks(trace, a.ranks, "x", "y")


def _mean(rows):
    """Mean seconds of every category."""
    return rows.mean(axis=0) if len(rows) else np.zeros(len(CATEGORIES))


def heatmap(a):
    """Rank x step: seconds of useful computation."""
    if not len(a.steps) or np.isnan(a.useful).all():
        return None
    factor, unit = seconds_unit(np.nanmax(a.useful))
    steps = some(range(len(a.steps)), max(1, MOST_CELLS // len(a.ranks)))
    cells = heat(names(a.steps[steps]), names(a.ranks), a.useful[:, steps] * factor, unit, zmin=0)
    cells["zmax"] = float(np.nanmax(a.useful)) * factor
    title = "Useful computation, rank \u00d7 step"
    if len(steps) < len(a.steps):
        title += f" ({len(steps)} of {len(a.steps)} steps)"
    return [
        panel(
            title,
            [of_ranks(cells, a.ranks, "y", "z")],
            "step",
            "rank",
            height=_rank_height(len(a.ranks)),
            xaxis={"type": "category"},
            yaxis={"type": "category", "autorange": "reversed"},
        )
    ]


def _rank_height(ranks):
    return int(np.clip(150 + 22 * ranks, 260, 640))


def memory(a):
    categories = [c for c in a.memory if c != "total" and np.nansum(a.memory[c]) > 0]
    if not categories:
        return None
    categories.sort(key=lambda c: -np.nansum(a.memory[c]))
    factor, unit = bytes_unit(np.nanmax(sum(np.nan_to_num(a.memory[c]) for c in categories)))
    ranks, many = names(a.ranks), len(a.ranks) > MANY_RANKS
    data = []
    for i, name in enumerate(categories):
        values = np.nan_to_num(a.memory[name]) * factor
        trace = stack(name, ranks, values, MEMORY_COLOURS.get(name, series(i)), many)
        data.append(of_ranks(trace, a.ranks, "x", "y"))
    if "total" in a.memory:
        total = line("peak at one moment", ranks, a.memory["total"] * factor, INK)
        if not many:
            total.update(mode="markers", marker={"color": INK, "symbol": "diamond"})
        data.append(of_ranks(total, a.ranks, "x", "y"))
    return [
        panel(
            "Peak memory by category",
            data,
            "rank",
            f"peak memory ({unit})",
            barmode="stack",
            xaxis={"type": "category"},
        )
    ]


def lengths(a):
    if a.segment_tokens is None or not a.segment_tokens.size:
        return None
    tokens = np.maximum(a.segment_tokens, 1)
    low, high = np.floor(np.log2(tokens.min())), np.ceil(np.log2(tokens.max() + 1))
    edges = 2.0 ** np.arange(low, max(high, low + 1) + 0.25, 0.5)
    labels = [f"{_tokens(lo)} to {_tokens(hi)}" for lo, hi in zip(edges, edges[1:])]
    packs = a.micro_batch_tokens
    bins = np.histogram_bin_edges(packs, min(30, max(5, len(np.unique(packs)))))
    sizes = np.histogram(packs, bins)[0]
    panels = []
    for title, values, y in (
        ("Segment lengths", np.histogram(tokens, edges)[0], "segments"),
        ("Tokens by segment length", np.histogram(tokens, edges, weights=tokens)[0], "tokens"),
    ):
        data = [bars(y, labels, values, SERIES[0])]
        panels.append(panel(title, data, "segment length (tokens)", y, showlegend=False))
    data = [bars("micro-batches", (bins[:-1] + bins[1:]) / 2, sizes, SERIES[2])]
    return panels + [panel("Micro-batch sizes", data, "tokens", "micro-batches", showlegend=False)]


def _tokens(value):
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


# name -> (function, caption); the order of the page.
FIGURES = {
    "split": (
        split,
        (
            "Where the time of a step goes. Every moment counts once, for the innermost region the"
            " rank is in; idle is time of the step outside all regions. Checkpoints and validation"
            " run between steps and stand on top of the step before."
        ),
    ),
    "heatmap": (
        heatmap,
        (
            "Time of useful computation. A slow rank is a bright row, an uneven batch a bright"
            " column; a gap: no data."
        ),
    ),
    "timeline": (timelines.timeline, timelines.TIMELINE),
    "prediction": (timelines.prediction, timelines.PREDICTION),
    "ring": (attention_figures.ring, attention_figures.RING),
    "memory": (
        memory,
        (
            "Highest value of each category over all steps. The peaks need not coincide: peak at"
            " one moment is the highest sum."
        ),
    ),
    "loss": (loss, "Loss of each step, and held-out loss where it was taken."),
    "preferences": (
        preferences,
        (
            "DPO: beta times what the policy's log probability gained on the reference's, mean over"
            " the pairs of a step; accuracy: share of the pairs whose chosen answer has the higher"
            " reward."
        ),
    ),
    "needle": (
        needle,
        (
            "Share of the held-out questions whose whole answer is the most likely one, by length"
            " of the sample and depth of the asked pair."
        ),
    ),
    "recall": (attention_figures.recall, attention_figures.RECALL),
    "sparsity": (attention_figures.sparsity, attention_figures.SPARSITY),
    "budgets": (attention_figures.budgets, attention_figures.BUDGETS),
    "lengths": (lengths, "From the executed plans."),
}
