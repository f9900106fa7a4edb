"""Steps of adapters (LoRA) against PEFT, which needs its package beside Transformers."""
import os

from results import REFERENCE, Command, Figure, deck, ratio

DROPOUTS = ("0.1", "0")
ADAPTERS = ["lora.rank=16", "lora.projections=['q','k','v','o','gate','up','down']"]


def lora_commands(s):
    case = ["--case", "qwen2.5-3b-8k", "repeats=8", "warmup=4"]
    if s.host:
        case = ["--case", "laptop", "model.layers=1", "repeats=1", "warmup=0"]
    step = [s.ballast, "bench", "step", deck("bench", "step.toml"), *case, *ADAPTERS]
    commands = []
    for dropout in DROPOUTS:
        ours = [*step, f"lora.dropout={dropout}", "--json", f"{{out}}/dropout-{dropout}.json"]
        commands.append(Command(f"dropout-{dropout}", ours, ranks=1))
        if s.host:
            continue
        peer = ["python3", os.path.join(REFERENCE, "peer_step.py"), "qwen2.5-3b", "8192"]
        for how in ([], ["compile"]):
            name = "-".join(["peer", *how, dropout])
            commands.append(Command(name, [*peer, *how, f"lora=16,{dropout}"], limit_s=180))
    return commands


def lora_figures(r):
    figures = []
    for dropout in DROPOUTS:
        rate = r.value(f"dropout-{dropout}", "tokens_per_s_per_rank")
        what = f"LoRA of rank 16, dropout {dropout}, Qwen2.5-3B at 8K"
        figures.append(Figure(f"{what}, tokens/s", rate))
        peers = [
            r.match(f"{name}-{dropout}", r"([0-9]+) tokens/s") for name in ("peer", "peer-compile")
        ]
        best = max((p for p in peers if p is not None), default=None)
        figures.append(Figure("the same, x PEFT (the faster of plain and compiled)",
                              ratio(rate, best), 1.0, 1.3))  # fmt: skip
    return figures
