"""Decks drawn anew by BALLAST_TEST_SEED over the whole table of combinations, model shapes and
lengths: every run on GPUs follows the same deck, ranks included, on the host in fp32.  Where there
are fewer GPUs than ranks, ranks share them.  Skips, with the reason, where no GPU answers;
BALLAST_TEST_BACKEND=host tries the decks without one."""
import json
import os
import random
import unittest
from concurrent.futures import ThreadPoolExecutor

from cuda_case import BACKEND, GPUS, WORKERS
from runs import RunCase
from test_combinations import BASE, SEED, Design, table
from test_memory import TABLE_KEYS

DECKS = int(os.environ.get("BALLAST_TEST_DECKS", 24))
FIRST, LATER, NORM = 5e-3, 2e-2, 6e-2  # relative: loss of the first step, of others; gradient norm
RULES = [
    {"pattern": "a_shape", "sink": 64, "window": 64},
    {"pattern": "vertical_slash", "columns": 8, "slashes": 1},
    {"pattern": "block_sparse", "blocks": 1},
    {"pattern": "dense"},
]
DECK = """[run]
seed = {seed}
steps = 4
hang_timeout_s = 60
[model]
layers = {layers}
hidden = {hidden}
intermediate = {intermediate}
query_heads = {query_heads}
kv_heads = {kv_heads}
head_dim = {head_dim}
vocabulary = {vocabulary}
qkv_bias = {bias}
qk_norm = {qk_norm}
tied_embedding = {tied}
head_chunk_tokens = {head_chunk}
[data]
source = "lengths"
lengths = {lengths}
max_tokens = {longest}
validation_share = 0
[batching]
global_tokens = {tokens}
micro_batch_tokens = {longest}
[checkpoint]
every_steps = 0
at_end = false
[optimizer]
learning_rate = 1e-3
clip_norm = 1.0
"""


def shape_of(rng, row):
    """A model and samples of very unequal lengths that fit the row's choices."""
    kv = rng.choice([1, 2, 2, 4])
    heads = kv * rng.choice([1, 2, 4, 7 if kv == 1 else 3])
    if row["sp"] == "sp 2" and heads % 2:
        heads *= 2
    packed = row["method"].startswith("method hbp") or row["loss"] == "loss dpo"
    longest = 250 if packed else rng.choice([512, 1024, 2048])
    bias, qk_norm = rng.choice([("true", "false"), ("false", "true"), ("false", "false")])
    lengths = [rng.randrange(2, longest + 1 if rng.random() < 0.6 else 90) for _ in range(40)]
    return {
        "seed": rng.randrange(1, 1000),
        "layers": rng.choice([2, 3, 4]),
        "hidden": rng.choice([128, 192, 256, 320]),
        "intermediate": rng.choice([256, 352, 512]),
        "query_heads": heads,
        "kv_heads": kv,
        "head_dim": rng.choice([64, 64, 96, 128, 128, 256]),
        "vocabulary": rng.choice([256, 500, 1111, 2048]),
        "bias": bias,
        "qk_norm": qk_norm,
        "tied": rng.choice(["true", "false"]),
        "head_chunk": rng.choice([100, 128, 512, 1024]),
        "lengths": lengths,
        "longest": longest,
        "tokens": longest * rng.choice([1, 2, 3]) * (2 if row["dp"] == "dp 2" else 1),
    }


def keys_of(rng, row, design):
    """Settings of the row and, beside them, what other choices than the usual ones are read by."""
    chunk = rng.choice([128, 256, 384])
    keys = [key for key in BASE if key.split("=")[0] in TABLE_KEYS]
    keys += [
        f"ring.stripe={rng.choice([128, 256])}",
        f"chunk.tokens={chunk}",
        f"chunk.window_tokens={chunk}",
        f"attention.moba_block={rng.choice([64, 128])}",
        f"optimizer.bucket_bytes={rng.choice([1 << 16, 1 << 20, 1 << 27])}",
        *design.overrides(row),
    ]
    if rng.random() < 0.3:
        keys.append(f"recompute.layers={rng.choice([1, 2])}")
    if row["optimizer"] == "optimizer adamw" and rng.random() < 0.3:
        keys.append("optimizer.moments=bf16")
    if row["optimizer"] == "optimizer adamw" and rng.random() < 0.3:
        keys.append("optimizer.gradients=bf16")
    return keys


