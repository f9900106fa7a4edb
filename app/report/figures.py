"""One function a figure: takes an Analysis, returns a matplotlib figure or None where the run has
nothing to show."""
import re

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MultipleLocator

import metrics
from analysis import CATEGORIES
from style import (
    CATEGORY_COLOURS,
    HEAT,
    INK,
    MEMORY_COLOURS,
    SERIES,
    WIDTH,
    bytes_unit,
    integer_axis,
    plt,
    rank_height,
    rank_ticks,
    seconds_unit,
)
from timelines import prediction, timeline


def loss(a):
    if "loss" not in a.scalars:
        return None
    figure, ax = plt.subplots(figsize=(WIDTH, 3.0))
    steps, values = a.scalars["loss"]
    ax.plot(steps, values, label="training", marker="o" if len(steps) <= 60 else None, markersize=3)
    if "validation_loss" in a.scalars:
        ax.plot(*a.scalars["validation_loss"], "D", markersize=5, color=SERIES[1], label="held out")
        ax.legend(loc="upper right")
    ax.set(xlabel="step", ylabel="loss (nats / token)", title="Loss")
    integer_axis(ax.xaxis)
    return figure


_CELL = re.compile(r"needle_accuracy\.length\.(\d+)\.depth\.(\d+)$")


def needle(a):
    """Accuracy over the run, and by length and depth at its last evaluation."""
    if "needle_accuracy" not in a.scalars:
        return None
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(WIDTH, 3.2), gridspec_kw={"width_ratios": [1, 1.2]}
    )
    lengths = sorted(
        {
            int(m[1])
            for m in map(re.compile(r"needle_accuracy\.length\.(\d+)$").match, a.scalars)
            if m
        }
    )
    for i, length in enumerate(lengths):
        left.plot(
            *a.scalars[f"needle_accuracy.length.{length}"],
            marker="o",
            markersize=3,
            color=SERIES[i % len(SERIES)],
            label=f"{length} tokens",
        )
    left.plot(*a.scalars["needle_accuracy"], color=INK, linewidth=1.2, linestyle="--", label="all")
    left.set(xlabel="step", ylabel="accuracy", ylim=(-0.02, 1.02), title="Needle accuracy")
    left.legend(loc="lower right")
    integer_axis(left.xaxis)
    cells = {
        (int(m[1]), int(m[2])): float(a.scalars[m[0]][1][-1])
        for m in map(_CELL.match, a.scalars)
        if m
    }
    depths = 1 + max((d for _, d in cells), default=0)
    table = np.array([[cells.get((n, d), np.nan) for d in range(depths)] for n in lengths])
    right.imshow(table, vmin=0, vmax=1, cmap=HEAT, aspect="auto")
    for (row, column), value in np.ndenumerate(table):
        if value == value:
            right.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if value < 0.5 else INK,
            )
    right.set_xticks(
        range(depths), [f"{100 * d // depths}-{100 * (d + 1) // depths} %" for d in range(depths)]
    )
    right.set_yticks(range(len(lengths)), [str(n) for n in lengths])
    right.set(xlabel="depth of the pair", ylabel="length (tokens)", title="At the last evaluation")
    right.grid(False)
    return figure


def split(a):
    """Step-time split: per rank (mean over steps) and per step (mean over ranks)."""
    if not a.split.size or not np.nansum(a.split):
        return None
    here = ~np.isnan(a.step_seconds)
    by_rank = np.array([_mean(a.split[r, here[r]]) for r in range(len(a.ranks))])
    by_step = np.array([_mean(a.split[here[:, s], s]) for s in range(len(a.steps))])
    factor, unit = seconds_unit(max(by_rank.sum(axis=1).max(), by_step.sum(axis=1).max()))
    by_rank, by_step = by_rank * factor, by_step * factor
    figure, (left, right) = plt.subplots(
        1,
        2,
        figsize=(WIDTH, max(rank_height(len(a.ranks)) + 0.5, 3.2)),
        gridspec_kw={"width_ratios": [1, 1.25]},
    )
    offset_rank, offset_step = np.zeros(len(a.ranks)), np.zeros(len(a.steps))
    for c, name in enumerate(CATEGORIES):
        if not by_rank[:, c].any() and not by_step[:, c].any():
            continue
        style = {"color": CATEGORY_COLOURS[name]}
        rows = range(len(a.ranks))
        left.barh(rows, by_rank[:, c], left=offset_rank, height=0.72, label=name, **style)
        top = offset_step + by_step[:, c]
        if len(a.steps) <= 120:
            right.bar(a.steps, by_step[:, c], bottom=offset_step, width=0.86, **style)
        else:
            right.fill_between(a.steps, offset_step, top, linewidth=0, **style)
        offset_rank += by_rank[:, c]
        offset_step = top
    left.invert_yaxis()
    rank_ticks(left, a.ranks)
    left.grid(axis="y", visible=False)
    right.grid(axis="x", visible=False)
    left.set(
        xlabel=f"time per step ({unit})", ylabel="rank", title="Step time by rank, mean over steps"
    )
    right.set(xlabel="step", ylabel=f"time ({unit})", title="Step time by step, mean over ranks")
    integer_axis(right.xaxis)
    figure.legend(
        *left.get_legend_handles_labels(), loc="upper center", ncol=5, bbox_to_anchor=(0.5, 0.0)
    )
    return figure


