"""Bars of attention kernels and of one step on one GPU, each beside its peer."""
import os
import re

from results import REFERENCE, Command, Figure, deck, ratio

PEER_ATTENTION = os.path.join(REFERENCE, "peer_attention.py")
PEER_FSDP = os.path.join(REFERENCE, "peer_fsdp.py")
PEER_STEP = os.path.join(REFERENCE, "peer_step.py")
# Of dense attention beside cuDNN: tokens, heads, head dim, bar and goal of either pass.
DENSE = [
    ("8K", "16/2", 128, None, None),
    ("32K", "16/2", 128, 1.0, 1.05),
    ("128K", "16/2", 128, 1.0, 1.05),
    ("32K", "14/2", 64, 1.0, 1.1),
    ("8K", "16/2", 256, 0.8, 0.95),
    ("32K", "16/2", 256, 0.8, 0.95),
]
DETERMINISTIC = r"^.*\bbwd\s*([0-9.]+) ms.*\bdet\s*([0-9.]+) ms"


def attention_commands(s):
    lengths = [s.lengths] if s.lengths else []
    return [
        Command("check", [s.kernels, "check"], limit_s=200),
        Command("time", [s.kernels, "time", *lengths], limit_s=200),
        Command("peers", ["python3", PEER_ATTENTION], limit_s=200),
    ]


def attention_figures(r):
    number = r"\s*([0-9.]+)"

    def ours(case, what):
        return r.match("time", rf"^{re.escape(case)}\s.*?\b{what}{number} ms")

    def ours_rate(case, what):
        return r.match("time", rf"^{re.escape(case)}\s.*?\b{what}\s*[0-9.]+ ms{number} TF/s")

    def peer(case, what):
        return r.match("peers", rf"^{re.escape(case)}\s.*?\b{what}{number} ms")

    def peer_rate(case, what):
        return r.match("peers", rf"^{re.escape(case)}\s.*?\b{what}\s*[0-9.]+ ms{number} TF/s")

    figures = [
        Figure(
            "wrong results of the kernels' own check",
            r.match("check", r"^(\d+) failures"),
            0,
            at_most=True,
        )
    ]
    passes = (("fwd", "forward"), ("bwd", "backward"))
    for tokens, heads, dim, bar, goal in DENSE:
        for what, name in passes:
            figures.append(
                Figure(
                    f"dense {tokens}, {heads} heads, D {dim}, {name}, x cuDNN",
                    ratio(
                        peer(f"cudnn {tokens} {heads} D{dim}", what),
                        ours(f"dense {tokens} D{dim} {heads}", what),
                    ),
                    bar,
                    goal,
                )
            )
    for tokens in ("8K", "32K"):
        for what, name in passes:
            wide, narrow = (ours_rate(f"dense {tokens} D{dim} 16/2", what) for dim in (128, 96))
            figures.append(
                Figure(
                    f"dense {tokens}, D 96, {name}, of D 128's rate", ratio(narrow, wide), 0.8, 0.95
                )
            )
    figures.append(
        Figure(
            "deterministic backward, x the default's time, the slowest line",
            max((d / b for b, d in r.matches("time", DETERMINISTIC)), default=None),
            1.2,
            1.1,
            at_most=True,
        )
    )
    for (what, name), bar, goal in zip(passes, (400, 380), (450, 420)):
        rate = ours_rate("32K, segments of 1024", what)
        figures.append(Figure(f"32K in segments of 1,024, {name}, TFLOP/s", rate, bar, goal))
    for kind in ("aligned runs of 2", "free runs of 2", "single blocks"):
        bars = (1.2, 1.0, 1.5, 1.3) if kind == "aligned runs of 2" else (None,) * 4
        for i, (what, name) in enumerate((("fwd", "forward"), ("bwd", "backward"))):
            figures.append(
                Figure(
                    f"5 % of 128K, {kind}, {name}, per pair, x FlexAttention",
                    ratio(ours_rate(f"5% of 128K, {kind}", what), peer_rate("flex 5%", what)),
                    bars[i],
                    bars[2 + i],
                )
            )
    figures.append(
        Figure(
            "packed lengths, forward + backward, x own dense rate",
            r.match("time", r"^packed, all:.*= ([0-9.]+) of dense"),
            0.94,
            0.97,
        )
    )
    # MTraining's kernels on the same GPU and pattern took these times (ms), conversion included.
    for tokens, forward, backward in (("128K", 14.6, 73.0), ("256K", 29.0, 141.8)):
        case = f"vertical slash {tokens}, built here"
        figures.append(
            Figure(
                f"vertical slash {tokens}, index + forward, x MTraining's kernels",
                ratio(forward, r.match("time", rf"^{case}.*?\+ fwd =\s*([0-9.]+) ms")),
                1.3,
                1.7,
            )
        )
        figures.append(
            Figure(
                f"vertical slash {tokens}, backward, x MTraining's kernels",
                ratio(backward, r.match("time", rf"^{case}.*?\| bwd\s*([0-9.]+) ms")),
                2.0,
                3.0,
            )
        )
    return figures


