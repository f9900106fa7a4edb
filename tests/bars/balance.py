"""Bars of packing and of balanced sparsity."""

import csv
import glob
import os
import statistics

from results import Command, Figure, deck, step_ratio


def hbp_commands(s):
    if s.host:
        path, common = deck("hbp", "speed.toml"), ["warmup=0", "repeats=1"]
    else:
        path, common = deck("hbp", "speed_gpu.toml"), [
            "warmup=1",
            "repeats=4",
            "model.layers=12",
            "recompute.layers=0",
            "batching.group_recompute=[0,0]",
        ]
    isf1 = [] if s.host else ["recompute.layers=6"]
    if s.gpus == 4:
        cases = {"hbp": [], "isf-sp1": isf1, "isf-sp2": [], "isf-sp4": []}
    else:
        common += ["batching.global_tokens=8192" if s.host else "batching.global_tokens=393216"]
        cases = {
            "hbp": ["mesh.dp=2", "batching.group_ranks=[1,2]"],
            "isf-sp1": ["mesh.dp=2", *isf1],
            "isf-sp2": ["mesh.dp=1"],
        }
    return [
        Command(
            case,
            [
                s.ballast,
                "bench",
                "step",
                path,
                "--case",
                case,
                *common,
                *keys,
                "--json",
                f"{{out}}/{case}.json",
            ],
            ranks=s.gpus,
        )
        for case, keys in cases.items()
    ]


def hbp_figures(r):
    others = [step_ratio(r, name, "hbp") for name in r.names("isf-sp") if name != "isf-sp1"]
    return [
        Figure(
            "128K + short mix: hbp, x isf at SP 1",
            step_ratio(r, "isf-sp1", "hbp"),
            1.3 if r.gpus == 4 else None,
            1.4 if r.gpus == 4 else None,
        ),
        Figure(
            "the same, x isf at its best SP above 1",
            min((x for x in others if x is not None), default=None),
            1.0 if r.gpus == 4 else None,
        ),
    ]


# Of each round: the seed of its samples.  The first has the cases one after another, the second
# backwards; those that stand beside run fewer steps, in the first alone.
ROUNDS = {"first": 1, "second": 2}
CASES = ("baseline", "sab", "sab+dst", "sab+dst-capped", "path")
TUNED = CASES[2:]
OF_PAPER = ("sab+dst", "sab+dst-capped")  # mean anchor, p = 0.1
BESIDE = ("dst", "lbb", "lbb+dst", "sab-fewer", "sab+dst-ordered")
STEPS, BESIDE_STEPS, WARM = 10, 6, 2
BUDGET, FEWER = 32, 24  # blocks of every micro-batch, of the deck and of its case sab-fewer


def balance_deck(s):
    """Deck and overrides of all cases; 9 layers a stage, so that 20 steps of each take minutes."""
    if s.host:
        return [deck("sparsebalance", "training.toml"), *(["mesh.pp=1"] if s.gpus == 2 else [])]
    keys = ["model.layers=18", "profile.table={out}/profile/profile.h5"]
    keys += ["mesh.dp=1"] if s.gpus == 2 else []
    return [deck("sparsebalance", "four_gpus.toml"), *keys]


def balance_profile(s):
    path = deck("sparsebalance", "figure6.toml")
    line = [s.ballast, "profile", path, "--case", "h200", "-d", "{out}/profile"]
    return Command("profile", [*line, "--json", "{out}/profile.json"], ranks=1, limit_s=150)


def balance_run(s, case, name, seed, steps):
    path, *keys = balance_deck(s)
    keys += ["warmup=0", "repeats=1"] if s.host else [f"warmup={WARM}", f"repeats={steps}"]
    line = [s.ballast, "bench", "step", path, "--case", case, *keys, f"run.seed={seed}"]
    return Command(name, [*line, "--json", f"{{out}}/{name}.json"], ranks=s.gpus)


def balance_commands(s):
    """With `coverage`, a run whose trace has C(k) of the first round's steps at every budget, and
    its report."""
    profile = [] if s.host else [balance_profile(s)]
    if not s.host and s.gpus == 1:
        return profile
    first, second = ROUNDS
    runs = [balance_run(s, case, f"{case}-{first}", ROUNDS[first], STEPS) for case in CASES]
    runs += [
        balance_run(s, case, f"{case}-{second}", ROUNDS[second], STEPS) for case in CASES[::-1]
    ]
    runs += [balance_run(s, case, case, ROUNDS[first], BESIDE_STEPS) for case in BESIDE]
    path, *keys = balance_deck(s)
    steps = 2 if s.host else WARM + BESIDE_STEPS
    train = [s.ballast, "train", path, "--case", "sab+dst", *keys, f"run.seed={ROUNDS[first]}"]
    train += [f"run.steps={steps}", "trace.enabled=true", "-d", "{out}/run-coverage"]
    report = os.path.join(os.path.dirname(s.ballast), "ballast-report")
    return [
        *profile,
        *runs,
        Command("coverage", train, ranks=s.gpus),
        Command("report-coverage", [report, "{out}/run-coverage"]),
    ]


