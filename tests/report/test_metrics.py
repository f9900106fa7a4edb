"""metrics.py against hand-worked numbers and, on random data, against core/observe/metrics.cpp
through report_helper."""
import random
import re
import subprocess
import unittest

import support  # noqa: F401  (puts app/report on the path)
import metrics
import synthetic


def cpp(lines):
    done = subprocess.run(
        [synthetic.HELPER, "metrics"],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
        check=True,
    )
    return done.stdout.splitlines()


def line(name, table, *more):
    values = [repr(v) for row in table for v in row] + [
        repr(v)
        for other in more
        for row in (other if isinstance(other, list) else [[other]])
        for v in row
    ]
    return f"{name} {len(table)} {len(table[0])} " + " ".join(values)


class Metrics(unittest.TestCase):
    def test_papers_example(self):
        k = 1024
        self.assertEqual(metrics.balance_ratio([8 * k * k, 4 * k * k]), 0.25)
        self.assertEqual(metrics.padding_ratio([4096, 2048], 4096), 0.25)

    def test_by_hand(self):
        times = [[1, 2], [3, 2]]
        self.assertAlmostEqual(metrics.worker_imbalance(times), 1.25)
        self.assertAlmostEqual(metrics.step_imbalance(times), (2 / 1.5 + 3 / 2.5) / 2)
        self.assertAlmostEqual(metrics.computation_ratio(times, [[2, 0], [3, 8]]), 1.75 / 3)
        self.assertEqual(metrics.pop([2, 4], 8), (0.75, 0.5, 0.375))

    def test_empty(self):
        self.assertEqual(metrics.imbalance_degree([]), 1)
        self.assertEqual(metrics.worker_imbalance([]), 1)
        self.assertEqual(metrics.step_imbalance([[], []]), 1)
        self.assertEqual(metrics.computation_ratio([], []), 1)
        self.assertEqual(metrics.balance_ratio([]), 0)
        self.assertEqual(metrics.pop([], 1), (1, 1, 1))
        self.assertEqual(metrics.exclusive_seconds([], []).size, 0)
        self.assertEqual(metrics.innermost_intervals([], []), [])

    def test_overhead_share(self):
        self.assertEqual(metrics.overhead_share([], []), 0)
        self.assertEqual(metrics.overhead_share([3], [4]), 0.75)
        self.assertAlmostEqual(metrics.overhead_share([3, 0.1, 0.2], [4, 1, 5]), 0.05)

    def test_ragged(self):
        with self.assertRaises(ValueError):
            metrics.worker_imbalance([[1, 2], [3]])

    def test_equal_to_core(self):
        seed = random.randrange(2**32)
        rng = random.Random(seed)
        lines, expected = [], []
        for _ in range(200):
            workers, steps = rng.randint(1, 6), rng.randint(1, 7)
            zero = rng.random() < 0.1
            table = [
                [0.0 if zero or rng.random() < 0.1 else rng.random() for _ in range(steps)]
                for _ in range(workers)
            ]
            wall = [[0.0 if rng.random() < 0.1 else rng.random() + v for v in row] for row in table]
            extra = rng.random() * 3
            for name in ("worker_imbalance", "step_imbalance"):
                lines.append(line(name, table))
                expected.append([getattr(metrics, name)(table)])
            lines.append(line("computation_ratio", table, wall))
            expected.append([metrics.computation_ratio(table, wall)])
            for name in ("imbalance_degree", "balance_ratio"):
                lines.append(line(name, table[:1]))
                expected.append([getattr(metrics, name)(table[0])])
            lines.append(line("padding_ratio", table[:1], extra))
            expected.append([metrics.padding_ratio(table[0], extra)])
            lines.append(line("pop", table[:1], extra))
            expected.append(list(metrics.pop(table[0], extra)))
            # Times on a grid, so that ties and touching events occur.
            events = [
                [float(b), float(b + rng.randint(0, 9))]
                for b in (rng.randint(0, 20) for _ in range(rng.randint(1, 15)))
            ]
            lines.append(line("exclusive_seconds", events))
            expected.append(
                metrics.exclusive_seconds([b for b, _ in events], [e for _, e in events]).tolist()
            )
        for sent, got, want in zip(lines, cpp(lines), expected, strict=True):
            for g, w in zip(map(float, got.split()), want, strict=True):
                self.assertAlmostEqual(g, w, places=9, msg=f"seed {seed}: {sent}")

    def test_intervals_lay_out_exclusive_times(self):
        seed = random.randrange(2**32)
        rng = random.Random(seed)
        for _ in range(200):
            begin = [rng.uniform(0, 10) for _ in range(rng.randint(1, 12))]
            end = [b + rng.uniform(0, 5) for b in begin]
            spent, last = [0.0] * len(begin), float("-inf")
            for b, e, i in metrics.innermost_intervals(begin, end):
                self.assertLessEqual(last, b, f"seed {seed}")
                self.assertLess(b, e)
                spent[i] += e - b
                last = e
            for got, want in zip(spent, metrics.exclusive_seconds(begin, end)):
                self.assertAlmostEqual(got, want, places=9, msg=f"seed {seed}")
            self.assertAlmostEqual(sum(spent), metrics.union_seconds(begin, end), places=9)


class Page(support.RunTest):
    """docs/metrics.md has the names that runs write."""

    ROOT = support.REPORT.parents[1]

    def setUp(self):
        super().setUp()
        self.text = (self.ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")

    def test_every_key_of_metrics_json_is_there(self):
        runs = [synthetic.known_run(self.folder / "a"), synthetic.training_run(self.folder / "b")]
        keys = {"cases"}
        for run in runs:
            self.report(run, draw=False)
            keys.update(self.metrics(run / "report"))
        summaries = (support.REPORT / name for name in ("analysis.py", "prediction.py"))
        for text in (path.read_text().split("\ndef summary(")[1] for path in summaries):
            keys.update(re.findall(r'^        "(\w+)": ', text, re.M))
        self.assertGreater(len(keys), 25)
        self.assertEqual([key for key in sorted(keys) if f"`{key}`" not in self.text], [])

    def test_every_name_is_one_that_the_programs_write(self):
        rows = re.findall(r"^\| (`.*?) \|", self.text, re.M)
        names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
        self.assertGreater(len(names), 40)
        sources = [*self.ROOT.glob("app/**/*.py"), *self.ROOT.glob("app/**/*.cpp")]
        sources += self.ROOT.glob("core/**/*.cpp")
        written = set()
        for path in sources:
            written.update(re.findall(r'"(\w+)"', path.read_text(encoding="utf-8")))
        # `plan` puts this before names of the pipeline's table.
        names = [name.removeprefix("first_batch_") for name in names]
        self.assertEqual([name for name in names if name not in written], [])


if __name__ == "__main__":
    unittest.main()
