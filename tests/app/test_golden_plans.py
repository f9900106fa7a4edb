"""The plans of every deck against those of commit 909e272 (tests/golden/plans.json): hashes of the
first steps' batches and schedules, formed from step plans by the old rules."""
import functools
import json
import os
import shlex
import unittest

from runs import RunCase

ROOT = os.environ.get("BALLAST_ROOT", "")
WORD = (1 << 64) - 1
STEPS = 20


def batch_hash(step, lists):
    """Hash of 909e272's Batch: lists[rank] of (segments, sp, recompute layers, align)."""
    value, count = 0x243F6A8885A308D3, 0

    def add(x):
        nonlocal value, count
        y = value ^ ((x + 0x9E3779B97F4A7C15) & WORD)
        y = ((y ^ (y >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        y = ((y ^ (y >> 27)) * 0x94D049BB133111EB) & WORD
        count += 1
        value = ((y ^ (y >> 31)) + 0x632BE59BD9B4E019 * count) & WORD

    add(step)
    for micro_batches in lists:
        add(len(micro_batches))
        for segments, sp, recompute, align in micro_batches:
            for x in (len(segments), sp, recompute, align):
                add(x & WORD)
            for segment in segments:
                for x in segment:
                    add(x & WORD)
    return f"{value:016x}"


@functools.lru_cache(maxsize=4096)
def fnv(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & WORD
    return f"{value:016x}"


def own_lists(plan):
    """Lists of the ranks as batches had them, without places for others' micro-batches."""
    lists = [[] for _ in plan["lanes"]]
    for rank, lane in enumerate(plan["lanes"]):
        for place in lane["micro_batches"]:
            m = plan["micro_batches"][place]
            if m["first"] == rank:
                lists[rank].append(entry(m, m["segments"]))
    return lists


def entry(m, segments):
    return segments, m.get("ranks", 1), m.get("recompute_layers", -1), m.get("align", 1)


def round_lists(plan):
    """Likewise where ranks share packs: every rank has an entry in every round."""
    lists = [[] for _ in plan["lanes"]]
    rounds = {}
    for m in plan["micro_batches"]:
        rounds.setdefault(m["round"], {})[m["first"]] = m
    for _, placed in sorted(rounds.items()):
        any_of_them = next(iter(placed.values()))
        for rank, entries in enumerate(lists):
            m = placed.get(rank)
            entries.append(entry(m or any_of_them, m["segments"] if m else []))
    return lists


def one_f_one_b(micro_batches, stages):
    """Ops of 1F1B over standalone micro-batches, as texts of the golden rule, by stage."""
    result = []
    for s in range(stages):
        ops, done = [], 0

        def transfer(kind, m, peer, payload):
            if 0 <= peer < stages:
                ops.append(f"{kind} {m} 0 {peer} {payload}")

        for b in range(micro_batches):
            while done < min(micro_batches, b + 1 + stages - 1 - s):
                transfer("recv", done, s - 1, "activation")
                ops.append(f"forward {done} 0 -1 none")
                transfer("send", done, s + 1, "activation")
                done += 1
            transfer("recv", b, s + 1, "gradient")
            ops.append(f"backward {b} 0 -1 none")
            transfer("send", b, s - 1, "gradient")
        result.append(ops)
    return result


def planned_ops(plan, rank):
    """The same texts of a rank's schedule, by stage; collectives were no ops then."""
    result = []
    for columns in plan["schedules"][plan["lanes"][rank]["schedule"]]:
        count = len(columns["kind"])
        rows = zip(
            columns["kind"],
            columns["micro_batch"],
            columns.get("chunk", [0] * count),
            columns.get("peer", [-1] * count),
            columns.get("payload", [0] * count),
        )
        result.append(
            [
                f"{plan['op_kinds'][kind]} {m} {chunk} {peer} {plan['payloads'][payload]}"
                for kind, m, chunk, peer, payload in rows
                if plan["op_kinds"][kind] != "collective"
            ]
        )
    return result


def schedules_hash(plan, lists):
    text = []
    for rank, entries in enumerate(lists):
        text.append(f"dp {rank}")
        own = plan["lanes"][rank]["micro_batches"]
        if len(own) == len(entries):
            stages = planned_ops(plan, rank)
        else:  # places without work were scheduled too
            stages = one_f_one_b(len(entries), plan["mesh"]["pp"])
        for s, ops in enumerate(stages):
            text += [f"stage {s}", *ops]
    return fnv("\n".join(text) + "\n")


# What is planned otherwise than by commit 909e272, and why.
#
# Stages take times in proportion to their layers, and a deck that states no costs has built-in
# rates: orders of chunks are searched by those, no longer by 1 us a token on every stage.
ORDER = ("schedules",)
# Idle ranks of a round pass no empty micro-batch along.
IDLE = ("schedules",)
# Samples are weighed by the costs as stated, no longer by a table sampled from them.
WEIGHTS = ("batch", "schedules")
# Positions that align documents under sparse patterns count against a chunk's tokens.
PADDING = ("batch", "schedules")
# The search of zero-bubble orders stopped at a bound that weight halves can pass.
BOUND = ("schedules",)
NEEDLE_CHUNKS = " ".join(
    [
        "inputs/mtraining/needle.toml",
        "batching.method=chunkflow chunk.tokens=256 loss.normaliser=token_mean",
        "mesh.dp=2 mesh.pp=2 pipeline.schedule=state_aware_1f1b",
    ]
)
FIGURE8 = "inputs/chunkflow/figure8.toml"
CHUNKS = {"chunks": ORDER, "zero-bubble": ORDER, "chunks, offloaded": ORDER}
ZERO_BUBBLE = " pipeline.schedule=zero_bubble chunk.offload=host chunk.k=1"
CHANGED = {  # DECK OVERRIDE ...: {case, or * for the others: what differs}
    FIGURE8: CHUNKS,
    FIGURE8 + " mesh.pp=2 mesh.dp=2": CHUNKS,
    FIGURE8 + ZERO_BUBBLE: {"*": ORDER},
    NEEDLE_CHUNKS: {"dense": ORDER, "*": PADDING},
    "inputs/chunkflow/zero_bubble.toml": {f"zero-bubble, K {k}": BOUND for k in (1, 2, 4)},
    "inputs/hbp/speed.toml mesh.pp=2": {"hbp": IDLE},
    "inputs/sparsebalance/figure8.toml": {"*": WEIGHTS},
    "inputs/sparsebalance/figure9.toml": {"*": WEIGHTS},
}
for table, prefixes in {
    "figure7": [f"{m} {l} " for m in ("0.5B", "3B") for l in ("bimodal", "long-tailed")],
    "table1": ["", "dp 4 "],
}.items():
    CHANGED[f"inputs/sparsebalance/{table}.toml"] = {
        prefix + case: WEIGHTS for prefix in prefixes for case in ("+SAB", "+SAB+DST")
    }
UNPLANNED = {
    "inputs/hbp/selected.toml": "no plan without the profile table that the deck names",
    "inputs/hbp/table10.toml": "check refuses the case that packs whole epochs, as train does",
    "inputs/sparsebalance/four_gpus.toml": "no plan without the profile table that the deck names",
}


class GoldenPlans(RunCase):
    def cases(self, deck, overrides):
        """Plans of the first steps by case."""
        twin = self.out("twin.json")
        done = self.run_ballast(
            1,
            "check",
            deck,
            *overrides,
            "--elsewhere",
            "--plans",
            str(STEPS),
            "--json",
            twin,
            status=None,
            timeout=600,
            cwd=ROOT,
        )
        self.assertEqual(done.returncode, 0, f"{deck}: {done.stderr[-2000:]}")
        with open(twin) as f:
            found = json.load(f)
        return found["cases"] if "cases" in found else [found]

    def compare(self, where, golden, found, but):
        if "batch" not in golden:
            return 0
        self.assertIn("plans", found, f"{where}: {found.get('plans_refused')}")
        plans = found["plans"]
        hashes = {"batch": [], "schedules": []}
        for plan in plans:
            # Where ranks may share packs, every rank had an entry in every round.
            both = [own_lists(plan), round_lists(plan)]
            hashes["batch"].append({batch_hash(plan["step"] - 1, lists) for lists in both})
            hashes["schedules"].append({schedules_hash(plan, lists) for lists in both})
        for key, values in hashes.items():
            if key in but:
                continue
            want = golden[key] * (STEPS if len(golden[key]) == 1 else 1)
            other = golden.get("portable", {}).get(key, {})
            for step, (value, expected) in enumerate(zip(values, want, strict=True)):
                known = {expected, other.get(str(step), expected)}
                self.assertTrue(value & known, f"{where}: {key} {step}")
        return len(plans)

    def test_every_deck_plans_what_it_did(self):
        with open(os.path.join(ROOT, "tests", "golden", "plans.json")) as f:
            golden = json.load(f)
        compared = 0
        for group in ("decks", "variants"):
            for name, cases in golden[group].items():
                deck, *overrides = shlex.split(name)
                if not any("batch" in case for case in cases.values()) or name in UNPLANNED:
                    continue
                with self.subTest(name):
                    found = {got.get("name") or "": got for got in self.cases(deck, overrides)}
                    for case, want in cases.items():  # decks may have others by now
                        but = CHANGED.get(name, {}).get(case, CHANGED.get(name, {}).get("*", ()))
                        compared += self.compare(f"{name} {case}", want, found[case], but)
        self.assertGreater(compared, 2000)


if __name__ == "__main__":
    unittest.main()
