"""Bars of chunks and pipelines: memory, ChunkFlow Figure 8 and predicted schedules."""
import statistics

from results import Command, Figure, deck, ratio


def memory_commands(s):
    small = [
        "run.backend=host",
        "model.preset=custom",
        "model.layers=2",
        "model.hidden=64",
        "model.intermediate=128",
        "model.query_heads=4",
        "model.kv_heads=2",
        "model.head_dim=16",
        "model.vocabulary=512",
        "chunk.tokens=256",
        "chunk.window_tokens=1024",
    ]
    commands = []
    for case, tokens in (("32K", 2048), ("256K", 8192)):
        size = [*small, f"data.lengths=[{tokens}]", f"data.max_tokens={tokens}"] if s.host else []
        commands.append(
            Command(
                case,
                [
                    s.ballast,
                    "train",
                    deck("chunkflow", "table5.toml"),
                    "--case",
                    case,
                    "run.steps=1",
                    *size,
                    "-d",
                    f"{{out}}/run-{case}",
                ],
                ranks=1,
                limit_s=200,
            )
        )
    return commands


def memory_figures(r):
    short, long = r.log("32K", "memory_mib"), r.log("256K", "memory_mib")
    seconds = r.log("256K", "step_time_s")
    return [
        Figure(
            "peak memory of a 256K sequence / 32K, chunks of 2K, offloaded",
            ratio(long[-1], short[-1]) if long and short else None,
            1.05,
            at_most=True,
        ),
        Figure("step of the 256K sequence (s)", seconds[-1] if seconds else None),
    ]


SHAPE_7B = [
    "run.backend=cuda",
    "model.preset=qwen2.5-7b",
    "model.layers=8",
    "data.bin_tokens=[1024,4096,8192,32768,131072,262144]",
    "data.samples=4096",
    "batching.global_samples=256",
    "chunk.tokens=8192",
    "chunk.k=4",
    "optimizer.zero=1",
]


def figure8_meshes(s):
    return (
        {"pp4": ["mesh.pp=4"], "pp2-dp2": ["mesh.pp=2", "mesh.dp=2"]}
        if s.gpus == 4
        else {f"pp{s.gpus}": [f"mesh.pp={s.gpus}"]}
    )


def figure8_command(s, name, case, *more, limit_s=120):
    return Command(
        name,
        [
            s.ballast,
            "train",
            deck("chunkflow", "figure8.toml"),
            "--case",
            case,
            *([] if s.host else SHAPE_7B),
            *more,
            "-d",
            f"{{out}}/run-{name}",
        ],
        ranks=s.gpus,
        limit_s=limit_s,
    )


def figure8_commands(s):
    commands = []
    for mesh, keys in figure8_meshes(s).items():
        for case in ("baseline", "chunks", "zero-bubble"):
            commands.append(
                figure8_command(
                    s,
                    f"32K {mesh} {case}",
                    case,
                    *keys,
                    "run.steps=4",
                    *([] if s.host else ["data.max_tokens=32768"]),
                )
            )
    mesh, keys = list(figure8_meshes(s).items())[0]
    for case in () if s.host else ("baseline", "chunks"):
        commands.append(
            figure8_command(
                s,
                f"256K {mesh} {case}",
                case,
                *keys,
                "run.steps=1",
                "data.max_tokens=262144",
                "run.seed=3",
                limit_s=200,
            )
        )
    return commands


def figure8_figures(r):
    figures = []
    for name in r.names("*baseline"):
        limit, mesh, _ = name.split(" ", 2)
        first = (
            1 if limit == "32K" else 0
        )  # the first step warms libraries up; at 256K it is the only one
        baseline = sum(r.log(name, "step_time_s")[first:])
        for case in ("chunks", "zero-bubble"):
            if r.text(f"{limit} {mesh} {case}"):
                bars = (
                    ((1.4, None) if limit == "32K" else (2.2, None))
                    if case == "chunks" and r.gpus == 4
                    else (None, None)
                )
                figures.append(
                    Figure(
                        f"Table 2 mix to {limit}, {mesh}: {case}, x Megatron-style baseline",
                        ratio(
                            baseline, sum(r.log(f"{limit} {mesh} {case}", "step_time_s")[first:])
                        ),
                        *bars,
                    )
                )
        losses = [r.log(f"{limit} {mesh} {case}", "loss")[:1] for case in ("baseline", "chunks")]
        if all(losses):
            figures.append(
                Figure(
                    f"Table 2 mix to {limit}, {mesh}: first losses, difference",
                    abs(losses[0][0] - losses[1][0]),
                    0.01,
                    at_most=True,
                )
            )
    return figures


