"""What the simulator's answers make of changes, alone and together."""
import unittest

import support  # noqa: F401  (puts app/report on the path)
import advice
import simulator

A, B = "batching.method", "batching.window"


class Answers(simulator.Simulator):
    """Rates in tokens a second by the keys that are changed, at a step of 10 s throughout."""

    def __init__(self, **rates):
        super().__init__("", "")
        self.rates = rates

    def ask(self, settings):
        name = "_".join(sorted(key.split(".")[1] for key in settings)) or "now"
        twin = {"step_s": 10.0, "tokens_per_s": self.rates[name]}
        return {"simulated": twin, "largest_rank_bytes": 2**30}, ""


class Late(Answers):
    """Answers one question; then its time is over."""

    def __init__(self):
        super().__init__(now=100)

    def ask(self, settings):
        if settings:
            return simulator.Simulator.ask(self, settings)
        self.until = 0
        return super().ask(settings)


class Judgement(unittest.TestCase):
    def judged(self, **rates):
        changes = [advice.Change({A: "balanced"}, "a"), advice.Change({B: 4}, "b")]
        Answers(**rates).judge(changes)
        return changes

    def test_a_gain_is_of_tokens_a_second(self):
        """A step of equal length may train fewer tokens."""
        changes = self.judged(now=100, method=90, window=100, method_window=90)
        self.assertAlmostEqual(changes[0].gain, -0.1)
        self.assertAlmostEqual(changes[1].gain, 0)

    def test_two_changes_that_gain_more_together_are_added(self):
        changes = self.judged(now=100, method=120, window=110, method_window=130)
        self.assertEqual(changes[2].settings, {A: "balanced", B: 4})
        self.assertAlmostEqual(changes[2].gain, 0.3)

    def test_two_changes_that_gain_less_together_are_not_added(self):
        changes = self.judged(now=100, method=120, window=110, method_window=115)
        self.assertEqual([c.settings for c in changes], [{A: "balanced"}, {B: 4}])

    def test_a_change_that_no_time_is_left_for_says_so(self):
        changes = [advice.Change({A: "balanced"}, "a")]
        asked = Late()
        asked.judge(changes)
        self.assertIsNone(changes[0].gain)
        self.assertEqual(changes[0].unanswered, "not asked, 12 s were over")


if __name__ == "__main__":
    unittest.main()
