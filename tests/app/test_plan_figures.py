"""Figures of `ballast plan` and `ballast check` that must agree: memory of chunks and of packs,
times of sparse packs, and what a profile table adds to the notes."""
import json
import os
import random
import unittest

from runs import RunCase

SEED = int(os.environ.get("BALLAST_TEST_SEED", "20261201"))
MODEL = """
[model]
layers = 4
hidden = 256
intermediate = 512
query_heads = 4
kv_heads = 2
head_dim = 64
vocabulary = 2000
"""
DATA = """
[data]
source = "distribution"
samples = 200
min_tokens = 64
bin_tokens = [1024, 4096, 16384]
bin_share = [0.6, 0.3, 0.1]
"""
COSTS = """
[costs]
forward_token_s = 1e-6
forward_pair_s = 1e-9
"""
CHUNKS = f"""[run]
steps = 1000
[mesh]
pp = 2
{MODEL}{DATA}
[batching]
method = "chunkflow"
global_tokens = 65536
[chunk]
tokens = 1024
k = 1
search_tokens = [1024]
search_k = [1, 4]
search_memory_gib = 4
[pipeline]
schedule = "state_aware_1f1b"
{COSTS}"""
GROUPS = f"""[run]
steps = 2
[mesh]
dp = 4
{MODEL}{DATA}
[batching]
method = "hbp"
micro_batch_tokens = 4096
global_tokens = 65536
select_lengths = [4096, 16384]
select_ranks = [1, 2]
select_refine = false
{COSTS}"""
PAIRS = f"""[run]
steps = 2
{MODEL}
[data]
source = "hdf5"
path = "nowhere.h5"
[batching]
method = "balanced"
micro_batch_tokens = 8192
global_tokens = 16384
[loss]
kind = "dpo"
[dpo]
reference = "neither.h5"
"""
PROFILED = """[run]
steps = 2
[model]
layers = 2
hidden = 64
intermediate = 96
query_heads = 4
kv_heads = 2
head_dim = 16
vocabulary = 64
[data]
source = "lengths"
lengths = [100, 200]
[batching]
method = "packed"
micro_batch_tokens = 256
global_samples = 4
[profile]
lengths = [128, 256]
recompute = ["none"]
repeats = 2
warmup = 1
held_out = 0
repair_limit = 100
largest_message = 65536
"""


