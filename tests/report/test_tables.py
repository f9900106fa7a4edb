"""Columns of the CSV files beside the page: their units."""
import unittest

import synthetic
from support import RunTest


class Units(RunTest):
    def test_memory_is_in_mebibytes(self):
        """Activations of 1 and 2 MiB."""
        run = synthetic.known_run(self.folder / "known")
        self.report(run, draw=False)
        rows = self.table(run / "report", "memory.csv")
        self.assertEqual([float(r["activations (MiB)"]) for r in rows], [1, 2])


if __name__ == "__main__":
    unittest.main()
