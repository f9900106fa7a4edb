"""Whole-program tests of sparse attention: the same losses on every mesh, ring and layout."""
import json
import re
import unittest
import zlib
from pathlib import Path

from runs import RunCase

# (ranks, dp, cp_outer, cp_inner, layout, stripe)
MESHES = [(1, 1, 1, 1, "zigzag", 64), (2, 1, 1, 2, "striped", 128), (4, 1, 2, 2, "zigzag", 64)]


def head_table(folder, layers, heads, rule):
    """A table for attention.heads: rule(layer, head) is an object of it."""
    rules = [[rule(layer, head) for head in range(heads)] for layer in range(layers)]
    path = Path(folder, f"heads-{layers}-{heads}-{abs(hash(str(rules)))}.json")
    path.write_text(json.dumps({"layers": layers, "heads": heads, "rules": rules}))
    return str(path)


MIXED = [
    {"pattern": "a_shape", "sink": 64, "window": 128},
    {"pattern": "vertical_slash", "columns": 10, "slashes": 1},
    {"pattern": "block_sparse", "blocks": 2},
    {"pattern": "dense"},
]


class Sparse(RunCase):
    def mixed_heads(self):
        """The rule of every kind, other heads in other layers."""
        folder = Path(self.out("heads"))
        folder.mkdir(exist_ok=True)
        return head_table(folder, 2, 4, lambda layer, head: MIXED[(layer + head) % 4])

    def losses_of(self, mesh, *overrides):
        ranks, dp, outer, inner, layout, stripe = mesh
        run = self.out("-".join(str(m) for m in mesh) + str(abs(hash(overrides))))
        self.run_ballast(
            ranks,
            "train",
            self.deck(dp=dp, cp_outer=outer, cp_inner=inner, steps=2, every=0),
            "-d",
            run,
            "run.precision=fp64",
            f"ring.layout={layout}",
            f"ring.stripe={stripe}",
            "batching.micro_batch_tokens=640",
            *overrides,
        )
        return [float(v) for v in self.losses(run).values()]

    def expect_same_on_every_mesh(self, *overrides):
        reference = self.losses_of(MESHES[0], *overrides)
        self.assertEqual(len(reference), 2)
        for mesh in MESHES[1:]:
            for a, b in zip(reference, self.losses_of(mesh, *overrides)):
                self.assertAlmostEqual(a, b, delta=2e-6, msg=str(mesh))
        return reference

    def test_moba_of_every_block_is_dense(self):
        moba = ["attention.pattern=moba", "attention.moba_block=64", "attention.moba_top_k=40"]
        dense = self.losses_of(MESHES[0], "attention.pattern=dense")
        chunks = ["batching.method=chunkflow", "chunk.tokens=128", "chunk.k=1"]
        for found in (
            self.expect_same_on_every_mesh(*moba),
            self.losses_of(MESHES[0], *moba, *chunks),
        ):
            for a, b in zip(dense, found):
                self.assertAlmostEqual(a, b, delta=2e-6)

    def test_generated_index(self):
        generated = [
            "attention.index=generated",
            "attention.generated_band_tokens=64",
            "attention.generated_columns=8",
        ]
        sparse = self.expect_same_on_every_mesh(*generated, "attention.generated_density=0.3")
        for a, b in zip(
            sparse,
            self.losses_of(
                (4, 1, 1, 2, "striped", 64),
                *generated,
                "attention.generated_density=0.3",
                "mesh.sp=2",
            ),
        ):
            self.assertAlmostEqual(
                a, b, delta=2e-6, msg="each Ulysses rank has its own heads' patterns"
            )
        dense = self.losses_of(MESHES[0])
        self.assertNotEqual(sparse, dense)
        for a, b in zip(
            dense, self.losses_of(MESHES[0], *generated, "attention.generated_density=1")
        ):
            self.assertAlmostEqual(a, b, delta=2e-6, msg="density 1 is dense")

    def test_patterns(self):
        patterns = {
            "vertical_slash": [
                "attention.vertical_share=0.5",
                "attention.slash_share=0.5",
                "attention.last_q=32",
            ],
            "vertical_slash attention.selection=causal": [
                "attention.stretch=64",
                "attention.vertical_share=0.3",
                "attention.slash_share=0.3",
                "attention.last_q=32",
            ],
            "moba": ["attention.moba_block=64", "attention.moba_top_k=2"],
            "xattention": ["attention.xattention_block=64", "attention.xattention_threshold=0.3"],
            "by_head": [f"attention.heads={self.mixed_heads()}", "attention.last_q=32"],
            "flexprefill": [
                "attention.flex_share=0.4",
                "attention.flex_threshold=0.15",
                "attention.last_q=32",
            ],
        }
        dense_table = head_table(self.out("heads"), 2, 4, lambda layer, head: MIXED[3])
        full = {
            "vertical_slash": "attention.slash_share=1",
            "vertical_slash attention.selection=causal": "attention.slash_share=1",
            "moba": "attention.moba_top_k=1000",
            "xattention": "attention.xattention_threshold=1",
            "by_head": f"attention.heads={dense_table}",
            "flexprefill": "attention.flex_share=1",
        }
        dense = self.losses_of(MESHES[0])
        for pattern, settings in patterns.items():
            with self.subTest(pattern):
                settings = f"attention.pattern={pattern}".split() + settings
                sparse = self.expect_same_on_every_mesh(*settings)
                self.assertNotEqual(sparse, dense)
                for a, b in zip(
                    dense,
                    self.losses_of(MESHES[0], *settings, full[pattern]),
                ):
                    self.assertAlmostEqual(a, b, delta=2e-6, msg="a full budget is dense")

    def test_trace_holds_budgets_and_pairs(self):
        import h5py

        run = self.out("trace")
        self.run_ballast(
            2,
            "train",
            self.deck(dp=1, cp_inner=2, steps=1, every=0),
            "-d",
            run,
            "attention.pattern=vertical_slash",
            "attention.max_columns=2",
            "attention.vertical_share=0.5",
            "attention.slash_share=0.5",
            "attention.last_q=32",
        )
        rows, flops = [], 0
        for rank in range(2):
            with h5py.File(f"{run}/trace/trace_{rank:05}.h5") as f:
                rows.append(f["budgets"][:])
                events = f["events"][:]
                names = {v: k for k, v in h5py.check_enum_dtype(f["events"].dtype["kind"]).items()}
                flops += sum(
                    e["flops"] for e in events if names[int(e["kind"])] == "attention_forward"
                )
        self.assertEqual(len(rows[0]), len(rows[1]))
        self.assertEqual(
            {(r["layer"], r["head"]) for r in rows[0]},
            {(layer, head) for layer in range(2) for head in range(4)},
        )
        for mine, other in zip(*rows):
            self.assertEqual(mine["budget"], other["budget"], "ranks of a ring choose alike")
            self.assertEqual(mine["overflow"], other["overflow"])
        self.assertGreater(sum(r["overflow"] for r in rows[0]), 0)
        computed, visible = (
            sum(r[name] for part in rows for r in part)
            for name in ("computed_pairs", "visible_pairs")
        )
        self.assertLess(computed, visible)
        self.assertAlmostEqual(
            flops, 4 * 8 * computed, delta=1e-6 * flops
        )  # 4 FLOPs a pair and head dim, one row a head

    def test_recall_is_measured_every_so_many_steps(self):
        """In log, JSON and trace, of the first and third step, the same on one rank, on two that
        share the samples out and on four."""
        import h5py

        found = {}
        for ranks, mesh in ((1, {}), (2, {"dp": 2}), (4, {"cp_inner": 2, "sp": 2})):
            run = self.out(f"recall-{ranks}")
            self.run_ballast(
                ranks,
                "train",
                self.deck(steps=3, every=0, **{"dp": 1, **mesh}),
                "-d",
                run,
                "--json",
                f"{run}.json",
                "attention.pattern=moba",
                "attention.moba_block=64",
                "attention.moba_top_k=1",
                "trace.recall_every=2",
            )
            log = Path(run, "log.txt").read_text()
            found[ranks] = re.findall(r"recall=([\d.]+)\s+recall_interval=([\d.]+)", log)
            self.assertEqual(len(found[ranks]), 2, log)
            summary = json.loads(Path(f"{run}.json").read_text())
            self.assertAlmostEqual(summary["recall"], float(found[ranks][1][0]), delta=6e-6)
            heads = set()
            for rank in range(ranks):
                with h5py.File(f"{run}/trace/trace_{rank:05}.h5") as f:
                    text = f["plan_text"][:].tobytes()
                    for p in f["plans"][:]:
                        if p["kind"].startswith(b"recall"):
                            part = text[p["begin"] : p["begin"] + p["bytes"]]
                            heads |= {(r[0], r[3], r[4]) for r in json.loads(zlib.decompress(part))}
            self.assertEqual(
                heads,
                {(step, layer, head) for step in (1, 3) for layer in range(2) for head in range(4)},
            )
        self.assertLess(float(found[1][0][0]), 1)
        # The first step's weights are equal; the third's follow sums in another order.
        for ranks in (2, 4):
            self.assertAlmostEqual(float(found[1][0][0]), float(found[ranks][0][0]), delta=2e-5)

    def test_drift_is_measured_on_a_held_out_sample(self):
        """From the second measured step on; nothing drifts where weights stand still."""
        import h5py

        found = {}
        placed = ["batching.method=balanced", "batching.micro_batch_tokens=160"]
        for name, ranks, mesh, rate, more in [
            ("still", 1, {}, 1e-30, []),
            ("alone", 1, {}, 0.05, []),
            ("ring", 4, {"cp_inner": 2, "sp": 2}, 0.05, []),
            ("joined", 2, {"dp": 2}, 0.05, placed),  # each has half of the heads
        ]:
            run = self.out(f"drift-{name}")
            self.run_ballast(
                ranks,
                "train",
                self.deck(steps=5, every=0, **{"dp": 1, **mesh}),
                "-d",
                run,
                "attention.pattern=vertical_slash",
                "attention.vertical_share=0.3",
                "attention.slash_share=0.3",
                "attention.last_q=32",
                "data.validation_share=0.5",
                "data.min_tokens=200",
                "trace.recall_every=2",
                "trace.recall_drift=true",
                f"optimizer.learning_rate={rate}",
                *more,
            )
            rows = []
            for rank in range(ranks):
                with h5py.File(f"{run}/trace/trace_{rank:05}.h5") as f:
                    text = f["plan_text"][:].tobytes()
                    for p in f["plans"][:]:
                        if p["kind"].startswith(b"drift"):
                            part = text[p["begin"] : p["begin"] + p["bytes"]]
                            rows += json.loads(zlib.decompress(part))
            self.assertEqual(
                {tuple(row[:3]) for row in rows},
                {(step, layer, head) for step in (3, 5) for layer in range(2) for head in range(4)},
            )
            found[name] = {tuple(row[:3]): row[4:] for row in rows}
            log = Path(run, "log.txt").read_text()
            self.assertEqual(len(re.findall(r" drift=", log)), 2, log)
        for now, before in found["still"].values():
            self.assertEqual(now, before)
        self.assertTrue(any(now != before for now, before in found["alone"].values()))
        for key, values in found["alone"].items():
            for mesh in ("ring", "joined"):
                for a, b in zip(values, found[mesh][key]):
                    self.assertAlmostEqual(a, b, delta=2e-2, msg=f"{mesh} {key}")

    def test_recorded_indexes_are_replayed(self):
        """The choices of a run, read back over other meshes, give its first loss; `plan` balances
        them."""
        slash = [
            "attention.vertical_share=0.3",
            "attention.slash_share=0.3",
            "attention.last_q=32",
            "data.max_tokens=0",  # so that hardly two samples have the same length
            "batching.method=none",
            "batching.micro_batch_tokens=1024",
            "batching.global_tokens=2000",
            "run.precision=fp64",
        ]
        for selection in ("last", "causal"):
            run = self.out(f"recording-{selection}")
            deck = self.deck(dp=1, cp_inner=1, steps=1, every=0)
            choose = [
                "attention.pattern=vertical_slash",
                f"attention.selection={selection}",
                *(["attention.stretch=64"] if selection == "causal" else []),
            ]
            self.run_ballast(1, "train", deck, "-d", run, "trace.indexes_every=1", *choose, *slash)
            rows = [
                json.loads(line)
                for line in Path(run, "indexes", "rank_00000.jsonl").read_text().splitlines()
            ]
            self.assertEqual(
                {(r["layer"], r["head"]) for r in rows},
                {(layer, head) for layer in range(2) for head in range(4)},
            )
            self.assertGreater(max(len(r["stretches"]) for r in rows), selection == "causal")
            replay = ["attention.index=recorded", f"attention.recorded={run}/indexes", *slash[3:]]
            expected = list(self.losses(run).values())[0]
            for ranks, mesh in ((1, {}), (2, {"cp_inner": 2}), (4, {"cp_inner": 2, "sp": 2})):
                again = self.out(f"replay-{selection}-{ranks}")
                deck = self.deck(steps=1, every=0, **{"dp": 1, **mesh})
                self.run_ballast(ranks, "train", deck, "-d", again, *replay)
                found = list(self.losses(again).values())[0]
                self.assertAlmostEqual(float(found), float(expected), delta=2e-6)
            if selection == "last":
                plan = self.run_ballast(1, "plan", deck, "mesh.cp_inner=4", "mesh.sp=1", *replay)
                self.assertIn("recorded", plan.stdout)
        replay = ["-d", self.out("none"), "attention.index=recorded", "attention.recorded=none"]
        missing = self.run_ballast(1, "train", self.deck(dp=1), *replay, status=None)
        self.assertIn("no folder of indexes", missing.stderr)

    def test_placement_cuts_samples_between_stretches(self):
        """Chunks of a sample compute what the whole one does: they begin with a stretch."""
        causal = [
            "attention.pattern=vertical_slash",
            "attention.selection=causal",
            "attention.stretch=128",
            "attention.last_q=32",
            "attention.vertical_share=0.5",
            "attention.slash_share=0.3",
            "data.max_tokens=900",
            "batching.method=balanced",
            "batching.global_tokens=3000",
            "run.precision=fp64",
        ]
        found = {}
        for name, ranks, mesh, tokens in [
            ("whole", 1, {}, 1024),
            ("cut", 1, {}, 448),
            ("stages", 2, {"stages": 2}, 320),
            ("ring", 2, {"cp_inner": 2}, 448),
        ]:
            stages = f"mesh.pp={mesh.pop('stages', 1)}"
            run, deck = self.out(name), self.deck(steps=2, every=0, **{"dp": 1, **mesh})
            micro_batch = f"batching.micro_batch_tokens={tokens}"
            self.run_ballast(ranks, "train", deck, "-d", run, micro_batch, stages, *causal)
            found[name] = [float(loss) for loss in self.losses(run).values()]
        for name, losses in found.items():
            for loss, expected in zip(losses, found["whole"], strict=True):
                self.assertAlmostEqual(loss, expected, delta=1e-5, msg=name)

    def test_leak(self):
        """Later tokens change nothing before them under dense, moba and causal selection; the
        paper's form of vertical_slash and xattention choose by them."""
        slash = [
            "attention.pattern=vertical_slash",
            "attention.last_q=32",
            "attention.vertical_share=0.5",
            "attention.slash_share=0.3",
        ]
        causal = [*slash, "attention.selection=causal", "attention.stretch=64"]
        moba = ["attention.pattern=moba", "attention.moba_block=64", "attention.moba_top_k=2"]
        xattention = ["attention.pattern=xattention", "attention.xattention_threshold=0.3"]
        table = head_table(self.out(""), 2, 4, lambda layer, head: MIXED[(layer + head) % 4])
        by_head = ["attention.pattern=by_head", f"attention.heads={table}", "attention.last_q=32"]
        shapes = head_table(self.out(""), 2, 4, lambda layer, head: MIXED[3 * (head % 2)])
        windows = [*by_head[:1], f"attention.heads={shapes}", *by_head[2:]]
        flex = ["attention.pattern=flexprefill", "attention.last_q=32", "attention.flex_share=0.4"]
        long = ["data.max_tokens=900", "batching.micro_batch_tokens=1000"]
        chunks = ["batching.method=chunkflow", "chunk.tokens=128"]
        dense = {}  # tokens before the cuts
        for ranks, mesh, leaks, settings in [
            (1, {}, False, ["attention.pattern=dense"]),
            (1, {}, False, ["attention.pattern=dense", *long]),
            (2, {"cp_inner": 2}, False, moba),
            (4, {"cp_outer": 2, "cp_inner": 2}, False, causal),
            (2, {"sp": 2}, False, causal),
            (2, {"cp_inner": 2}, False, [*causal, *chunks]),
            (2, {}, False, [*causal, "mesh.pp=2"]),
            (2, {"cp_inner": 2}, False, [*causal, *long]),
            (2, {"cp_inner": 2}, True, [*slash, *long]),
            (1, {}, True, [*xattention, *long, "align=1"]),
            (2, {"cp_inner": 2}, False, windows),
            (2, {"cp_inner": 2}, True, [*by_head, *long]),
            (4, {"cp_inner": 2, "sp": 2}, True, [*flex, *long]),
        ]:
            with self.subTest(ranks=ranks, settings=settings):
                found = self.out("leak.json")
                deck = self.deck(**{"dp": 1, **mesh})
                bench = ["bench", "leak", deck, "samples=8", "seed=3", "--json", found]
                self.run_ballast(ranks, *bench, *settings)
                leak = json.loads(Path(found).read_text())
                self.assertGreater(leak["tokens"], 500)
                if "align=1" not in settings:  # padding, which dense attention has not, is none
                    dense.setdefault(long[0] in settings, leak["tokens"])
                    self.assertEqual(leak["tokens"], dense[long[0] in settings])
                changed = [
                    leak[name]
                    for name in (
                        "changed_pairs_share",
                        "changed_tokens_share",
                        "largest_log_probability_change",
                    )
                ]
                if leaks:
                    self.assertGreater(min(changed), 0, leak)
                else:
                    self.assertEqual(changed, [0, 0, 0], leak)

    def test_heads_are_searched_and_recall_tells_them_apart(self):
        """`bench heads` finds the same table on one rank and on four; by it a run holds more of the
        attention than by one rule for all heads, on the samples that were searched."""
        import h5py

        tables = {}
        sample = ["data.max_tokens=900", "batching.micro_batch_tokens=1000", "run.precision=fp64"]
        sample.append("model.initial_std=0.3")  # so that heads attend to something
        for ranks, mesh in ((1, {}), (4, {"cp_inner": 2, "sp": 2})):
            out = self.out(f"searched-{ranks}.json")
            deck = self.deck(steps=1, every=0, **{"dp": 1, **mesh})
            search = [
                "bench",
                "heads",
                deck,
                f"out={out}",
                "pairs=0.5",
                "queries=sampled",
                "samples=6",
                *sample,
            ]
            done = self.run_ballast(ranks, *search, "attention.last_q=32")
            self.assertIn("highest mean share of the exact softmax", done.stdout)
            tables[ranks] = json.loads(Path(out).read_text())
        for a, b in zip(sum(tables[1]["rules"], []), sum(tables[4]["rules"], [])):
            self.assertEqual(a["pattern"], b["pattern"])
            self.assertAlmostEqual(a["recall"], b["recall"], delta=1e-6)
            self.assertAlmostEqual(a["pairs"], b["pairs"], delta=1e-6)
        found = tables[1]
        for single in found["single_patterns"]:
            self.assertGreaterEqual(found["recall"], single["recall"] - 1e-12)
        for head in sum(found["rules"], []):
            self.assertLessEqual(head["pairs"], 0.5)
        run = self.out("by-table")
        settings = ["attention.pattern=by_head", f"attention.heads={self.out('searched-1.json')}"]
        deck = self.deck(dp=1, steps=1, every=0)
        self.run_ballast(1, "train", deck, "-d", run, *settings, *sample, "attention.last_q=32")
        with h5py.File(f"{run}/trace/trace_00000.h5") as f:
            kinds = {(int(r["layer"]), int(r["head"])): int(r["kind"]) for r in f["budgets"][:]}
        names = ["dense", "a_shape", "vertical_slash", "block_sparse"]
        for (layer, head), kind in kinds.items():
            self.assertEqual(names[kind], found["rules"][layer][head]["pattern"])

    def test_heads_are_searched_over_data_parallel_ranks(self):
        """Ranks whose samples differ in length try the same candidates."""
        tables = []
        for ranks in (1, 2, 4):
            out = self.out(f"searched-{ranks}.json")
            deck = self.deck(dp=ranks, steps=1, every=0)
            search = ["bench", "heads", deck, f"out={out}", "queries=last", "samples=5"]
            search += ["data.max_tokens=900", "batching.micro_batch_tokens=1000", "pairs=0.5"]
            search += ["run.precision=fp64", "model.initial_std=0.3", "attention.last_q=32"]
            self.run_ballast(ranks, *search)
            tables.append(json.loads(Path(out).read_text())["rules"])
        for other in tables[1:]:
            for a, b in zip(sum(tables[0], []), sum(other, []), strict=True):
                for name, value in a.items():
                    check = self.assertAlmostEqual if isinstance(value, float) else self.assertEqual
                    check(b[name], value)

    def test_a_search_of_too_few_pairs_is_refused(self):
        """Before a table is written; what it says is enough is enough."""
        out = self.out("few.json")
        search = ["bench", "heads", self.deck(dp=1), f"out={out}", "samples=2"]
        search.append("attention.last_q=32")
        done = self.run_ballast(1, *search, "pairs=0.01", status=None)
        self.assertNotEqual(done.returncode, 0)
        enough = re.search(r"pairs = 0\.01 is too few.*; set (pairs=0\.\d+) or more", done.stderr)
        self.assertTrue(enough, done.stderr)
        self.assertFalse(Path(out).exists())
        self.run_ballast(1, *search, enough[1])
        table = json.loads(Path(out).read_text())
        for head in sum(table["rules"], []):
            self.assertLessEqual(head["pairs"], float(enough[1][6:]))

    def test_tables_that_do_not_fit_are_refused(self):
        """By `check` and `train` with the same words."""
        self.mixed_heads()
        fits = lambda layer, head: MIXED[3]
        cases = [
            ("attention.heads=", "needs attention.heads"),
            ("attention.heads=none.json", "no such file"),
            (
                f"attention.heads={head_table(self.out('heads'), 2, 8, fits)}",
                "2 layers and 8 query",
            ),
            (
                "attention.heads="
                + head_table(self.out("heads"), 2, 4, lambda l, h: {**MIXED[0], "window": 100}),
                "layer 0, head 0: window = 100",
            ),
            ("dst.enabled=true", "by_head"),
            ("attention.selection=causal", "by_head"),
        ]
        for setting, mention in cases:
            settings = [
                "attention.pattern=by_head",
                f"attention.heads={self.mixed_heads()}",
                setting,
            ]
            run = ["train", self.deck(dp=1), "-d", self.out("bad"), *settings]
            for command in (["check", *run[1:2], *settings], run):
                done = self.run_ballast(1, *command, status=None)
                self.assertNotEqual(done.returncode, 0, setting)
                self.assertIn(mention, done.stderr + done.stdout)

    def test_bad_budgets_are_refused(self):
        for setting, mention in [
            ("attention.vertical_share=0", "vertical_share"),
            ("attention.slash_share=1.5", "slash_share"),
            ("attention.last_q=0", "last_q"),
            ("attention.moba_block=100", "multiple of 64"),
            ("attention.xattention_stride=48", "divide 64"),
            ("ring.stripe=96", "stripes must not cut"),
            ("attention.stretch=96", "multiple of 64"),
            ("attention.last_q=4096", "above attention.stretch"),
            ("attention.pattern=xattention", "that block's own queries"),
            ("dst.enabled=true", "one budget"),
            ("chunk.tokens=64", "multiple of attention.stretch"),
            (
                "batching.method=balanced batching.micro_batch_tokens=512",
                "hold at least attention.stretch",
            ),
        ]:
            done = self.run_ballast(
                1,
                "train",
                self.deck(dp=1),
                "-d",
                self.out("bad"),
                "attention.pattern=vertical_slash",
                "attention.selection=causal",
                "batching.method=chunkflow",
                "chunk.tokens=1024",
                "ring.layout=striped",
                *setting.split(),
                status=None,
            )
            self.assertNotEqual(done.returncode, 0, setting)
            self.assertIn(mention, done.stderr)


if __name__ == "__main__":
    unittest.main()
