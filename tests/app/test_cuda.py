"""Whole training runs on GPUs against the host backend: the same deck, run.backend = "cuda".
Skips, with the reason, where no GPU answers."""
import itertools
import os
import random
import signal
import subprocess
import unittest

from cuda_case import BACKEND, BESIDE, GPUS, LONG, RATE, WIDE, CudaCase
from runs import BALLAST
from test_combinations import BASE, DEGREES, SEED, Design, row_of, table

SLASH = [
    "attention.pattern=vertical_slash",
    "attention.vertical_share=0.3",
    "attention.slash_share=0.5",
]
MOBA = ["attention.pattern=moba", "attention.moba_block=64", "attention.moba_top_k=3"]
XATTENTION = ["attention.pattern=xattention"]
TUNED = ["dst.enabled=true", "costs.forward_pair_s=1e-6"]
SHUFFLED = ["ring.layout=shuffled", "ring.stripe=128"]


def chunked(tokens, *extra):
    return [
        "batching.method=chunkflow",
        f"chunk.tokens={tokens}",
        "pipeline.schedule=state_aware_1f1b",
        "chunk.k=2",
        *extra,
    ]


class Cuda(CudaCase):
    def test_dense_runs_follow_the_host_on_every_mesh(self):
        meshes = [{}, {"dp": 2}, {"cp_inner": 2}, {"sp": 2}, {"cp_inner": 4}, {"sp": 4}]
        both = {"dp": 2, "cp_inner": 2}
        meshes += [{"cp_outer": 2, "cp_inner": 2}, both, {"sp": 2, "cp_inner": 2}]
        runs = [
            (mesh, [f"optimizer.zero={zero}"])
            for mesh in meshes
            for zero in ((1, 2) if mesh.get("dp") else (1,))
        ]
        halved = ["optimizer.gradients=bf16", "optimizer.moments=bf16"]  # reduced in bf16 too
        runs += [
            (mesh, halved + [f"optimizer.zero={zero}", "optimizer.bucket_bytes=65536"])
            for mesh, zero in itertools.product(({"dp": 2}, both), (0, 1, 2))
        ]
        curve = self.compare("dense", [], runs, steps=20)
        self.assertLess(curve[-1], curve[0] - 1)

    def test_rings_follow_the_host_on_every_layout(self):
        rings = [{"cp_inner": 3}, {"cp_inner": 4}, {"cp_outer": 2, "cp_inner": 2}, {"cp_outer": 4}]
        layouts = [
            ["ring.layout=striped", "ring.stripe=1"],
            ["ring.layout=shuffled", "ring.stripe=16"],
            ["ring.layout=contiguous"],
        ]
        self.compare(
            "rings",
            [],
            [
                (mesh, layout)
                for mesh in rings
                for layout in layouts[: 3 if mesh == {"cp_inner": 4} else 2]
            ],
            steps=4,
        )

    def test_degrees_that_change_within_a_step_follow_the_host(self):
        hbp = [
            "batching.method=hbp",
            "batching.groups=[80,160,300]",
            "batching.group_ranks=[1,2,4]",
            "batching.group_recompute=[-1,1,2]",
        ]
        self.compare("adaptive degrees", [], [({"dp": 4}, hbp)], steps=20)

    def test_joined_ranks_that_share_heads_and_a_ring_follow_the_host(self):
        """Three ranks do not divide four heads: they are a ring, six two of heads by three."""

        def hbp(*ranks):
            groups = ["batching.groups=[80,300]", f"batching.group_ranks={list(ranks)}"]
            return ["batching.method=hbp", *groups, "batching.group_recompute=[-1,1]"]

        placed = ["batching.method=balanced", "batching.micro_batch_tokens=100"]
        runs = [({"dp": 3}, hbp(1, 3)), ({"dp": 6}, hbp(2, 6)), ({"dp": 3}, placed)]
        self.compare("joined rings", [], runs, steps=6)

    def test_sparse_patterns_follow_the_host(self):
        capped = [
            "attention.pattern=vertical_slash",
            "attention.max_columns=70",
            "attention.max_slashes=2",
        ]
        flat, two_level = {"cp_inner": 4}, {"cp_outer": 2, "cp_inner": 2}
        for name, pattern, meshes in (
            (
                "slash",
                SLASH,
                [
                    ({}, []),
                    ({"cp_inner": 2}, []),
                    ({"cp_inner": 2}, SHUFFLED),
                    (flat, SHUFFLED),
                    (two_level, SHUFFLED),
                ],
            ),
            ("capped slash", capped, [({}, []), (flat, [])]),
            (
                "moba",
                MOBA,
                [({}, []), ({"cp_inner": 2}, SHUFFLED), (flat, SHUFFLED), (two_level, [])],
            ),
            (
                "xattention",
                XATTENTION,
                [
                    ({}, []),
                    ({"cp_inner": 2}, []),
                    ({"cp_inner": 2}, SHUFFLED),
                    (flat, SHUFFLED),
                    (two_level, SHUFFLED),
                    ({"sp": 2}, []),
                ],
            ),
        ):
            curve = self.compare(
                name,
                pattern,
                [(mesh, pattern + extra) for mesh, extra in meshes],
                text=LONG,
                steps=5,
            )
            self.assertLess(curve[-1], curve[0])

    def test_drift_follows_the_host(self):
        each = ["trace.recall_every=2", "trace.recall_drift=true"]
        for name, pattern in (("slash", SLASH), ("moba", MOBA), ("xattention", XATTENTION)):
            pattern = pattern + each
            meshes = [({}, []), ({"cp_inner": 2}, []), ({"sp": 2}, []), ({"pp": 2}, [])]
            runs = [(mesh, pattern + extra) for mesh, extra in meshes]
            self.compare(f"drift {name}", pattern, runs, text=LONG, steps=5)
            rows = self.steps(self.out(f"drift-{name}-0"))
            self.assertEqual([int(r["step"]) for r in rows if "drift" in r], [3, 5], name)

    def test_tuned_budgets_follow_the_host(self):
        for name, pattern in (
            ("moba tuned", MOBA + TUNED),
            ("moba tuned by a quarter", MOBA + TUNED + ["dst.coverage_rows=sampled"]),
            ("slash tuned", SLASH + ["dst.base_budget=4"] + TUNED),
        ):
            meshes = [
                {},
                {"cp_inner": 2},
                {"sp": 2},
                {"sp": 2, "cp_inner": 2},
                {"pp": 2},
                {"cp_inner": 4},
            ]
            self.compare(
                name,
                pattern,
                [(mesh, pattern) for mesh in meshes]
                + [
                    ({"cp_outer": 2, "cp_inner": 2}, pattern + SHUFFLED),
                    ({"pp": 2, "cp_inner": 2}, pattern + ["pipeline.schedule=zero_bubble"]),
                ],
                text=LONG,
                steps=4,
            )
            cut = pattern + chunked(256)
            offloaded = ["chunk.offload=host", "chunk.window_tokens=256"]
            self.compare(
                name + " in chunks",
                cut,
                [
                    ({}, cut),
                    ({}, cut + offloaded),
                    ({"cp_inner": 2}, cut),
                    ({"pp": 2}, cut + ["pipeline.schedule=zero_bubble"]),
                    ({"sp": 2}, cut),
                ],
                text=LONG,
                steps=3,
            )

    def test_pipelines_and_chunks_follow_the_host(self):
        deep = ["model.layers=4"]
        cut, offloaded, halves = (
            chunked(64),
            ["chunk.offload=host", "chunk.window_tokens=128"],
            ["pipeline.schedule=zero_bubble"],
        )
        runs = [
            ({}, cut),
            ({}, cut + offloaded),
            ({"pp": 2}, ["pipeline.schedule=gpipe"]),
            ({"pp": 2}, cut + offloaded),
            ({"cp_inner": 2}, cut),
            ({"cp_inner": 2}, cut + offloaded),
            ({"pp": 2}, halves),
            ({"pp": 2}, cut + halves),
            ({"pp": 2}, cut + halves + ["recompute.mode=selective"] + offloaded),
            ({"pp": 4}, cut + halves + ["recompute.mode=full"]),
            ({"pp": 4}, halves),
            ({"pp": 4}, []),
            ({"pp": 4}, ["pipeline.schedule=gpipe"]),
            ({"pp": 4}, cut),
            ({"pp": 2, "cp_inner": 2}, cut + offloaded),
            ({"pp": 2, "cp_inner": 2}, cut + halves),
            ({"pp": 2, "dp": 2}, halves),
            ({"cp_outer": 2, "cp_inner": 2}, cut + offloaded),
            ({"pp": 2, "sp": 2}, cut),
        ]
        windows = cut[:-1] + [
            "chunk.k=1",
            "chunk.offload=host",
            "chunk.window_tokens=64",
        ]  # many windows, inputs that go and come
        runs += [({}, windows), ({"pp": 2}, windows)]
        self.compare("deep", deep, [(mesh, deep + extra) for mesh, extra in runs], steps=6)
        many = chunked(
            64, "chunk.k=1", "chunk.offload=host", "chunk.window_tokens=64"
        )  # more chunks than transfers run ahead, host memory that grows
        self.compare(
            "many chunks", many, [({"pp": 2}, many), ({"pp": 2}, many + halves)], text=LONG, steps=4
        )
        tied = deep + ["model.tied_embedding=true"]
        self.compare("tied", tied, [({"pp": 2}, tied), ({"pp": 2}, tied + halves)], steps=6)

    def test_sparse_chunks_with_stored_keys_follow_the_host(self):
        for name, pattern in (("moba", MOBA), ("slash", SLASH), ("xattention", XATTENTION)):
            cut, offloaded = pattern + chunked(256), [
                "chunk.offload=host",
                "chunk.window_tokens=256",
            ]
            self.compare(
                name + " in chunks",
                cut,
                [
                    ({}, cut),
                    ({}, cut + offloaded),
                    ({"cp_inner": 2}, cut),
                    ({"cp_inner": 2}, cut + SHUFFLED + offloaded),
                    ({"pp": 2}, cut),
                ],
                text=LONG,
                steps=3,
            )

    def test_random_plans_follow_the_host(self):
        """Meshes, methods, schedules and shards drawn anew by BALLAST_TEST_SEED: 200 plans of
        random samples, with rings, exchanges, pipelines and reductions in flight together."""
        rng = random.Random(SEED)
        design = Design(table(), rng, {"index recorded"})
        fixed = row_of(
            "pattern dense",
            "index pattern",
            "loss cross_entropy",
            "normaliser ave_token",
            "optimizer adamw",
            "lora off",
            f"backend {BACKEND}",
            "precision bf16" if BACKEND == "cuda" else "precision fp32",
        )
        common = [setting for setting in BASE if not setting.startswith("run.steps")]
        common += [f"run.seed={rng.randrange(1, 1000)}", "optimizer.bucket_bytes=65536"]
        runs = []
        for number in range(20):
            row = design.drawn(fixed, 4 if number % 2 else 2)
            ring = DEGREES["ring"].get(row["ring"].partition(" ")[2], 1)
            mesh = {d: DEGREES[d].get(row[d].partition(" ")[2], 1) for d in ("dp", "pp", "sp")}
            mesh.update(cp_inner=min(ring, 2), cp_outer=ring // 2 or 1)
            runs.append((mesh, common + design.overrides(row)))
        self.compare("random plans", common, runs, steps=10)

    def test_adapters_follow_the_host(self):
        lora = [
            "lora.rank=8",
            "lora.dropout=0.1",
            'lora.projections=["q","k","v","o","gate","up","down"]',
            "model.initial_std=0.1",
        ]
        halves = ["pipeline.schedule=zero_bubble"]
        self.compare(
            "lora",
            lora,
            [
                ({}, lora),
                ({}, lora + ["recompute.mode=full"]),
                ({"dp": 2}, lora),
                ({"cp_inner": 2}, lora),
                ({"sp": 2}, lora),
                ({"pp": 2}, lora + halves),
                ({"pp": 2}, lora + chunked(64) + halves),
            ],
            steps=6,
        )

    def test_fp8_follows_the_host(self):
        fp8 = ["run.precision=fp8"]
        halves = ["pipeline.schedule=zero_bubble"]
        self.compare(
            "fp8",
            fp8,
            [
                ({}, fp8),
                ({}, fp8 + ["recompute.mode=full"]),
                ({"dp": 2}, fp8 + ["optimizer.zero=2"]),
                ({"cp_inner": 3}, fp8 + ["ring.layout=striped", "ring.stripe=1"]),
                ({"pp": 2}, fp8 + chunked(64) + halves),
            ],
            steps=6,
        )

    def test_deterministic_runs_repeat_their_digits_with_and_without_recomputation(self):
        for title, ranks, text, common, variants in (
            (
                "one rank",
                1,
                WIDE,
                [],
                ([], [], ["recompute.mode=full"], ["recompute.mode=selective"]),
            ),
            (
                "vertical_slash on a ring of two",
                2,
                LONG,
                SLASH + ["mesh.cp_inner=2"],
                ([], [], ["recompute.mode=full"]),
            ),
            (
                "moba tuned on a ring of two",
                2,
                LONG,
                MOBA + TUNED + SHUFFLED + ["mesh.cp_inner=2"],
                ([], []),
            ),
            (
                "zero-bubble on two stages",
                2,
                WIDE,
                # A search orders micro-batches by what they cost, recomputation included.
                ["mesh.pp=2", "pipeline.schedule=zero_bubble", "pipeline.search=1"],
                ([], [], ["recompute.mode=full"]),
            ),
        ):
            rows = []
            for number, overrides in enumerate(variants):
                run, _ = self.train(
                    f"{title}-{number}".replace(" ", "-"),
                    ranks,
                    f"run.backend={BACKEND}",
                    "run.deterministic=true",
                    *common,
                    *overrides,
                    text=text,
                    steps=5,
                )
                rows.append(
                    [(r["step"], r["loss"], r["grad_norm"]) for r in self.steps(run) if "loss" in r]
                )
                with self.subTest(title, overrides=overrides):
                    self.assertEqual(
                        rows[0],
                        rows[-1],
                        f"{title}: the first run against run {number} {' '.join(overrides)}",
                    )

    def test_restart_is_bit_identical(self):
        for title, text in (("alone", WIDE), ("beside", BESIDE)):
            common = [
                f"run.backend={BACKEND}",
                "run.deterministic=true",
                "optimizer.decay_steps=6",
                "optimizer.bucket_bytes=1",
            ]
            whole, _ = self.train(f"whole-{title}", 1, *common, text=text, steps=6, every=3)
            parts, _ = self.train(f"parts-{title}", 1, *common, text=text, steps=3, every=3)
            self.run_ballast(
                1,
                "train",
                self.deck(f"again-{title}.toml", text, dp=1, steps=6, every=3),
                "-d",
                parts,
                "-r",
                "latest",
                RATE,
                *common,
            )
            with self.subTest(title):
                self.assertEqual(self.losses(whole), self.losses(parts))

    def test_ranks_that_are_shown_one_gpu_each_do_not_share(self):
        """Launchers may show every rank its own GPU, as number 0: NCCL uses NVLink then."""
        if GPUS < 2:
            self.skipTest("needs two GPUs")
        alone = self.out("alone.sh")
        with open(alone, "w") as file:
            file.write('export CUDA_VISIBLE_DEVICES=$PMI_RANK\nexec "$@"\n')
        command = self.command
        self.command = lambda ranks, *arguments: [
            *command(ranks)[:3],
            "sh",
            alone,
            BALLAST,
            *arguments,
        ]
        mesh = {"dp": 2, "steps": 4}
        run, done = self.train("shown-one", 2, f"run.backend={BACKEND}", **mesh)
        self.assertNotIn("share", done.stdout)
        self.command = command
        whole, done = self.train("shown-all", 2, f"run.backend={BACKEND}", **mesh)
        self.assertNotIn("share", done.stdout)
        for found, expected in zip(self.curve(run), self.curve(whole)):
            self.assertLess(abs(found - expected), 2e-2 * expected)

    def test_a_stopped_rank_is_reported_within_the_time_limit(self):
        run = self.out("stopped")
        deck = self.deck("stopped.toml", WIDE, dp=1, cp_inner=2, steps=100000, every=0)
        process = self.start(
            2, "train", deck, "-d", run, f"run.backend={BACKEND}", "run.hang_timeout_s=8"
        )
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
                self.fail(
                    f"still running 90 s after rank {max(ranks)} was stopped; states {states};"
                    f" output:\n{output[-4000:]}"
                )
        finally:
            self.stop_group(process)
        self.assertNotEqual(process.returncode, 0)
        self.assertIn("without progress (run.hang_timeout_s)", output)


if __name__ == "__main__":
    unittest.main()
