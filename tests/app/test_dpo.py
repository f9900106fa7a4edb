"""Direct preference optimization: loss and gradients against a model and an objective written in
numpy (fp64, on fresh random pairs), equal on every mesh and under every batching method; the
reference file, and what is refused."""
import itertools
import json
import math
import os
import struct
import unittest

import h5py
import numpy as np

from runs import RunCase

SEED = int(os.environ.get("BALLAST_TEST_SEED", "20261122"))
VOCABULARY, PAIRS = 61, 14

BASE = """[run]
steps = 1
seed = 3
[model]
layers = 2
hidden = 32
intermediate = 48
query_heads = 4
kv_heads = 2
head_dim = 8
vocabulary = 61
initial_std = 0.3
[data]
source = "distribution"
bin_tokens = [32]
bin_share = [1]
samples = 8
[batching]
micro_batch_tokens = 64
global_tokens = 64
[optimizer]
schedule = "constant"
learning_rate = {rate}
[checkpoint]
every_steps = 1
"""
DPO = """[run]
precision = "fp64"
steps = 1
[model]
weights = "{weights}"
[data]
source = "hdf5"
path = "{path}"
[batching]
micro_batch_tokens = 120
global_samples = {samples}
[loss]
kind = "dpo"
[dpo]
beta = 0.3
label_smoothing = 0.1
reference = "{reference}"
reference_free = {free}
[optimizer]
learning_rate = 0.003
clip_norm = 0.0
[checkpoint]
every_steps = 0
at_end = false
"""
# The model of BASE, without a file of weights.
FRESH = [
    "model.layers=2",
    "model.hidden=32",
    "model.intermediate=48",
    "model.query_heads=4",
    "model.kv_heads=2",
    "model.head_dim=8",
    f"model.vocabulary={VOCABULARY}",
]


def safetensors(path):
    """{name: fp64 array} of a file of F32 tensors."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = file.read()
    header.pop("__metadata__", None)
    return {
        name: (
            np.frombuffer(data[slice(*t["data_offsets"])], "<f4")
            .reshape(t["shape"])
            .astype(np.float64)
        )
        for name, t in header.items()
    }


class Policy:
    """A Qwen2 or Llama decoder in numpy."""

    def __init__(self, folder):
        self.weights = safetensors(os.path.join(folder, "model.safetensors"))
        with open(os.path.join(folder, "config.json")) as file:
            self.config = json.load(file)

    def norm(self, x, name):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[name]

    def heads(self, x, name, count):
        y = x @ self.weights[name + ".weight"].T + self.weights.get(name + ".bias", 0)
        return y.reshape(len(x), count, -1)

    def rotated(self, x):
        half = x.shape[-1] // 2
        theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(self, x, number):
        name = f"model.layers.{number}."
        queries = self.config["num_attention_heads"]
        keys = self.config["num_key_value_heads"]
        y = self.norm(x, name + "input_layernorm.weight")
        q = self.rotated(self.heads(y, name + "self_attn.q_proj", queries))
        k = self.rotated(self.heads(y, name + "self_attn.k_proj", keys))
        v = self.heads(y, name + "self_attn.v_proj", keys)
        k, v = (np.repeat(t, queries // keys, axis=1) for t in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", share, v).reshape(len(x), -1)
        x = x + mixed @ self.weights[name + "self_attn.o_proj.weight"].T
        y = self.norm(x, name + "post_attention_layernorm.weight")
        gate = y @ self.weights[name + "mlp.gate_proj.weight"].T
        up = y @ self.weights[name + "mlp.up_proj.weight"].T
        product = gate / (1 + np.exp(-gate)) * up
        return x + product @ self.weights[name + "mlp.down_proj.weight"].T

    def log_probability(self, tokens, mask):
        """Of the tokens whose mask is set, each after those before it, summed."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(x, number)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        logits = self.norm(x, "model.norm.weight") @ head.T
        top = logits.max(-1, keepdims=True)
        logits -= top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
        return sum(logits[i, tokens[i + 1]] for i in range(len(tokens) - 1) if mask[i + 1])


