"""Synthetic runs for the report's tests: times are chosen, so every metric is known; the program's
own writer makes the files."""
import json
import os
import random
import subprocess
from pathlib import Path

HELPER = os.environ.get("BALLAST_REPORT_HELPER", "")
DECK = (
    '[run]\nname = "synthetic"\nbackend = "host"\n[model]\npreset = "tiny"\n[batching]\nmethod ='
    ' "packed"\nmicro_batch_tokens = 4096\n'
)


class Rank:
    """Lines for one rank, with a clock that advances as events are written."""

    def __init__(self, rank, ranks, mesh=None, at=None, segment=0, clock=1000.0, deck=DECK):
        self.rank, self.clock = rank, clock
        degrees = {"dp": 1, "pp": 1, "cp_outer": 1, "cp_inner": 1, "sp": 1, "tp": 1, **(mesh or {})}
        place = {**dict.fromkeys(degrees, 0), **(at or {})}
        fields = [f"mesh.{k}={v}" for k, v in degrees.items()] + [
            f"at.{k}={v}" for k, v in place.items()
        ]
        escaped = deck.replace("\n", "\\n")
        self.lines = [
            f"deck\t{rank}\t{escaped}",
            "\t".join(["session", str(rank), str(ranks), str(segment)] + fields),
        ]

    def event(
        self,
        kind,
        begin,
        end,
        step=-1,
        mb=-1,
        chunk=-1,
        layer=-1,
        stage=0,
        outer=-1,
        inner=-1,
        flops=0,
        nbytes=0,
    ):
        ids = (step, mb, chunk, layer, stage, outer, inner)
        self.lines.append(
            "\t".join(
                map(
                    str,
                    (
                        "event",
                        self.rank,
                        *ids,
                        kind,
                        repr(float(begin)),
                        repr(float(end)),
                        flops,
                        nbytes,
                    ),
                )
            )
        )

    def span(self, kind, seconds, **ids):
        """An event of this length, beginning now."""
        self.event(kind, self.clock, self.clock + seconds, **ids)
        self.clock += seconds

    def predicted(self, kind, begin, end, step=-1, mb=-1, chunk=-1, stage=0):
        self.lines.append(
            "\t".join(
                map(
                    str,
                    (
                        "predicted",
                        self.rank,
                        step,
                        mb,
                        chunk,
                        stage,
                        kind,
                        repr(float(begin)),
                        repr(float(end)),
                    ),
                )
            )
        )

    def budget(self, step, layer, head, budget, computed, visible, overflow=0, kind=-1):
        self.lines.append(
            "\t".join(
                map(
                    str,
                    (
                        *("budget", self.rank, step, layer, head),
                        *(budget, computed, visible, overflow, kind),
                    ),
                )
            )
        )

    def step(self, step, **values):
        self.lines.append(
            "\t".join(
                ["step", str(self.rank), str(step)] + [f"{k}={v!r}" for k, v in values.items()]
            )
        )

    def plan(self, kind, number, step, value):
        self.lines.append(f"plan\t{self.rank}\t{kind}\t{number}\t{step}\t{json.dumps(value)}")


def batch_plan(*rows, sample=lambda: 9):
    """The part of a step's plan that the report reads: (first rank, ranks, [segment tokens])."""
    return {
        "micro_batches": [
            {"first": first, "ranks": ranks, "segments": [[sample(), 0, n, n] for n in lengths]}
            for first, ranks, lengths in rows
        ]
    }


def write(run, ranks, kill=False, deck=DECK):
    """Writes RUN/trace with report_helper; `kill` ends it as kill -9 does, after a flush."""
    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    (run / "deck.toml").write_text(deck)
    lines = (
        [line for rank in ranks for line in rank.lines[:2]]
        + [line for rank in ranks for line in rank.lines[2:]]
        + (["kill"] if kill else [])
    )
    done = subprocess.run(
        [HELPER, "write", str(run / "trace")],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
    )
    if done.returncode != (-9 if kill else 0):
        raise RuntimeError(f"report_helper: status {done.returncode}: {done.stderr}")
    return run


