"""Odd inputs, second part: pairs of equal answers, contents in parts, tools and names of columns as
other programs write them, files with byte-order marks."""
import importlib.util
import json
import os
import re
import subprocess
import sys
import unittest

from test_data import PLAIN, PROGRAM
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
        more += [{"function_call": one} for one in (shapes[1]["function"], shapes[1])]
        rows = [[self.CHAT[0], {"role": "assistant", "content": None, **m}] for m in more]
        self.assertEqual(self.learnt(rows), [json.dumps(shapes[0]) + TOLD] * len(rows))
        # Templates that write a content, and that tell calls by one that is none.
        told = "(m.tool_calls | tojson if m.tool_calls else '')"
        writes, tells = "{{ m.content }}{{ " + told + " }}", "{{ m['content'] + '' }}"
        tells = "{% if m['content'] is none %}{{ " + told + " }}{% else %}" + tells + "{% endif %}"
        for body in (writes, tells):
            source = PLAIN.replace("{{ m['content'] + ", body + "{{ ")
            self.change("tokenizer_config.json", lambda c: c.update(chat_template=source))
            self.assertEqual(self.learnt(rows[:1]), [json.dumps(shapes[0]) + TOLD])
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


class KeysTwice(Odd):
    """Of such a row one of both values would be lost."""

    SOUND = json.dumps({"messages": Odd.CHAT})
    TWICE = (
        '{"messages": [{"role": "user", "content": "a"},'
        ' {"role": "assistant", "content": "b", "content": ""}]}'
    )

    def test_they_are_refused_with_their_place(self):
        lines = f"{self.SOUND}\n{self.TWICE}\n".encode()
        self.refused(lines, "odd.jsonl:2", "'content' stands twice")
        rows = b'{"text": "a", "text": "b"}\n'
        self.refused(rows, "odd.jsonl:1", "'text' stands twice")
        array = f"[{self.SOUND},\n {self.TWICE} , {self.SOUND}]".encode()
        self.refused(array, "element 1", "'content' stands twice", name="odd.json")
        row = {"messages": json.dumps(self.CHAT).replace('"role"', '"role": "x", "role"', 1)}
        self.refused(json.dumps(row).encode(), "odd.jsonl:1", "'role' stands twice")
        row = {"messages": self.CHAT, "tools": '[{"name": "a", "name": "b"}]'}
        self.refused(json.dumps(row).encode(), "odd.jsonl:1", "tools", "'name' stands twice")

    def test_skipping_takes_them_alone(self):
        for name, text in (
            ("chat.jsonl", f"{self.TWICE}\n{self.SOUND}\n{self.SOUND}\n"),
            ("chat.json", f"[{self.SOUND},{self.TWICE}\n,\n{self.SOUND}]"),
        ):
            with open(self.out(name), "w") as f:
                f.write(text)
            options = ["--bad-rows", "skip", "--force", "--restart"]
            said = self.build(self.out(name), options=options)
            self.assertIn("1 bad rows skipped: the key 'content' stands twice", said)
            self.assertEqual(len(self.documents()), 2)


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