def sigmoid_loss(policy, reference, beta, smoothing):
    """(mean loss, accuracy) as TRL's loss_type = "sigmoid" defines them."""
    margins = [beta * ((p[0] - p[1]) - (r[0] - r[1])) for p, r in zip(policy, reference)]
    softplus = lambda x: np.logaddexp(0, x)
    losses = [softplus(-m) * (1 - smoothing) + softplus(m) * smoothing for m in margins]
    return np.mean(losses), np.mean([m > 0 for m in margins])


class Dpo(RunCase):
    def setUp(self):
        super().setUp()
        self.rng = np.random.default_rng(SEED)
        self.pairs_path = self.write_pairs("pairs.h5")
        self.base = self.model("base", 0.0)

    def write_pairs(self, name, marked=True):
        self.answers = []
        for _ in range(PAIRS):
            prompt = self.rng.integers(0, VOCABULARY, self.rng.integers(2, 20))
            for _ in range(2):
                answer = self.rng.integers(0, VOCABULARY, self.rng.integers(1, 26))
                tokens = np.concatenate([prompt, answer]).astype("<i4")
                mask = (np.arange(len(tokens)) >= len(prompt)).astype("u1")
                self.answers.append((tokens, mask))
        path = self.out(name)
        with h5py.File(path, "w") as file:
            file["tokens"] = np.concatenate([t for t, _ in self.answers])
            file["loss_mask"] = np.concatenate([m for _, m in self.answers])
            lengths = [len(t) for t, _ in self.answers]
            file["offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
            if marked:
                file.attrs["pairs"] = np.int64(1)
        return path

    def model(self, name, rate):
        """A Hugging Face folder with weights in F32; another rate gives other weights."""
        run, folder = self.out("run-" + name), self.out(name)
        self.run_ballast(1, "train", self.deck(name + ".toml", BASE, rate=rate), "-d", run)
        last = os.path.join(run, "checkpoints", "step_00000001.h5")
        self.run_ballast(1, "export", last, folder, "--dtype", "f32")
        return folder

    def dpo(self, reference="", samples=PAIRS, **more):
        values = {"weights": self.base, "path": self.pairs_path, **more}
        values["free"] = "false" if reference else "true"
        return self.deck("dpo.toml", DPO, reference=reference, samples=samples, **values)

    def train(self, name, deck, *settings, ranks=1, status=0):
        gradients = self.out(name + ".safetensors")
        done = self.run_ballast(
            ranks, "train", deck, "-d", self.out(name), f"run.dump_gradients={gradients}",
            *settings, status=status,
        )  # fmt: skip
        if status:
            return done.stdout + done.stderr
        with open(os.path.join(self.out(name), "steps.jsonl")) as file:
            rows = [json.loads(line) for line in file]
        return rows, safetensors(gradients)

    def log_probabilities(self, policy):
        found = [policy.log_probability(t, m) for t, m in self.answers]
        return list(zip(found[::2], found[1::2]))

    def test_loss_and_gradient_against_numpy(self):
        rows, gradients = self.train("one", self.dpo())
        policy = Policy(self.base)
        zeros = [(0, 0)] * PAIRS
        found = self.log_probabilities(policy)
        loss, accuracy = sigmoid_loss(found, zeros, 0.3, 0.1)
        self.assertAlmostEqual(rows[0]["loss"], loss, delta=1e-9 * loss)
        self.assertAlmostEqual(rows[0]["rewards_accuracy"], accuracy, delta=1e-12)
        chosen, rejected = np.mean(found, axis=0)
        self.assertAlmostEqual(rows[0]["logps_chosen"], chosen, delta=1e-8 * abs(chosen))
        self.assertAlmostEqual(rows[0]["logps_rejected"], rejected, delta=1e-8 * abs(rejected))
        self.assertAlmostEqual(rows[0]["rewards_rejected"], 0.3 * rejected, delta=1e-6)
        self.assertAlmostEqual(rows[0]["rewards_margin"], 0.3 * (chosen - rejected), delta=1e-6)
        # The derivative along random directions, by central differences.
        for _ in range(3):
            direction = {n: self.rng.standard_normal(w.shape) for n, w in policy.weights.items()}
            sides = []
            for h in (1e-5, -1e-5):
                moved = Policy(self.base)
                for name, step in direction.items():
                    moved.weights[name] = policy.weights[name] + h * step
                sides.append(sigmoid_loss(self.log_probabilities(moved), zeros, 0.3, 0.1)[0])
            slope = (sides[0] - sides[1]) / 2e-5
            dot = sum((gradients[n] * direction[n]).sum() for n in gradients)
            size = math.sqrt(sum((g * g).sum() for g in gradients.values()))
            self.assertAlmostEqual(dot, slope, delta=1e-5 * size)

    def test_every_mesh_and_method_gives_the_same(self):
        deck = self.dpo(samples=9)
        rows, expected = self.train("one", deck)
        cases = {
            "dp": (2, ["mesh.dp=2"]),
            "cp": (2, ["mesh.cp_inner=2"]),
            "sp": (2, ["mesh.sp=2"]),
            "pp": (4, ["mesh.pp=2", "mesh.dp=2", "optimizer.zero=2"]),
            "all": (8, ["mesh.cp_inner=2", "mesh.sp=2", "mesh.pp=2"]),
            "hbp": (2, ["mesh.dp=2", "batching.method=hbp", "batching.groups=[48,120]"]),
            "shared": (
                2, ["mesh.dp=2", "batching.method=hbp", "batching.groups=[48,120]",
                    "batching.group_ranks=[1,2]"],
            ),
            "balanced": (2, ["mesh.dp=2", "batching.method=balanced"]),
            "zero bubble": (
                2, ["mesh.pp=2", "pipeline.schedule=zero_bubble", "recompute.mode=full"],
            ),
        }  # fmt: skip
        for name, (ranks, settings) in cases.items():
            with self.subTest(name):
                found, gradients = self.train(name.replace(" ", "-"), deck, *settings, ranks=ranks)
                for key in ("loss", "rewards_margin", "rewards_accuracy", "logps_rejected"):
                    self.assertAlmostEqual(found[0][key], rows[0][key], delta=1e-9)
                for tensor, one in expected.items():
                    difference = np.linalg.norm(gradients[tensor] - one)
                    self.assertLess(difference, 1e-6 * np.linalg.norm(one), tensor)

    def test_the_reference_is_the_model_that_training_begins_with(self):
        reference = self.out("reference.h5")
        deck = self.dpo(reference=reference)
        self.run_ballast(4, "reference", deck, "mesh.dp=2", "mesh.cp_inner=2")
        policy = Policy(self.base)
        stored = self.log_probabilities(policy)
        with h5py.File(reference) as file:
            found = np.stack([file["chosen"][:], file["rejected"][:]], axis=1)
        np.testing.assert_allclose(found, stored, rtol=1e-9)
        for name, settings in (("whole", []), ("lora", ["lora.rank=4"])):
            rows, _ = self.train(name, deck, *settings, "run.steps=3")
            self.assertAlmostEqual(rows[0]["loss"], math.log(2), delta=1e-9)
            self.assertAlmostEqual(rows[0]["rewards_margin"], 0, delta=1e-9)
            self.assertLess(rows[2]["loss"], rows[0]["loss"])
        # A policy that has moved away, against both models in numpy.
        settings = ("checkpoint.at_end=true", "run.precision=fp32", "run.steps=3")
        self.train("moved", deck, *settings)
        last = os.path.join(self.out("moved"), "checkpoints", "step_00000003.h5")
        moved = self.out("moved-model")
        self.run_ballast(1, "export", last, moved, "--dtype", "f32")
        twin = self.out("eval.json")
        held = ("data.validation_share=0.3", "run.precision=fp32", "--json", twin)
        self.run_ballast(
            2, "eval", deck, "-d", self.out("moved"), "-r", "latest", *held, "mesh.dp=2"
        )
        with open(twin) as file:
            found = json.load(file)
        found_all = self.log_probabilities(Policy(moved))
        losses = [sigmoid_loss([p], [r], 0.3, 0.1)[0] for p, r in zip(found_all, stored)]
        # Which pairs are held out is the sampler's business: some mean of as many of these losses.
        count = found["samples"]
        self.assertGreater(count, 0)
        means = [np.mean(c) for c in itertools.combinations(losses, count)]
        self.assertLess(min(abs(m - found["validation_loss"]) for m in means), 1e-5)
        self.assertGreaterEqual(found["validation_loss"], min(losses) - 1e-5)

    def test_a_reference_file_without_a_place_is_refused_before_it_is_computed(self):
        deck = self.dpo(reference=os.path.join(self.out("absent"), "reference.h5"))
        done = self.run_ballast(1, "reference", deck, status=1)
        self.assertIn("cannot be written: No such file or directory", done.stderr)

    def test_a_reference_keeps_a_deck_of_any_length(self):
        deck = self.dpo(reference=self.out("reference.h5"))
        prompts = 'eval.generate_prompts=["' + "x" * 80000 + '"]'
        self.run_ballast(1, "reference", deck, prompts)
        rows, _ = self.train("long", deck, "run.steps=1")
        self.assertAlmostEqual(rows[0]["loss"], math.log(2), delta=1e-9)

    def test_another_reference_is_refused(self):
        reference = self.out("reference.h5")
        deck = self.dpo(reference=reference)
        self.assertIn("ballast reference", self.train("none-yet", deck, status=1))
        done = self.run_ballast(1, "check", deck, "data.path=nowhere.h5", status=1)
        self.assertIn("ballast reference", done.stderr)  # beside what else is wrong
        self.run_ballast(1, "reference", deck)
        other = self.model("other", 0.05)
        deck = self.dpo(reference=reference, weights=other)
        self.assertIn("another model", self.train("weights", deck, status=1))
        deck = self.dpo(reference=reference)
        self.run_ballast(1, "check", deck)

        def refused(words, *settings):
            for command in (["check", deck], ["train", deck, "-d", self.out("refused")]):
                done = self.run_ballast(1, *command, *settings, status=1)
                self.assertIn(words, done.stdout + done.stderr)

        refused("another model", "model.rope_theta=100.5")  # the same weights
        moba = ["attention.pattern=moba", "attention.moba_block=64", "attention.moba_top_k=1"]
        moba.append("batching.micro_batch_tokens=192")  # padded to blocks
        for command in (["check", deck], ["train", deck, "-d", self.out("moba")]):
            done = self.run_ballast(1, *command, *moba)
            self.assertIn("the first loss is not ln 2", done.stdout + done.stderr)
        with h5py.File(reference, "r+") as file:
            file["chosen"][0] = -5.0
        refused("is damaged")
        self.run_ballast(1, "reference", deck)
        # A run goes on against the reference that it began with.
        begun = self.out("begun")
        self.run_ballast(1, "train", deck, "-d", begun, "checkpoint.at_end=true")
        elsewhere = self.dpo(reference=self.out("elsewhere.h5"), weights=other)
        self.run_ballast(1, "reference", elsewhere)
        goes_on = ["-d", begun, "-r", "latest", "run.steps=2"]
        done = self.run_ballast(1, "train", elsewhere, *goes_on, status=1)
        self.assertIn("trained against another reference", done.stdout + done.stderr)
        without = [self.dpo(free="true"), *goes_on, "checkpoint.at_end=true"]
        self.run_ballast(1, "train", *without)  # for a step: the model still came from there
        elsewhere = self.dpo(reference=self.out("elsewhere.h5"), weights=other)
        done = self.run_ballast(1, "train", elsewhere, *goes_on[:4], "run.steps=3", status=1)
        self.assertIn("trained against another reference", done.stdout + done.stderr)
        deck = self.dpo(reference=reference)
        self.run_ballast(1, "train", deck, *goes_on[:4], "run.steps=3")
        with h5py.File(self.pairs_path, "r+") as file:
            file["loss_mask"][:] = 1
        refused("other data")

    def test_a_tie_is_no_preference(self):
        deck = self.dpo(reference=self.out("reference.h5"))
        # Each pair's products are those of the reference, to the bit.
        alone = "batching.method=none"
        self.run_ballast(1, "reference", deck, alone)
        rows, _ = self.train("ties", deck, alone)
        self.assertEqual((rows[0]["rewards_margin"], rows[0]["rewards_accuracy"]), (0, 0))

    def test_a_twin_does_not_replace_the_reference(self):
        file = self.out("reference.h5")
        done = self.run_ballast(1, "reference", self.dpo(reference=file), "--json", file, status=1)
        self.assertIn("this is dpo.reference", done.stderr)
        self.assertFalse(os.path.exists(file))

    def test_a_reference_of_other_first_weights_is_refused(self):
        deck = self.dpo(reference=self.out("reference.h5"), weights="")
        self.run_ballast(1, "reference", deck, *FRESH)
        rows, _ = self.train("same", deck, *FRESH)
        self.assertAlmostEqual(rows[0]["loss"], math.log(2), delta=1e-9)
        timed = self.out("timed.json")
        step = ["bench", "step", deck, *FRESH, "warmup=0", "repeats=1", "--json", timed]
        self.run_ballast(1, *step)
        with open(timed) as file:
            self.assertAlmostEqual(json.load(file)["loss"], math.log(2), delta=1e-9)
        for command in (["check", deck], ["train", deck, "-d", self.out("seed")]):
            done = self.run_ballast(1, *command, *FRESH, "run.seed=12", status=1)
            self.assertIn("another model", done.stdout + done.stderr)

    def test_a_reference_replaces_no_other_file(self):
        weights = os.path.join(self.base, "model.safetensors")
        for file in (self.pairs_path, weights, os.path.join(self.base, "config.json")):
            with open(file, "rb") as before:
                kept = before.read()
            done = self.run_ballast(2, "reference", self.dpo(reference=file), status=1)
            self.assertIn("would be replaced", done.stderr)
            with open(file, "rb") as after:
                self.assertEqual(after.read(), kept)
        config = os.path.join(self.base, "config.json")
        with open(config) as before:
            kept = before.read()
        done = self.run_ballast(1, "check", self.dpo(), "--json", config, status=1)
        self.assertIn("beside a model's config.json", done.stderr)
        with open(config) as after:
            self.assertEqual(after.read(), kept)
        dumped = f"run.dump_gradients={weights}"
        done = self.run_ballast(1, "train", self.dpo(), "-d", self.out("dumped"), dumped, status=1)
        self.assertIn("lies in the folder of model.weights", done.stdout + done.stderr)

    def test_pairs_that_padding_makes_too_long_are_refused_by_check_too(self):
        lengths = ["data.source=lengths", "data.lengths=[9,9,100,94]", "batching.method=balanced"]
        fits = [*lengths, "batching.micro_batch_tokens=200", "batching.global_samples=1"]
        padded = [*fits, "attention.pattern=moba", "attention.moba_block=64", "run.steps=1"]
        deck = self.dpo()
        self.run_ballast(1, "check", deck, *fits)
        # The longest pair fits where another one, with more padding, does not.
        widest = "data.lengths=[9,9,128,64,65,65]"
        for more in ([], [widest]):
            for command in (["check", deck], ["train", deck, "-d", self.out("padded")]):
                done = self.run_ballast(1, *command, *padded, *more, status=1)
                self.assertIn("padding to a sparse pattern's blocks", done.stdout + done.stderr)
        self.assertFalse(os.path.exists(self.out("padded")), "a refused start has no folder")

    def test_a_checkpoint_of_another_objective_is_not_the_reference(self):
        deck, tuned = self.dpo(reference=self.out("reference.h5")), self.out("tuned")
        self.run_ballast(1, "reference", deck)
        other = ["loss.kind=cross_entropy", "data.source=lengths", "data.lengths=[40,50,60,70]"]
        other.append("checkpoint.at_end=true")
        self.run_ballast(1, "train", deck, "-d", tuned, *other, "run.steps=1")
        begin = [
            "train",
            deck,
            "-d",
            self.out("again"),
            "-r",
            f"{tuned}/checkpoints/step_00000001.h5",
        ]
        done = self.run_ballast(1, *begin, "run.steps=2", status=1)
        self.assertIn("not the one that dpo.reference was computed with", done.stdout + done.stderr)
        self.run_ballast(1, *begin, "run.steps=2", "--force-model")

    def test_what_is_no_pair_is_refused(self):
        unmarked = self.write_pairs("plain.h5", marked=False)
        self.assertIn("holds no pairs", self.train("a", self.dpo(path=unmarked), status=1))
        deck = self.dpo()
        self.assertIn(
            "holds pairs",
            self.train("b", deck, "loss.kind=cross_entropy", status=1),
        )
        refused = {
            "batching.method=chunkflow": "both answers of a pair in one micro-batch",
            "data.min_tokens=2": "data.min_tokens",
            "dpo.reference_free=false": "dpo.reference",
        }
        for setting, text in refused.items():
            done = self.run_ballast(1, "check", deck, setting, status=1)
            self.assertIn(text, done.stdout + done.stderr)
        done = self.run_ballast(1, "check", deck, "data.max_tokens=20", "data.long=split", status=1)
        self.assertIn("would part the pairs", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
