"""Whole-program tests of sparse attention: the same losses on every mesh, ring and layout."""
import unittest

from runs import RunCase

# (ranks, dp, cp_outer, cp_inner, layout, stripe)
MESHES = [(1, 1, 1, 1, "zigzag", 64), (4, 2, 1, 2, "striped", 64), (4, 1, 2, 2, "striped", 128), (4, 1, 1, 4, "zigzag", 64)]


class Sparse(RunCase):
    def losses_of(self, mesh, *overrides):
        ranks, dp, outer, inner, layout, stripe = mesh
        run = self.out("-".join(str(m) for m in mesh) + str(abs(hash(overrides))))
        self.run_ballast(ranks, "train", self.deck(dp=dp, cp_outer=outer, cp_inner=inner, steps=3, every=0), "-d", run, "run.precision=fp64",
                         f"ring.layout={layout}", f"ring.stripe={stripe}", "batching.micro_batch_tokens=640", *overrides)
        return [float(v) for v in self.losses(run).values()]

    def expect_same_on_every_mesh(self, *overrides):
        reference = self.losses_of(MESHES[0], *overrides)
        self.assertEqual(len(reference), 3)
        for mesh in MESHES[1:]:
            for a, b in zip(reference, self.losses_of(mesh, *overrides)):
                self.assertAlmostEqual(a, b, delta=2e-6, msg=str(mesh))
        return reference

    def test_generated_index(self):
        generated = ["attention.index=generated", "attention.generated_band_tokens=64", "attention.generated_columns=8"]
        sparse = self.expect_same_on_every_mesh(*generated, "attention.generated_density=0.3")
        for a, b in zip(sparse, self.losses_of((4, 1, 1, 2, "striped", 64), *generated, "attention.generated_density=0.3", "mesh.sp=2")):
            self.assertAlmostEqual(a, b, delta=2e-6, msg="each Ulysses rank has its own heads' patterns")
        dense = self.losses_of(MESHES[0])
        self.assertNotEqual(sparse, dense)
        for a, b in zip(dense, self.losses_of(MESHES[1], *generated, "attention.generated_density=1")):
            self.assertAlmostEqual(a, b, delta=2e-6, msg="density 1 is dense")


if __name__ == "__main__":
    unittest.main()