def training_run(
    run, dp=2, cp=2, steps=12, layers=3, micro_batches=2, straggler=None, seed=0, kill=False
):
    """A run that looks like training: nested ops, layers, ring steps, waits until the slowest
    worker is done, reductions."""
    rng = random.Random(seed)
    ranks = [
        Rank(d * cp + c, dp * cp, {"dp": dp, "cp_inner": cp}, {"dp": d, "cp_inner": c})
        for d in range(dp)
        for c in range(cp)
    ]
    for step in range(steps):
        lengths = [
            [
                [
                    int(min(60000, 150 + rng.paretovariate(0.9) * 250))
                    for _ in range(rng.randint(1, 6))
                ]
                for _ in range(micro_batches)
            ]
            for _ in range(dp)
        ]
        plan = batch_plan(
            *((d, 1, lengths[d][m]) for d in range(dp) for m in range(micro_batches)),
            sample=lambda: rng.randrange(999),
        )
        begin = [r.clock for r in ranks]
        for r in ranks:
            r.plan("step", step + 1, step, plan)
            r.plan("ring", 7, step, {"rank": 0})
        for d in range(dp):
            workers = ranks[d * cp : (d + 1) * cp]
            for m in range(micro_batches):
                for r in workers:
                    r.span("data", 0.0005, step=step, mb=m)
                tokens, pairs = sum(lengths[d][m]), sum(n * n for n in lengths[d][m])
                for kind, layer_kind, attention_kind, factor in (
                    ("forward", "layer_forward", "attention_forward", 1.0),
                    ("backward", "layer_backward", "attention_backward", 2.4),
                ):
                    op_begin = [r.clock for r in workers]
                    for layer in range(layers):
                        layer_begin = [r.clock for r in workers]
                        for r in workers:
                            r.clock += factor * tokens * 6e-7 * rng.uniform(0.95, 1.05) / cp
                        for inner in range(cp):
                            compute = [
                                factor
                                * pairs
                                * 2.5e-11
                                * rng.uniform(0.9, 1.15)
                                * (1.6 if r.rank == straggler else 1)
                                / cp
                                / cp
                                for r in workers
                            ]
                            ready = max(r.clock + c for r, c in zip(workers, compute))
                            for r, c in zip(workers, compute):
                                r.span(
                                    attention_kind,
                                    c,
                                    step=step,
                                    mb=m,
                                    layer=layer,
                                    outer=0,
                                    inner=inner,
                                )
                                r.span(
                                    "ring_wait",
                                    ready - r.clock + 2e-5,
                                    step=step,
                                    mb=m,
                                    layer=layer,
                                    outer=0,
                                    inner=inner,
                                    nbytes=tokens * 256,
                                )
                        for r, at in zip(workers, layer_begin):
                            r.event(layer_kind, at, r.clock, step=step, mb=m, layer=layer)
                    for r in workers:
                        r.span("head", factor * tokens * 2e-7, step=step, mb=m)
                    for r, at in zip(workers, op_begin):
                        r.event(kind, at, r.clock, step=step, mb=m)
        together = max(r.clock for r in ranks) + 0.002
        for r, at in zip(ranks, begin):
            r.span("gradient_reduce", together - r.clock, step=step)
            r.span("optimizer", 0.0015, step=step)
            r.span("parameter_gather", 0.001, step=step)
            r.clock += 0.0004
            r.event("step", at, r.clock, step=step)
            if step % 5 == 4:
                r.span("checkpoint", 0.006, step=step)
            r.step(
                step,
                loss=5.5 - 2.4 * (1 - 0.93**step) + rng.uniform(-0.05, 0.05),
                step_time_s=r.clock - at,
                tokens=sum(sum(map(sum, x)) for x in lengths),
                mfu=0.42,
                peak_bytes_parameters=4.0e6,
                peak_bytes_gradients=4.0e6,
                peak_bytes_optimizer=1.2e7,
                peak_bytes_activations=6e6 + 400.0 * max(sum(x) for x in lengths[r.rank // cp]),
                peak_bytes_communication=3e6,
                peak_bytes_workspace=5e6,
                peak_bytes_total=3.4e7 + 300.0 * max(sum(x) for x in lengths[r.rank // cp]),
            )
            if step % 4 == 0:
                r.step(step, validation_loss=5.6 - 2.3 * (1 - 0.93**step))
    return write(run, ranks, kill=kill)


def known_run(folder):
    """Two context-parallel ranks, two steps of 10 s.  Rank 0 computes 4 s a step, rank 1 computes 8
    s."""
    mesh = {"cp_inner": 2}
    ranks = [Rank(r, 2, mesh, {"cp_inner": r}) for r in range(2)]
    ring = {0: [1.0, 1.0], 1: [2.0, 4.0]}  # computation of the two ring steps
    for step in range(2):
        for r in ranks:
            t0 = 100.0 + 10 * step
            r.event("step", t0, t0 + 10, step=step)
            r.event("forward", t0, t0 + 8, step=step, mb=0)
            at = t0
            for inner, compute in enumerate(ring[r.rank]):
                wall = [2.0, 4.0][inner]
                r.event(
                    "attention_forward",
                    at,
                    at + compute,
                    step=step,
                    mb=0,
                    layer=0,
                    outer=0,
                    inner=inner,
                )
                if compute < wall:
                    r.event(
                        "ring_wait",
                        at + compute,
                        at + wall,
                        step=step,
                        mb=0,
                        layer=0,
                        outer=0,
                        inner=inner,
                        nbytes=64,
                    )
                at += wall
            # 2 s of the forward op are left: useful on both ranks.
            if r.rank == 1:
                r.event("indexing", t0 + 7, t0 + 8, step=step, mb=0)
            r.event("gradient_reduce", t0 + 8, t0 + 9.5, step=step)
            r.plan("step", 5, step, batch_plan((0, 1, [2048, 1024])))
            r.step(
                step,
                loss=3.0 - step,
                tokens=3072,
                peak_bytes_activations=2**20 * (1 + r.rank),
                peak_bytes_total=2**21,
            )
    return write(folder, ranks)