def step_commands(s):
    if s.host:
        return [
            Command(
                "laptop",
                [
                    s.ballast,
                    "bench",
                    "step",
                    deck("bench", "step.toml"),
                    "--case",
                    "laptop",
                    "model.layers=1",
                    "repeats=1",
                    "warmup=0",
                    "--json",
                    "{out}/laptop.json",
                ],
                ranks=1,
            )
        ]
    commands = []
    for size in ("0.5b", "3b"):
        commands.append(
            Command(
                size,
                [
                    s.ballast,
                    "bench",
                    "step",
                    deck("bench", "step.toml"),
                    "--case",
                    f"qwen2.5-{size}-8k",
                    "repeats=7",
                    "warmup=8",
                    "--json",
                    f"{{out}}/{size}.json",
                ],
                ranks=1,
            )
        )
        commands.append(Command(f"peer-{size}", ["python3", PEER_STEP, f"qwen2.5-{size}", "8192"]))
    return [*commands, *short_commands(s)]


# Tokens a second of one sample of 8,192 tokens on an H200.
STEP_BARS = {"0.5b": (105e3, 112e3), "3b": (24.3e3, 25.5e3)}

# Tokens a second that a C++ trainer with all state in bf16 publishes for samples of 1,024 tokens
# on an H100.
SHORT_BARS = {"0.5b": (149e3, 162e3), "3b": (31e3, 32.5e3)}


def short_commands(s):
    """Steps of 524,288 tokens in samples of 1,024."""
    return [
        Command(
            f"short-{size}",
            [
                s.ballast, "bench", "step", deck("bench", "step.toml"), "--case",
                f"qwen2.5-{size}-1k", "repeats=5", "warmup=3", "--json",
                f"{{out}}/short-{size}.json",
            ],
            ranks=1,
            limit_s=240,
        )
        for size in SHORT_BARS
    ]  # fmt: skip


def step_figures(r):
    if r.text("laptop"):
        return [Figure("laptop step, mfu", r.value("laptop", "mfu"))]
    figures = [
        Figure(
            f"Qwen2.5-{size} step, 8K tokens, x Transformers",
            ratio(
                r.value(size, "tokens_per_s_per_rank"),
                r.match(f"peer-{size}", r"([0-9]+) tokens/s"),
            ),
            1.0,
            1.5,
        )
        for size in ("0.5b", "3b")
    ]
    for size, bars in STEP_BARS.items():
        rate = r.value(size, "tokens_per_s_per_rank")
        figures.append(Figure(f"Qwen2.5-{size} step, 8K tokens, tokens/s", rate, *bars))
    for size, bars in SHORT_BARS.items():
        rate = r.value(f"short-{size}", "tokens_per_s_per_rank")
        figures.append(
            Figure(f"Qwen2.5-{size} step, samples of 1,024 tokens, tokens/s", rate, *bars)
        )
    return figures


