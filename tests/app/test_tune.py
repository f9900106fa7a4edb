"""Whole-program tests of `ballast tune`: the deck of its first plan passes `check` and trains, what
it says can be read, and what it cannot do is refused in words."""
import json
import os
import random
import subprocess
import unittest

from runs import BALLAST, RunCase

SEED = int(os.environ.get("BALLAST_TEST_SEED", "16"))
DECKS = 20 if os.environ.get("BALLAST_TEST_FULL") else 6

DECK = """# Tiny.
[run]
seed = {seed}
steps = 2
[mesh]
dp = 1
[model]
layers = {layers}
hidden = {hidden}
intermediate = 48
query_heads = {heads}
kv_heads = {kv_heads}
head_dim = 8
vocabulary = 256
[data]
source = "distribution"
samples = 200
min_tokens = 4
bin_tokens = [16, 64, 256, 512]
bin_share = [0.5, 0.3, 0.15, 0.05]
[batching]
method = "{method}"
micro_batch_tokens = {capacity}
{size}
[trace]
enabled = false
[checkpoint]
at_end = false
{more}
"""

STATED = """[costs]
forward_token_s = 1e-6
forward_pair_s = 2e-9
exchange_token_s = {exchange}
ring_hop_token_s = {hop}
"""

SPARSE = """[attention]
pattern = "moba"
moba_block = 64
moba_top_k = 2
"""


def random_deck(rng):
    heads = rng.choice([2, 3, 4, 6])
    more = ""
    if rng.random() < 0.5:
        more += STATED.format(exchange=rng.choice([0, 1e-7, 1e-5]), hop=rng.choice([0, 1e-7, 1e-5]))
    sparse = rng.random() < 0.25
    if sparse:
        more += SPARSE
    return {
        "seed": rng.randint(1, 1000),
        "layers": rng.randint(1, 4),
        "heads": heads,
        "hidden": 8 * heads,
        "kv_heads": rng.choice([k for k in (1, 2, 3, heads) if heads % k == 0]),
        "method": rng.choice(["packed", "balanced", "chunkflow", "none"]),
        "capacity": rng.choice([128, 512, 640]),
        "size": rng.choice(["global_tokens = 3000", "global_samples = 12"]),
        "more": more,
    }, sparse


