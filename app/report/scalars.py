"""Scalars of a run's steps, from the traces of all ranks: a rank whose file was damaged begins a
new one, so any of them may lack steps that the others have."""
import re

import numpy as np

# What each rank measures of itself; every other scalar is the same on all ranks that have it.
OWN = re.compile(
    "plan_s|planning_s|tuning_s|computation_s|exposed_reduction_s|budget|coverage_loss"
    "|largest_coverage_loss|peak_bytes_.*"
)
# Losses, and the scalar that stands in the row of a step wherever the loss was taken.
TAKEN = {"loss": ("tokens", "training"), "validation_loss": ("validation_tokens", "held-out")}


def read(a):
    """name -> (steps, values): each step's value from the lowest rank that has one, but a rank's
    own all from one rank, that with most of the shown steps (of those the lowest).  The step log
    stands in for the loss where no trace has it."""
    traces, found, shown = a.run.traces, {}, a.steps[a.shown]
    rows = {rank: np.isin(traces[rank].steps.get("step", ()), shown).sum() for rank in a.ranks}
    owners = sorted(a.ranks, key=lambda rank: (-rows[rank], rank))
    names = sorted({name for trace in traces.values() for name in trace.steps} - {"step"})
    for name in names:
        own = OWN.fullmatch(name)
        parts = [_known(traces[rank].steps, name) for rank in (owners if own else a.ranks)]
        parts = [(steps, values) for steps, values in parts if len(steps)]
        if parts:
            steps, values = map(np.concatenate, zip(*(parts[:1] if own else parts)))
            steps, first = np.unique(steps, return_index=True)  # ranks stand in order
            found[name] = (steps, values[first])
    if a.ranks and owners[0] != a.ranks[0] and any(map(OWN.fullmatch, found)):
        a.run.notes.append(
            f"rank {owners[0]} recorded more steps than rank {a.ranks[0]}: what a rank measures of"
            f" itself (peak_bytes_total, computation_s ...) is rank {owners[0]}'s in steps.csv"
        )
    if "loss" not in found and a.run.log:
        rows = [(line["step"], line["loss"]) for line in a.run.log if "loss" in line]
        if rows:
            found["loss"] = tuple(np.array(rows).T)
    return found


def _known(columns, name):
    """Steps and values of a rank's scalar, where it is a number."""
    known = ~np.isnan(columns.get(name, np.zeros(0)))
    return (columns["step"][known], columns[name][known]) if known.any() else ((), ())


def finite(a, name):
    """Steps and values of a scalar, where these are finite; none of one that no step has."""
    steps, values = a.scalars.get(name, (np.zeros(0, int), np.zeros(0)))
    here = np.isfinite(values)
    return steps[here], values[here]


def note_lost_losses(a):
    """Notes a loss that is no finite number where it was taken last."""
    for name, (beside, label) in TAKEN.items():
        taken, told = a.scalars.get(beside, ((),))[0], finite(a, name)[0]
        some = any(name in trace.steps for trace in a.run.traces.values())  # simulated runs: none
        if not some or not len(taken) or (len(told) and told[-1] >= taken[-1]):
            continue
        stands = f"; {name} is that of step {told[-1]}" if len(told) else ""
        a.run.notes.append(
            f"the {label} loss of step {taken[-1]}, the last one taken, is no finite number{stands}"
        )


def summary(a):
    """Their part of metrics.json: last finite values, and the first loss."""
    result = {}
    for name in ("loss", "validation_loss", "needle_accuracy"):
        values = finite(a, name)[1]
        if len(values):
            result[name] = float(values[-1])
            if name == "loss":
                result["first_loss"] = float(values[0])
    if "mfu" in a.scalars:
        result["mfu"] = float(np.mean(a.scalars["mfu"][1]))
    return result
