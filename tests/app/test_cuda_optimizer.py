"""Updates of whole runs on GPUs: any number of replicas, Muon, and updates beside the next forward.
Skips, with the reason, where no GPU answers."""
import unittest

from cuda_case import BACKEND, BESIDE, CudaCase


class CudaOptimizer(CudaCase):
    def test_any_number_of_replicas_follows_the_host(self):
        """Shards of three, five and six replicas begin where kernels can read them."""
        runs = [
            (mesh, [f"optimizer.zero={zero}", "optimizer.bucket_bytes=65536"])
            for mesh in ({"dp": 3}, {"dp": 5}, {"dp": 3, "cp_inner": 2})
            for zero in (0, 1, 2)
        ]
        self.compare("replicas", [], runs, steps=6)

    def test_muon_follows_the_host(self):
        muon = ["optimizer.kind=muon"]
        runs = [(mesh, muon) for mesh in ({}, {"dp": 3}, {"dp": 2, "pp": 2})]
        self.compare("muon", muon, runs, steps=6)

    def test_muon_on_more_ranks_than_matrices_follows_the_host(self):
        """A layer has seven matrices: one of eight ranks has none."""
        muon = ["optimizer.kind=muon", "model.layers=1"]
        runs = [({"dp": 8}, muon + [f"optimizer.zero={zero}"]) for zero in (0, 1)]
        self.compare("muon of one layer", muon, runs, steps=6)

    def test_updates_beside_a_forward_change_no_digit(self):
        """Buckets of a layer each are updated beside the next forward, one bucket of all before
        it.  Without clipping, whose norm is summed bucket by bucket, a run's digits are alike."""
        for title, mesh, overrides in (
            ("one rank", {}, []),
            ("zero 0", {"dp": 2}, ["optimizer.zero=0"]),
            ("zero 1", {"dp": 2}, ["optimizer.zero=1"]),  # whose update waits
            ("zero 2", {"dp": 2}, ["optimizer.zero=2"]),
            ("two stages", {}, ["mesh.pp=2"]),
        ):
            found = []
            for size in (1 << 40, 1):
                run, _ = self.train(
                    f"{title}-{size}".replace(" ", "-"),
                    1 if title == "one rank" else 2,
                    f"run.backend={BACKEND}",
                    "run.deterministic=true",
                    "optimizer.clip_norm=0",
                    f"optimizer.bucket_bytes={size}",
                    *overrides,
                    text=BESIDE,
                    steps=6,
                    **mesh,
                )
                found.append(self.curve(run))
            with self.subTest(title):
                self.assertEqual(*found)
                self.assertLess(found[0][-1], found[0][0])


if __name__ == "__main__":
    unittest.main()
