"""Conversations above the limit that are split: what of their head each piece learns."""
from test_data import Data


class Heads(Data):
    def split(self, rows, limit):
        options = ["--max-tokens", str(limit), "--long", "split", "--force"]
        return self.build(self.lines(rows), options=options)

    def learnt(self):
        """Text of the tokens that carry loss, by piece."""
        decode = self.loaded().decode
        return [
            decode([token for token, carries in zip(tokens, mask) if carries], False)
            for tokens, mask in self.documents()
        ]

    def test_a_system_message_that_carries_loss_is_learnt_once(self):
        exchange = [
            {"role": "user", "content": "stripe " * 10},
            {"role": "assistant", "content": "a chunk of " * 5},
        ]
        system = {"role": "system", "content": "ring", "weight": 1}
        said = self.split([{"messages": [system, *exchange * 6]}], 120)
        self.assertIn("3 pieces made by splitting", said)
        pieces = self.learnt()
        self.assertEqual(["ring" in piece for piece in pieces], [True, False, False])
        for piece in pieces:
            self.assertEqual(piece.count("a chunk of " * 5), 2)

    def test_a_system_message_alone_is_cut(self):
        system = {"role": "system", "content": "ring stripe " * 60, "weight": 1}
        said = self.split([{"messages": [system]}], 64)
        self.assertIn("1 answers cut at the limit", said)
        ((tokens, mask),) = self.documents()
        self.assertEqual((len(tokens), mask[-1]), (64, 1))
