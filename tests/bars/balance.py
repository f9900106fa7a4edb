"""Bars of packing and of balanced sparsity."""

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


def balance_commands(s):
    if s.host:
        path, keys = deck("sparsebalance", "training.toml"), ["warmup=0", "repeats=1"]
        keys += ["mesh.pp=1"] if s.gpus == 2 else []
        commands = []
    else:
        path, keys = deck("sparsebalance", "four_gpus.toml"), [
            "warmup=2",
            "repeats=6",
            "profile.table={out}/profile/profile.h5",
        ]
        keys += ["mesh.dp=1", "model.layers=18"] if s.gpus == 2 else []
        commands = [
            Command(
                "profile",
                [
                    s.ballast,
                    "profile",
                    deck("sparsebalance", "figure6.toml"),
                    "--case",
                    "h200",
                    "-d",
                    "{out}/profile",
                    "--json",
                    "{out}/profile.json",
                ],
                ranks=1,
                limit_s=150,
            )
        ]
    if not s.host and s.gpus == 1:
        return commands
    return commands + [
        Command(
            case,
            [
                s.ballast,
                "bench",
                "step",
                path,
                "--case",
                case,
                *keys,
                "--json",
                f"{{out}}/{case}.json",
            ],
            ranks=s.gpus,
        )
        for case in ("baseline", "dst", "sab", "sab+dst", "path")
    ]


def balance_figures(r):
    figures = []
    if r.text("profile"):
        figures += [
            Figure(
                "layer latencies predicted by the table, held-out error",
                r.value("profile", "held_out_error"),
                0.10,
                at_most=True,
            ),
            Figure("by FLOPs alone", r.value("profile", "flops_error")),
            Figure("by length alone", r.value("profile", "length_error")),
            Figure("measuring the table (s)", r.value("profile", "measure_seconds")),
        ]
    if r.gpus == 1:
        return figures
    for case in ("dst", "sab", "sab+dst", "path"):
        bar = (1.3, 1.4) if case == "path" and r.gpus == 4 else (None, None)
        figures.append(
            Figure(f"bimodal lengths: +{case}, x baseline", step_ratio(r, "baseline", case), *bar)
        )
    figures += [
        Figure(f"{case}, x sab", step_ratio(r, "sab", case), 1.05 if case == "path" else None)
        for case in ("sab+dst", "path")
    ]
    figures += [
        Figure(f"{case}, coverage given up, mean of the run", r.value(case, "coverage_loss"))
        for case in ("dst", "sab+dst", "path")
    ]
    shares = [r.value("sab+dst", key) for key in ("dst_overhead_share", "sab_overhead_share")]
    return figures + [
        Figure(
            "overhead of DST and SAB, share of the step",
            sum(shares) if None not in shares else None,
            0.015,
            at_most=True,
        )
    ]
