"""Colours, type and axes of the figures, the colours being those of the page."""
import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

WIDTH = 9.6  # of every figure, in inches

INK, MUTED, GRID = "#1f2933", "#64748b", "#e5e9ef"
CATEGORY_COLOURS = {
    "attention": "#2563a8",
    "indexing": "#0e9aa7",
    "budget tuning": "#57c4cd",
    "planning": "#7a6f5d",
    "rest of forward and backward": "#8fb8de",
    "ring wait": "#d1495b",
    "sequence exchange": "#b5838d",
    "pipeline transfer": "#e4879b",
    "host copies": "#c2b8a3",
    "gradient reduction": "#edae49",
    "optimizer": "#5b9a68",
    "data": "#8d6a9f",
    "checkpoint": "#475569",
    "validation": "#a3845b",
    "other": "#94a3b8",
    "idle": "#dde2e9",
}
SERIES = ["#2563a8", "#d1495b", "#5b9a68", "#edae49", "#8d6a9f", "#0e9aa7", "#a3845b", "#475569"]
MEMORY_COLOURS = {
    "parameters": "#2563a8",
    "gradients": "#8fb8de",
    "optimizer": "#5b9a68",
    "activations": "#edae49",
    "communication": "#d1495b",
    "kv_store": "#8d6a9f",
    "workspace": "#94a3b8",
    "data": "#0e9aa7",
    "offloaded": "#c2b8a3",
}
HEAT = "viridis"

plt.rcParams.update(
    {
        "figure.dpi": 100,
        "savefig.dpi": 170,
        "figure.facecolor": "white",
        "figure.constrained_layout.use": True,
        "font.family": "sans-serif",
        "font.sans-serif": ["Inter", "Source Sans 3", "Liberation Sans", "DejaVu Sans"],
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 9,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": "#b8c1cc",
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": matplotlib.cycler(color=SERIES),
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "patch.linewidth": 0,
    }
)


def seconds_unit(longest):
    """(factor, unit) that makes times of this size readable."""
    if longest >= 1:
        return 1.0, "s"
    return (1e3, "ms") if longest >= 1e-3 else (1e6, "\u00b5s")


def bytes_unit(most):
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if most >= factor:
            return 1.0 / factor, unit
    return 1.0, "bytes"


def integer_axis(axis):
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def rank_height(ranks, per=0.32, least=2.1, most=7.5):
    return float(np.clip(1.2 + per * ranks, least, most))


def rank_ticks(ax, ranks):
    every = max(1, len(ranks) // 24)
    ax.set_yticks(range(0, len(ranks), every))
    ax.set_yticklabels([str(r) for r in ranks[::every]])
