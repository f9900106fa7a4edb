"""Balance, bubbles and HBP's ratios: what `check`, `plan` and `pack` say of a deck and what the
report finds in the trace of the same simulated steps."""
import json
import subprocess
import unittest

import support
import synthetic
from synthetic import Rank, batch_plan

MODEL = """[model]
layers = 2
hidden = 16
intermediate = 32
query_heads = 2
kv_heads = 1
head_dim = 8
vocabulary = 64
[data]
source = "lengths"
"""
CHUNKS = """[mesh]
dp = 2
[batching]
method = "chunkflow"
global_samples = 9
[chunk]
tokens = 256
k = 1
[pipeline]
schedule = "state_aware_1f1b"
"""
COSTS = """[costs]
forward_token_s = 1e-6
forward_pair_s = 1e-8
ring_hop_token_s = 4e-6
"""
PACKS = '[batching]\nmethod = "packed"\nmicro_batch_tokens = 256\n'
GROUPS = """[mesh]
dp = 2
[batching]
method = "hbp"
groups = [16, 240]
group_ranks = [1, 2]
global_samples = 2
shuffle = false
"""
SAB = """[mesh]
dp = 2
[batching]
method = "sab"
micro_batch_tokens = 256
global_samples = 8
[costs]
forward_token_s = 1e-6
forward_pair_s = 1e-8
forward_micro_batch_s = 1e-3
"""


@unittest.skipUnless(support.PROGRAM, "BALLAST_PROGRAM names no ballast")
class SameFigures(support.RunTest):
    def ballast(self, command, deck, lengths, *arguments):
        path, twin = self.folder / "deck.toml", self.folder / f"{command}.json"
        path.write_text(f"{MODEL}lengths = {lengths}\n{deck}")
        line = [support.PROGRAM, command, path, *arguments, "--json", twin]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        return json.loads(twin.read_text())

    def both(self, name, deck, lengths, *arguments):
        """Of `check`, and of the report of the trace that it writes."""
        run = self.folder / name
        told = self.ballast("check", deck, lengths, *arguments, "--trace", run)
        self.report(run, draw=False)
        return told["simulated"], self.metrics(run / "report")

    def test_bubbles_and_balance(self):
        short = [2048, 256, 300, 17, 256, 256, 111, 256, 256]
        for name, deck, lengths, keys in (
            ("recomputed", CHUNKS, short, ()),
            ("stages", CHUNKS, short, ("mesh.pp=2",)),
            ("layers again", CHUNKS, short, ("mesh.pp=2", "recompute.mode=full")),
            ("parts again", PACKS, [256, 90], ("recompute.mode=selective",)),
            ("priced", CHUNKS + COSTS, short, ("mesh.pp=2",)),
            ("ring", PACKS + COSTS, [256, 256], ("mesh.cp_inner=4", "batching.global_samples=2")),
            ("idle", PACKS + COSTS, [256, 90], ("mesh.dp=3", "batching.global_samples=2")),
        ):
            told, found = self.both(name, deck, lengths, *keys, "run.steps=1")
            for figure in ("bubble_ratio", "load_balance"):
                self.assertAlmostEqual(told[figure], found[figure], 6, f"{name} {figure}")

    def test_bubbles_of_several_steps_are_of_all_of_them_together(self):
        lengths = [2048, 256, 300, 17, 256, 256, 111, 256, 256, 9, 9, 40]
        keys = ["mesh.pp=2", "batching.global_samples=3", "run.steps=4", "optimizer.zero=1"]
        keys += ["batching.method=chunkflow", "chunk.tokens=256", "chunk.k=1", "mesh.dp=2"]
        keys += ["pipeline.schedule=state_aware_1f1b", "recompute.mode=none", "chunk.offload=none"]
        deck = CHUNKS + COSTS
        told, found = self.both("steps", deck, lengths, *keys, "--steps", "4")
        self.assertAlmostEqual(told["bubble_ratio"], found["bubble_ratio"], 6)
        planned = self.ballast("plan", deck, lengths, *keys, "pipeline.plan_steps=4")
        self.assertAlmostEqual(planned["bubble_ratio"], told["bubble_ratio"], 9)
        tuned = self.ballast("tune", deck, lengths, *keys, "--steps", "4")["best"]
        self.assertEqual({plan["steps"] for plan in tuned}, {4})
        nearest = min(abs(plan["bubble_ratio"] - told["bubble_ratio"]) for plan in tuned)
        self.assertLess(nearest, 1e-9)
        first, _ = self.both("first", deck, lengths, *keys, "--steps", "1")
        self.assertGreater(abs(first["bubble_ratio"] - told["bubble_ratio"]), 0.01)

    def test_communication_ratio_is_a_quotient_of_sums(self):
        lengths = [240, 240, 8, 8]
        _, found = self.both("groups", GROUPS, lengths, "run.steps=2", "--steps", "2")
        told = self.ballast("pack", GROUPS, lengths)
        self.assertAlmostEqual(told["cr"], found["cr"], 9)
        self.assertAlmostEqual(found["cr"], 480 / 496, 9)

    def test_packs_of_sab_are_those_that_train(self):
        lengths = [1, 17, 33, 64, 64, 13, 250, 7, 1, 90, 5, 8, 3, 150, 44, 71]
        planned = self.ballast("pack", SAB, lengths, "--plans", "2")
        self.assertEqual(planned["packs"], sum(len(p["micro_batches"]) for p in planned["plans"]))


class KnownPlans(support.RunTest):
    """Ratios of plans by hand."""

    def metrics_of(self, ranks, plan, **deck):
        for r in ranks:
            r.event("step", 0, 10, step=0)
            r.plan("step", 1, 0, plan)
        run = synthetic.write(self.folder / "r", ranks, **deck)
        self.report(run, draw=False)
        return self.metrics(run / "report")

    def test_hbp_pads_to_the_smallest_group_that_holds_a_micro_batch(self):
        """8 of 16 tokens are empty, and none of 240."""
        deck = '[batching]\nmethod = "hbp"\ngroups = [16, 240]\ngroup_ranks = [1, 1]\n'
        plan = batch_plan((0, 1, [8]), (0, 1, [240]))
        m = self.metrics_of([Rank(0, 1, deck=deck)], plan, deck=deck)
        self.assertAlmostEqual(m["pr"], 0.25)

    def test_ranks_that_share_a_micro_batch_have_a_part_of_its_tokens_each(self):
        """60 tokens over two ranks, and 10 and 20 of their own: 40 and 50, of which 10 of 2 x 50
        are spent waiting."""
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        plan = batch_plan((0, 2, [60]), (0, 1, [10]), (1, 1, [20]))
        plan["lanes"] = [{"micro_batches": [1, 0]}, {"micro_batches": [0, 2]}]
        self.assertAlmostEqual(self.metrics_of(ranks, plan)["dbr"], 0.1)


if __name__ == "__main__":
    unittest.main()
