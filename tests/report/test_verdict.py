"""The verdict: where the time went, which ranks, and what the simulator says of changes."""
import json
import stat
import unittest

import support
import synthetic
from synthetic import Rank

DECK = synthetic.DECK.replace("[batching]", "[mesh]\ndp = 4\n[batching]")
# Stands for ballast: `batching.method=balanced` saves a fifth, a window is refused.
SIMULATOR = """#!/usr/bin/env python3
import json, sys
changes = sys.argv[3:]
if "batching.window=4" in changes:
    sys.exit("deck.toml:3: no window here")
step = 8.0 if "batching.method=balanced" in changes else 10.0
twin = {"simulated": {"step_s": step, "tokens_per_s": 1000 / step}, "largest_rank_bytes": 2**30}
json.dump(twin, open(changes[changes.index("--json") + 1], "w"))
"""


def uneven_run(folder, deck=DECK):
    """Four replicas over three steps: 2, 2, 8 and 0 s of computation in each."""
    ranks = [Rank(r, 4, {"dp": 4}, {"dp": r}, deck=deck) for r in range(4)]
    for step in range(3):
        for r, busy in zip(ranks, (2, 2, 8, 0)):
            at = 100.0 + 10 * step
            r.event("step", at, at + 10, step=step)
            if busy:
                r.event("forward", at, at + busy, step=step, mb=0)
            r.event("gradient_reduce", at + busy, at + 9, step=step)
    return synthetic.write(folder, ranks, deck=deck)


