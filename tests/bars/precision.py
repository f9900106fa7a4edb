"""Bars of what is kept and multiplied in fewer bits: FP8, and optimizer state in bf16.  Steps of
both kinds, and the loss after 300 steps of three seeds."""
from kernels import BF16_GRADIENTS, BF16_MOMENTS, SHORT_BARS, STEP_BARS
from results import Command, Figure, deck, ratio

SEEDS = (1, 2, 3)
# Tokens a second of one sample of 8,192 tokens on an H200.
FP8_BARS = {"0.5b": (None, None), "3b": (28e3, None)}
STATE = [BF16_GRADIENTS, BF16_MOMENTS]
FP8 = {"bf16": ["run.precision=bf16"], "fp8": ["run.precision=fp8"]}
FULL_OR_BF16 = {
    "full": [],
    "gradients": STATE[:1],
    "state": STATE,
}


def step(s, name, case, keys, repeats=7, warmup=4):
    line = [s.ballast, "bench", "step", deck("bench", "step.toml"), "--case", case]
    line += [f"repeats={repeats}", f"warmup={warmup}", *keys, "--json", f"{{out}}/{name}.json"]
    return Command(name, line, ranks=1, limit_s=240)


def losses(s, label, keys, precision):
    for seed in SEEDS:
        name = f"loss-{label}-{seed}"
        line = [s.ballast, "train", deck("fp8.toml"), "-d", f"{{out}}/run-{name}"]
        line += [f"run.seed={seed}", "trace.enabled=false", *keys]
        if s.host:
            host = {"bf16": "fp32", "fp8": "fp8"}[precision]
            line += ["--case", "laptop", f"run.precision={host}"]
        else:
            line += ["--case", precision]
        yield Command(name, line, ranks=1, limit_s=200)


def loss_figures(r, base, other, most=None, most_of_spread=None):
    def last_loss(label, seed):
        list_of = r.log(f"loss-{label}-{seed}", "loss")[-50:]
        return sum(list_of) / len(list_of) if list_of else None

    pairs = [(last_loss(base, seed), last_loss(other, seed)) for seed in SEEDS]
    if any(loss is None for pair in pairs for loss in pair):
        return []
    bases, others = zip(*pairs)
    # One pair says little: two bf16 runs that round in another order part as far.
    apart = abs(sum(others) / sum(bases) - 1)
    spread = (max(bases) - min(bases)) / bases[0]
    return [
        Figure(
            f"loss of the last 50 steps, mean of three seeds, {other} to {base}, apart",
            apart,
            most,
            at_most=True,
        ),
        Figure("the same of one seed, at most", max(abs(b / a - 1) for a, b in pairs)),
        Figure("apart, of the spread of three seeds", apart / spread, most_of_spread, at_most=True),
    ]


def fp8_commands(s):
    commands = []
    for precision, keys in FP8.items():
        for size in () if s.host else ("0.5b", "3b"):
            commands.append(step(s, f"step-{size}-{precision}", f"qwen2.5-{size}-8k", keys))
        commands += losses(s, precision, [], precision)
    return commands


def fp8_figures(r):
    figures = []
    for size in ("0.5b", "3b"):
        rate = {p: r.value(f"step-{size}-{p}", "tokens_per_s_per_rank") for p in FP8}
        bar = {"0.5b": (None, None), "3b": (1.15, 1.25)}[size]
        name = f"Qwen2.5-{size} step, 8K tokens, FP8 x bf16"
        figures.append(Figure(name, ratio(rate["fp8"], rate["bf16"]), *bar))
        figures.append(Figure(f"Qwen2.5-{size}, FP8, tokens/s", rate["fp8"], *FP8_BARS[size]))
    return figures + loss_figures(r, "bf16", "fp8", 0.005, 2.0)


def state_commands(s):
    commands = []
    for label, keys in FULL_OR_BF16.items():
        if not s.host:
            commands.append(step(s, f"8k-{label}", "qwen2.5-3b-8k", keys, 16, 4))
            fp8 = [*keys, "run.precision=fp8"]
            commands.append(step(s, f"8k-fp8-{label}", "qwen2.5-3b-8k", fp8, 16, 4))
        commands += losses(s, label, keys, "bf16")
    if not s.host:
        for label in ("full", "state"):
            keys = FULL_OR_BF16[label]
            commands.append(step(s, f"1k-{label}", "qwen2.5-3b-1k", keys, 2, 1))
    return commands


def state_figures(r):
    figures = []
    for case, what, bars in (
        ("8k", "8K tokens", STEP_BARS["3b"]),
        ("8k-fp8", "8K tokens, FP8", FP8_BARS["3b"]),
        ("1k", "samples of 1,024 tokens", SHORT_BARS["3b"]),
    ):
        rate = {l: r.value(f"{case}-{l}", "tokens_per_s_per_rank") for l in FULL_OR_BF16}
        for label in FULL_OR_BF16:
            if label == "gradients" and case == "1k":
                continue
            name = f"Qwen2.5-3B, {what}, {label}"
            figures.append(Figure(f"{name}, tokens/s", rate[label], *bars))
            if label != "full":
                figures.append(Figure(f"{name}, x full", ratio(rate[label], rate["full"])))
            used = r.value(f"{case}-{label}", "device_memory_gib")
            figures.append(Figure(f"{name}, GiB of the card", used or None))
    for label in ("gradients", "state"):
        figures += loss_figures(r, "full", label)
    return figures
