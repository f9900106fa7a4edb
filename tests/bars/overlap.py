"""Bar of reductions beside computation: the same steps with gradients in buckets and in one bucket,
which hides nothing, in turns; and the memory that `check` foretells of a rank that talks to
others."""
import json
import os
import statistics

from results import Command, Figure, deck, ratio

TURNS = 2
SKIPPED = 3  # first steps, in which kernels and connections are prepared
WHOLE = str(1 << 40)  # bytes of a bucket that holds everything
HOWS = {"buckets": [], "one": [f"optimizer.bucket_bytes={WHOLE}"]}


def settings(s):
    case = "laptop" if s.host else "qwen2.5-3b-8k"
    tokens = (4096 if s.host else 8192) * s.gpus
    return [
        deck("bench", "step.toml"), "--case", case, f"mesh.dp={s.gpus}",
        f"batching.global_tokens={tokens}",
    ]  # fmt: skip


def overlap_commands(s):
    commands = []
    for zero in (1, 2):
        more = [f"optimizer.zero={zero}", "--json"]
        check = [s.ballast, "check", *settings(s), *more, f"{{out}}/check-{zero}.json"]
        bench = [
            s.ballast, "bench", "step", *settings(s), *more, f"{{out}}/bench-{zero}.json",
            "warmup=4", "repeats=3",
        ]  # fmt: skip
        commands.append(Command(f"check-{zero}", check))
        commands.append(Command(f"bench-{zero}", bench, ranks=s.gpus))
    for turn, zero in ((turn, zero) for turn in range(TURNS) for zero in (1, 2)):
        for how, more in HOWS.items():
            name = f"zero{zero}-{how}-{turn}"
            line = [
                s.ballast, "train", *settings(s), *more, f"optimizer.zero={zero}",
                f"run.steps={SKIPPED + (3 if s.host else 12)}", "checkpoint.at_end=false",
                "-d", f"{{out}}/run-{name}",
            ]  # fmt: skip
            commands.append(Command(name, line, ranks=s.gpus))
    return commands


def step_lines(r, name):
    """steps.jsonl of a run without its first steps."""
    try:
        with open(os.path.join(r.folder, "run-" + name, "steps.jsonl")) as lines:
            rows = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []
    return [row for row in rows if row.get("step", 0) > SKIPPED and "step_time_s" in row]


def median(r, zero, how, key):
    rows = [row for turn in range(TURNS) for row in step_lines(r, f"zero{zero}-{how}-{turn}")]
    found = [row[key] for row in rows if key in row]
    return statistics.median(found) if found else None


def overlap_figures(r):
    figures = []
    for zero in (1, 2):
        one, buckets = (median(r, zero, how, "step_time_s") for how in ("one", "buckets"))
        figures += [
            Figure(f"ZeRO {zero}, step in one bucket, s", one),
            Figure(f"ZeRO {zero}, step in buckets, s", buckets),
            Figure(f"ZeRO {zero}, one bucket / buckets", ratio(one, buckets), 1.0),
        ]
        for how in HOWS:
            exposed = median(r, zero, how, "exposed_reduction_s")
            figures.append(Figure(f"ZeRO {zero}, exposed seconds, {how}", exposed))
        used = r.value(f"bench-{zero}", "device_memory_gib")
        told = r.value(f"check-{zero}", "largest_rank_bytes")
        figures.append(Figure(f"ZeRO {zero}, device memory in use, GiB", used))
        error = abs(told / (1 << 30) / used - 1) if used and told else None
        figures.append(Figure(f"ZeRO {zero}, error of check", error, 0.05, at_most=True))
    return figures
