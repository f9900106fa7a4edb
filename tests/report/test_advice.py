"""Changes of the deck that are worth asking about: they keep the number of ranks, and are legal."""
import types
import unittest

import numpy as np

import support  # noqa: F401  (puts app/report on the path)
import advice


def analysed(mesh):
    """A run on this mesh whose ranks are in balance."""
    newest = types.SimpleNamespace(mesh=mesh)
    run = types.SimpleNamespace(deck={}, first_trace=types.SimpleNamespace(last=newest))
    return types.SimpleNamespace(run=run, pop=(1, 1, 1), bubble_ratio=0, worked=np.ones((1, 1)))


class Candidates(unittest.TestCase):
    def test_a_ring_in_place_of_all_to_alls_has_all_their_ranks(self):
        found = advice.candidates(analysed({"sp": 2, "cp_inner": 4}), {"sequence exchange": 0.5})
        self.assertIn({"mesh.sp": 1, "mesh.cp_inner": 8}, [c.settings for c in found])

    def test_heads_are_exchanged_only_where_all_ranks_divide_them(self):
        """Two ranks of a ring times four that share heads."""
        for heads, legal in ((4, False), (8, True)):
            deck, mesh = {"model.query_heads": heads}, {"cp_inner": 2, "sp": 4}
            found = [c.settings for c in advice._ring(deck, mesh, 2)]
            ulysses = {"mesh.sp": 8, "mesh.cp_outer": 1, "mesh.cp_inner": 1}
            self.assertEqual(ulysses in found, legal, heads)


if __name__ == "__main__":
    unittest.main()
