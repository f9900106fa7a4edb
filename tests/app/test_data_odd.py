"""Odd inputs, second part: pairs of equal answers, contents in parts, files as other programs
write them."""
import json
import unittest

from test_data_rows import Odd


class EqualAnswers(Odd):
    SAME = "pairs left out because both answers are the same"

    def told(self, rows, *options):
        options = ["--restart", "--force", "--pairs", *options]
        return self.build(self.lines(rows), options=options)

    def test_pairs_whose_answers_differ_in_ids_alone_are_left_out_and_counted(self):
        asked, good, bad = self.CHAT[0], self.CHAT[1], {"role": "assistant", "content": "x"}
        sound = {"prompt": "ring", "chosen": [good], "rejected": [bad]}
        other = lambda message, i: {**message, "id": i, "score": i / 2}
        rows = [
            {"chosen": [asked, other(good, 1)], "rejected": [asked, other(good, 2)]},
            {"prompt": "ring", "chosen": [other(good, 1)], "rejected": [other(good, 2)]},
            {"prompt": "ring", "chosen": [asked, good], "rejected": [other(asked, 3), good]},
            {"prompt": "ring", "chosen": "stripe", "rejected": "stripe"},
            {"chosen": "stripe", "rejected": "stripe"},
        ]
        said = self.told([*rows, sound])
        self.assertIn(f"{len(rows)} {self.SAME}", said)
        self.assertIn("6 rows, 2 samples", said)
        self.assertNotIn("bad rows", said)

    def test_answers_that_are_the_same_as_rendered_or_as_cut(self):
        asked, sound = self.CHAT[0], {"prompt": "ring", "chosen": "a", "rejected": "b"}
        pair = [{"role": "assistant", "content": c} for c in ("stripe", " stripe")]
        row = {"prompt": [asked], "chosen": pair[:1], "rejected": pair[1:]}
        self.assertNotIn(self.SAME, self.told([row]))
        strips = lambda c: c.update(chat_template=c["chat_template"].replace("']", "'] | trim"))
        self.change("tokenizer_config.json", strips)
        self.assertIn(f"1 {self.SAME}", self.told([row, sound]))
        row = {"prompt": "ring ", "chosen": "a " * 90 + "b", "rejected": "a " * 90 + "c"}
        self.assertIn(f"1 {self.SAME}", self.told([row, sound], "--max-tokens", "40"))

    def test_an_answer_that_is_empty_or_the_others_beginning_is_named(self):
        row = lambda **columns: json.dumps(columns).encode()
        for name, other in (("chosen", "rejected"), ("rejected", "chosen")):
            raw = row(prompt="ring", **{name: "", other: "stripe"})
            self.refused(raw, f"odd.jsonl:1: the {name} answer", "is empty", options=["--pairs"])
        raw = row(chosen=self.CHAT, rejected=self.CHAT * 2)
        words = ("odd.jsonl:1", "the beginning of the other one", "column of its own")
        self.refused(raw, *words, options=["--pairs"])


class Parts(Odd):
    def test_texts_of_parts_are_joined_with_nothing_between(self):
        part = lambda text, **more: {"type": "text", "text": text, **more}
        for parts in ([part("stripe"), part(" 1234")], [part("stripe 12", image=None), part("34")]):
            row = [{**self.CHAT[0], "content": parts}, {**self.CHAT[1], "content": parts}]
            self.assertEqual(self.learnt([row]), ["stripe 1234<|im_end|>"])
            (document,) = self.documents()
            self.assertIn("user\nstripe 1234<|im_end|>", self.loaded().decode(document[0], False))
        untyped = [{"text": "stripe"}, {"type": None, "text": " 1234"}]
        row = [self.CHAT[0], {**self.CHAT[1], "content": untyped}]
        self.assertEqual(self.learnt([row]), ["stripe 1234<|im_end|>"])

    def test_parts_that_are_no_text_name_row_and_remedy(self):
        for part, words in (
            ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'"),
            ({"type": "image", "text": "x"}, "'image'"),
            ({"type": "text"}, "whose text is none"),
            ({"type": "text", "text": None}, "whose text is none"),
            ({"type": "text", "text": 3}, "whose text is none"),
            ({"image": "x"}, "a dict"),
            ("ring", "a str"),
            (None, "a NoneType"),
        ):
            content = [{"type": "text", "text": "ring"}, part]
            raw = json.dumps([{"role": "user", "content": content}, self.CHAT[1]]).encode()
            self.refused(raw, "odd.jsonl:1: a message holds a part", words, "--bad-rows skip")


if __name__ == "__main__":
    unittest.main()
