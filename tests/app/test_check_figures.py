"""Figures of `ballast check` that follow from a deck by hand: what packs that ranks share count as,
what hops carry, what a rank keeps of the optimizer, all ranks' memory, simulated steps."""
import json
import re
import resource
import subprocess
import unittest

from runs import BALLAST, RunCase

LENGTHS = [1500, 100, 300, 2000, 500, 100, 1500, 300, 1500, 2000, 100, 300, 500, 1500, 100, 2000]
DECK = f"""[run]
seed = 1
steps = 2
precision = "bf16"
backend = "cuda"
[mesh]
dp = 4
cp_inner = 2
pp = 2
[model]
layers = 4
hidden = 64
intermediate = 128
query_heads = 4
kv_heads = 2
head_dim = 64
vocabulary = 512
[data]
source = "lengths"
lengths = {LENGTHS}
[batching]
method = "hbp"
groups = [512, 2048]
group_ranks = [1, 2]
micro_batch_tokens = 512
global_samples = 8
"""
TIMES = ["costs.forward_token_s=1e-6", "costs.forward_pair_s=1e-9"]  # which sab goes by
LAYER = 2 * 64 + 64 * (2 * 256 + 2 * 128) + 3 * 64 * 128  # norms, attention, MLP


class TraceFolder(RunCase):
    def test_a_folder_that_cannot_be_made_is_said_before_steps_are_simulated(self):
        bounds = ["--steps", "1000000", "--trace", "/proc/run"]  # steps of many hours
        said = self.run_ballast(1, "check", self.deck(), *bounds, status=1).stderr
        self.assertIn("choose another --trace", said)
        self.assertNotIn("trace.enabled", said)

    def test_a_full_disk_ends_a_trace_of_simulated_steps_with_one_error(self):
        deck = self.deck()
        for size in (3000, 60000, 100000, 800000):  # of a file; where HDF5 meets it differs

            def limit(size=size):
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

            line = [BALLAST, "check", deck, "--trace", self.out(str(size)), "--steps", "200"]
            done = subprocess.run(line, capture_output=True, text=True, preexec_fn=limit)
            self.assertEqual(done.returncode, 1, f"{size}: {done.stderr}")
            self.assertIn("no trace of simulated steps", done.stderr)
            self.assertIn("space and rights", done.stderr)