class Pipes(Odd):
    """FIFOs: opening one waits for a writer that never comes, until the time of `build` is over."""

    def pipe(self, name):
        path = self.out(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.mkfifo(path)
        return path

    def test_named_pipes_are_refused(self):
        rows, chat = self.lines([self.CHAT]), self.pipe("pipe.jsonl")
        templates = [self.pipe("pipe.jinja"), self.pipe("pipe.json")]
        cases = [((rows, chat), [], chat)]
        cases += [((rows,), ["--chat-template", path], path) for path in templates]
        for inputs, options, path in cases:
            error = self.build(*inputs, options=options, status=2)
            self.assertEqual(error.count("\n"), 1, error)
            self.assertIn(f"{path} is no regular file; copy ", error)
        command = [sys.executable, PROGRAM, "inspect", self.pipe("pipe.h5")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
        self.assertIn("pipe.h5 is no regular file; inspect reads", done.stderr)

    def test_pipes_of_a_folder_are_left_out_and_told(self):
        self.pipe("set/more/x.jsonl"), self.pipe("set/quiet")
        error = self.build(self.out("set"), status=2)
        self.assertIn("no regular file of .jsonl", error)
        os.rename(self.lines([self.CHAT]), self.out("set/chat.jsonl"))
        said = self.build(self.out("set"))
        self.assertIn(f"{self.out('set')}: left out as no regular files: more/x.jsonl\n", said)
        self.assertEqual(len(self.documents()), 1)
        os.symlink("nowhere", self.out("set/gone.jsonl"))
        error = self.build(self.out("set"), options=["--force"], status=2)
        self.assertIn("gone.jsonl: No such file", error)

    def test_pipes_of_a_saved_data_set_or_a_tokenizer_are_refused(self):
        path = self.pipe("saved/data.arrow")
        with open(self.out("saved/state.json"), "w") as f:
            json.dump({"_data_files": [{"filename": "data.arrow"}]}, f)
        error = self.build(self.out("saved"), status=2)
        self.assertIn(f"{path} is no regular file", error)
        path = self.pipe("tokenizer/additional_chat_templates/x.jinja")
        error = self.build(self.lines([self.CHAT]), status=2)
        self.assertIn(f"{path} is no regular file", error)


class Options(Odd):
    def said(self, *options, rows=None, status=2):
        path = self.lines([self.CHAT] if rows is None else rows)
        options = ["--restart", "--force", *options]
        said = self.build(path, options=options, status=status)
        self.assertNotIn("Traceback", said)
        return said

    def test_an_input_is_never_replaced(self):
        path = self.lines([self.CHAT])
        with open(path, "rb") as f:
            before = f.read()
        for name in (path, os.path.join(self.folder, ".", "chat.jsonl")):
            error = self.build(path, out=name, options=["--force"], status=2)
            self.assertIn("is an input; --out names another file", error)
        with open(path, "rb") as f:
            self.assertEqual(f.read(), before)

    def test_files_of_the_tokenizer_are_never_replaced(self):
        path, more = self.lines([self.CHAT]), f"{self.tokenizer}/additional_chat_templates"
        os.makedirs(more)
        names = {f"{self.tokenizer}/{n}.json": "{}" for n in ("special_tokens_map", "added_tokens")}
        templates = (f"{self.tokenizer}/chat_template.jinja", f"{more}/x.jinja")
        names |= {name: PLAIN for name in (*templates, self.out("own.jinja"))}
        for name, text in names.items():
            with open(name, "w") as f:
                f.write(text)
        os.symlink(f"{self.tokenizer}/tokenizer.json", self.out("link.h5"))
        names = [*names, self.out("link.h5")]
        names += [f"{self.tokenizer}/{name}.json" for name in ("tokenizer", "tokenizer_config")]
        for name in names:
            with open(name, "rb") as f:
                before = f.read()
            options = ["--force", "--chat-template", self.out("own.jinja")]
            error = self.build(path, out=name, options=options, status=2)
            self.assertEqual(error.count("\n"), 1, error)
            self.assertIn(f"{name} is an input; --out names another file", error)
            with open(name, "rb") as f:
                self.assertEqual(f.read(), before)
        for _ in range(2):  # a file that is not read may lie there, and be replaced
            self.build(path, out=f"{self.tokenizer}/out.h5", options=["--force"])

    def test_numbers_out_of_bounds_are_refused_at_once(self):
        for option, value in (
            *(("--shard-mib", value) for value in ("nan", "inf", "-inf", "0", "-1")),
            *(("--max-tokens", value) for value in ("99999999999999999999", str(1 << 63), "-1")),
            *((option, "0") for option in ("--workers", "--ranks")),
        ):
            error = self.said(f"{option}={value}")
            self.assertEqual(error.count("\n"), 1, error)
            self.assertIn(option, error)
            self.assertIn("must be", error)
            self.assertFalse(os.path.exists(self.out("out.h5.parts")))
        self.said("--max-tokens", str((1 << 63) - 1), "--shard-mib", "1e300", status=0)

    def test_roles_of_loss_that_no_row_has_are_told(self):
        words = "no row has the role"
        tool = [self.CHAT[0], {"role": "function", "content": "x"}, self.CHAT[1]]
        rows = [self.CHAT] * 30 + [tool]  # of which one shard alone has a tool
        options = ("--shard-mib", "0.001", "--loss-on")
        said = self.said(*options, "gpt,foo,tool,baz", rows=rows, status=0)
        self.assertIn(f"  {words}s baz, foo, which --loss-on names\n", said)
        said = self.said(*options, "assistant,foo", rows=rows, status=0)
        self.assertIn(f"  {words} foo, which --loss-on names\n", said)
        self.assertNotIn(words, self.said(*options, "assistant,observation", rows=rows, status=0))
        for row in ({"text": "ring"}, {"prompt": "ring", "completion": "stripe"}):
            self.assertNotIn(words, self.said(rows=[row], status=0))
        done = subprocess.run(
            self.line(self.lines([self.CHAT]), options=["--force", "--loss-on", "foo"]),
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 2)
        self.assertIn(f"{words} foo, which", done.stdout)

    def test_roles_by_any_of_their_names(self):
        chat = [self.CHAT[0], {"role": "tool", "content": "x"}, self.CHAT[1]]
        self.learnt([chat], "--loss-on", "assistant,tool")
        expected = self.documents()
        self.learnt([chat], "--loss-on", " gpt, Observation")
        self.assertEqual(self.documents(), expected)
        self.assertIn("--loss-on names no role", self.said("--loss-on", " ,"))

    def test_arguments_of_templates(self):
        source = "{{ 'yes' if x else 'no' }}" + PLAIN
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=source))
        for value, begun in (("False", "no"), ("false", "no"), ("None", "no"), ("True", "yes")):
            self.learnt([self.CHAT], "--template-arg", f"x={value}")
            self.assertTrue(self.loaded().decode(self.documents()[0][0]).startswith(begun))
        for name in ("messages", "tools", "add_generation_prompt"):
            self.assertIn(f"{name} is what the rows say", self.said("--template-arg", f"{name}=1"))

    def test_files_of_templates(self):
        def written(name, raw):
            with open(self.out(name), "wb") as f:
                f.write(raw)
            return "--chat-template", self.out(name)

        self.learnt([self.CHAT])
        expected = self.documents()
        for name, raw in (
            ("mark.jinja", b"\xef\xbb\xbf" + PLAIN.encode()),
            ("chat_template.json", json.dumps({"chat_template": PLAIN}).encode()),
        ):
            self.learnt([self.CHAT], *written(name, raw))
            self.assertEqual(self.documents(), expected)
        error = self.said(*written("latin.jinja", PLAIN.encode() + b"\xe9"))
        self.assertIn("latin.jinja: no UTF-8", error)
        self.assertIn("no text is under chat_template", self.said(*written("x.json", b"{}")))
        self.assertIn("is a folder", self.said("--chat-template", self.folder))

    def test_columns_of_pairs(self):
        asked, good, bad = self.CHAT[0], self.CHAT[1], {"role": "assistant", "content": "x"}
        rows = [{"prompt": [asked], "chosen": [good], "rejected": [bad]}]
        rows += [{k: json.dumps(v) for k, v in rows[0].items()}]
        rows += [{"prompt": [], "chosen": [asked, good], "rejected": [asked, bad]}]
        self.learnt(rows, "--pairs")
        same = self.documents()
        self.assertEqual(same[:2] * 3, same)
        row = {"prompt": "a", "chosen": "b", "rejected": "c", "system": "d"}
        self.assertIn("chat.jsonl:1: the column system", self.said("--pairs", rows=[row]))

    def test_tokens_for_what_the_tokenizer_does_not_know_are_counted(self):
        from tokenizers import Tokenizer, models

        words = {c: i for i, c in enumerate(["<unk>", *"ring "])}
        made = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
        made.save(f"{self.tokenizer}/tokenizer.json")
        said = self.said("--no-eos", rows=[{"text": "ring x"}, {"text": "y ring"}], status=0)
        self.assertIn("2 tokens that stand for what the tokenizer does not know", said)

    def test_settings_of_a_tokenizer_in_other_shapes_are_named(self):
        self.change("tokenizer_config.json", lambda c: c.update(added_tokens_decoder=[1]))
        error = self.said()
        self.assertEqual(error.count("\n"), 1, error)
        self.assertIn(f"{self.tokenizer}: its tokenizer cannot be made (AttributeError", error)

    def test_names_of_files_in_other_letters(self):
        path, command = self.lines([self.CHAT]), [sys.executable, PROGRAM, "inspect"]
        for name in (b"mod\xc3\xa8le", b"bad\xff"):
            folder = os.path.join(self.folder, os.fsdecode(name))
            os.rename(self.make_tokenizer("plain", PLAIN), folder)
            line = self.line(path, tokenizer=folder, out=os.path.join(folder, "out.h5"))
            done = []
            for words in (line, [*command, os.path.join(folder, "out.h5")]):
                strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
                done.append(subprocess.run(words, capture_output=True, env=strict))
                self.assertEqual(done[-1].returncode, 0, done[-1].stderr)
            self.assertEqual(done[0].stdout.splitlines()[-1], os.fsencode(folder) + b"/out.h5")
            shown = ("tokenizer: " + name.decode(errors="replace")).encode()
            self.assertIn(shown, done[1].stdout.splitlines())

    def test_numbers_of_inspect(self):
        self.learnt([self.CHAT])
        command = [sys.executable, PROGRAM, "inspect", self.out("out.h5")]
        look = lambda *options: subprocess.run([*command, *options], capture_output=True, text=True)
        whole = re.search(r"\d+ tokens, \d+ with loss", look().stdout)[0]
        self.assertIn(whole, look("--tokens", "2").stdout)
        done = look("--first", "1")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
        self.assertIn("has 1 samples", done.stderr)
        for option in ("--first", "--samples", "--tokens"):
            done = look(option, "-1")
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            self.assertIn("must be at least 0", done.stderr)


if __name__ == "__main__":
    unittest.main()