class Tune(RunCase):
    def tune(self, *arguments, status=0):
        twin = self.out("tune.json")
        done = subprocess.run(
            [BALLAST, "tune", *arguments, "--json", twin],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
        )
        self.assertEqual(done.returncode, status, f"{arguments}\n{done.stdout}{done.stderr}")
        if status != 0:
            return done.stderr
        with open(twin) as f:
            return json.load(f), done.stdout

    def small(self, **values):
        settings, _ = random_deck(random.Random(1))
        settings.update({"layers": 2, "heads": 4, "kv_heads": 2, "hidden": 32, "more": ""})
        settings.update({"method": "packed", "capacity": 512, "size": "global_tokens = 3000"})
        settings.update(values)
        return self.deck(text=DECK, **settings)

    def test_first_plans_of_random_decks_train(self):
        rng = random.Random(SEED)
        for number in range(DECKS):
            settings, sparse = random_deck(rng)
            ranks = rng.choice([1, 2, 4])
            extra = ["--coverage", "0.3"] if sparse else []
            deck, best = self.deck(text=DECK, **settings), self.out(f"best{number}.toml")
            with self.subTest(number=number, ranks=ranks, **settings):
                line = [deck, "--ranks", str(ranks), "--steps", "1", "--trials", "80", *extra]
                facts, _ = self.tune(*line, "--write", best)
                first = facts["best"][0]
                if rng.random() < 0.5:  # the same within two thirds of what that takes
                    limit = first["largest_rank_bytes"] / 1.5 / 2**30
                    done = subprocess.run(
                        [BALLAST, "tune", *line, "--memory", str(limit), "--write", best]
                        + ["--overwrite", "--json", self.out("less.json")],
                        capture_output=True,
                        text=True,
                        cwd=self.folder,
                    )
                    if done.returncode == 0:
                        with open(self.out("less.json")) as f:
                            first = json.load(f)["best"][0]
                        self.assertLessEqual(first["largest_rank_bytes"], limit * 2**30)
                    else:
                        self.assertIn("fits", done.stderr)
                self.check_and_train(best, ranks, first)

    def check_and_train(self, deck, ranks, first):
        twin = self.out("check.json")
        done = subprocess.run(
            [BALLAST, "check", deck, "--json", twin], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(twin) as f:
            checked = json.load(f)
        self.assertEqual(checked["ranks"], ranks)
        # The same plan by the same clock.
        self.assertAlmostEqual(
            checked["expected_balance"]["load_balance"], first["load_balance"], places=9
        )
        self.run_ballast(ranks, "train", deck, "-d", self.out("run"), "run.steps=2")
        subprocess.run(["rm", "-rf", self.out("run")], check=True)

    def test_written_deck_is_tuned_again(self):
        deck, best = self.small(more=STATED.format(exchange=1e-7, hop=1e-7)), self.out("best.toml")
        facts, text = self.tune(deck, "--ranks", "4", "--write", best)
        self.assertIn("wrote", text)
        with open(best) as f:
            written = f.read()
        self.assertIn("# Chosen by: ballast tune", written)
        self.assertIn("stated costs", written)
        again, _ = self.tune(best)
        self.assertEqual(again["ranks"], 4)
        self.assertLessEqual(
            again["best"][0]["step_time"], facts["best"][0]["step_time"] * (1 + 1e-9)
        )

    def test_printed_commands_can_be_typed(self):
        """Names with blanks, quotes, newlines and bytes that are no text; the deck stays TOML."""
        more = '[[case]]\nname = "two\\nlines, it\'s $HOME"\n'
        deck, best = self.out(os.fsdecode(b"a d'ck\n\xff.toml")), self.out("be 'st'.toml")
        os.rename(self.small(more=more), deck)
        line = [deck, "run.seed=7", "--case", "two\nlines, it's $HOME", "--steps", "1"]
        facts, _ = self.tune(*line, "run.output=it's\n# mine", "--write", best)
        with open(best, encoding="utf-8") as f:
            comments = [line for line in f if line.startswith("#")]
        command = comments[1].removeprefix("# Chosen by: ballast ").rstrip("\n")
        again = self.out("again.json")
        environment = {**os.environ, "again": again, "ballast": BALLAST}
        for shell in ("sh", "bash"):
            done = subprocess.run(
                [shell, "-c", '"$ballast" ' + command + ' --json "$again"'],
                capture_output=True,
                cwd=self.folder,
                env=environment,
            )
            self.assertEqual(done.returncode, 0, (command, done.stderr))
            with open(again) as f:
                self.assertEqual(json.load(f)["best"], facts["best"])
        check = next(line for line in comments if "ballast check" in line)[1:].strip()
        done = subprocess.run(
            ["sh", "-c", check.replace("ballast", '"$ballast"', 1)],
            capture_output=True,
            cwd=self.folder,
            env=environment,
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_plans_are_listed_and_losses_told(self):
        facts, text = self.tune(self.small(), "--ranks", "4", "--list", "5", "--steps", "2")
        times = [plan["step_time"] for plan in facts["best"]]
        self.assertEqual(times, sorted(times))
        self.assertLessEqual(len(times), 5)
        for plan in facts["best"]:
            self.assertEqual(plan["steps"], 2)
            self.assertAlmostEqual(
                sum(plan["terms"].values()), plan["first_step_time"], delta=1e-9 + 1e-6 * times[0]
            )
        choices = {loss["choice"]: loss for loss in facts["losses"]}
        methods = {c for c in choices if c.startswith("method ")}
        self.assertGreaterEqual(len(methods), 5)
        for loss in facts["losses"]:
            self.assertTrue(loss["why"], loss)
        self.assertIn("why others lose", text)
        counts = [facts[key] for key in ("trials", "bounded", "too_large", "left")]
        self.assertEqual(sum(counts), facts["candidates"])

    def test_keys_of_the_command_line_stay(self):
        facts, _ = self.tune(
            self.small(), "--ranks", "4", "mesh.pp=2", "batching.method=chunkflow", "--steps", "1"
        )
        for plan in facts["best"]:
            self.assertIn("chunkflow", plan["plan"])
            self.assertIn("pp 2", plan["plan"])

    def test_memory_is_given_in_gib(self):
        facts, _ = self.tune(self.small(), "--memory", "1", "--trials", "5", "--steps", "1")
        self.assertEqual(facts["memory_limit_bytes"], 1 << 30)

    def test_heads_take_the_memory_of_their_table(self):
        """On a GPU, whose lists of long samples hold what the table's patterns name."""
        long = 65536
        keys = ["attention.pattern=by_head", "run.backend=cuda", "run.precision=bf16"]
        keys += [f"data.lengths=[{long}]", f"data.max_tokens={long}", "data.source=lengths"]
        keys += [f"batching.micro_batch_tokens={long}", "model.head_dim=64", "mesh.pp=1"]
        told = {}
        for name, rule in (
            ("dense", {"pattern": "dense"}),
            ("blocks", {"pattern": "block_sparse", "blocks": 16}),
        ):
            table = self.out(name + ".json")
            with open(table, "w") as f:
                json.dump({"layers": 2, "heads": 8, "rules": [[rule] * 8] * 2}, f)
            deck = self.small(heads=8, hidden=512, capacity=512)
            facts, _ = self.tune(deck, *keys, f"attention.heads={table}", "--steps", "1")
            told[name] = facts["best"][0]["largest_rank_bytes"]
        self.assertGreater(told["dense"], told["blocks"] + (64 << 20))

    def test_samples_too_long_for_a_gpus_choice_are_refused(self):
        """By check and tune, and told by plan, however many ranks share them."""
        keys = ["run.backend=cuda", "run.precision=bf16", "model.head_dim=64", "mesh.dp=1"]
        keys += ["mesh.cp_inner=8", "data.source=lengths", "batching.method=none"]
        table = self.out("blocks.json")
        rules = [[{"pattern": "dense"}] * 3 + [{"pattern": "block_sparse", "blocks": 8}]] * 2
        with open(table, "w") as f:
            json.dump({"layers": 2, "heads": 4, "rules": rules}, f)
        deck = self.small()
        for tokens, most, pattern, *more in (
            (1048576, 786432, "moba"),
            (1100000, 1048576, "flexprefill"),
            (2200000, 2097152, "xattention"),
            (1100000, 1048576, "by_head", f"attention.heads={table}"),
        ):
            settings = [*keys, f"attention.pattern={pattern}", *more]
            long = [f"data.lengths=[300,{tokens}]", "data.max_tokens=0"]
            said = f"a sample of {tokens} tokens has"
            checked = self.run_ballast(1, "check", deck, *settings, *long, status=1)
            self.assertIn(said, checked.stderr, pattern)
            self.assertIn("`train` would stop here", checked.stderr)
            self.assertIn(said, self.tune(deck, *settings, *long, status=1), pattern)
            planned = self.run_ballast(
                1, "plan", deck, *settings, *long, "pipeline.schedule=1f1b", "run.steps=1"
            )
            self.assertIn(said, planned.stderr, pattern)
            short = [f"data.lengths=[300,{tokens}]", f"data.max_tokens={most}"]
            self.run_ballast(1, "check", deck, *settings, *short)

    def test_refusals(self):
        deck = self.small()
        self.assertIn("fits", self.tune(deck, "--memory", "1e-6", status=1))
        self.assertIn(
            "no candidate of 4 ranks", self.tune(deck, "--ranks", "4", "mesh.dp=3", status=1)
        )
        there = self.out("there.toml")
        with open(there, "w") as f:
            f.write("mine")
        self.assertIn("--overwrite", self.tune(deck, "--write", there, status=1))
        with open(there) as f:
            self.assertEqual(f.read(), "mine")
        self.tune(deck, "--write", there, "--overwrite", "--trials", "10")
        with open(there) as f:
            self.assertIn("[batching]", f.read())
        self.assertIn("0", self.tune(deck, "--coverage", "2", status=2))
        for pattern in ("dense", "vertical_slash"):
            keys = (f"attention.pattern={pattern}", "--coverage", "0.5")
            self.assertIn("has no budget", self.tune(deck, *keys, status=1))
        cases = self.small(more='[[case]]\nname = "a"\n[[case]]\nname = "b"\n')
        self.assertIn("--case", self.tune(cases, status=1))


if __name__ == "__main__":
    unittest.main()
