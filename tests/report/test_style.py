"""Numbers as the page shows them."""
import unittest

import support  # noqa: F401  (finds the report's modules)
import metrics
import numpy as np
import style


class Numbers(unittest.TestCase):
    def test_no_power_of_ten_is_shown(self):
        shown = {1010: "1,010", 999.7: "1,000", 999.4: "999", 12.345: "12.3", 0.5: "0.5"}
        for value, text in shown.items():
            self.assertEqual(style.short(value), text)
        self.assertEqual(style.short(12345.6, 4), "12,346")

    def test_a_mean_leaves_out_what_is_not_known(self):
        values = np.array([[1, np.nan], [3, np.nan]])
        with np.testing.suppress_warnings() as warnings:
            seen = warnings.record(RuntimeWarning)
            mean = metrics.mean_of_known(values, axis=0)
        self.assertEqual(seen, [])
        self.assertEqual(mean[0], 2)
        self.assertTrue(np.isnan(mean[1]))

    def test_neighbours_alone_are_a_range(self):
        self.assertEqual(style.number_ranges([0, 2]), "0, 2")
        self.assertEqual(style.number_ranges([7, 0, 1, 2]), "0-2, 7")
