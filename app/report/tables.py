"""The report's tables, once as data: the page shows them, CSV files repeat them."""
import csv
from dataclasses import dataclass

import numpy as np

import metrics
import starts
from analysis import CATEGORIES, step_seconds
from load import COORDINATES, HEAD_PATTERNS
from output import writing
from prediction import OPS
from style import number_ranges


@dataclass
class Table:
    name: str  # of the CSV file
    title: str
    columns: list  # headings, units in parentheses
    rows: list  # numbers or texts
    formula: str = ""
    formats: tuple = ()  # one a column; "" for texts and plain numbers
    # instead, where rows differ: one a row, of all its columns but the first
    row_formats: tuple = ()

    def write_csv(self, path):
        with writing(path, newline="") as out:
            writer = csv.writer(out)
            writer.writerow(self.columns)
            writer.writerows(self.rows)


def ranks(a):
    rows = []
    for rank in a.ranks:
        trace = a.run.traces[rank]
        session = trace.last
        rows.append(
            [rank, session.host, session.device]
            + [session.at.get(c, 0) for c in COORDINATES]
            + [
                len(trace.sessions),
                int((~np.isnan(a.step_seconds[a.ranks.index(rank)])).sum()),
                len(trace.events),
            ]
        )
    return Table(
        "ranks",
        "Ranks",
        ["rank", "host", "device", *COORDINATES, "starts", "steps", "events"],
        rows,
        formats=("", "", "") + ("",) * len(COORDINATES) + ("", "", ",d"),
    )


def pop(a):
    useful, most, runtime = np.zeros((3, len(a.ranks)))
    for world in a.worlds:
        mine = starts.useful_by_rank(a, world)
        useful[world.members] += mine
        most[world.members] += mine.max(initial=0)
        runtime[world.members] += world.runtime
    rows = [
        [rank, float(u), float(u / max(m, 1e-300)), float(u / t) if t > 0 else 1.0]
        for rank, u, m, t in zip(a.ranks, useful, most, runtime)
    ]
    rows.append(["all: load balance", "", a.pop[0], ""])
    rows.append(["all: communication efficiency", "", "", a.pop[1]])
    rows.append(["all: parallel efficiency", "", "", a.pop[2]])
    return Table(
        "pop",
        "POP efficiencies",
        ["rank", "useful (s)", "useful / max useful", "useful / runtime"],
        rows,
        metrics.FORMULAS["pop"],
        ("", ".4f", ".4f", ".4f"),
    )


def split(a):
    names = list(CATEGORIES)
    used, apart = (
        [c for c in range(len(names)) if table[..., c].any()] for table in (a.split, a.between)
    )
    rows = []
    for r, rank in enumerate(a.ranks):
        here = ~np.isnan(a.step_seconds[r])
        mean, between = (
            1e3 * (table[r, here].mean(axis=0) if here.any() else np.zeros(len(names)))
            for table in (a.split, a.between)
        )
        rows.append([rank, *mean[used].tolist(), float(mean.sum()), *between[apart].tolist()])
    return Table(
        "split",
        "Step-time split, mean over steps",
        ["rank"]
        + [f"{names[c]} (ms)" for c in used]
        + ["sum (ms)"]
        + [f"{names[c]}, between steps (ms)" for c in apart],
        rows,
    )


def ring(a):
    if not a.ring:
        return None
    rows = [
        [d, v["worker_imbalance"], v["step_imbalance"], v["computation_ratio"]]
        for d, v in sorted(a.ring.items(), key=lambda i: i[0] == "all")
    ]
    return Table(
        "ring",
        "Ring attention",
        ["direction", "worker imbalance", "step imbalance", "computation ratio"],
        rows,
        metrics.FORMULAS["ring"],
        ("", ".4f", ".4f", ".4f"),
    )


