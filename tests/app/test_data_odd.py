"""Odd inputs, second part: pairs of equal answers, contents in parts, tools and names of columns as
other programs write them, files with byte-order marks."""
import importlib.util
import json
import unittest

from test_data import PLAIN
from test_data_rows import Odd

TOLD = "<|im_end|>"
WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson + '\n' }}{% endfor %}" + PLAIN.replace(
    "m['content']", "(m.content or '') + (m.tool_calls | tojson if m.tool_calls else '')"
)


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


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


class Tools(Odd):
    def setUp(self):
        super().setUp()
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=WITH_TOOLS))

    def test_tools_in_every_shape(self):
        tools = [{"type": "function", "function": {"name": n}} for n in ("ring", "stripe")]
        shapes = [tools, json.dumps(tools), json.dumps(json.dumps(tools))]
        shapes += [[json.dumps(tool) for tool in tools]]
        rows = [{"messages": self.CHAT, "tools": shape} for shape in shapes]
        rows += [{"messages": self.CHAT, "tools": shape} for shape in (tools[:1], tools[0])]
        rows += [{"messages": self.CHAT, "tools": shape} for shape in (None, "", "null", "[]")]
        self.learnt(rows)
        texts = [self.loaded().decode(tokens, False) for tokens, _ in self.documents()]
        of_two, of_one, of_none = set(texts[:4]), set(texts[4:6]), set(texts[6:])
        self.assertEqual([len(s) for s in (of_two, of_one, of_none)], [1, 1, 1])
        written = "".join(json.dumps(tool) + "\n" for tool in tools)
        self.assertEqual(of_two.pop(), written + next(iter(of_none)))
        for bad, words in ((3, "a int"), ("ring", "no JSON"), ([3], "a int in it")):
            raw = json.dumps({"messages": self.CHAT, "tools": bad}).encode()
            self.refused(raw, "odd.jsonl:1: tools: ", words)

    def test_calls_in_every_shape(self):
        shapes = [[call("ring", x=1)], call("ring", x=1), [json.dumps(call("ring", x=1))]]
        more = [{"tool_calls": shape} for shape in [*shapes, json.dumps(shapes[0])]]
        more += [{"function_call": {"name": "ring", "arguments": {"x": 1}}}]
        rows = [[self.CHAT[0], {"role": "assistant", "content": None, **m}] for m in more]
        self.assertEqual(self.learnt(rows), [json.dumps(shapes[0]) + TOLD] * len(rows))
        for bad, words in ((3, "tool_calls: a int"), ([{"id": 1}], "names no function")):
            row = [self.CHAT[0], {"role": "assistant", "content": "x", "tool_calls": bad}]
            self.refused(json.dumps(row).encode(), "odd.jsonl:1: ", words)

    @unittest.skipIf(importlib.util.find_spec("pyarrow") is None, "no pyarrow")
    def test_a_table_gives_no_call_the_arguments_of_another(self):
        import pyarrow
        import pyarrow.parquet

        tools = [
            {"function": {"name": name, "parameters": {key: {"type": "int"}}}, "type": "function"}
            for name, key in (("ring", "x"), ("stripe", "y"))
        ]
        told = lambda one: {"role": "assistant", "content": None, "tool_calls": [one]}
        ordered = lambda name, **a: {"function": {"arguments": a, "name": name}, "type": "function"}
        rows = [
            {"messages": [self.CHAT[0], told(one)], "tools": tools}
            for one in (ordered("ring", x=1), ordered("stripe", y=2))
        ]
        self.learnt(rows)
        expected = self.documents()
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, self.out("rows.parquet"))
        with pyarrow.OSFile(self.out("rows.arrow"), "wb") as sink:
            with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        for name in ("rows.parquet", "rows.arrow"):
            self.build(self.out(name), options=["--force"])
            self.assertEqual(self.documents(), expected)

    def test_tools_that_the_template_does_not_read_are_told(self):
        row = {"messages": self.CHAT, "tools": [call("ring")]}
        words = "1 conversations with tools, which the chat template does not read"
        self.assertNotIn(words, self.build(self.lines([row])))
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=PLAIN))
        self.assertIn(words, self.build(self.lines([row]), options=["--force"]))


