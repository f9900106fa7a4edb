"""The bars that Ballast holds itself to on GPUs: for each the commands that measure it and the
figures that come out.

A bar's commands write into a folder of its own; `figures` reads that folder alone, so that figures
can be computed later, elsewhere.
On the host (`--host`) the same commands run at laptop size, to see that everything works; such
figures mean nothing."""

from adapters import lora_commands, lora_figures
from balance import balance_commands, balance_figures, hbp_commands, hbp_figures
from balanced import balanced_commands, balanced_figures
from checkpoint import checkpoint_commands, checkpoint_figures
from chunks import (
    figure8_commands,
    figure8_figures,
    long_tail_commands,
    long_tail_figures,
    memory_commands,
    memory_figures,
    prediction_commands,
    prediction_figures,
)
from kernels import (
    attention_commands,
    attention_figures,
    fsdp_commands,
    fsdp_figures,
    step_commands,
    step_figures,
)
from overlap import overlap_commands, overlap_figures
from placement import placement_commands, placement_figures
from precision import fp8_commands, fp8_figures, state_commands, state_figures
from results import Bar
from rings import (
    figure6_commands,
    figure6_figures,
    index_commands,
    index_figures,
    nodes_commands,
    nodes_figures,
    ring_commands,
    ring_figures,
    sparse_step_commands,
    sparse_step_figures,
)
from tune import tune_commands, tune_figures

BARS = [
    Bar(
        "attention",
        "attention kernels against cuDNN, FlexAttention and MTraining's times",
        [1],
        260,
        attention_commands,
        attention_figures,
    ),
    Bar(
        "step",
        "training steps against Hugging Face Transformers; steps of short samples",
        [1],
        300,
        step_commands,
        step_figures,
        host=True,
    ),
    Bar(
        "lora",
        "steps of adapters against PEFT",
        [1],
        260,
        lora_commands,
        lora_figures,
        host=True,
    ),
    Bar(
        "fp8",
        "FP8 against bf16: steps, and the loss after 300 of them, of three seeds",
        [1],
        700,
        fp8_commands,
        fp8_figures,
        host=True,
    ),
    Bar(
        "state",
        "optimizer state in bf16 against full: steps of 3B, and the loss of three seeds",
        [1],
        1000,
        state_commands,
        state_figures,
        host=True,
    ),
    Bar(
        "fsdp",
        "a step of Llama-3.1-8B on two or four GPUs against FSDP2 with torch.compile",
        [2, 4],
        540,
        fsdp_commands,
        fsdp_figures,
        host=True,
    ),
    Bar(
        "index",
        "cost of choosing sparse indexes against the attention saved",
        [1],
        120,
        index_commands,
        index_figures,
    ),
    Bar(
        "memory",
        "peak memory against the longest sequence",
        [1],
        90,
        memory_commands,
        memory_figures,
        host=True,
    ),
    Bar(
        "checkpoint",
        "checkpoints of 8 GB beside training, in turns with dd",
        [1, 2, 4],
        240,
        checkpoint_commands,
        checkpoint_figures,
        host=True,
    ),
    Bar(
        "overlap",
        "gradients reduced beside computation against after it; memory with NCCL's",
        [2, 4],
        240,
        overlap_commands,
        overlap_figures,
        host=True,
    ),
    Bar("ring", "dense ring attention", [2, 4], 25, ring_commands, ring_figures, host=True),
    Bar(
        "sparse-step",
        "a long sequence, 95 % sparse against dense",
        [2, 4],
        300,
        sparse_step_commands,
        sparse_step_figures,
        host=True,
    ),
    Bar(
        "nodes",
        "hierarchical against flat rings over two emulated nodes",
        [2, 4],
        300,
        nodes_commands,
        nodes_figures,
    ),
    Bar(
        "figure6",
        "MTraining's methods on one small model: losses and seconds",
        [4],
        350,
        figure6_commands,
        figure6_figures,
        host=True,
    ),
    Bar(
        "figure8",
        "chunks against a Megatron-style baseline",
        [2, 4],
        250,
        figure8_commands,
        figure8_figures,
        host=True,
    ),
    Bar(
        "long-tail",
        "samples to 256K placed by time against chunks over a pipeline, by memory",
        [2, 4],
        150,
        long_tail_commands,
        long_tail_figures,
        host=True,
    ),
    Bar(
        "prediction",
        "simulated against measured schedules",
        [1, 2, 4],
        150,
        prediction_commands,
        prediction_figures,
        host=True,
    ),
    Bar(
        "hbp",
        "Hierarchical Balance Packing against naive packing",
        [2, 4],
        180,
        hbp_commands,
        hbp_figures,
        host=True,
    ),
    Bar(
        "balanced",
        "placement by time against fixed splits of the same samples, and its bound",
        [2, 4],
        650,
        balanced_commands,
        balanced_figures,
        host=True,
    ),
    Bar(
        "balance",
        "profile table; DST and SAB against the baseline",
        [1, 2, 4],
        900,
        balance_commands,
        balance_figures,
        host=True,
    ),
    Bar(
        "tune",
        "what the clock of `ballast tune` predicts of configurations drawn before measuring",
        [1, 2, 4],
        1300,
        tune_commands,
        tune_figures,
        host=True,
    ),
    Bar(
        "placement",
        "`balanced` against other placements of the same samples, simulated",
        [0],
        30,
        placement_commands,
        placement_figures,
        host=True,
    ),
]