class Verdict(support.RunTest):
    def verdict(self, run):
        self.report(run, draw=False)
        return self.metrics(run / "report")["verdict"]

    def asked(self, program, run):
        """The verdict where `program` stands for ballast, however slow this machine is."""
        named = {"BALLAST_PROGRAM": str(program)}
        with unittest.mock.patch.dict("os.environ", named):
            with unittest.mock.patch("simulator.MOST_SECONDS", 300):
                return self.verdict(run)

    def test_known_numbers(self):
        run = uneven_run(self.folder / "run")
        found = self.verdict(run)
        self.assertIn("30 % of the ranks' time is the model's arithmetic", found["headline"])
        self.assertIn("slowest rank included 60 %", found["headline"])
        self.assertIn("idle time 10 %", found["headline"])
        self.assertIn("Rank 3 computed nothing", found["ranks"][0])
        self.assertIn("Rank 2 computed more", found["ranks"][1])
        self.assertIn("one rank is the slowest in 3 of 3 steps", found["ranks"][1])
        self.assertIn("was not asked", found["simulator"])
        self.assertTrue(all("simulated_gain" not in c for c in found["changes"]))
        settings = [c["settings"] for c in found["changes"]]
        self.assertIn({"batching.method": "balanced"}, settings)
        body = self.body(run / "report")
        self.assertLess(body.index("computed nothing"), body.index('class="tiles"'))
        self.assertIn("<code>batching.method=balanced</code>", body)

    def test_a_rank_that_only_updates_computed_nothing(self):
        """Four replicas and one micro-batch: every rank sets targets and updates its share."""
        deck = DECK + "[dst]\nenabled = true\n"
        ranks = [Rank(r, 4, {"dp": 4}, {"dp": r}, deck=deck) for r in range(4)]
        for r in ranks:
            r.event("step", 0, 10, step=0)
            r.event("tuning", 0, 0.1, step=0)
            if r.rank == 0:
                r.event("forward", 1, 6, step=0, mb=0)
            r.event("optimizer", 8, 9, step=0)
        run = synthetic.write(self.folder / "run", ranks, deck=deck)
        found = self.verdict(run)
        self.assertIn("Ranks 1-3 computed nothing", found["ranks"][0])
        self.assertNotIn("less than half", " ".join(found["ranks"]))
        settings = [c["settings"] for c in found["changes"]]
        self.assertIn({"batching.micro_batch_tokens": 2048}, settings)

    def test_gains_are_the_simulators(self):
        program = self.folder / "ballast"
        program.write_text(SIMULATOR)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        found = self.asked(program, uneven_run(self.folder / "run"))
        self.assertEqual(
            [c["settings"] for c in found["changes"]], [{"batching.method": "balanced"}]
        )
        self.assertAlmostEqual(found["changes"][0]["simulated_gain"], 0.25)
        self.assertEqual(found["changes"][0]["step_s"], [10, 8])
        self.assertIn("+25 % tokens a second", self.body(self.folder / "run" / "report"))
        self.assertIn(", 2 changes simulated, 1 faster. Without an answer:", found["simulator"])
        refused = "`batching.window=4` (deck.toml:3: no window here)."
        self.assertTrue(found["simulator"].endswith(refused), found["simulator"])

    def test_changes_without_an_answer_are_not_counted(self):
        program = self.folder / "ballast"
        program.write_text(SIMULATOR.replace('"batching.method=balanced" in', '"x" in'))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        found = self.asked(program, uneven_run(self.folder / "run"))
        self.assertIn("2 changes simulated, none faster by more than 1 %", found["simulator"])
        listed, refused = found["simulator"].split("Without an answer: ")
        self.assertIn("`batching.method=balanced`", listed)
        self.assertNotIn("batching.window", listed)
        self.assertIn("batching.window=4", refused)

    def test_simulator_that_fails_is_named(self):
        program = self.folder / "ballast"
        program.write_text("#!/bin/sh\necho 'deck.toml:1: no such data' >&2\nexit 1\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        found = self.asked(program, uneven_run(self.folder / "run"))
        self.assertIn("no such data", found["simulator"])
        self.assertTrue(all("simulated_gain" not in c for c in found["changes"]))

    def test_even_ranks_need_no_change(self):
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        for r in ranks:
            r.event("step", 0, 10, step=0)
            r.event("forward", 0, 10, step=0, mb=0)
        found = self.verdict(synthetic.write(self.folder / "run", ranks))
        self.assertEqual(found["changes"], [])
        self.assertIn("All ranks computed alike", found["ranks"][0])

    def test_budget_tuning_is_arithmetic(self):
        """2 s of tuning and 3 s of forward, of 10 s."""
        r = Rank(0, 1)
        r.event("step", 0, 10, step=0)
        r.event("tuning", 0, 2, step=0)
        r.event("forward", 2, 5, step=0, mb=0)
        found = self.verdict(synthetic.write(self.folder / "run", [r]))
        self.assertIn("50 % of the ranks' time is the model's arithmetic", found["headline"])

    def causes(self, mesh, places, busy):
        """What is said of ranks at `places` that compute `busy` seconds of a step of 20."""
        ranks = [Rank(r, len(busy), mesh, at) for r, at in enumerate(places)]
        for r, seconds in zip(ranks, busy):
            r.event("step", 0, 20, step=0)
            r.event("forward", 0, seconds, step=0, mb=0)
        found = self.verdict(synthetic.write(self.folder / "run", ranks))
        return " ".join(found["ranks"])

    def test_a_coordinate_that_every_rank_has_alone_explains_nothing(self):
        places = [{"dp": d} for d in range(4)]
        said = self.causes({"dp": 4}, places, (1, 3, 5, 7))
        self.assertNotIn("difference follows", said)

    def test_a_coordinate_that_explains_little_is_not_told(self):
        """Of dp, means of 8 and 12 s: 4 x 2^2 of 4 x (2^2 + 3^2); of pp, nothing."""
        places = [{"dp": d, "pp": p} for d in range(2) for p in range(4)]
        busy = (5, 11, 11, 5, 15, 9, 9, 15)
        said = self.causes({"dp": 2, "pp": 4}, places, busy)
        self.assertNotIn("difference follows", said)

    def test_a_coordinate_that_explains_most_is_told(self):
        """Of dp, means of 8 and 12 s: 4 x 2^2 of 4 x (2^2 + 1^2)."""
        places = [{"dp": d, "pp": p} for d in range(2) for p in range(4)]
        busy = (7, 9, 9, 7, 13, 11, 11, 13)
        said = self.causes({"dp": 2, "pp": 4}, places, busy)
        self.assertIn("The difference follows dp: it explains 80 % of it", said)

    def test_memory_that_a_change_saves_is_told(self):
        import advice
        import verdict

        change = advice.Change({"a": 1}, "b", 0.1, (1.0, 0.9), (2**30, 2**29))
        self.assertIn("memory of the fullest rank 1 to 0.5 GiB", verdict.told(change))


class Simulator(support.RunTest):
    def test_defaults_of_an_effective_deck_are_not_given(self):
        import simulator

        deck = "# Effective deck\n[run]  # a\nsteps = 3  # [steps] b\nseed = 1  # default; c\n"
        deck += "[costs]  # d\nforward_token_s = 1e-06  # default; [s] e\n"
        self.assertEqual(simulator.given(deck), "[run]  # a\nsteps = 3  # [steps] b\n")

    @unittest.skipUnless(support.PROGRAM, "BALLAST_PROGRAM names no ballast")
    def test_it_times_a_run_as_the_run_was_simulated(self):
        """Defaults of the effective deck do not count as given."""
        import subprocess

        import simulator
        import thousand

        deck, run = self.folder / "deck.toml", self.folder / "run"
        smaller = ["mesh.dp=2", "mesh.pp=2", "batching.global_tokens=262144"]
        deck.write_text(thousand.DECK)
        twin = self.folder / "twin.json"
        command = [support.PROGRAM, "check", deck, *smaller, "--steps", str(simulator.STEPS)]
        subprocess.run(
            [*command, "--trace", run, "--json", twin], check=True, stdout=subprocess.DEVNULL
        )
        asked = simulator.Simulator(support.PROGRAM, (run / "deck.toml").read_text())
        answer, why = asked.ask({})
        self.assertEqual(why, "")
        self.assertEqual(answer["simulated"], json.loads(twin.read_text())["simulated"])


if __name__ == "__main__":
    unittest.main()
