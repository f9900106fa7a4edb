"""Bar of placement: batches of `balanced` against others on the same samples, by the one clock.  No
GPU is needed: plans are simulated, only planning itself is timed."""
from results import Command, Figure, deck, ratio

RANKS = 1024  # that planning is timed for
STEP_TOKENS = 16384  # a rank, as in the deck


def placement_commands(s):
    path = deck("hbp", "balanced.toml")
    data = (
        [
            "data.source=lengths",
            f"data.lengths_file={s.lengths}",
            "data.max_tokens=131072",
            "data.bin_tokens=[]",
            "data.bin_share=[]",
        ]
        if s.lengths
        else []
    )
    pack = [s.ballast, "pack"]
    large = [f"mesh.dp={RANKS}", f"batching.global_tokens={RANKS * STEP_TOKENS}"]
    return [
        Command(name, [*pack, *flags, path, *keys, *data, "--json", f"{{out}}/{name}.json"])
        for name, flags, keys in (
            ("compare", ["--compare"], ["--case", "balanced"]),
            ("window", [], ["--case", "balanced-window-8"]),
            ("large", [], ["--case", "balanced", *large]),
        )
    ]


def placement_figures(r):
    rows = {case["name"]: case for case in r.values("compare", "cases")}
    times = {name: row["step_seconds"] for name, row in rows.items()}
    over = lambda name: ratio(times.get(name), times.get("balanced"))
    planned = ratio(r.value("large", "plan_seconds"), r.value("large", "batches"))
    bars = {"hbp-909e272": 1.35, "packed": 1.10}
    return [
        *(
            Figure(
                f"{name}{'' if row['trains'] else ' (not trained)'}, x balanced",
                over(name),
                bars.get(name),
            )
            for name, row in rows.items()
            if name != "balanced"
        ),
        Figure(
            "steps that were planned",
            rows["balanced"]["batches"] if rows else None,
            100,
        ),
        Figure(
            "balanced, window of 8 steps, x every sample alone on one rank / ranks",
            r.value("window", "step_over_bound"),
            1.05,
            at_most=True,
        ),
        Figure(f"planning a step of {RANKS} ranks (s)", planned, 0.2, at_most=True),
    ]