LONG_TAIL_WARM = 2  # first steps, in which kernels are loaded


def long_tail_commands(s):
    """The mix to 256K in chunks over a pipeline, and placed by time: within the same memory, and
    with more of it, which saves recomputation and joins more short samples."""
    steps = f"run.steps={LONG_TAIL_WARM + (2 if s.host else 10)}"
    size = [steps] if s.host else [steps, "data.max_tokens=262144", "run.seed=3"]
    n = str(s.gpus)
    placed = ["mesh.pp=1", f"mesh.dp={n}"]
    tokens = (128, 256) if s.host else (2048, 8192)
    more = [] if s.host else ["recompute.mode=selective"]
    return [
        figure8_command(s, "chunks", "chunks", f"mesh.pp={n}", *size),
        *(
            figure8_command(
                s, name, "balanced", *placed, f"batching.micro_batch_tokens={t}", *keys, *size
            )
            for name, t, keys in (("placed", tokens[0], []), ("more", tokens[1], more))
        ),
    ]


def long_tail_figures(r):
    names = ("chunks", "placed", "more")
    seconds = {name: sum(r.log(name, "step_time_s")[LONG_TAIL_WARM:]) or None for name in names}
    memory = {name: max(r.log(name, "memory_mib"), default=None) for name in names}
    losses = [r.log(name, "loss") for name in names]
    apart = [max(v) / min(v) - 1 for v in zip(*losses)] if all(losses) else []
    rows = []
    for name, bar, room in (("placed", 1.0, 1.0), ("more", 1.15, 1.5)):
        gain = ratio(seconds["chunks"], seconds[name])
        used = ratio(memory[name], memory["chunks"])
        rows += [
            Figure(f"mix to 256K, chunks over pp / {name}", gain, bar if r.gpus == 4 else None),
            Figure(f"memory, {name} / chunks", used, room if r.gpus == 4 else None, at_most=True),
        ]
    return [
        *rows,
        Figure("losses apart", max(apart, default=None), 0.01, at_most=True),
        Figure("chunks over pp, s of all steps", seconds["chunks"]),
    ]


def prediction_commands(s):
    keys = [f"mesh.pp={s.gpus}"]
    lengths = (
        "profile.lengths=[8,16,32,64,128,256,512]"
        if s.host
        else "profile.lengths=[16,64,128,256,512,1024,2048,4096,8192,16384,32768]"
    )
    prefixes = "profile.prefixes=[128,256,384]" if s.host else "profile.prefixes=[8192,16384,24576]"
    commands = [
        Command(
            "profile",
            [
                s.ballast,
                "profile",
                deck("chunkflow", "figure8.toml"),
                *([] if s.host else SHAPE_7B),
                *keys,
                lengths,
                prefixes,
                'profile.recompute=["none","full"]',
                "profile.repeats=5",
                "profile.held_out=8",
                "profile.target_s=40",
                "profile.repair_limit=0.5",
                "-d",
                "{out}/profile",
                "--json",
                "{out}/profile.json",
            ],
            ranks=s.gpus,
            limit_s=150,
        )
    ]
    for case in ("baseline", "chunks", "zero-bubble"):
        for k in (4, 1) if case != "baseline" else (4,):
            size = [f"chunk.k={k}"] + (
                [] if s.host else ["data.max_tokens=32768", "batching.global_samples=64"]
            )
            commands.append(
                figure8_command(
                    s,
                    f"run {case} K {k}",
                    case,
                    *keys,
                    "run.steps=4",
                    *size,
                    "profile.table={out}/profile/profile.h5",
                )
            )
    return commands


def prediction_figures(r):
    errors, figures = [], []
    for name in r.names("run "):
        mine = [p / m for m, p in r.schedule_times("run-" + name)[1:] if m > 0]
        if mine:
            figures.append(
                Figure(
                    f"{name[4:]}: predicted / measured, median of steps", statistics.median(mine)
                )
            )
            errors += [abs(x - 1) for x in mine]
    return [
        Figure(
            "predicted step time, median error",
            statistics.median(errors) if errors else None,
            0.10,
            at_most=True,
        ),
        *figures,
    ]