@unittest.skipIf(GPUS == 0 and BACKEND == "cuda", "no GPU answers here (nvidia-smi lists none)")
class CudaDecks(RunCase):
    def run_of(self, name, deck, ranks, keys):
        """(what went wrong, rows with a loss)"""
        run = self.out(name)
        done = self.run_ballast(ranks, "train", deck, *keys, "-d", run, status=None, timeout=240)
        if done.returncode != 0:
            said = [l for l in done.stderr.splitlines() if l.startswith("ballast:")]
            return "\n".join(said) or f"status {done.returncode}", []
        return "", [row for row in self.steps(run) if "loss" in row]

    def differences(self, number, row, design):
        rng = random.Random(SEED * 1000 + number)
        shape, keys = shape_of(rng, row), keys_of(rng, row, design)
        heads = self.out(f"heads-{number}.json")
        with open(heads, "w") as file:
            rules = [
                [rng.choice(RULES) for _ in range(shape["query_heads"])]
                for _ in range(shape["layers"])
            ]
            json.dump(
                {"layers": shape["layers"], "heads": shape["query_heads"], "rules": rules}, file
            )
        deck, ranks = self.out(f"deck-{number}.toml"), design.ranks(row)
        with open(deck, "w") as file:
            file.write(DECK.format(**shape))
        keys += [f"attention.heads={heads}", "trace.enabled=false"]
        wrong, found = self.run_of(f"gpu-{number}", deck, ranks, keys)
        host = ["run.backend=host", "run.precision=fp32"]
        refused, expected = self.run_of(f"host-{number}", deck, ranks, keys + host)
        self.ran += not refused
        if wrong or refused:
            # A deck may have too few samples for its ranks; then neither runs, for one reason.
            return (
                [] if wrong == refused else [f"GPU: {wrong or 'runs'}\nhost: {refused or 'runs'}"]
            )
        if not found or len(found) != len(expected):
            return [f"{len(found)} steps on the GPU, {len(expected)} on the host"]
        return [
            f"step {mine['step']}: {key} {mine[key]}, on the host {theirs[key]}"
            for step, (mine, theirs) in enumerate(zip(found, expected))
            for key, bound in (("loss", LATER if step else FIRST), ("grad_norm", NORM))
            if not abs(float(mine[key]) - float(theirs[key])) <= bound * float(theirs[key]) + 1e-3
        ]

    def test_random_decks_follow_the_host(self):
        self.ran = 0
        rng = random.Random(SEED)
        others = ("precision fp32", "backend host") if BACKEND == "cuda" else ("backend cuda",)
        design = Design(table(), rng, ("index recorded", "precision fp64", *others))
        # Margins of pairs hang on few logits: in FP8 they are further off than these bounds.
        design.refused.append({"precision fp8", "loss dpo"})
        rows = [design.drawn({}, rng.choice([1, 1, 2, 2, 4])) for _ in range(DECKS)]
        with ThreadPoolExecutor(WORKERS) as pool:
            found = list(pool.map(lambda n: self.differences(n, rows[n], design), range(len(rows))))
        print(f"{self.ran} of {DECKS} decks ran, seed {SEED}")
        self.assertGreater(self.ran, DECKS // 2)
        wrong = [
            f"{number}: {' | '.join(sorted(rows[number].values()))}\n" + "\n".join(lines)
            for number, lines in enumerate(found)
            if lines
        ]
        self.assertFalse(wrong, f"{len(wrong)} of {DECKS}, seed {SEED}:\n" + "\n\n".join(wrong))


if __name__ == "__main__":
    unittest.main()