BF16_MOMENTS, BF16_GRADIENTS = "optimizer.moments=bf16", "optimizer.gradients=bf16"
REDUCED_IN_FULL = ("zero1", "zero2", "zero2-fp8", "zero1-bf16-moments", "zero2-bf16-moments")
PEERS = ("zero2", "zero3", "zero3-recompute")
PEERS_BF16 = ("zero2-bf16", "zero3-bf16")


def fsdp_commands(s):
    ours = {
        "zero1": ["optimizer.zero=1"],
        "zero2": [],
        "zero2-fp8": ["run.precision=fp8", "recompute.mode=full"],
        # Moments in bf16 leave room for layers that keep everything.
        "zero1-bf16-moments": ["optimizer.zero=1", BF16_MOMENTS, "recompute.layers=6"],
        "zero2-bf16-moments": [BF16_MOMENTS, "recompute.layers=7"],
        # And gradients, beside peers that reduce them in bf16 too.
        "zero1-bf16-gradients": ["optimizer.zero=1", BF16_GRADIENTS, "recompute.mode=none"],
        "zero2-bf16-state": [BF16_GRADIENTS, BF16_MOMENTS, "recompute.layers=4"],
    }
    if s.host:
        small = ["--case", "laptop", f"mesh.dp={s.gpus}", "model.layers=1", "repeats=1", "warmup=0"]
        small.append(f"batching.global_tokens={4096 * s.gpus}")
        ours = {"zero1": ["optimizer.zero=1"], "zero2": ["optimizer.zero=2"]}
    else:
        small = ["--case", "llama3.1-8b-8k", f"mesh.dp={s.gpus}", "repeats=9", "warmup=4"]
        small.append(f"batching.global_tokens={8192 * s.gpus}")
    commands = [
        Command(
            name,
            [
                s.ballast, "bench", "step", deck("bench", "step.toml"), *small, *more, "--json",
                f"{{out}}/{name}.json",
            ],
            ranks=s.gpus,
            limit_s=150,
        )
        for name, more in ours.items()
    ]  # fmt: skip
    if s.host:
        return commands
    torchrun = ["python3", "-m", "torch.distributed.run", f"--nproc-per-node={s.gpus}"]
    peers = [
        Command(f"peer-{how}", [*torchrun, PEER_FSDP, "llama3.1-8b", "8192", how], limit_s=200)
        for how in (*PEERS, *PEERS_BF16)
    ]
    return [*commands, *peers]


def best_peer(r, hows):
    """Its tokens/s/GPU, or None, and its GiB of the card."""
    best, fastest = max(
        (r.match(f"peer-{how}", r"([0-9.]+) tokens/s/GPU") or 0, how) for how in hows
    )
    return best or None, r.match(f"peer-{fastest}", r"card ([0-9.]+) GiB")


def fsdp_figures(r):
    best, memory = best_peer(r, PEERS)
    rounding, its_memory = best_peer(r, (*PEERS, *PEERS_BF16))
    figures = [
        Figure("best of FSDP2 + compile, tokens/s/GPU", best),
        Figure("its memory, GiB of the card", memory),
        Figure("the same where it may reduce in bf16", rounding),
        Figure("its memory, GiB of the card", its_memory),
    ]
    for name, bar, memory in (
        ("zero1", 1.12, 95),
        ("zero2", 1.08, 75),
        ("zero2-fp8", None, None),
        ("zero1-bf16-moments", 1.12, 95),
        ("zero2-bf16-moments", 1.08, 75),
        ("zero1-bf16-gradients", 1.12, 95),
        ("zero2-bf16-state", 1.08, 75),
    ):
        rate = r.value(name, "tokens_per_s_per_rank")
        figures += [
            Figure(f"8B, {name}, tokens/s/GPU", rate),
            Figure(
                f"8B, {name}, x the best of FSDP2",
                ratio(rate, best if name in REDUCED_IN_FULL else rounding),
                bar,
            ),
            Figure(
                f"8B, {name}, GiB of the card",
                r.value(name, "device_memory_gib") or None,
                memory if r.gpus == 4 else None,
                at_most=True,
            ),
        ]
    return figures