def _mean(rows):
    """Mean seconds of every category."""
    return rows.mean(axis=0) if len(rows) else np.zeros(len(CATEGORIES))


def heatmap(a):
    """Rank x step: seconds of useful computation."""
    if not len(a.steps) or np.isnan(a.useful).all():
        return None
    factor, unit = seconds_unit(np.nanmax(a.useful))
    figure, ax = plt.subplots(figsize=(WIDTH, rank_height(len(a.ranks))))
    colours = plt.get_cmap(HEAT).copy()
    colours.set_bad("#eceff3")
    image = ax.imshow(
        a.useful * factor, aspect="auto", cmap=colours, interpolation="nearest", vmin=0
    )
    rank_ticks(ax, a.ranks)
    ticks = np.arange(0, len(a.steps), -(-len(a.steps) // 16))
    ax.set_xticks(ticks)
    ax.set_xticklabels([str(a.steps[t]) for t in ticks])
    ax.grid(False)
    ax.set(xlabel="step", ylabel="rank", title="Useful computation, rank \u00d7 step")
    bar = figure.colorbar(image, ax=ax, pad=0.015, aspect=18)
    bar.set_label(f"useful ({unit})")
    bar.outline.set_visible(False)
    return figure


def ring(a):
    """Mean computation and wait at each ring step, per worker."""
    directions = [d for d in ("forward", "backward") if d in a.ring_times]
    if not directions:
        return None
    longest = max((a.ring_times[d][2] + a.ring_times[d][3]).max() for d in directions)
    factor, unit = seconds_unit(longest)
    many = any(len(a.ring_times[d][0]) > 8 for d in directions)
    workers = max(len(a.ring_times[d][0]) for d in directions)
    figure, axes = plt.subplots(
        1,
        len(directions),
        figsize=(WIDTH, rank_height(workers) if many else 3.0),
        squeeze=False,
        sharey=not many,
    )
    for ax, direction in zip(axes[0], directions):
        names, ring_steps, compute, wait = a.ring_times[direction]
        if many:
            image = _ring_image(ax, names, compute * factor, longest * factor)
        else:
            _ring_columns(ax, names, compute * factor, wait * factor)
        two_levels = len({o for o, _ in ring_steps}) > 1
        labels = [f"{max(o, 0)}.{max(i, 0)}" if two_levels else str(i) for o, i in ring_steps]
        ax.set_xticks(np.arange(len(ring_steps)))
        ax.set_xticklabels(labels)
        ax.set(
            xlabel="ring step" + (" (outer.inner)" if two_levels else ""),
            title=f"Ring attention, {direction}",
        )
    if many:
        label = f"mean computation ({unit})"
        figure.colorbar(image, ax=axes[0].tolist(), pad=0.015).set_label(label)
    else:
        axes[0][0].set_ylabel(f"mean time of a ring step ({unit})")
        handles, names = axes[0][0].get_legend_handles_labels()
        handles.append(Patch(**WAITS))
        axes[0][-1].legend(handles, names + ["wait"], loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


WAITS = {"facecolor": "white", "edgecolor": "#94a3b8", "hatch": "////", "linewidth": 0.6}


def _ring_image(ax, names, compute, longest):
    image = ax.imshow(
        compute, aspect="auto", cmap=HEAT, vmin=0, vmax=longest, interpolation="nearest"
    )
    rank_ticks(ax, names)
    ax.set_ylabel("rank")
    ax.grid(False)
    return image


def _ring_columns(ax, names, compute, wait):
    """A column of computation with its wait on top for every worker of every ring step."""
    width = 0.82 / len(names)
    for w, name in enumerate(names):
        x = np.arange(compute.shape[1]) + (w - (len(names) - 1) / 2) * width
        colour = SERIES[w % len(SERIES)]
        ax.bar(x, compute[w], width * 0.92, color=colour, label=f"rank {name}")
        ax.bar(x, wait[w], width * 0.92, bottom=compute[w], **WAITS)
    ax.grid(axis="x", visible=False)


def recall(a):
    """Recall by layer and head, by step with its 95 % interval, and coverage curves by layer."""
    if a.recall is None:
        return None
    layers, heads = (np.unique(a.recall[:, i]) for i in (3, 4))
    curves = a.coverage is not None
    figure, axes = plt.subplots(
        1, 2 + curves, figsize=(WIDTH, rank_height(len(layers), least=2.8)), squeeze=False
    )
    left, middle, *rest = axes[0]
    table = np.full((len(layers), len(heads)), np.nan)
    for i, j in np.ndindex(table.shape):
        mine = a.recall[(a.recall[:, 3] == layers[i]) & (a.recall[:, 4] == heads[j])]
        if len(mine):
            table[i, j] = metrics.recall(*mine[:, 6:9].T)[0]
    image = left.imshow(table, aspect="auto", cmap=HEAT, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=left, pad=0.02)
    rank_ticks(left, [int(layer) for layer in layers])
    left.grid(False)
    left.set(xlabel="head", ylabel="layer", title="Recall, mean over steps")
    integer_axis(left.xaxis)
    steps = np.unique(a.recall[:, 0])
    mean, interval = np.array(
        [metrics.recall(*a.recall[a.recall[:, 0] == step][:, 6:9].T) for step in steps]
    ).T
    middle.errorbar(steps, mean, interval, marker="o", markersize=3, capsize=2, color=SERIES[0])
    middle.set(xlabel="step", title="Recall by step, 95 % interval")
    integer_axis(middle.xaxis)
    for ax in rest:
        for i, layer in enumerate(np.unique(a.coverage[:, 3])):
            mine = a.coverage[a.coverage[:, 3] == layer]
            budgets = np.unique(mine[:, 4])
            values = [mine[mine[:, 4] == k][:, 5].mean() for k in budgets]
            ax.plot(budgets, values, color=SERIES[i % len(SERIES)], label=f"layer {int(layer)}")
        ax.set(xlabel="budget k", title="Coverage C(k)", ylim=(None, 1.02))
        integer_axis(ax.xaxis)
        if len(ax.lines) <= len(SERIES):
            ax.legend(loc="lower right")
    return figure


def sparsity(a):
    """Sparsity ratio by layer and head, and by step: mean and range over layers and heads."""
    if not a.sparse:
        return None
    steps, layers, heads = (sorted({key[i] for key in a.sparse}) for i in range(3))
    table = np.full((len(steps), len(layers), len(heads)), np.nan)
    for (step, layer, head), v in a.sparse.items():
        table[steps.index(step), layers.index(layer), heads.index(head)] = metrics.sparsity_ratio(
            v[2], v[3]
        )
    figure, (left, right) = plt.subplots(
        1,
        2,
        figsize=(WIDTH, rank_height(len(layers), least=2.6)),
        gridspec_kw={"width_ratios": [1.25, 1]},
    )
    image = left.imshow(
        np.nanmean(table, axis=0),
        aspect="auto",
        cmap=HEAT,
        vmin=np.nanmin(table),
        vmax=np.nanmax(table),
        interpolation="nearest",
    )
    figure.colorbar(image, ax=left, pad=0.02)
    rank_ticks(left, [layer if layer >= 0 else "all" for layer in layers])
    left.grid(False)
    left.set(xlabel="head", ylabel="layer", title="Sparsity ratio, mean over steps")
    integer_axis(left.xaxis)
    flat = table.reshape(len(steps), -1)
    right.fill_between(
        steps,
        np.nanmin(flat, axis=1),
        np.nanmax(flat, axis=1),
        color=SERIES[0],
        alpha=0.22,
        label="range over layers and heads",
    )
    right.plot(
        steps,
        np.nanmean(flat, axis=1),
        color=SERIES[0],
        label="mean",
        marker="o" if len(steps) <= 60 else None,
        markersize=3,
    )
    right.set(xlabel="step", title="Sparsity ratio by step")
    right.legend()
    integer_axis(right.xaxis)
    return figure


def memory(a):
    categories = [c for c in a.memory if c != "total" and np.nansum(a.memory[c]) > 0]
    if not categories:
        return None
    categories.sort(key=lambda c: -np.nansum(a.memory[c]))
    factor, unit = bytes_unit(np.nanmax(sum(np.nan_to_num(a.memory[c]) for c in categories)))
    figure, ax = plt.subplots(figsize=(WIDTH, rank_height(len(a.ranks)) + 0.5))
    offset = np.zeros(len(a.ranks))
    for i, name in enumerate(categories):
        values = np.nan_to_num(a.memory[name])
        ax.barh(
            range(len(a.ranks)),
            values * factor,
            left=offset * factor,
            height=0.72,
            color=MEMORY_COLOURS.get(name, SERIES[i % len(SERIES)]),
            label=name,
        )
        offset += values
    if "total" in a.memory:
        ax.plot(
            a.memory["total"] * factor,
            range(len(a.ranks)),
            "D",
            color=INK,
            markersize=5,
            label="peak at one moment",
        )
    ax.invert_yaxis()
    rank_ticks(ax, a.ranks)
    ax.grid(axis="y", visible=False)
    ax.set(xlabel=f"peak memory ({unit})", ylabel="rank", title="Peak memory by category")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def lengths(a):
    if a.segment_tokens is None or not a.segment_tokens.size:
        return None
    tokens = np.maximum(a.segment_tokens, 1)
    low, high = np.floor(np.log2(tokens.min())), np.ceil(np.log2(tokens.max() + 1))
    edges = 2.0 ** np.arange(low, max(high, low + 1) + 0.25, 0.5)
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.9))
    panels = [
        (axes[0], tokens, None, edges, "segments", "Segment lengths"),
        (axes[1], tokens, tokens, edges, "tokens", "Tokens by segment length"),
    ]
    for ax, values, weights, bins, ylabel, title in panels:
        ax.hist(values, bins=bins, weights=weights, color=SERIES[0], rwidth=0.94)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
        ax.xaxis.set_major_formatter(FuncFormatter(_tokens))
        ax.set(xlabel="segment length (tokens)", ylabel=ylabel, title=title)
    axes[2].hist(
        a.micro_batch_tokens,
        bins=min(30, max(5, len(np.unique(a.micro_batch_tokens)))),
        color=SERIES[2],
        rwidth=0.94,
    )
    axes[2].set(
        xlabel="micro-batch size (tokens)", ylabel="micro-batches", title="Micro-batch sizes"
    )
    axes[2].xaxis.set_major_formatter(FuncFormatter(_tokens))
    axes[2].xaxis.set_major_locator(
        MultipleLocator(2.0 ** np.ceil(np.log2(max(a.micro_batch_tokens.max(), 4) / 4)))
    )
    for ax in axes:
        ax.grid(axis="x", visible=False)
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def budgets(a):
    """Final budgets and coverage losses of dynamic sparsity tuning."""
    if a.budgets is None:
        return None
    base, chosen, loss = a.budgets.T
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.9))
    values, counts = np.unique(chosen, return_counts=True)
    left.bar(np.arange(len(values)), counts, color=SERIES[0], width=0.86)
    left.set_xticks(np.arange(len(values)), [f"{v:.0f}" for v in values])
    for b in np.unique(base):
        at = np.interp(b, values, np.arange(len(values)))
        left.axvline(at, color=SERIES[1], linewidth=1.2, linestyle="--", label=f"base {b:.0f}")
    left.legend()
    left.set(
        xlabel="final budget (key blocks a query)",
        ylabel="layers x micro-batches",
        title="Attention budgets",
    )
    right.hist(loss, bins=30, color=SERIES[2], rwidth=0.94)
    right.set(
        xlabel="coverage lost against the base budget",
        ylabel="layers x micro-batches",
        title="Coverage",
    )
    for ax in (left, right):
        ax.grid(axis="x", visible=False)
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def _tokens(value, _=None):
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def compare(analyses):
    """Several runs: loss, step-time split and POP side by side."""
    labels = [a.run.name for a in analyses]
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(WIDTH * 1.15, 3.4), gridspec_kw={"width_ratios": [1.1, 1, 1]}
    )
    for i, a in enumerate(analyses):
        if "loss" in a.scalars:
            left.plot(*a.scalars["loss"], color=SERIES[i % len(SERIES)], label=labels[i])
    left.set(xlabel="step", ylabel="loss (nats / token)", title="Loss")
    if left.lines:
        left.legend()
    integer_axis(left.xaxis)
    slanted = max(map(len, labels)) >= 12
    below = {
        "loc": "upper center",
        "bbox_to_anchor": (0.5, -0.34 if slanted else -0.16),
        "fontsize": 7.5,
    }
    offset = np.zeros(len(analyses))
    means = []
    for a in analyses:
        here = ~np.isnan(a.step_seconds)
        means.append(_mean(a.split[here]))
    means = np.array(means)
    factor, unit = seconds_unit(max(means.sum(axis=1).max(), 1e-9))
    for c, name in enumerate(CATEGORIES):
        if means[:, c].any():
            middle.bar(
                range(len(labels)),
                means[:, c] * factor,
                bottom=offset * factor,
                width=0.66,
                color=CATEGORY_COLOURS[name],
                label=name,
            )
            offset += means[:, c]
    middle.set(ylabel=f"time per step ({unit})", title="Step time, mean")
    middle.legend(**below, ncol=2, handlelength=1.1, columnspacing=1)
    at, width = np.arange(len(labels)), 0.26
    for i, name in enumerate(("load balance", "communication efficiency", "parallel efficiency")):
        right.bar(
            at + (i - 1) * width,
            [a.pop[i] for a in analyses],
            width * 0.92,
            color=SERIES[i],
            label=name,
        )
    right.set(ylim=(0, 1.02), ylabel="efficiency", title="POP efficiencies")
    right.legend(**below, ncol=1)
    for ax in (middle, right):
        ax.set_xticks(range(len(labels)))
        ax.set_xticklabels(
            labels, rotation=20 if slanted else 0, ha="right" if slanted else "center"
        )
        ax.grid(axis="x", visible=False)
    return figure


