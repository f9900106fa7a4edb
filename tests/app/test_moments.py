"""Moments in bf16 through the program: what a checkpoint holds, restarts bit for bit on other ranks
too, checkpoints continued as the other kind, and where the key has no effect."""
import os
import unittest

import h5py
import numpy as np

from runs import RunCase

BF16 = "optimizer.moments=bf16"
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

    def test_muon_does_not_read_the_key(self):
        deck = self.deck(steps=1)
        said = self.run_ballast(1, "check", deck, "optimizer.kind=muon", BF16)
        self.assertIn("optimizer.moments has no effect", said.stdout + said.stderr)


if __name__ == "__main__":
    unittest.main()
