"""Whole-program tests of adapters: every mesh, restarts, export merged and as PEFT, what is
refused."""
import json
import os
import shutil
import unittest

import h5py
import numpy

from runs import RunCase
from test_huggingface import REFERENCE, numbers, tensors

DECK = """[run]
steps = {steps}
seed = 3
precision = "fp64"
[mesh]
dp = {dp}
cp_inner = {cp_inner}
[model]
weights = "{weights}"
[data]
source = "hdf5"
path = "{tokens}"
validation_share = 0.3
[batching]
micro_batch_tokens = 128
global_samples = 3
[lora]
rank = 4
alpha = 8
dropout = {dropout}
projections = {projections}
[optimizer]
learning_rate = 0.02
"""
ALL = '["q", "k", "v", "o", "gate", "up", "down"]'


class Lora(RunCase):
    def setUp(self):
        super().setUp()
        rng = numpy.random.default_rng(7)
        lengths = rng.integers(20, 90, 12)
        self.tokens = self.out("tokens.h5")
        with h5py.File(self.tokens, "w") as f:
            f["tokens"] = rng.integers(0, 96, lengths.sum()).astype("i4")
            f["offsets"] = numpy.cumsum([0, *lengths]).astype("i8")
        self.base = os.path.join(REFERENCE, "qwen2")

    def lora(self, name="deck.toml", **values):
        settings = {
            "dp": 1,
            "cp_inner": 1,
            "steps": 4,
            "weights": self.base,
            "tokens": self.tokens,
            "dropout": 0.2,
            "projections": ALL,
        }
        settings.update(values)
        return self.deck(name, DECK, **settings)

    def checkpoint(self, run, step=4):
        return os.path.join(run, "checkpoints", f"step_{step:08}.h5")

    def test_losses_are_the_same_on_every_mesh(self):
        reference = None
        for ranks, dp, cp, zero in ((1, 1, 1, 1), (2, 2, 1, 2), (2, 1, 2, 0), (4, 2, 2, 1)):
            run = self.out(f"run-{ranks}-{dp}-{zero}")
            self.run_ballast(
                ranks, "train", self.lora(dp=dp, cp_inner=cp), "-d", run, f"optimizer.zero={zero}"
            )
            losses = [float(v) for v in self.losses(run).values()]
            self.assertEqual(len(losses), 4)
            reference = reference or losses
            for a, b in zip(reference, losses):
                self.assertAlmostEqual(a, b, delta=2e-6, msg=f"dp {dp} cp {cp} ZeRO {zero}")
        run = self.out("stages")
        self.run_ballast(
            2, "train", self.lora(), "-d", run, "mesh.pp=2", "pipeline.schedule=zero_bubble"
        )
        for a, b in zip(reference, self.losses(run).values()):
            self.assertAlmostEqual(a, float(b), delta=2e-6, msg="two stages")
        self.run_ballast(
            1, "train", self.lora(), "-d", run, "-r", "latest", "run.steps=5"
        )  # the base's fingerprint does not depend on the mesh
        other = ["-r", "latest", "run.steps=6", "lora.alpha=3"]
        refused = self.run_ballast(1, "train", self.lora(), "-d", run, *other, status=1)
        self.assertIn("lora.alpha", refused.stdout + refused.stderr)
        with_dropout = reference[3]
        self.run_ballast(1, "train", self.lora(dropout=0), "-d", self.out("plain"))
        self.assertNotAlmostEqual(
            float(self.losses(self.out("plain"))[4]), with_dropout, delta=1e-4
        )

    def test_restart_is_bit_identical_and_holds_adapters_alone(self):
        whole, parts = self.out("whole"), self.out("parts")
        self.run_ballast(2, "train", self.lora(dp=2), "-d", whole, "run.precision=fp32")
        self.run_ballast(
            2,
            "train",
            self.lora(dp=2),
            "-d",
            parts,
            "run.precision=fp32",
            "run.steps=2",
            "optimizer.decay_steps=4",
        )
        self.run_ballast(
            2, "train", self.lora(dp=2), "-d", parts, "run.precision=fp32", "-r", "latest"
        )
        self.assertEqual(self.losses(whole), self.losses(parts))
        found = self.tensors(self.checkpoint(whole))
        self.assertEqual(found, self.tensors(self.checkpoint(parts)))
        self.assertTrue(all(".lora_" in name for name in found))
        with h5py.File(os.path.join(whole, "trace", "trace_00000.h5"), "r") as f:
            steps = f["steps"][()]
        parameters = steps["peak_bytes_parameters"][0] / 4
        adapters = 4 * sum(a + b for a, b in self.extents())
        self.assertLess(steps["peak_bytes_gradients"][0] / 4, adapters + 8)  # none for the frozen
        self.assertGreater(parameters, 2 * adapters)

    def extents(self):
        """(in, out) of every matrix with an adapter."""
        return [
            tuple(t[1]) for name, t in tensors(self.base).items() if name.endswith("_proj.weight")
        ]

    def evaluate(self, deck, *more):
        twin = self.out("eval.json")
        self.run_ballast(1, "eval", deck, "--json", twin, *more)
        with open(twin) as f:
            return json.load(f)["validation_loss"]

    def test_export_merges_and_writes_peft(self):
        run, merged, peft = self.out("run"), self.out("merged"), self.out("peft")
        deck = self.lora(cp_inner=2)
        self.run_ballast(2, "train", deck, "-d", run)
        self.run_ballast(1, "export", self.checkpoint(run), merged, "--dtype", "f32")
        self.run_ballast(1, "export", self.checkpoint(run), peft, "--adapter", "--dtype", "f32")
        with open(os.path.join(peft, "adapter_config.json")) as f:
            config = json.load(f)
        self.assertEqual(
            (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]),
            ("LORA", 4, 8, "none"),
        )
        self.assertEqual(
            sorted(config["target_modules"]),
            sorted(p + "_proj" for p in ("q", "k", "v", "o", "gate", "up", "down")),
        )
        adapters, base, found = (
            tensors(os.path.join(peft, "adapter_model.safetensors")),
            tensors(self.base),
            tensors(merged),
        )
        self.assertEqual(sorted(found), sorted(base))
        self.assertEqual(len(adapters), 2 * len(self.extents()))
        for name, tensor in found.items():
            expected, module = numbers(base[name]), "base_model.model." + name[: -len(".weight")]
            if module + ".lora_A.weight" in adapters:
                a, b = (
                    numbers(adapters[f"{module}.lora_{which}.weight"]).reshape(
                        adapters[f"{module}.lora_{which}.weight"][1]
                    )
                    for which in "AB"
                )
                self.assertGreater(numpy.abs(b).max(), 1e-3)
                expected = expected + (8 / 4 * b @ a).ravel()
            self.assertLess(numpy.abs(numbers(tensor) - expected).max(), 1e-6, name)
        self.assertAlmostEqual(
            self.evaluate(self.plain(merged)),
            self.evaluate(self.lora(), "-r", self.checkpoint(run)),
            delta=2e-5,
        )
        self.assertGreater(
            abs(self.evaluate(self.plain(self.base)) - self.evaluate(self.plain(merged))), 1e-3
        )

    def plain(self, weights):
        text = DECK[: DECK.index("[lora]")] + DECK[DECK.index("[optimizer]") :]
        return self.deck(
            "plain.toml", text, dp=1, cp_inner=1, steps=1, weights=weights, tokens=self.tokens
        )

    def test_adapters_beside_initial_weights(self):
        # Without a folder the frozen weights are the initial ones of the seed; they merge all the
        # same.
        text = DECK.replace(
            'weights = "{weights}"',
            (
                "layers = 2\nhidden = 16\nintermediate = 24\nquery_heads = 2\nkv_heads ="
                " 1\nhead_dim = 8\nvocabulary = 96"
            ),
        )
        deck, run, merged = (
            self.deck(
                "own.toml",
                text,
                dp=1,
                cp_inner=1,
                steps=4,
                tokens=self.tokens,
                dropout=0,
                projections='["q", "v"]',
            ),
            self.out("run"),
            self.out("merged"),
        )
        self.run_ballast(1, "train", deck, "-d", run)
        self.run_ballast(1, "export", self.checkpoint(run), merged, "--dtype", "f32")
        self.assertAlmostEqual(
            self.evaluate(self.plain(merged)),
            self.evaluate(deck, "-r", self.checkpoint(run)),
            delta=2e-5,
        )
        other = ("-d", run, "-r", "latest", "run.steps=6", "model.initial_std=0.3")
        done = self.run_ballast(1, "train", deck, *other, status=1)
        self.assertIn("model.initial_std", done.stdout + done.stderr)
        # Another seed is another base, also for what asks of no sample's order.
        leak = ["bench", "leak", deck, f"checkpoint={self.checkpoint(run)}"]
        leak += ["attention.pattern=vertical_slash", "attention.last_q=16"]
        leak += ["attention.vertical_share=0.5", "attention.slash_share=0.3"]
        self.run_ballast(1, *leak)
        done = self.run_ballast(1, *leak, "run.seed=4", status=1)
        self.assertIn("run.seed = 3, the deck has 4", done.stdout + done.stderr)

    def test_what_does_not_fit_is_refused(self):
        run, folder = self.out("run"), self.out("copy")
        shutil.copytree(self.base, folder)
        self.run_ballast(1, "train", self.lora(weights=folder, steps=1), "-d", run)
        file = os.path.join(folder, "model.safetensors")
        with open(file, "r+b") as f:
            f.seek(-2, os.SEEK_END)
            f.write(b"\x12\x3f")
        done = self.run_ballast(
            1, "train", self.lora(weights=folder), "-d", run, "-r", "latest", status=1
        )
        self.assertIn("other weights", done.stderr)
        done = self.run_ballast(1, "export", self.checkpoint(run, 1), self.out("mix"), status=1)
        self.assertIn("other weights", done.stderr)
        self.assertFalse(os.path.exists(self.out("mix")))
        shutil.rmtree(folder)
        done = self.run_ballast(
            1, "train", os.path.join(run, "deck.toml"), "-d", run, "-r", "latest", status=1
        )
        self.assertIn("adapters need the weights", done.stderr)
        done = self.run_ballast(1, "export", self.checkpoint(run, 1), self.out("none"), status=1)
        self.assertIn("no such folder", done.stderr)
        full = self.out("full")
        self.run_ballast(1, "train", self.plain(self.base), "-d", full)
        done = self.run_ballast(1, "train", self.lora(), "-d", full, "-r", "latest", status=1)
        self.assertIn("lora_", done.stderr)
        done = self.run_ballast(
            1, "export", self.checkpoint(full, 1), self.out("none"), "--adapter", status=1
        )
        self.assertIn("holds no adapters", done.stderr)
        done = self.run_ballast(
            1, "train", self.lora(projections='["q", "query"]'), "-d", self.out("bad"), status=1
        )
        self.assertIn('"query" is not a known value', done.stderr)


if __name__ == "__main__":
    unittest.main()
