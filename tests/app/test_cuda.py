"""Whole training runs on GPUs against the host backend: the same deck, run.backend = "cuda".  Where there are fewer GPUs than ranks, ranks share
them, so that every mesh is tried even on one GPU.  Skips, with the reason, where no GPU answers."""
import os
import signal
import subprocess
import unittest
from pathlib import Path

from runs import DECK, RunCase


def gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


GPUS = gpus()
WIDE = DECK.replace("hidden = 32", "hidden = 256").replace("intermediate = 64", "intermediate = 512").replace("head_dim = 8", "head_dim = 64")
RATE = "optimizer.learning_rate=0.001"


@unittest.skipIf(GPUS == 0, "no GPU answers here (nvidia-smi lists none)")
class Cuda(RunCase):
    def train(self, name, ranks, *overrides, **mesh):
        run = self.out(name)
        values = {"dp": 1, "cp_outer": 1, "cp_inner": 1, "steps": 30, "every": 0}
        values.update(mesh)
        done = self.run_ballast(ranks, "train", self.deck(name + ".toml", WIDE, **values), "-d", run, RATE, *overrides)
        return run, done

    def curve(self, run):
        return [float(row["loss"]) for row in self.steps(run) if "loss" in row]

    def test_loss_curve_is_the_hosts_within_bf16_noise_on_every_mesh(self):
        host, _ = self.train("host", 1)
        reference = self.curve(host)
        self.assertLess(reference[-1], reference[0] - 1)
        meshes = [(1, {}), (2, {"dp": 2}), (2, {"cp_inner": 2}), (2, {"sp": 2}), (4, {"cp_inner": 4}),
                  (4, {"cp_outer": 2, "cp_inner": 2}), (4, {"dp": 2, "cp_inner": 2}), (4, {"sp": 4}), (4, {"sp": 2, "cp_inner": 2})]
        for ranks, mesh in meshes:
            for zero in (1, 2) if mesh.get("dp") else (1,):
                run, done = self.train("cuda" + "".join(f"-{k}{v}" for k, v in mesh.items()) + f"-zero{zero}", ranks, "run.backend=cuda", f"optimizer.zero={zero}", **mesh)
                self.assertNotIn("use the host backend", done.stdout)
                curve = self.curve(run)
                worst = max(abs(a - b) / b for a, b in zip(curve, reference))
                print(f"# {ranks} ranks {mesh} zero {zero}: first {curve[0]:.5f} (host {reference[0]:.5f}), last {curve[-1]:.5f} ({reference[-1]:.5f}), worst {worst:.2e}")
                self.assertAlmostEqual(curve[0], reference[0], delta=5e-3 * reference[0])
                self.assertLess(worst, 3e-2)

    def test_degrees_that_change_within_a_step_give_the_hosts_loss_curve(self):
        hbp = ["batching.method=hbp", "batching.groups=[80,160,300]", "batching.group_ranks=[1,2,4]", "batching.group_recompute=[-1,1,2]"]
        host, _ = self.train("host", 1)
        reference = self.curve(host)
        run, done = self.train("adaptive", 4, "run.backend=cuda", *hbp, dp=4)
        self.assertNotIn("use the host backend", done.stdout)
        worst = max(abs(a - b) / b for a, b in zip(self.curve(run), reference))
        print(f"# 4 ranks, degrees 1, 2, 4 in turn: worst {worst:.2e}")
        self.assertLess(worst, 3e-2)

    def test_sparse_patterns_built_on_the_gpu_follow_the_hosts_curve(self):
        long = WIDE.replace("max_tokens = 300", "max_tokens = 900").replace("micro_batch_tokens = 300", "micro_batch_tokens = 1800").replace("global_tokens = 1500", "global_tokens = 3600")
        tuned = ["dst.enabled=true", "costs.forward_pair_s=1e-6"]
        patterns = {"slash": ["attention.pattern=vertical_slash", "attention.vertical_share=0.3", "attention.slash_share=0.5"],
                    "capped": ["attention.pattern=vertical_slash", "attention.max_columns=70", "attention.max_slashes=2"],
                    "moba": ["attention.pattern=moba", "attention.moba_block=64", "attention.moba_top_k=3"],
                    "moba-dst": ["attention.pattern=moba", "attention.moba_block=64", "attention.moba_top_k=3", *tuned],
                    "slash-dst": ["attention.pattern=vertical_slash", "dst.base_budget=4", *tuned],
                    "xattention": ["attention.pattern=xattention"]}
        for name, pattern in patterns.items():
            curves = []
            for backend, ranks in [("host", 1), ("cuda", 1), ("cuda", 2), ("cuda", 4)]:
                run = self.out(f"{name}-{backend}-{ranks}")
                deck = self.deck(f"{name}-{backend}-{ranks}.toml", long, dp=1, cp_outer=1, cp_inner=ranks, steps=12, every=0)
                self.run_ballast(ranks, "train", deck, "-d", run, RATE, f"run.backend={backend}", *pattern)
                curves.append(self.curve(run))
            worst = max(abs(a - b) / b for curve in curves[1:] for a, b in zip(curve, curves[0]))
            print(f"# {name}: host {curves[0][0]:.5f} to {curves[0][-1]:.5f}, worst {worst:.2e}")
            self.assertLess(curves[0][-1], curves[0][0])
            self.assertLess(worst, 3e-2)

    def test_pipelines_and_chunks_follow_the_host(self):
        host, _ = self.train("host-deep", 1, "model.layers=4", steps=10)
        reference = self.curve(host)
        chunked = ["batching.method=chunkflow", "chunk.tokens=64", "pipeline.schedule=state_aware_1f1b", "chunk.k=2"]
        runs = [(1, 1, 1, chunked), (1, 1, 1, chunked + ["chunk.offload=host", "chunk.window_tokens=128"])]
        runs += [(2, 2, 1, ["pipeline.schedule=gpipe"]), (2, 2, 1, ["model.tied_embedding=false"]), (2, 2, 1, chunked + ["chunk.offload=host"]), (2, 1, 2, chunked)]
        runs += [(2, 2, 1, ["pipeline.schedule=zero_bubble"]), (4, 4, 1, chunked + ["pipeline.schedule=zero_bubble", "recompute.mode=full"])]
        runs += [(4, 4, 1, []), (4, 4, 1, ["pipeline.schedule=gpipe"]), (4, 4, 1, chunked), (4, 2, 2, chunked + ["chunk.offload=host"])]
        for number, (ranks, pp, inner, extra) in enumerate(runs):
            run, done = self.train(f"deep{number}", ranks, "run.backend=cuda", "model.layers=4", f"mesh.pp={pp}", *extra, cp_inner=inner, steps=10)
            self.assertNotIn("use the host backend", done.stdout)
            curve = self.curve(run)
            worst = max(abs(a - b) / b for a, b in zip(curve, reference))
            print(f"# {ranks} ranks pp {pp} cp {inner} {' '.join(extra)}: first {curve[0]:.5f} (host {reference[0]:.5f}), last {curve[-1]:.5f} ({reference[-1]:.5f}), worst {worst:.2e}")
            self.assertAlmostEqual(curve[0], reference[0], delta=5e-3 * reference[0])
            self.assertLess(worst, 3e-2)

    def test_sparse_chunks_with_stored_keys_follow_the_host(self):
        long = WIDE.replace("max_tokens = 300", "max_tokens = 900")
        chunked = ["batching.method=chunkflow", "chunk.tokens=256", "pipeline.schedule=state_aware_1f1b", "chunk.k=2"]
        for pattern in (["attention.pattern=moba", "attention.moba_block=64", "attention.moba_top_k=3"], ["attention.pattern=vertical_slash", "attention.vertical_share=0.3", "attention.slash_share=0.5"],
                        ["attention.pattern=xattention"]):
            for place in ([], ["chunk.offload=host", "chunk.window_tokens=256"]):
                curves = []
                for backend in ("host", "cuda"):
                    run = self.out("-".join([backend, pattern[0].split("=")[1], str(len(place))]))
                    deck = self.deck(Path(run).name + ".toml", long, dp=1, cp_outer=1, cp_inner=1, steps=3, every=0)
                    self.run_ballast(1, "train", deck, "-d", run, RATE, f"run.backend={backend}", *chunked, *place, *pattern)
                    curves.append(self.curve(run))
                worst = max(abs(a - b) / b for a, b in zip(curves[1], curves[0]))
                print(f"# chunks, {pattern[0]} {' '.join(place)}: host {curves[0][0]:.5f} to {curves[0][-1]:.5f}, worst {worst:.2e}")
                self.assertLess(worst, 3e-2)

    def test_deterministic_runs_repeat_their_digits_with_and_without_recomputation(self):
        rows = []
        for name, overrides in (("a", []), ("b", []), ("full", ["recompute.mode=full"]), ("selective", ["recompute.mode=selective"])):
            run, _ = self.train(name, 1, "run.backend=cuda", "run.deterministic=true", *overrides, steps=8)
            rows.append([(r["loss"], r["grad_norm"]) for r in self.steps(run)])
        for other in rows[1:]:
            self.assertEqual(rows[0], other)

    def test_restart_is_bit_identical(self):
        whole, _ = self.train("whole", 1, "run.backend=cuda", "run.deterministic=true", steps=6, every=3)
        parts, _ = self.train("parts", 1, "run.backend=cuda", "run.deterministic=true", "optimizer.decay_steps=6", steps=3, every=3)
        self.run_ballast(1, "train", self.deck("again.toml", WIDE, dp=1, steps=6, every=3), "-d", parts, "-r", "latest", RATE, "run.backend=cuda", "run.deterministic=true")
        self.assertEqual(self.losses(whole), self.losses(parts))

    def test_a_stopped_rank_is_reported_within_the_time_limit(self):
        run = self.out("stopped")
        deck = self.deck("stopped.toml", WIDE, dp=1, cp_inner=2, steps=100000, every=0)
        process = self.start(2, "train", deck, "-d", run, "run.backend=cuda", "run.hang_timeout_s=8")
        try:
            self.wait_for_step(process, run, 3, timeout=120)
            ranks = self.ranks_of(run)
            if not ranks:
                self.skipTest("the ranks' processes do not show in /proc under the program's name")
            os.kill(max(ranks), signal.SIGSTOP)
            try:
                output, _ = process.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                states = {pid: self.state_of(pid) for pid in ranks}
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate(timeout=30)
                self.fail(f"still running 90 s after rank {max(ranks)} was stopped; states {states}; output:\n{output[-4000:]}")
        finally:
            self.stop_group(process)
        self.assertNotEqual(process.returncode, 0)
        self.assertIn("without progress (run.hang_timeout_s)", output)


@unittest.skipIf(GPUS == 0, "no GPU answers here (nvidia-smi lists none)")
class CudaBench(RunCase):
    """The benchmarks refuse a wrong result themselves; their tables are printed for the record."""

    def bench(self, ranks, *arguments):
        done = self.run_ballast(ranks, "bench", *arguments, "backend=cuda", timeout=300)
        print(done.stdout)

    def test_gemm(self):
        self.bench(1, "gemm")
        self.bench(1, "gemm", "m=1000", "n=264", "k=4096")

    def test_attention(self):
        for settings in (["tokens=8192"], ["tokens=8192", "lengths=random"], ["tokens=16384", "density=0.05", "run=2"], ["tokens=4095", "head_dim=64", "q_heads=14"]):
            self.bench(1, "attention", "q_heads=16", "kv_heads=2", "head_dim=128", *settings)

    def test_ring(self):
        for ranks, outer in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)):
            for layout in ("zigzag", "striped"):
                self.bench(ranks, "ring", "tokens=16384", "q_heads=16", "kv_heads=2", "head_dim=128", f"outer={outer}", f"layout={layout}")


if __name__ == "__main__":
    unittest.main()