def ring_steps(a):
    rows = []
    for direction, (workers, steps, compute, wait) in a.ring_times.items():
        rows += [
            [direction, worker, max(o, 0), max(i, 0), float(compute[w, t]), float(wait[w, t])]
            for w, worker in enumerate(workers)
            for t, (o, i) in enumerate(steps)
        ]
    return (
        Table(
            "ring_steps",
            "",
            ["direction", "rank", "outer", "inner", "computation (s)", "wait (s)"],
            rows,
        )
        if rows
        else None
    )


def steps_balance(a):
    rows = [["imbalance", a.imbalance], ["bubble_ratio", a.bubble_ratio]]
    return Table(
        "schedule",
        "Micro-batches and schedule",
        ["metric", "value"],
        rows,
        metrics.FORMULAS["step"],
        ("", ".4f"),
    )


def predicted(a):
    if a.prediction is None:
        return None
    p, rows = a.prediction, []
    for stage, sums in p.stages.items():
        rows += [
            [
                f"stage {stage}",
                kind,
                *sums[kind],
                sums[kind][0] / sums[kind][1] if sums[kind][1] > 0 else np.nan,
            ]
            for kind in (*OPS, "busy", "wait")
            if kind in sums
        ]
    mean = (float(p.predicted_s.mean()), float(p.measured_s.mean()))
    rows += [
        ["all", "step time", *mean, mean[0] / mean[1]],
        ["all", "bubble ratio", *p.bubble_ratio, np.nan],
    ]
    return Table(
        "prediction",
        "Simulated and measured schedule, mean over steps",
        ["stage", "ops", "predicted (s)", "measured (s)", "predicted / measured"],
        rows,
        metrics.FORMULAS["prediction"] + f" Here {100 * p.error:.1f} % over {len(p.steps)} steps.",
        ("", "", ".5f", ".5f", ".3f"),
    )


def overheads(a):
    if not a.overheads:
        return None
    return Table(
        "overheads",
        "Overheads of balance",
        ["metric", "share of the step"],
        [[k, v] for k, v in a.overheads.items()],
        metrics.FORMULAS["overhead"],
        ("", ".6f"),
    )


def batch(a):
    if not a.batch:
        return None
    rows = [[k, v] for k, v in a.batch.items()]
    return Table(
        "batch", "Batch plans", ["metric", "value"], rows, metrics.FORMULAS["batch"], ("", ".4f")
    )


def sparsity(a):
    if not a.sparse:
        return None
    layers = sorted({layer for _, layer, _ in a.sparse})
    rows = []
    for layer in layers:
        mine = np.array([v for (_, l, _), v in a.sparse.items() if l == layer])
        ratios = metrics.sparsity_ratio(mine[:, 2], mine[:, 3])
        total = mine.sum(axis=0)
        rows.append(
            [
                str(layer) if layer >= 0 else "all",
                metrics.sparsity_ratio(total[2], total[3]),
                float(ratios.min()),
                float(ratios.max()),
                float(total[0] / total[1]),
                int(total[4]),
            ]
        )
    return Table(
        "sparsity",
        "Sparse attention",
        ["layer", "sparsity ratio", "least of a head and step", "most", "mean budget", "overflow"],
        rows,
        metrics.FORMULAS["sparsity"],
        ("", ".4f", ".4f", ".4f", ".2f", ",d"),
    )


def recall(a):
    if a.recall is None:
        return None
    rows = []
    for layer in np.unique(a.recall[:, 3]):
        mine = a.recall[a.recall[:, 3] == layer]
        parts = np.average(mine[:, 10:14], axis=0, weights=mine[:, 6])
        rows.append(
            [str(int(layer)), *metrics.recall(mine), float(mine[:, 7].min())]
            + [float(mine[:, 9].min()), *map(float, parts)]
        )
    return Table(
        "recall",
        "Recall of sparse attention",
        ["layer", "recall", "\u00b1", "least of a head and step", "10th percentile"]
        + ["sink", "own block", "blocks", "columns"],
        rows,
        metrics.FORMULAS["recall"],
        ("",) + 8 * (".4f",),
    )


