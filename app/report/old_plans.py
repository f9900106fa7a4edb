"""What traces of formats 1 to 3 lack: plans as values, and flags of event kinds."""
import re

USEFUL = (
    "forward recompute backward backward_input backward_weight attention_forward attention_backward"
    " layer_forward layer_backward head indexing tuning optimizer"
).split()
BESIDE = ("offload", "fetch")

_MICRO_BATCH = re.compile(
    r"dp (\d+) micro_batch (\d+)(?: sp (\d+))?(?: recompute \d+)?:((?: -?\d+\[\d+,\d+\))*)"
)
_SEGMENT = re.compile(r"(-?\d+)\[(\d+),(\d+)\)")
_CHOICE = re.compile(r"micro_batch (\d+) layer (-?\d+) base (\d+) budget (\d+) coverage_loss (\S+)")


def _batch(text):
    """The part of a step's plan that a batch's prose tells."""
    micro_batches = []
    for m in _MICRO_BATCH.finditer(text):
        segments = [[int(s[1]), int(s[2]), int(s[3]), 0] for s in _SEGMENT.finditer(m[4])]
        if segments:  # others only keep a place
            micro_batches.append(
                {"segments": segments, "first": int(m[1]), "ranks": int(m[3] or 1)}
            )
    return {"micro_batches": micro_batches}


def read(kind, number, text):
    """(kind, hash, value) as newer traces have them; schedules and rings stay text."""
    if kind == "batch":
        return "step", number, _batch(text)
    if kind == "budgets":
        return kind, number, [[float(v) for v in c] for c in _CHOICE.findall(text)]
    return "old " + kind, number, text
