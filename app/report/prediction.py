"""The executor's ops beside the simulated ones: per stage, per kind of op, and for whole steps."""
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from load import code, rows_by
from starts import session_of_rank

USEFUL_OPS = ("forward", "backward", "backward_input", "backward_weight")
BUSY_OPS = ("forward", "recompute", "backward", "backward_input", "backward_weight")
OPS = BUSY_OPS + ("offload", "fetch", "send", "recv")


@dataclass
class Prediction:
    """Means over the steps that have both sides; step times are those of the schedule, first begin
    to last end."""

    steps: list = field(default_factory=list)
    predicted_s: np.ndarray = None  # [step] slowest data-parallel rank
    measured_s: np.ndarray = None  # [step]
    error: float = 0.0  # median over steps of |predicted / measured - 1|
    bubble_ratio: tuple = (
        0.0,
        0.0,
    )  # predicted, measured: 1 - seconds of USEFUL_OPS / (ranks x schedule time)
    stages: dict = field(
        default_factory=dict
    )  # stage -> {kind: (predicted, measured) seconds a step}, and "busy", "wait", "step"
    lanes: dict = field(
        default_factory=dict
    )  # step -> {(pipeline, stage): (predicted rows, measured rows)}, of one rank a stage


def ops_of(events):
    """Events that report ops of the schedule: what lies inside a layer is a part of one."""
    codes = [code(k) for k in OPS]
    return events[
        np.isin(events["kind"], codes) & (events["layer"] < 0) & (events["micro_batch"] >= 0)
    ]


def _both_sides(run):
    """Step -> (its session, rank -> (predicted, measured ops)) of the steps that have predicted ops
    on every rank that recorded ops in the session."""
    sessions = defaultdict(dict)
    for rank, trace in run.traces.items():
        measured = ops_of(trace.events)
        for i, session in enumerate(trace.sessions):
            mine = measured[(measured["session"] == i) & (measured["step"] >= 0)]
            if len(mine):
                sides = (trace.predicted, mine)
                sessions[session.number][rank] = [rows_by(side["step"], side) for side in sides]
    found = {}
    for number, ranks in sessions.items():
        steps = [predicted.keys() & ran.keys() for predicted, ran in ranks.values()]
        for step in sorted(set.intersection(*steps)):
            found[step] = number, {
                rank: tuple(side[step] for side in sides) for rank, sides in ranks.items()
            }
    return dict(sorted(found.items()))


def compare(run):
    """None where no step has both sides."""
    both = _both_sides(run)
    if not both:
        return None
    p = Prediction(list(both))
    spans, useful, walls = np.zeros((2, len(both))), np.zeros(2), np.zeros(2)
    totals, members = defaultdict(lambda: np.zeros(2)), defaultdict(int)
    for i, (step, (number, chosen)) in enumerate(both.items()):
        begin = min(m["begin_s"].min() for _, m in chosen.values())
        spans[:, i] = (
            max(q["end_s"].max() for q, _ in chosen.values()),
            max(m["end_s"].max() for _, m in chosen.values()) - begin,
        )
        lanes = p.lanes[step] = {}
        for rank, sides in chosen.items():
            at = session_of_rank(run.traces[rank], number).at
            stage = at.get("pp", 0)
            members[stage] += 1
            lanes.setdefault((at.get("dp", 0), stage), sides)
            for side, rows in enumerate(sides):
                seconds = rows["end_s"] - rows["begin_s"]
                for kind in OPS:
                    spent = float(seconds[rows["kind"] == code(kind)].sum())
                    if spent > 0:
                        totals[stage, kind][side] += spent
                    totals[stage, "busy"][side] += spent if kind in BUSY_OPS else 0
                    useful[side] += spent if kind in USEFUL_OPS else 0
                totals[stage, "step"][side] += spans[side, i]
                walls[side] += spans[side, i]
    for (stage, kind), seconds in sorted(totals.items(), key=lambda item: item[0][0]):
        p.stages.setdefault(stage, {})[kind] = tuple((seconds / members[stage]).tolist())
    for sums in p.stages.values():
        sums["wait"] = tuple(whole - busy for whole, busy in zip(sums["step"], sums["busy"]))
    p.predicted_s, p.measured_s = spans
    p.error = float(np.median(np.abs(spans[0] / spans[1] - 1)))
    p.bubble_ratio = tuple(
        np.where(walls > 0, 1 - useful / np.maximum(walls, 1e-300), 0.0).tolist()
    )
    return p


def summary(p):
    """Its part of metrics.json."""
    if p is None:
        return {}
    names = ("predicted_s", "measured_s")
    return {
        "predicted_schedule_s": float(p.predicted_s.mean()),
        "schedule_s": float(p.measured_s.mean()),
        "prediction_error": p.error,
        "predicted_bubble_ratio": p.bubble_ratio[0],
        "schedule_bubble_ratio": p.bubble_ratio[1],
        "predicted_stages": [
            {"stage": stage, **{kind: dict(zip(names, seconds)) for kind, seconds in sums.items()}}
            for stage, sums in p.stages.items()
        ],
    }
