"""Moments and gradients in bf16 through the program: what a checkpoint holds, restarts bit for
bit on other ranks too, checkpoints continued as the other kind, what is summed, and where the
keys have no effect."""
import json
import os
import unittest

import h5py
import numpy as np

from runs import RunCase

BF16 = "optimizer.moments=bf16"
GRADIENTS = "optimizer.gradients=bf16"
FIELDS = ("moment1", "moment2")


def as_float(field):
    """Moments of either kind."""
    return (field.astype(np.uint32) << 16).view(np.float32) if field.dtype == "u2" else field


class Moments(RunCase):
    def state(self, run, step):
        with h5py.File(os.path.join(run, "checkpoints", f"step_{step:08}.h5")) as file:
            return {
                name: {field: data[()] for field, data in group.items()}
                for name, group in file["parameters"].items()
            }

    def train(self, name, *keys, ranks=2, zero=1, steps=6):
        deck, run = self.deck(name + ".toml", steps=steps, every=1, dp=ranks), self.out(name)
        more = (f"optimizer.zero={zero}", "checkpoint.keep=20", "run.deterministic=true")
        self.run_ballast(ranks, "train", deck, "-d", run, *more, *keys)
        return run

    def expect_same(self, a, b):
        for name, fields in a.items():
            for field, data in fields.items():
                np.testing.assert_array_equal(data, b[name][field], f"{name} {field}")

    def test_a_restart_repeats_the_bits_and_shards_do_not_matter(self):
        run = self.train("whole", BF16)
        whole = self.state(run, 6)
        for fields in whole.values():
            self.assertEqual(fields["master"].dtype, np.float32)
            for field in FIELDS:
                self.assertEqual(fields[field].dtype, np.uint16, "the 16 bits")
        back = os.path.join(run, "checkpoints", "step_00000003.h5")
        self.expect_same(whole, self.state(self.train("later", BF16, "-r", back), 6))
        self.expect_same(whole, self.state(self.train("zero0", BF16, zero=0), 6))

    def test_copies_of_a_tied_embedding_stay_the_same(self):
        keys = (BF16, "model.tied_embedding=true", "mesh.dp=1", "mesh.pp=2")
        run = self.train("tied", *keys)  # a checkpoint holds one of the two copies
        back = os.path.join(run, "checkpoints", "step_00000003.h5")
        self.expect_same(self.state(run, 6), self.state(self.train("t2", *keys, "-r", back), 6))

    def test_rounding_alone_tells_the_kinds_apart(self):
        full, half = (self.state(self.train(n, *k), 1) for n, k in (("f", ()), ("h", (BF16,))))
        unlike = 0
        for name, fields in full.items():
            np.testing.assert_array_equal(fields["master"], half[name]["master"], name)
            for field in FIELDS:
                exact, kept = fields[field], as_float(half[name][field])
                # Of the neighbours, either: less than a unit of the last of eight bits.
                self.assertTrue(np.all(np.abs(exact - kept) < 2.0**-7 * np.abs(exact) + 1e-45))
                unlike += np.count_nonzero(exact != kept)
        self.assertGreater(unlike, 0)

    def test_either_kind_continues_as_the_other(self):
        for first, then in (((BF16,), ()), ((), (BF16,))):
            run = self.train("from" + str(len(first)), *first, steps=3)
            back = os.path.join(run, "checkpoints", "step_00000003.h5")
            then_run = self.train("to" + str(len(then)), *then, "-r", back, steps=4)
            kinds = {f[m].dtype for f in self.state(then_run, 4).values() for m in FIELDS}
            self.assertEqual(kinds, {np.dtype("u2" if then else "f4")})
            same = self.train("same" + str(len(first)), *first, "-r", back, steps=4)
            a, b = self.state(then_run, 4), self.state(same, 4)
            for name, fields in a.items():
                np.testing.assert_allclose(
                    fields["master"], b[name]["master"], rtol=1e-3, atol=1e-4, err_msg=name
                )

    def test_muon_does_not_read_the_keys(self):
        deck = self.deck(steps=1)
        said = self.run_ballast(1, "check", deck, "optimizer.kind=muon", BF16, GRADIENTS)
        for key in ("moments", "gradients"):
            self.assertIn(f"optimizer.{key} has no effect", said.stdout + said.stderr)

    def test_gradients_in_bf16_restart_and_shards_do_not_matter(self):
        run = self.train("rounded", GRADIENTS)
        whole = self.state(run, 6)
        back = os.path.join(run, "checkpoints", "step_00000003.h5")
        self.expect_same(whole, self.state(self.train("again", GRADIENTS, "-r", back), 6))
        self.expect_same(whole, self.state(self.train("zero0r", GRADIENTS, zero=0), 6))
        full = self.state(self.train("in_full", "-r", back), 6)  # a checkpoint holds no gradients
        unlike = 0
        for name, fields in whole.items():
            apart = np.abs(fields["master"] - full[name]["master"])
            self.assertLess(np.max(apart), 0.02, name)
            unlike += np.count_nonzero(apart)
        self.assertGreater(unlike, 0)

    def dumped(self, name, *keys):
        deck, file = self.deck(name + ".toml", steps=1, dp=2), self.out(name + ".safetensors")
        self.run_ballast(
            2, "train", deck, "-d", self.out(name), f"run.dump_gradients={file}", *keys
        )
        with open(file, "rb") as stored:
            size = int.from_bytes(stored.read(8), "little")
            header, data = json.loads(stored.read(size)), stored.read()
        header.pop("__metadata__", None)
        return {
            tensor: np.frombuffer(data[slice(*entry["data_offsets"])], np.float32)
            for tensor, entry in header.items()
        }

    def test_moments_of_a_first_step_are_shares_of_the_gradient(self):
        """Each by its own beta: 1 - beta1 of it, and 1 - beta2 of its square."""
        keys = ("optimizer.beta1=0.75", "optimizer.beta2=0.5", "optimizer.clip_norm=0")
        gradients = self.dumped("betas", *keys)
        for name, fields in self.state(self.out("betas"), 1).items():
            gradient = gradients[name]
            self.assertGreater(np.linalg.norm(gradient), 0, name)
            for field, expected in zip(FIELDS, (0.25 * gradient, 0.5 * gradient**2)):
                found = fields[field].reshape(-1)
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-30, err_msg=name)

    def test_gradients_of_one_micro_batch_a_rank_are_rounded_twice(self):
        """Once as the micro-batch's, once as the sum over ranks."""
        exact = self.dumped("exact")
        for zero in (0, 1, 2):
            rounded = self.dumped(f"half{zero}", GRADIENTS, f"optimizer.zero={zero}")
            for name, half in rounded.items():
                error = np.linalg.norm(half - exact[name]) / np.linalg.norm(exact[name])
                self.assertLess(error, 5e-3, name)
                self.assertGreater(error, 0, name)
                if zero < 2:
                    self.assertFalse((half.view(np.uint32) & 0xFFFF).any(), name)

    def test_check_counts_gradients(self):
        deck = self.deck(steps=1)

        def gradients(*keys):
            twin = self.out("check.json")
            self.run_ballast(1, "check", deck, *keys, "--json", twin)
            with open(twin) as file:
                return [s["memory"]["gradients_bytes"] for s in json.load(file)["stages"]]

        self.assertEqual([2 * half for half in gradients(GRADIENTS)], gradients())
        # Sums over rounds stay full.
        sharded = [gradients("optimizer.zero=2", *more)[0] for more in ((), (GRADIENTS,))]
        self.assertLess(sharded[1], sharded[0])
        self.assertGreater(sharded[1], sharded[0] / 2)


if __name__ == "__main__":
    unittest.main()
