"""Muon through the program: ten steps against numpy in fp64, any number of ranks alike, restarts
bit for bit, one moment in checkpoints, the memory of `check`, and what is refused."""
import json
import os
import unittest

import h5py
import numpy as np

from runs import RunCase

RATE, DECAY, MOMENTUM = 0.01, 0.1, 0.95
SETTINGS = [
    "optimizer.kind=muon",
    "run.precision=fp64",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "optimizer.clip_norm=0",
    f"optimizer.learning_rate={RATE}",
    f"optimizer.weight_decay={DECAY}",
    "checkpoint.keep=20",
]
MATRIX = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight",
          "up_proj.weight", "down_proj.weight")  # fmt: skip


def newton_schulz(gradient, steps=5):
    x = gradient.T if gradient.shape[0] > gradient.shape[1] else gradient
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if gradient.shape[0] > gradient.shape[1] else x


class Muon(RunCase):
    def train(self, name, *settings, ranks=1, **values):
        run = self.out(name)
        mesh = {"dp": ranks, **{k: values.pop(k) for k in ("cp_inner", "sp") if k in values}}
        if "cp_inner" in mesh or "sp" in mesh:
            mesh["dp"] = ranks // (mesh.get("cp_inner", 1) * mesh.get("sp", 1))
        deck = self.deck(name + ".toml", every=1, **mesh, **values)
        self.run_ballast(ranks, "train", deck, "-d", run, *SETTINGS, *settings)
        return run

    def state(self, run, step):
        """{parameter: {field: array}} of a checkpoint."""
        path = os.path.join(run, "checkpoints", f"step_{step:08}.h5")
        with h5py.File(path) as file:
            return {
                name: {field: data[()] for field, data in group.items()}
                for name, group in file["parameters"].items()
            }

    def expect_steps_of_numpy(self, run, steps, nesterov=True, products=5, rms=0.2):
        before = self.state(run, 1)
        for step in range(2, steps + 1):
            now = self.state(run, step)
            for name, fields in now.items():
                old = before[name]
                if not name.endswith(MATRIX):
                    self.assertIn("moment2", fields, name)
                    continue
                self.assertNotIn("moment2", fields, name)
                # What the moment took up is the gradient.
                gradient = fields["moment1"] - MOMENTUM * old["moment1"]
                ahead = gradient + MOMENTUM * fields["moment1"] if nesterov else fields["moment1"]
                direction = newton_schulz(ahead, products)
                scale = RATE * rms * np.sqrt(max(direction.shape))
                expected = (1 - RATE * DECAY) * old["master"] - scale * direction
                error = np.linalg.norm(fields["master"] - expected)
                moved = np.linalg.norm(fields["master"] - old["master"])
                self.assertLess(error, 1e-9 * moved, f"{name}, step {step}")
            before = now

    def test_ten_steps_are_those_of_numpy(self):
        self.expect_steps_of_numpy(self.train("ten", steps=10), 10)

    def test_keys_of_the_direction_are_read(self):
        keys = ["optimizer.newton_schulz_steps=3", "optimizer.nesterov=false"]
        keys.append("optimizer.update_rms=0.1")
        run = self.train("keys", *keys, steps=3)
        self.expect_steps_of_numpy(run, 3, nesterov=False, products=3, rms=0.1)

    def test_the_gradient_is_what_the_moment_takes_up(self):
        """Starts of one step each, so that each dumps its gradient (fp32)."""
        from test_dpo import safetensors

        run, deck = self.out("dumped"), self.deck("dumped.toml", every=1, dp=1)
        moments = {}
        for step in range(1, 4):
            dump = self.out(f"gradient{step}.safetensors")
            self.run_ballast(
                1, "train", deck, "-d", run, *SETTINGS, f"run.steps={step}",
                f"run.dump_gradients={dump}", *(["-r", "latest"] if step > 1 else []),
            )  # fmt: skip
            state = self.state(run, step)
            for name, gradient in safetensors(dump).items():
                if not name.endswith(MATRIX):
                    continue
                moments[name] = MOMENTUM * moments.get(name, 0) + gradient
                error = np.linalg.norm(state[name]["moment1"] - moments[name])
                self.assertLess(error, 1e-6 * np.linalg.norm(moments[name]), name)

    def test_ranks_and_meshes_train_alike(self):
        meshes = [(2, {}), (4, {}), (4, {"cp_inner": 2, "sp": 2}), (8, {"cp_inner": 2})]
        alone = self.state(self.train("alone", "checkpoint.keep=2", steps=4), 4)
        for number, (ranks, mesh) in enumerate(meshes):
            run = self.train(f"mesh{number}", steps=4, ranks=ranks, **mesh)
            state = self.state(run, 4)
            for name, fields in alone.items():
                for field, expected in fields.items():
                    error = np.linalg.norm(state[name][field] - expected)
                    self.assertLess(
                        error, 1e-8 * (1e-12 + np.linalg.norm(expected)), f"{mesh} {name} {field}"
                    )
        zero0 = self.state(self.train("zero0", "optimizer.zero=0", steps=4, ranks=2), 4)
        zero1 = self.state(self.out("mesh0"), 4)
        for name, fields in zero0.items():
            for field, expected in fields.items():
                self.assertTrue(np.array_equal(zero1[name][field], expected), f"{name} {field}")

    def test_pipeline_stages_and_adapters(self):
        alone = self.train("flat", steps=3)
        pipe = self.out("pipe")
        self.run_ballast(
            2, "train", self.deck("pipe.toml", every=1, dp=1, steps=3), "-d", pipe, *SETTINGS,
            "mesh.pp=2", "model.tied_embedding=false",
        )  # fmt: skip
        for name, fields in self.state(alone, 3).items():
            for field, expected in fields.items():
                error = np.linalg.norm(self.state(pipe, 3)[name][field] - expected)
                self.assertLess(error, 1e-8 * (1e-12 + np.linalg.norm(expected)), name)
        adapters = self.state(self.train("lora", "lora.rank=4", steps=3, ranks=2), 3)
        self.assertTrue(all("moment2" not in fields for fields in adapters.values()))

    def test_a_restart_is_the_same_run(self):
        whole = self.train("whole", steps=4, ranks=2)
        part = self.train("part", steps=2, ranks=2)
        deck = self.deck("part.toml", every=1, dp=2, steps=4)
        self.run_ballast(2, "train", deck, "-d", part, *SETTINGS, "-r", "latest")
        self.assertEqual(self.losses(whole), self.losses(part))
        a, b = self.state(whole, 4), self.state(part, 4)
        for name, fields in a.items():
            for field, expected in fields.items():
                self.assertTrue(np.array_equal(b[name][field], expected), f"{name} {field}")
        # On other ranks it goes on as well, and evaluation and export read it.
        deck = self.deck("four.toml", every=1, dp=4, steps=5)
        self.run_ballast(4, "train", deck, "-d", part, *SETTINGS, "-r", "latest")
        self.run_ballast(2, "eval", self.deck("e.toml"), "-d", part, *SETTINGS, "-r", "latest")
        last = os.path.join(part, "checkpoints", "step_00000005.h5")
        self.run_ballast(1, "export", last, self.out("exported"))

    def test_another_optimizer_does_not_continue(self):
        run = self.train("muon", steps=2)
        deck = self.deck("muon.toml", every=1, dp=1, steps=4)
        settings = [s for s in SETTINGS if not s.startswith("optimizer.kind")]
        last = os.path.join(run, "checkpoints", "step_00000002.h5")
        done = self.run_ballast(
            1, "train", deck, "-d", self.out("other"), *settings, "-r", last, status=1
        )
        self.assertIn("optimizer.kind", done.stdout + done.stderr)
        adamw = self.out("adamw")
        self.run_ballast(1, "train", self.deck(every=1, dp=1, steps=2), "-d", adamw, *settings)
        last = os.path.join(adamw, "checkpoints", "step_00000002.h5")
        done = self.run_ballast(
            1, "train", deck, "-d", self.out("third"), *SETTINGS, "-r", last, status=1
        )
        self.assertIn("optimizer.kind", done.stdout + done.stderr)

    def test_zero_2_is_refused_by_check_and_train(self):
        deck = self.deck(dp=2)
        for command, ranks in (("check", 1), ("train", 2)):
            done = self.run_ballast(
                ranks, command, deck, "optimizer.kind=muon", "optimizer.zero=2", status=1
            )
            said = done.stdout + done.stderr
            self.assertIn('optimizer.kind = "muon"', said)
            self.assertIn("optimizer.zero = 1", said)

    def test_check_knows_its_memory_and_time(self):
        facts = {}
        for kind in ("adamw", "muon"):
            twin = self.out(kind + ".json")
            self.run_ballast(
                1, "check", self.deck(), f"optimizer.kind={kind}", "run.precision=fp64",
                "--steps", "2", "--json", twin,
            )  # fmt: skip
            with open(twin) as file:
                facts[kind] = json.load(file)
        memory = {k: f["stages"][0]["memory"] for k, f in facts.items()}
        # Two ranks; the second holds the last half of the elements, among them all of AdamW's.
        matrices = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
        self.assertEqual(
            memory["adamw"]["optimizer_bytes"] - memory["muon"]["optimizer_bytes"],
            8 * (self.shard(facts["adamw"]) - min(self.shard(facts["adamw"]), self.rest(matrices))),
        )

    @staticmethod
    def shard(facts):
        return facts["stages"][0]["shard_parameters"]

    @staticmethod
    def rest(matrices):
        embeddings, norms = 2 * 256 * 32, 5 * 32
        return embeddings + norms


if __name__ == "__main__":
    unittest.main()
