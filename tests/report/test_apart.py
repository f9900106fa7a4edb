"""Calls whose process may die."""
import os
import signal
import unittest

from support import REPORT  # the path of modules

assert REPORT


class Apart(unittest.TestCase):
    def test_a_death_costs_its_own_item(self):
        import apart

        def call(item):
            if item == "abort":
                signal.signal(signal.SIGABRT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGABRT)
            if item == "exit":
                os._exit(3)
            return item * 2

        found = list(apart.each(call, ["abort", 1, "x" * 10**6, "exit", "abort", 2, "exit"]))
        results = [result for _, result in found]
        died = {i: results[i].reason for i in (0, 3, 4, 6)}
        self.assertEqual(died, {0: "SIGABRT", 3: "status 3", 4: "SIGABRT", 6: "status 3"})
        self.assertEqual([results[i] for i in (1, 2, 5)], [2, "x" * 2 * 10**6, 4])
        self.assertEqual([item for item, _ in found][3:6], ["exit", "abort", 2])

    def test_of_no_items_nothing_is_asked(self):
        import apart

        self.assertEqual(list(apart.each(os.abort, [])), [])

    def test_who_wants_no_more_waits_for_nothing(self):
        import apart

        calls = apart.each(lambda item: "x" * 10**6, range(10**6))
        self.assertEqual(next(calls)[0], 0)
        calls.close()  # the process, which fills the pipe, ends here


if __name__ == "__main__":
    unittest.main()