def drift(a):
    if a.drift is None:
        return None
    rows = []
    for layer in np.unique(a.drift[:, 1]):
        mine = a.drift[a.drift[:, 1] == layer]
        now, before = (np.average(mine[:, i], weights=mine[:, 3]) for i in (4, 5))
        rows.append(
            [str(int(layer)), float(now), float(before), float(now - before)]
            + [float((mine[:, 4] - mine[:, 5]).max())]
        )
    return Table(
        "drift",
        "Drift of sparse indexes",
        ["layer", "recall", "of the index before", "drift", "largest of a head and step"],
        rows,
        metrics.FORMULAS["drift"],
        ("",) + 4 * (".4f",),
    )


def recall_rows(a):
    if a.recall is None:
        return None
    names = ["step", "micro_batch", "chunk", "layer", "head", "rows", "queries", "recall"]
    names += ["error", "p10", "sink", "own", "blocks", "columns"]
    return Table("recall_rows", "", names, a.recall.tolist())


def coverage(a):
    if a.coverage is None:
        return None
    names = ["step", "micro_batch", "chunk", "layer", "budget", "coverage", "chosen"]
    return Table("coverage", "", names, a.coverage.tolist())


def budgets(a):
    if not a.sparse:
        return None
    rows = [
        [
            step,
            layer,
            head,
            float(v[0] / v[1]),
            float(v[2]),
            float(v[3]),
            float(metrics.sparsity_ratio(v[2], v[3])),
            int(v[4]),
        ]
        for (step, layer, head), v in sorted(a.sparse.items())
    ]
    return Table(
        "budgets",
        "",
        [
            "step",
            "layer",
            "head",
            "budget",
            "computed pairs",
            "visible pairs",
            "sparsity ratio",
            "overflow",
        ],
        rows,
    )


def head_patterns(a):
    if not a.kinds:
        return None
    rows = [[layer, head, *chosen] for (layer, head), chosen in sorted(a.kinds.items())]
    return Table("head_patterns", "", ["layer", "head", *HEAD_PATTERNS], rows)


def memory(a):
    if not a.memory:
        return None
    names = sorted(a.memory, key=lambda n: (n == "total", n))
    rows = [
        [rank] + [float(a.memory[n][r]) / 2**20 for n in names] for r, rank in enumerate(a.ranks)
    ]
    return Table(
        "memory",
        "Peak memory by category",
        ["rank"] + [f"{n} (MiB)" for n in names],
        rows,
        (
            "Highest value over all steps; total is the highest sum at one moment, not the sum of"
            " the peaks."
        ),
        ("",) + (".1f",) * len(names),
    )


def regions(a):
    rows = []
    for region in sorted(a.regions, key=lambda g: -g["exclusive"].sum()):
        mine = region["exclusive"][[a.ranks.index(r) for r in region["ranks"]]]
        who = "all" if len(region["ranks"]) == len(a.ranks) else number_ranges(region["ranks"])
        rows.append(
            [
                region["region"],
                who,
                region["events"],
                float(mine.min()),
                float(mine.mean()),
                float(mine.max()),
                float(region["inclusive"].sum()),
                region["imbalance"],
            ]
        )
    return Table(
        "regions",
        "Regions",
        [
            "region",
            "ranks",
            "events",
            "exclusive, min (s)",
            "mean (s)",
            "max (s)",
            "inclusive, all ranks (s)",
            "imbalance",
        ],
        rows,
        metrics.FORMULAS["regions"],
        ("", "", ",d", ".4f", ".4f", ".4f", ".4f", ".3f"),
    )