class Columns(Odd):
    def test_names_of_role_and_content_in_any_pair(self):
        rows = [
            [{role: r, said: m["content"]} for r, m in zip(names, self.CHAT)]
            for role, names in (("role", (" User", "assistant ")), ("from", ("human", "gpt")))
            for said in ("content", "value")
        ]
        self.assertEqual(self.learnt(rows), ["stripe 1234" + TOLD] * 4)
        for messages in (rows[0], json.dumps(rows[0])):
            row = {"talk": messages}
            self.assertEqual(self.learnt([row], "--key", "talk"), ["stripe 1234" + TOLD])
        self.assertEqual(self.learnt([{"talk": "[1] ring"}], "--key", "talk"), ["1] ring" + TOLD])

    def test_a_message_without_any_content_is_refused(self):
        raw = b'[{"role": "user", "content": "x"}, {"role": "assistant", "text": "y"}]'
        self.refused(raw, "odd.jsonl:1: a message without content", "it has 'role', 'text'")

    def test_columns_that_are_no_text_are_refused(self):
        for row, words in (
            ({"messages": self.CHAT, "system": ["x"]}, "system holds a list"),
            ({"instruction": "x", "input": ["x"], "output": "y"}, "input is a list"),
            ({"instruction": "x", "input": 3, "output": "y"}, "input is a int"),
            ({"instruction": "x", "output": "y", "history": 3}, "history is no list of"),
            ({"instruction": "x", "output": "y", "history": [["x"]]}, "history is no list of"),
        ):
            self.refused(json.dumps(row).encode(), "odd.jsonl:1: ", words)

    def test_history_and_empty_instructions(self):
        row = {"instruction": "chunk", "output": "b", "history": [["ring", "stripe 1234"]]}
        chat = [*self.CHAT, {"role": "user", "content": "chunk"}]
        chat.append({"role": "assistant", "content": "b"})
        self.learnt([row, chat])
        self.assertEqual(*self.documents())
        self.learnt([{"instruction": "", "input": "ring", "output": "stripe 1234"}, self.CHAT])
        self.assertEqual(*self.documents())


class Encodings(Odd):
    def test_byte_order_marks(self):
        mark, line = b"\xef\xbb\xbf", b'{"text": "ring"}\r\n'
        for name, raw, count in (
            ("a.jsonl", mark + line + mark + line, 2),  # two files, one behind the other
            ("a.txt", mark + b"ring", 1),
        ):
            with open(self.out(name), "wb") as f:
                f.write(raw)
            self.build(self.out(name), options=["--force"])
            texts = [self.loaded().decode(tokens, False) for tokens, _ in self.documents()]
            self.assertEqual(texts, ["ring" + TOLD] * count)

    def test_utf_16_is_named(self):
        one = '{"text": "ring"}'
        for raw in (one, one + "\n" + one + "\n"):
            self.refused(raw.encode("utf-16"), "odd.jsonl:1: no UTF-8 but UTF-16", "iconv")
        self.refused(one.encode("utf-16-le"), "odd.jsonl:1: no JSON")

    def test_a_header_that_takes_white_space_carries_no_loss(self):
        def takes(stored):
            stored["added_tokens"][0]["rstrip"] = True

        self.change("tokenizer.json", takes)
        template = "{% for m in messages %}{{ m.role + '<|im_start|>' + m.content + '<|im_end|>' }}"
        template += "{% endfor %}{% if add_generation_prompt %}assistant<|im_start|>{% endif %}"
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=template))
        for said in ("stripe", "\n stripe"):
            self.learnt([[self.CHAT[0], {"role": "assistant", "content": said}]])
            ((tokens, mask),) = self.documents()
            begun = self.loaded().token_to_id("<|im_start|>")
            self.assertEqual([m for t, m in zip(tokens, mask) if t == begun], [0, 0])
            learnt = self.loaded().decode([t for t, m in zip(tokens, mask) if m], False)
            self.assertEqual(learnt, "stripe" + TOLD)


if __name__ == "__main__":
    unittest.main()