def rounds_ratio(r, slow, fast):
    """Median over the steps of both rounds of the time of `slow` / `fast` on the same samples."""
    pairs = []
    for name in ROUNDS:
        a, b = (r.values(f"{case}-{name}", "steps_s") for case in (slow, fast))
        pairs += zip(a, b) if len(a) == len(b) else []
    return statistics.median(a / b for a, b in pairs) if pairs else None


def beside_ratio(r, slow, case):
    """The same for a case that stands beside, whose steps are the first round's first ones."""
    a, b = r.values(f"{slow}-{next(iter(ROUNDS))}", "steps_s"), r.values(case, "steps_s")
    return statistics.median(x / y for x, y in zip(a, b)) if a and b else None


def held_coverage(r):
    """Mean C(k) by budget k of the run that wrote a trace, and of its choices (None)."""
    sums = {}
    found = glob.glob(os.path.join(r.folder, "run-coverage", "**", "coverage.csv"), recursive=True)
    for path in found:
        with open(path) as file:
            for row in csv.DictReader(file):
                keys = [int(float(row["budget"]))] + ([None] if float(row["chosen"]) else [])
                for key in keys:
                    sums.setdefault(key, []).append(float(row["coverage"]))
    return {budget: statistics.mean(values) for budget, values in sums.items()}


def coverage_at(held, k):
    """Mean C(k), on a straight line between the budgets that were candidates."""
    known = sorted(budget for budget in held if budget is not None)
    if not known or not known[0] <= k <= known[-1]:
        return None
    above = next(budget for budget in known if budget >= k)
    below = max(budget for budget in known if budget <= k)
    share = (k - below) / (above - below) if above > below else 0
    return held[below] + share * (held[above] - held[below])


def equal_coverage_ratio(r, case):
    """Time of SAB at the one budget whose mean coverage is that of `case`, over the case's, on the
    steps that all ran: SAB was timed at the deck's budget and at one below; in between time and
    coverage go along straight lines."""
    held, first = held_coverage(r), next(iter(ROUNDS))
    most, least = coverage_at(held, BUDGET), coverage_at(held, FEWER)
    lost = r.value(f"{case}-{first}", "coverage_loss")
    times = [r.values(name, "steps_s") for name in (f"sab-{first}", "sab-fewer", f"{case}-{first}")]
    if None in (most, least, lost) or not all(times):
        return None
    share = lost / (most - least)
    return statistics.median((a + share * (b - a)) / t for a, b, t in zip(*times))


def table_figures(r):
    if not r.text("profile"):
        return []
    error = r.value("profile", "held_out_error")
    return [
        Figure("layer latencies predicted by the table, held-out error", error, 0.1, at_most=True),
        Figure("by FLOPs alone", r.value("profile", "flops_error")),
        Figure("by length alone", r.value("profile", "length_error")),
        Figure("measuring the table (s)", r.value("profile", "measure_seconds")),
    ]


def balance_figures(r):
    figures = table_figures(r)
    if r.gpus == 1:
        return figures
    bars = r.gpus == 4  # what the figures are held to
    for case in CASES[1:]:
        bar = (1.3, 1.4) if case in OF_PAPER and bars else (None, None)
        what = f"bimodal lengths: {case}, x baseline"
        figures.append(Figure(what, rounds_ratio(r, "baseline", case), *bar))
    figures += [
        Figure(f"bimodal lengths: {case}, x baseline", beside_ratio(r, "baseline", case))
        for case in BESIDE
    ]
    for case in TUNED:
        of_paper = bars and case in OF_PAPER
        figures += [
            Figure(f"{case}, x sab", rounds_ratio(r, "sab", case), 1.1 if of_paper else None),
            Figure(
                f"{case}, x sab at equal mean coverage",
                equal_coverage_ratio(r, case),
                1.05 if of_paper else None,
            ),
        ]
    for case in TUNED:
        lost = [r.value(f"{case}-{name}", "coverage_loss") for name in ROUNDS]
        mean = statistics.mean(lost) if None not in lost else None
        figures.append(Figure(f"{case}, coverage given up, mean of both rounds", mean))
    held = held_coverage(r)
    figures += [Figure(f"C({k}), mean", coverage_at(held, k)) for k in (FEWER, BUDGET)]
    counted = [len(r.values(f"sab+dst-{name}", "steps_s")) for name in ROUNDS]
    figures.append(Figure("steps of each case", sum(counted)))
    shares = [r.value("sab+dst-first", key) for key in ("dst_overhead_share", "sab_overhead_share")]
    total = sum(shares) if None not in shares else None
    what = "overhead of DST and SAB, share of the step"
    return figures + [Figure(what, total, 0.01, at_most=True)]