class CheckFigures(RunCase):
    def check(self, *keys):
        deck, twin = self.out("deck.toml"), self.out("check.json")
        with open(deck, "w") as file:
            file.write(DECK)
        done = self.run_ballast(1, "check", deck, *keys, "--json", twin)
        with open(twin) as file:
            return json.load(file), done.stdout

    def test_micro_batches_of_so_many_samples_of_any_length(self):
        for method in ("none", "sab", "lbb"):
            for together in (1, 2):
                facts, text = self.check(
                    f"batching.method={method}",
                    f"batching.micro_batch_samples={together}",
                    "batching.micro_batch_tokens=8192",
                    *TIMES,
                )
                self.assertEqual(facts["micro_batch_tokens"], together * 2000, method)
                self.assertEqual(facts["micro_batches"], 8 // (4 * together), method)
                # Ranks take samples in turn, or, by weight, one heavy one for many that are light.
                bound = "" if method == "none" else "at most "
                self.assertIn(f"\nschedule: {bound}{facts['micro_batches']} micro-batch", text)
                self.assertNotIn("packs are full", text)

    def test_no_planned_step_has_more_micro_batches_than_are_said(self):
        """Two heavy packs fill as much of two ranks as all others of the third."""
        keys = ["mesh.cp_inner=1", "mesh.dp=3", "data.lengths=[2000,2000,120,120,120,120,120]"]
        keys += ["batching.global_samples=7", "batching.micro_batch_tokens=128"]
        keys += ["pipeline.schedule=gpipe", "batching.groups=[128,2000]"]
        keys += ["batching.group_ranks=[]", "batching.select_ranks=[1]", "chunk.tokens=128", *TIMES]
        methods = ("packed", "hbp", "sab", "lbb", "balanced", "chunkflow", "none", "random")
        for method in methods:
            for size in ([], ["batching.global_samples=0", "batching.global_tokens=4600"]):
                facts, text = self.check(*keys, *size, f"batching.method={method}", "--plans", "2")
                lanes = [len(lane["micro_batches"]) for p in facts["plans"] for lane in p["lanes"]]
                said = facts["micro_batches"]
                self.assertLessEqual(max(lanes), said, method)
                if method in ("packed", "hbp", "sab", "lbb"):
                    self.assertEqual((max(lanes), said), (5, 5), method)
                    self.assertEqual(facts["stages"][0]["live_micro_batches"], 5, method)
                    self.assertIn("schedule: about 5 micro-batches a step on the fullest", text)
                elif not size:
                    bound = "about" if method in ("balanced", "chunkflow") else "at most"
                    self.assertIn(f"schedule: {bound} {said} micro-batches", text, method)

    def test_a_remedy_for_idle_ranks_names_a_key_that_is_read(self):
        keys = ["mesh.cp_inner=1", "mesh.pp=1", "batching.global_samples=2", "chunk.tokens=512"]
        keys += ["batching.group_ranks=[]", "batching.micro_batch_samples=2"]
        keys += ["batching.packing=isf"]
        for method, way in (
            ("packed", "fewer batching.micro_batch_tokens"),
            ("chunkflow", "fewer chunk.tokens"),
            ("hbp", "shorter batching.groups"),
            ("none", "fewer batching.micro_batch_samples"),
        ):
            for lengths in ([100, 100], [2000]):  # of one sample no part runs elsewhere
                _, text = self.check(
                    *keys,
                    f"batching.method={method}",
                    f"data.lengths={lengths}",
                    f"batching.global_samples={len(lengths)}",
                )
                told = re.search(r"3 idle, load balance .*; evener with (.*)", text)[1].split(
                    ", or "
                )
                ways = [each for each in told if each.split()[0] in ("fewer", "shorter")]
                self.assertEqual(ways, [way] if len(lengths) == 2 else [], f"{method} {lengths}")
                one = lengths == [2000] and method != "chunkflow" or len(lengths) == 2
                self.assertEqual("with 1 micro-batch;" in text, one, f"{method} {lengths}")

    def test_a_curriculum_that_is_cut_short_is_told(self):
        short = ["batching.method=packed", "curriculum.steps=3", "curriculum.max_tokens=100"]
        for samples, said in (
            (4, "the first step takes samples of at most 100 tokens alone (curriculum.steps = 3: "),
            (8, "no step takes samples of at most 100 tokens alone (curriculum.steps = 3: "),
            (1, ""),
        ):
            keys = [*short, f"batching.global_samples={samples}"]
            _, text = self.check(*keys)
            packed = self.run_ballast(1, "pack", self.out("deck.toml"), *keys).stdout
            for told in (text, packed):
                self.assertEqual(told.count("note: curriculum:"), 1 if said else 0, told)
                self.assertIn(said, told)

    def test_packs_that_two_replicas_share(self):
        facts, text = self.check()
        # 8 samples on 4 replicas, each sample on two of them.
        self.assertEqual(facts["micro_batches"], 8 * 2 // 4)
        # Of 2048 tokens half, of two heads one: two rings of two.  Gradients travel in fp32.
        elements = 2 * 1024 * 1 * 64
        self.assertEqual(facts["ring"]["kv_hop_bytes"], 2 * elements)
        self.assertEqual(facts["ring"]["dkv_hop_bytes"], 4 * elements)
        # The embedding before the first layers; the last norm and the head after the last ones.
        stages = [2 * LAYER + 512 * 64, 2 * LAYER + 64 + 512 * 64]
        self.assertEqual([stage["parameters"] for stage in facts["stages"]], stages)
        shards = [stage["shard_parameters"] for stage in facts["stages"]]
        self.assertEqual(shards, [size // (4 * 2) for size in stages])
        # Each stage is held by 4 x 2 ranks.
        total = sum(8 * stage["memory"]["total_bytes"] for stage in facts["stages"])
        told = re.search(r"all 16 ranks at most ([\d.]+) GiB", text)
        self.assertAlmostEqual(float(told[1]), total / 2**30, delta=0.06)

    def test_a_rate_of_simulated_steps_is_of_their_whole_time(self):
        facts, _ = self.check("--steps", "2", "--plans", "2")
        simulated = facts["simulated"]
        self.assertEqual(simulated["steps"], 2)
        tokens = [
            sum(end - begin for m in plan["micro_batches"] for _, begin, end, _ in m["segments"])
            for plan in facts["plans"]
        ]
        self.assertEqual(sum(tokens), sum(LENGTHS))
        rate = sum(tokens) / (2 * simulated["step_s"])
        self.assertAlmostEqual(simulated["tokens_per_s"] / rate, 1, places=9)

    def test_a_sample_that_a_pattern_computes_whole_shows_no_drift(self):
        keys = ["attention.pattern=moba", "attention.moba_block=64", "attention.moba_top_k=2"]
        keys += ["trace.recall_every=1", "trace.recall_drift=true", "data.validation_share=0.25"]
        keys += ["batching.method=packed", "run.backend=host", "run.precision=fp32"]
        lengths = "data.lengths=[{0},{0},{0},{0},{0},{0},{0},{0}]"
        self.check(*keys, lengths.format(129))
        done = self.run_ballast(
            1, "check", self.out("deck.toml"), *keys, lengths.format(128), status=1
        )
        self.assertIn("needs a held-out sample of more than 128 tokens", done.stderr)


if __name__ == "__main__":
    unittest.main()