def steps(a):
    """CSV alone: a row a step with every scalar of the trace."""
    names = sorted(a.scalars)
    known = {n: dict(zip(s.tolist(), v.tolist())) for n, (s, v) in a.scalars.items()}
    every = sorted({int(s) for values in known.values() for s in values} | set(a.steps.tolist()))
    slowest = step_seconds(a)
    return Table(
        "steps",
        "",
        ["step", "slowest rank (s)", *names],
        [[s, slowest.get(s, "")] + [known[n].get(s, "") for n in names] for s in every],
    )


def segments(a):
    if a.segment_tokens is None:
        return None
    values, counts = np.unique(a.segment_tokens, return_counts=True)
    return Table(
        "segments",
        "",
        ["segment length (tokens)", "segments"],
        [list(r) for r in zip(values.tolist(), counts.tolist())],
    )


# Every single number of metrics.json, of runs side by side.
COMPARED = [
    ("ranks", "ranks", ""),
    ("ranks_read", "ranks with a trace", ""),
    ("steps", "steps", ""),
    ("runtime_s", "runtime (s)", ".4f"),
    ("step_time_s", "step time (s)", ".4f"),
    ("tokens_per_s_per_rank", "tokens / s / rank", ",.0f"),
    ("mfu", "MFU", ".3f"),
    ("first_loss", "first loss", ".4f"),
    ("loss", "last loss", ".4f"),
    ("validation_loss", "held-out loss", ".4f"),
    ("needle_accuracy", "needle accuracy", ".4f"),
    ("load_balance", "load balance", ".4f"),
    ("communication_efficiency", "communication efficiency", ".4f"),
    ("parallel_efficiency", "parallel efficiency", ".4f"),
    ("worker_imbalance", "worker imbalance", ".4f"),
    ("step_imbalance", "step imbalance", ".4f"),
    ("computation_ratio", "computation ratio", ".4f"),
    ("sparsity_ratio", "sparsity ratio", ".4f"),
    ("mean_budget", "mean budget", ".2f"),
    ("budget_overflow", "overflow of budgets", ",.0f"),
    ("recall", "recall", ".4f"),
    ("recall_interval", "recall, \u00b1", ".4f"),
    ("dst_overhead_share", "DST, share of step", ".5f"),
    ("sab_overhead_share", "SAB, share of step", ".5f"),
    ("imbalance", "imbalance", ".4f"),
    ("bubble_ratio", "bubble ratio", ".4f"),
    ("predicted_schedule_s", "schedule, predicted (s)", ".5f"),
    ("schedule_s", "schedule, measured (s)", ".5f"),
    ("prediction_error", "prediction error", ".4f"),
    ("predicted_bubble_ratio", "bubble ratio of schedules, predicted", ".4f"),
    ("schedule_bubble_ratio", "bubble ratio of schedules, measured", ".4f"),
    ("dbr", "dbr", ".4f"),
    ("pr", "pr", ".4f"),
    ("abr", "abr", ".4f"),
    ("cr", "cr", ".4f"),
    ("ave_t", "ave_t (tokens)", ",.0f"),
    ("peak_bytes", "peak memory (MiB)", ".1f"),
]


SHOWN = (
    pop,
    ring,
    sparsity,
    recall,
    drift,
    steps_balance,
    predicted,
    batch,
    overheads,
    regions,
    memory,
    ranks,
)
CSV_ONLY = (split, budgets, head_patterns, recall_rows, coverage, ring_steps, steps, segments)
# Name of every table of a run -> how its CSV file begins, in small letters.
HEADINGS = {
    "pop": "rank",
    "ring": "direction",
    "sparsity": "layer",
    "recall": "layer",
    "drift": "layer",
    "schedule": "metric",
    "prediction": "stage",
    "batch": "metric",
    "overheads": "metric",
    "regions": "region",
    "memory": "rank",
    "ranks": "rank",
    "split": "rank",
    "budgets": "step",
    "head_patterns": "layer",
    "recall_rows": "step",
    "coverage": "step",
    "ring_steps": "direction",
    "steps": "step",
    "segments": "segment length (tokens)",
}
