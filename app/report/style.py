"""Colours and units of the figures, the colours being those of the page."""

INK, MUTED = "#1f2933", "#64748b"
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
HEAT = "Viridis"


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


def short(value, digits=3):
    """A number in so many digits, or all of those before its point, never as a power of ten."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:,.0f}"


def number_ranges(numbers):
    """0, 1, 2, 7 as "0-2, 7"."""
    spans = []
    for n in sorted(numbers):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def series(i):
    return SERIES[i % len(SERIES)]


def loss_unit(deck):
    """What training losses are of; held-out ones are means of tokens, under DPO of pairs."""
    if deck.get("loss.kind") == "dpo":
        return "nats / pair"
    summed = deck.get("loss.normaliser") == "sum"
    return "training: nats, summed; held out: nats / token" if summed else "nats / token"