class PlanFigures(RunCase):
    def facts(self, command, deck, *keys):
        path, twin = self.out("deck.toml"), self.out("twin.json")
        with open(path, "w") as file:
            file.write(deck)
        self.run_ballast(1, command, path, *keys, "--json", twin)
        with open(twin) as file:
            return json.load(file)

    def test_a_pair_of_chunk_and_k_takes_the_memory_that_check_says(self):
        for k in (1, 4):
            found = self.facts("plan", CHUNKS, f"chunk.search_k=[{k}]")
            checked = self.facts("check", CHUNKS, *found["best_overrides"])
            full = max(stage["full_memory"]["total_bytes"] for stage in checked["stages"])
            # `check` looks at many whole steps too, which may leave larger pools.
            self.assertLessEqual(found["search"][0]["fullest_rank_bytes"], full)
            self.assertGreater(found["search"][0]["fullest_rank_bytes"], 0.85 * full)

    def test_a_pack_takes_the_memory_that_check_says(self):
        for keys in (
            ["lora.rank=8"],
            ["optimizer.zero=2", "optimizer.bucket_bytes=65536"],
        ):
            trials = self.facts("plan", GROUPS, *keys)["trials"]
            trial = next(t for t in trials if t["pack_tokens"] == 16384 and t["ranks"] == 1)
            groups = [
                "batching.groups=[16384]",
                "batching.group_ranks=[1]",
                f"batching.group_recompute=[{trial['recompute_layers']}]",
            ]
            checked = self.facts("check", GROUPS, *keys, *groups, "--elsewhere")
            full = checked["stages"][0]["full_memory"]["total_bytes"]
            # Before full packs come shorter ones, whose buffers may stay beside larger ones.
            self.assertLessEqual(full, trial["bytes"], keys)
            self.assertLess(trial["bytes"], 1.05 * full, keys)

    def test_check_counts_no_more_for_selected_groups_than_their_limit(self):
        """Packs of several groups share a step, and samples' packs are not full."""
        numbers = random.Random(SEED)
        limited = 0
        for _ in range(12):
            case = [
                f"mesh.dp={numbers.choice([2, 4, 8])}",
                f"run.seed={numbers.randrange(1000)}",
                f"model.hidden={numbers.choice([64, 128])}",
                f"optimizer.zero={numbers.choice([0, 1, 2])}",
                f"batching.select_refine={numbers.choice(['true', 'false'])}",
                "batching.select_ranks=[]",
                "batching.select_lengths="
                + numbers.choice(["[2048,16384]", "[4096,8192,16384]", "[16384]"]),
            ]
            free = self.facts("plan", GROUPS, *case)
            limit = free["bytes"] * numbers.uniform(0.85, 0.99)
            found = self.facts("plan", GROUPS, *case, f"batching.select_memory_gib={limit / 2**30}")
            groups = [
                f"batching.{key}={found[key]}".replace(" ", "")
                for key in ("groups", "group_ranks", "group_recompute")
            ]
            checked = self.facts("check", GROUPS, *case, *groups)["largest_rank_bytes"]
            with self.subTest(case=case, limit=limit, groups=groups):
                self.assertLessEqual(checked, found["bytes"] * 1.0001)
                self.assertLessEqual(found["bytes"], limit)
                self.assertGreater(checked, 0.85 * found["bytes"])
            limited += found["groups"] != free["groups"] or any(found["group_recompute"])
        self.assertGreater(limited, 6)

    def test_sparse_packs_take_the_time_of_their_budget(self):
        times = []
        for keys in (["attention.moba_top_k=2"], ["attention.moba_top_k=8"], []):
            pattern = "moba" if keys else "dense"
            trials = self.facts("plan", GROUPS, f"attention.pattern={pattern}", *keys)["trials"]
            times.append(trials[0]["token_s"])
        self.assertLess(times[0], 0.9 * times[1])
        self.assertLess(times[1], 0.99 * times[2])

    def test_pairs_of_another_machine_are_checked(self):
        self.facts("check", PAIRS, "--elsewhere")

    def test_a_table_adds_to_the_notes(self):
        without = self.facts("check", PROFILED)["notes"]
        self.assertTrue(any("global_samples" in note for note in without), without)
        table = self.out("table.h5")
        self.facts("profile", PROFILED, f"profile.table={table}", "-d", self.out("run"))
        taken = f"profile.table={table}"
        notes = self.facts("check", PROFILED, taken)["notes"]
        self.assertLessEqual(set(without), set(notes))
        self.assertFalse(any("not stated" in note for note in notes), notes)
        for key, told in (("model.vocabulary=96", "vocabulary of"), ("lora.rank=4", "adapters of")):
            notes = self.facts("check", PROFILED, taken, key, "--elsewhere")["notes"]
            self.assertTrue(any("measured on something else" in n and told in n for n in notes))

    def test_tune_chooses_groups_and_says_how_many_plans_it_listed(self):
        deck = os.path.join(os.environ["BALLAST_ROOT"], "inputs", "tune.toml")
        best, twin = self.out("best.toml"), self.out("tune.json")
        keys = ["batching.method=hbp", "--ranks", "8", "--trials", "6", "--steps", "1"]
        keys += ["--list", "3", "--write", best, "--json", twin]
        self.run_ballast(1, "tune", deck, *keys)
        with open(twin) as file:
            facts = json.load(file)
        self.assertLessEqual(facts["trials"], 6)
        for plan in facts["best"]:
            self.assertIn("hbp", plan["plan"])
        with open(best) as file:
            self.assertIn(" --list 3", file.read())


if __name__ == "__main__":
    unittest.main()
