"""Bar of `balanced` against fixed splits of the same samples on GPUs, and against its bound: every
sample alone on one rank, summed, divided by ranks."""
import re
import statistics

from results import Command, Figure, deck, ratio

STEPS = 20
ALONE_STEPS = 6  # of the bound, which takes as many times as long as there are ranks
SKIPPED = 1  # first steps, in which kernels and connections are prepared


def meshes(gpus):
    """Keys of each case's mesh."""
    n = str(gpus)
    cases = {
        "balanced": [f"mesh.dp={n}"],
        "packed-dp": [f"mesh.dp={n}"],
        "packed-sp": ["mesh.dp=1", f"mesh.sp={n}"],
        "packed-cp": ["mesh.dp=1", f"mesh.cp_inner={n}"],
        "hbp": [f"mesh.dp={n}", f"batching.group_ranks=[1,{n}]"],
    }
    if gpus == 4:
        cases["packed-sp-dp2"] = ["mesh.dp=2", "mesh.sp=2"]
    return cases


def settings(s, case):
    """Deck, case and size; a case's name may go on with its mesh."""
    named = case.replace("-dp2", "")
    if s.host:
        tokens = 1024 * s.gpus
        small = [
            "model.preset=custom", "model.layers=2", "model.hidden=64", "model.intermediate=192",
            "model.query_heads=4", "model.kv_heads=2", "model.head_dim=16", "model.vocabulary=256",
            "data.min_tokens=4", "data.max_tokens=1024", "data.bin_tokens=[16,64,512,1024]",
            "data.bin_share=[0.5,0.4,0.08,0.02]", "batching.micro_batch_tokens=1024",
            f"batching.global_tokens={tokens}", "profile.lengths=[8,64,256,1024]",
            "profile.prefixes=[128,512]", "profile.repair_limit=0.9", "run.backend=host",
            "run.precision=fp32", "data.samples=2000",
        ]  # fmt: skip
        small += ["batching.groups=[128,1024]"] if named == "hbp" else []
        return [deck("hbp", "balanced_gpu.toml"), "--case", named, *small]
    lengths = []
    if s.lengths:
        lengths = ["data.source=lengths", f"data.lengths_file={s.lengths}"]
        lengths += ["data.bin_tokens=[]", "data.bin_share=[]"]
    tokens = 131072 * s.gpus
    return [
        deck("hbp", "balanced_gpu.toml"), "--case", named, f"batching.global_tokens={tokens}",
        *lengths,
    ]  # fmt: skip


def balanced_commands(s):
    profile = [
        s.ballast, "profile", *settings(s, "balanced"), f"mesh.dp={s.gpus}", "-d", "{out}/profile",
        "--json", "{out}/profile.json",
    ]  # fmt: skip
    commands = [Command("profile", profile, ranks=s.gpus, limit_s=200)]

    def add(case, keys, ranks, steps):
        line = [
            s.ballast, "train", *settings(s, case), *keys, f"run.steps={steps}",
            "profile.table={out}/profile/profile.h5", "-d", f"{{out}}/run-{case}",
        ]  # fmt: skip
        commands.append(Command(f"run-{case}", line, ranks=ranks, limit_s=400))

    for case, keys in meshes(s.gpus).items():
        add(case, keys, s.gpus, STEPS)
    add("alone", [], 1, ALONE_STEPS)
    return commands


def steps(r, case, key):
    """Values of a key in the log, by step, without the first steps."""
    found = re.findall(rf"^step=(\d+) .*?\b{key}=([0-9.e+-]+)", r.run_log(f"run-{case}"), re.M)
    return {int(step): float(value) for step, value in found if int(step) > SKIPPED}


def quartiles(times):
    return statistics.quantiles(times, n=4) if len(times) > 1 else []


def over_bound(r):
    """Step times over every sample alone on one rank / ranks, over the steps of both."""
    alone, ours = steps(r, "alone", "schedule_s"), steps(r, "balanced", "step_time_s")
    both = [step for step in alone if step in ours]
    return ratio(
        sum(ours[step] for step in both) * r.gpus, sum(alone[step] for step in both) or None
    )


def balanced_figures(r):
    ours = steps(r, "balanced", "step_time_s")
    figures = [
        Figure("balanced, s a step, mean", statistics.mean(ours.values()) if ours else None),
        Figure("balanced, x every sample alone / ranks", over_bound(r), 1.07, at_most=True),
        Figure("steps", len(ours) + SKIPPED if ours else None, STEPS),
    ]
    worst = []
    for case in (c for c in meshes(r.gpus) if c != "balanced"):
        other = steps(r, case, "step_time_s")
        both = [step for step in ours if step in other]
        total = [sum(times[step] for step in both) for times in (ours, other)]
        figures.append(Figure(f"{case}, x balanced", ratio(total[1], total[0] or None)))
        mine, theirs = quartiles(list(ours.values())), quartiles(list(other.values()))
        worst += [b / a for a, b in zip(mine, theirs)]
        losses = [steps(r, c, "loss") for c in ("balanced", case)]
        apart = [abs(losses[0][step] / losses[1][step] - 1) for step in both]
        figures.append(Figure(f"{case}, loss apart", max(apart, default=None), 0.01, at_most=True))
    figures.append(
        Figure("fixed split / balanced, worst of all quartiles", min(worst, default=None), 1.0)
    )
    errors = [
        abs(p / m - 1)
        for case in meshes(r.gpus)
        for p, m in zip(
            steps(r, case, "predicted_schedule_s").values(), steps(r, case, "schedule_s").values()
        )
    ]
    figures.append(
        Figure(
            "predicted schedule, median error",
            statistics.median(errors) if errors else None,
            0.05,
            at_most=True,
        )
    )
    return figures
