"""What a run that goes on from a checkpoint tells of data, held-out samples and steps that are not
those of before."""
import os
import unittest

import h5py

from runs import RunCase

WHOLE = (
    "batching.micro_batch_tokens=2000",
    "batching.global_tokens=4000",
)


class Resume(RunCase):
    def train(self, *keys):
        """Standard output of a start of one rank; the first begins the run, the others go on."""
        again = os.path.exists(self.out("run"))
        line = [self.deck(dp=1, steps=2), "-d", self.out("run"), *keys]
        return self.run_ballast(1, "train", *line, *(["-r", "latest"] if again else [])).stdout

    def change_ends(self):
        """Other last 64 bytes in files that are longer than three times that."""
        changed = 0
        for name in os.listdir(self.data):
            path = os.path.join(self.data, name)
            size = os.path.getsize(path)
            self.assertLess(size, 1500)
            if size > 192:
                changed += 1
                with open(path, "r+b") as file:
                    file.seek(size - 64)
                    file.write(b"#" * 64)
        self.assertGreater(changed, 20)

    def test_other_data_are_told_by_lengths_and_by_tokens(self):
        self.train(*WHOLE, "data.max_tokens=2000")
        same = self.train(*WHOLE, "data.max_tokens=2000", "run.steps=3")
        self.assertNotIn("hold other tokens", same)
        self.assertNotIn("written over other data", same)
        # No document is as long, so its samples stay those of before: only the key tells.
        shorter = self.train(*WHOLE, "data.max_tokens=1500", "run.steps=4")
        self.assertIn("written over other data", shorter)
        self.assertNotIn("hold other tokens", shorter)
        self.change_ends()
        changed = self.train(*WHOLE, "data.max_tokens=1500", "run.steps=5")
        self.assertIn("hold other tokens", changed)
        self.assertNotIn("written over other data", changed)
        with h5py.File(os.path.join(self.out("run"), "trace", "trace_00000.h5")) as trace:
            done = [int(s.attrs["segment"]) for _, s in sorted(trace["sessions"].items())]
        self.assertEqual(done, [0, 2, 3, 4], "steps done when each session began")

    def test_a_best_loss_of_fewer_samples_is_no_bar(self):
        keys = ("checkpoint.best=true", "eval.every_steps=1", "data.validation_share=0.3")
        self.train(*keys)
        self.assertNotIn("looked for anew", self.train(*keys, "run.steps=3"))
        self.assertIn("looked for anew", self.train(*keys, "run.steps=4", "eval.samples=2"))

    def test_another_order_and_another_split_are_told(self):
        keys = ("data.validation_share=0.1", "optimizer.learning_rate=0.001")
        self.train(*keys)
        same = self.train(*keys, "run.steps=3")
        self.assertNotIn("another order", same)
        split = self.train("data.validation_share=0.3", *keys[1:], "run.steps=4")
        self.assertRegex(
            split,
            "another order, and may have trained on samples held out now: data.validation_share",
        )
        order = self.train("data.validation_share=0.3", *keys[1:], "batching.shuffle=false")
        self.assertRegex(order, r"another order: batching\.shuffle.*false")


if __name__ == "__main__":
    unittest.main()