# name -> (function, caption); the order of the page.
FIGURES = {
    "loss": (loss, "Loss of each step, and held-out loss where it was taken."),
    "needle": (
        needle,
        (
            "Share of the held-out questions whose whole answer is the most likely one, by length"
            " of the sample and depth of the asked pair."
        ),
    ),
    "split": (
        split,
        (
            "Where the time of a step goes. Every moment counts once, for the innermost region the"
            " rank is in."
        ),
    ),
    "heatmap": (
        heatmap,
        (
            "Seconds of useful computation. A straggler is a bright row, an uneven batch a bright"
            " column; grey: no data."
        ),
    ),
    "timeline": (
        timeline,
        (
            "The step of median length. Upper lane: operations of the schedule with their"
            " micro-batch (F forward, R recompute, B backward). Lower lane: what the rank was"
            " doing."
        ),
    ),
    "prediction": (
        prediction,
        (
            "The step of median schedule time. Upper lane of a stage: its ops as the simulator"
            " times them with profile.table; lower lane: as they ran (F forward, R recompute, B"
            " backward or its input half, W weight half). Receives last until the message is there."
        ),
    ),
    "ring": (
        ring,
        (
            "Mean computation (solid) and wait (hatched) of each context-parallel worker at each"
            " ring step."
        ),
    ),
    "sparsity": (
        sparsity,
        (
            "Share of the causal pairs that sparse attention leaves out (MTraining Figure 3)."
            " Budgets of every layer, head and step: budgets.csv."
        ),
    ),
    "memory": (
        memory,
        (
            "Highest value of each category over all steps. The peaks need not coincide; the"
            " diamond is the highest sum at one moment."
        ),
    ),
    "lengths": (lengths, "From the executed plans."),
    "recall": (
        recall,
        (
            "Share of the exact attention that lies on computed pairs, from sampled queries of the"
            " measured steps; C(k) where budgets are tuned. Rows: recall_rows.csv, coverage.csv."
        ),
    ),
    "budgets": (
        budgets,
        (
            "Dynamic sparsity tuning: what every layer chose for every micro-batch. Negative losses"
            " are coverage gained."
        ),
    ),
}
