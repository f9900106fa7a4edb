"""Rows of odd shapes that data sets in use have: what they become, and how others are refused."""
import importlib.util
import json
import os
import random
import re
import unittest

from test_data import MARKED, PLAIN, Data


class Odd(Data):
    CHAT = [{"role": "user", "content": "ring"}, {"role": "assistant", "content": "stripe 1234"}]

    def learnt(self, rows, *options):
        """Text under loss of every document."""
        self.build(self.lines(rows), options=["--restart", "--force", *options])
        pick = self.loaded().decode
        return [
            pick([t for t, m in zip(tokens[1:], mask[1:]) if m], skip_special_tokens=False)
            for tokens, mask in self.documents()
        ]

    def refused(self, raw, *words, name="odd.jsonl", options=()):
        with open(self.out(name), "wb") as f:
            f.write(raw)
        error = self.build(self.out(name), out="no.h5", options=["--restart", *options], status=2)
        self.assertNotIn("Traceback", error)
        for word in words:
            self.assertIn(word, error)

    def change(self, name, change):
        """Changes a JSON file of the tokenizer's folder."""
        with open(f"{self.tokenizer}/{name}") as f:
            stored = json.load(f)
        change(stored)
        with open(f"{self.tokenizer}/{name}", "w") as f:
            json.dump(stored, f)


class OddRows(Odd):
    def test_layouts(self):
        by_name = [
            {"role": {"user": "Human", "assistant": "AI"}[m["role"]], "content": m["content"]}
            for m in self.CHAT
        ]
        rows = [
            self.CHAT,
            {"messages": json.dumps(self.CHAT)},
            {"messages": by_name},
            {"instruction": "ring", "context": "x", "response": "stripe 1234"},
            {"instruction": "ring", "input": None, "output": "stripe 1234"},
        ]
        self.assertEqual(self.learnt(rows), ["stripe 1234<|im_end|>"] * len(rows))

    def test_rows_that_are_no_text_name_their_place(self):
        sound = b'{"text": "a ring"}\n'
        self.refused(sound + b'{"instruction": 3, "output": "x"}\n', "odd.jsonl:2", "a int")
        self.refused(sound + b'{"text": null}\n', "odd.jsonl:2", "'text' (empty)")
        self.refused(sound + b'{"messages": "[oops"}\n', "odd.jsonl:2", "no JSON")
        self.refused(sound + b'{"messages": 3}\n', "odd.jsonl:2", "not a list")
        self.refused(sound + b'{"text": "a \\ud83d b"}\n', "odd.jsonl:2", "surrogate")
        self.refused(sound + b'{"text": "a \xff b"}\n', "odd.jsonl:2", "utf-8")
        deep = b'{"text": ' + b"[" * 100000 + b"]" * 100000 + b"}\n"
        self.refused(sound + deep, "odd.jsonl:2", "no JSON")
        self.refused(b"[" + deep + b"]", "no JSON", name="deep.json")
        self.refused("ring h\xe9".encode("latin-1"), "no UTF-8", "byte 6", name="latin.txt")
        self.refused(b'{\n "data": [\n {"text": "a"}]}\n', "several lines", name="one.json")

    def test_nothing_beside_an_array_is_lost(self):
        array = b'[{"text": "ring"}, {"text": "stripe"}]'
        words = ("two.json: ", "after the end of the array, at byte 40", "one array")
        self.refused(array + b"\n " + array, *words, name="two.json")
        self.refused(array + b" " * (5 << 20) + b"x", "two.json: 'x' comes", name="two.json")
        words = ("two.json: begins with", "one array")
        self.refused(b'3 {"text": "a"}\n' + array, *words, name="two.json")
        with open(self.out("sound.json"), "wb") as f:
            f.write(b"\xef\xbb\xbf\n " + array + b"\n\n")
        self.build(self.out("sound.json"))
        self.assertEqual(len(self.documents()), 2)

    def test_skipping_takes_broken_lines_and_texts(self):
        raw = b'{"text": "ring"}\n{"text": \n{"text": "a \\ud83d b"}\n{"text": "stripe"}\n'
        with open(self.out("broken.jsonl"), "wb") as f:
            f.write(raw)
        said = self.build(self.out("broken.jsonl"), options=["--bad-rows", "skip"])
        self.assertIn("1 bad rows skipped: no JSON", said)
        self.assertIn("1 bad rows skipped: half of a surrogate", said)
        texts = [self.loaded().decode(tokens) for tokens, _ in self.documents()]
        self.assertEqual(texts, ["ring", "stripe"])

    def test_nul_characters_stay_in_texts_and_messages(self):
        answer = "stripe\0 1234\0"
        chat = [self.CHAT[0], {"role": "assistant", "content": answer}]
        self.assertEqual(self.learnt([{"messages": chat}]), [answer + "<|im_end|>"])
        with open(self.out("nul.txt"), "wb") as f:
            f.write(b"ring\0 stripe\n")
        self.build(self.out("nul.txt"), out="nul.h5")
        texts = [self.loaded().decode(tokens) for tokens, _ in self.documents("nul.h5")]
        self.assertEqual(texts, ["ring\0 stripe\n"])
        self.refused(b'{"text": "a"}\n{"text": "a\0b"}\n', "odd.jsonl:2", "no JSON")

    def test_outputs_that_cannot_be_written_are_named(self):
        rows = self.lines([{"text": "ring"}])
        for out in (f"{rows}/x.h5", f"{rows}/sub/x.h5", "/proc/x.h5", "/dev/full", self.folder):
            error = self.build(rows, out=out, options=["--force"], status=2)
            self.assertEqual(error.count("\n"), 1, error)
            self.assertIn("--out names", error)
            self.assertIn(os.path.dirname(out), error)

    def test_pointers_of_git_lfs_are_named(self):
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
        for name in ("chat.jsonl", "book.txt", "table.parquet"):
            self.refused(pointer, name, "Git LFS pointer", "git lfs pull", name=name)
        rows = self.lines([{"text": "ring"}])
        with open(f"{self.tokenizer}/tokenizer.json", "wb") as f:
            f.write(pointer)
        error = self.build(rows, status=2)
        self.assertIn("tokenizer.json: is a Git LFS pointer", error)

    def test_tool_calls_without_content_are_learnt(self):
        call = {"type": "function", "function": {"name": "ring", "arguments": {"x": 1}}}
        told = {"role": "assistant", "tool_calls": [call]}
        for asked in ("m.content is not none", "m.content is string", "not m.tool_calls"):
            written = "m.content if " + asked + " else m.tool_calls | tojson"
            template = PLAIN.replace("m['content']", f"({written})")
            self.change("tokenizer_config.json", lambda c, t=template: c.update(chat_template=t))
            rows = [{"messages": [self.CHAT[0], {**told, "content": None}]}]
            rows += [{"messages": [self.CHAT[0], told]}] * (asked != "m.content is not none")
            self.assertEqual(self.learnt(rows), [json.dumps([call]) + "<|im_end|>"] * len(rows))
        rows = [self.CHAT, [self.CHAT[0], {**told, "content": ""}]]
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=PLAIN))
        error = self.build(self.lines(rows), options=["--restart", "--force"], status=2)
        self.assertIn("chat.jsonl:2: the chat template renders nothing of the tool calls", error)
        self.assertIn("message 2", error)

    def test_messages_of_calls_that_the_template_skips_are_left_out(self):
        skips = PLAIN.replace("in messages %}", "in messages if m.content %}")
        call = {"type": "function", "function": {"name": "ring", "arguments": {"x": 1}}}
        told = {"role": "assistant", "content": "", "tool_calls": [call]}
        reply = {"role": "tool", "content": "chunk of"}
        for marks in (False, True):
            source = (
                skips if not marks else MARKED.replace("messages %}", "messages if m.content %}")
            )
            self.change("tokenizer_config.json", lambda c, s=source: c.update(chat_template=s))
            rows = [[self.CHAT[0], told, reply, self.CHAT[1]], [self.CHAT[0], reply, self.CHAT[1]]]
            self.assertEqual(self.learnt(rows), ["stripe 1234<|im_end|>"] * 2)
            with_call, without = self.documents()
            self.assertEqual(with_call, without)
        said = self.build(self.lines(rows), options=["--force"])
        self.assertIn("1 messages of tool calls alone, which the chat template skips", said)
        for more in ({"reasoning": "x"}, {"content": "x"}):
            row = json.dumps([self.CHAT[0], {**told, **more}, self.CHAT[1]]).encode()
            self.refused(row, "odd.jsonl:1: the chat template renders nothing of the tool calls")

    def test_reasoning_reaches_the_template_by_any_of_its_names(self):
        names = ("reasoning_content", "thinking", "reasoning")
        for read in names[:2]:
            source = PLAIN.replace("{{ m['content']", "{{ m.%s | default('') + m['content']" % read)
            self.change("tokenizer_config.json", lambda c, s=source: c.update(chat_template=s))
            rows = [[self.CHAT[0], {**self.CHAT[1], name: "chunk of"}] for name in names]
            self.assertEqual(self.learnt(rows), ["chunk ofstripe 1234<|im_end|>"] * 3)
        # Templates leave the reasoning of earlier turns out on purpose.
        source = source.replace("m.thinking", "(m.thinking if loop.last else '')")
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=source))
        self.assertEqual(len(self.learnt([rows[2] + self.CHAT], "--turns")), 2)

    def test_reasoning_is_never_lost(self):
        row = lambda **names: json.dumps([self.CHAT[0], {**self.CHAT[1], **names}]).encode()
        words = ("odd.jsonl:1: the chat template renders nothing of the reasoning of message 2",)
        self.refused(row(reasoning="chunk"), *words, "--chat-template")
        self.refused(row(reasoning=["chunk"]), "odd.jsonl:1", "reasoning of a message is a list")
        words = ("odd.jsonl:1", "reasoning_content and reasoning, which differ")
        self.refused(row(reasoning="chunk", reasoning_content="ring"), *words)
        self.learnt([json.loads(row(reasoning="", reasoning_content=None))])

    def test_a_content_of_null_without_calls_is_empty(self):
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=PLAIN))
        rows = [{"messages": [self.CHAT[0], {"role": "assistant", "content": None}]}]
        self.assertEqual(self.learnt(rows), ["<|im_end|>"], "not the word None")

    def test_misspelt_roles_are_told(self):
        rows = [{"messages": [self.CHAT[0], {"role": "asistant", "content": "x"}, *self.CHAT]}]
        said = self.build(self.lines(rows))
        self.assertIn("1 messages of role 'asistant', which carries no loss", said)


class Answers(Odd):
    def test_every_answer_is_learnt_once_or_counted(self):
        rng = random.Random(5)
        rows, answers = [], 0
        for _ in range(40):
            chat = []
            for _ in range(rng.randint(1, 4)):
                chat.append({"role": "user", "content": "ring " * rng.choice((1, 3, 60))})
                for turn in range(rng.randint(1, 3)):
                    if turn:
                        chat.append(
                            {"role": "tool", "content": "stripe " * rng.choice((1, 20, 60))}
                        )
                    text = f"<{answers}>" + "chunk of " * rng.choice((1, 3, 60))
                    chat.append({"role": "assistant", "content": text})
                    answers += 1
            rows.append(chat)
        for policy in ("split", "truncate"):
            options = ["--max-tokens", "120", "--long", policy, "--force"]
            said = self.build(self.lines(rows), options=options)
            texts = []
            for tokens, mask in self.documents():
                learnt = self.loaded().decode([t for t, m in zip(tokens, mask) if m], False)
                texts += re.findall(r"<\d+>", learnt)
            self.assertEqual(len(texts), len(set(texts)))
            lost = int(re.search(r"(\d+) answers left out with what was cut", said)[1])
            self.assertEqual(len(texts) + lost, answers)

    def test_an_input_changed_between_its_ends_is_noticed(self):
        rows = self.lines([{"text": f"ring {i} stripe"} for i in range(9000)])
        with open(rows, "ab") as f:
            f.write(b"{broken\n")
        options = ["--shard-mib", "0.05"]
        self.assertIn("no JSON", self.build(rows, options=options, status=2))
        with open(rows, "r+b") as f:
            changed = f.read().replace(b"ring 4500", b"gnir 4500")
            f.seek(0)
            f.write(changed)
        self.assertIn("begun with other inputs", self.build(rows, options=options, status=2))

    def test_the_time_of_an_input_changes_no_byte(self):
        rows, files = self.lines([self.CHAT]), []
        for seconds in (1, 2):
            os.utime(rows, (seconds, seconds))
            self.build(rows, options=["--force"])
            with open(self.out("out.h5"), "rb") as f:
                files.append(f.read())
        self.assertEqual(*files)


class Folders(Odd):
    def folder_of(self, name, *files):
        """A folder whose files each hold a row of their own name."""
        for file in files:
            path = self.out(f"{name}/{file}")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as f:
                text = os.path.splitext(file)[0]
                f.write(json.dumps({"text": text}) + "\n" if ".json" in file else text)
        return self.out(name)

    def taken(self, name, *files, split=None):
        """Names of the files of which rows are taken."""
        options = ["--force", "--no-eos", *(["--split", split] if split else [])]
        self.build(self.folder_of(name, *files), options=options)
        return sorted(self.loaded().decode(tokens) for tokens, _ in self.documents())

    def not_taken(self, name, *files, words, split=None):
        options = ["--split", split] if split else []
        error = self.build(self.folder_of(name, *files), options=options, out="no.h5", status=2)
        self.assertEqual(error.count("\n"), 1, error)
        for word in (self.out(name), *words):
            self.assertIn(word, error)

    def test_splits_of_a_folder_are_not_mixed(self):
        ultra = [f"data/{s}-00000-of-00001.jsonl" for s in ("train_sft", "test_sft", "train_gen")]
        words = ("test_sft, train_gen, train_sft", "--split")
        self.not_taken("ultra", *ultra, words=words)
        self.not_taken("ultra", *ultra, words=words, split="train")
        self.not_taken("ultra", words=("no file's name says split dev",), split="dev")
        self.assertEqual(self.taken("ultra", split="train_sft"), [ultra[0][:-6]])
        self.assertEqual(self.taken("pair", "train_00.jsonl", "test_00.jsonl"), ["train_00"])
        pieces = [
            "train-00000-of-00002-0123456789abcdef.jsonl",
            "train-1-of-2.jsonl",
            "test1.jsonl",
        ]
        self.assertEqual(len(self.taken("pieces", *pieces)), 2)
        self.assertEqual(self.taken("deep", "train/a.jsonl", "test/a.jsonl"), ["train/a"])

    def test_rows_of_several_folders_are_named(self):
        folder = self.folder_of("years", "2023/rows.jsonl", "2024/rows.jsonl")
        self.assertIn("rows of 2 folders together: 2023, 2024", self.build(folder))

    def test_configurations_of_a_card_are_not_mixed(self):
        folder = self.folder_of("carded", "en-train.jsonl", "README.md")
        one = '- config_name: "en" # English\n  data_files: en-*\n'
        other = "- data_files:\n  - split: train\n    path: de-*\n  config_name: de\n"
        infos = "dataset_info:\n- config_name: fr\n- config_name: it\n"
        for listed, several in (("configs:\n" + one + other, True), ("configs:\n" + one, False)):
            with open(f"{folder}/README.md", "w") as f:
                f.write(f"---\nlicense: mit\n{listed}{infos}---\n# Card\nconfig_name: x\n")
            if several:
                words = ("README.md lists several configurations: de, en;", "name the folder or")
                self.not_taken("carded", words=words)
                self.build(f"{folder}/en-train.jsonl")
            else:
                self.assertEqual(self.taken("carded"), ["en-train"])

    def test_one_file_of_no_split_does_not_mix_them(self):
        files = ("train.jsonl", "test.jsonl", "LICENSE.md", "notes.txt")
        self.assertEqual(self.taken("plain", *files), ["train"])
        self.not_taken("plain", "more.jsonl", words=("test, train", "more.jsonl", "--split"))
        self.assertEqual(self.taken("plain", split="test"), ["test"])
        self.assertEqual(self.taken("unnamed", "ab.jsonl", "ba_1.jsonl"), ["ab", "ba_1"])
        self.assertEqual(self.taken("own", "a_v1.jsonl", "a_v2.jsonl", split="v2"), ["a_v2"])
        self.assertEqual(self.taken("texts", "ab.txt", "ba.md", "LICENSE.txt"), ["ab", "ba"])
        pages = ["dev/a.md", "how-to-test.md", "test-plan.md", "user/README.md"]
        self.assertEqual(len(self.taken("pages", *pages, "README.md")), 4)
        self.assertEqual(self.taken("sets", "train/a.txt", "test/b.txt"), ["train/a"])
        self.assertEqual(self.taken("exam", "math.jsonl", "self_eval.jsonl"), ["math", "self_eval"])
        self.assertEqual(self.taken("tail", "c4-train.jsonl", "c4-test.jsonl"), ["c4-train"])
        self.assertEqual(len(self.taken("cut", "train_aa.jsonl", "train_ab.jsonl")), 2)
        self.not_taken("prep", "test-prep.jsonl", "dev-rust.jsonl", words=("none of them train",))
        self.not_taken("books", "a.txt", "b.txt", "index.jsonl", words=("2 texts", "move one kind"))

    def test_files_that_are_not_read_are_refused(self):
        quiet = ["README.md", "LICENSE", "LICENSE.TXT", "dataset_infos.json", "sub/state.json"]
        folder = self.folder_of("mixed", "sub/part-0.jsonl", *quiet, ".gitattributes")
        self.assertEqual(self.taken("mixed"), ["sub/part-0"])
        for name in ("part-1.jsonl.gz", "part-2.csv", "x.JSONL", "sub/part-3.jsonl.zst"):
            self.folder_of("mixed", name)
            self.not_taken("mixed", words=(f"cannot read {name};", "unpack", "move them away"))
            os.remove(f"{folder}/{name}")

    def test_damaged_descriptions_are_named(self):
        for name in ("dataset_dict.json", "state.json"):
            for text in ("{", "[]", "{}", '{"splits": [3], "_data_files": [{}]}', "\xff"):
                folder = self.folder_of(name.split(".")[0], "train.jsonl")
                with open(f"{folder}/{name}", "w", encoding="latin-1") as f:
                    f.write(text)
                error = self.build(folder, out="no.h5", status=2)
                self.assertEqual(error.count("\n"), 1, error)
                self.assertIn(f"{folder}/{name}: ", error)
                self.assertIn("is it damaged?", error)


@unittest.skipIf(importlib.util.find_spec("pyarrow") is None, "no pyarrow")
class DamagedTables(Odd):
    def table(self):
        import pyarrow

        rows = random.Random(3)
        return pyarrow.table({"text": [f"ring {rows.random()}" for _ in range(60)]})

    def stream(self, footed=False):
        """Bytes of an Arrow file of six batches, and how many each batch's end is at."""
        import pyarrow

        sink, ends = pyarrow.BufferOutputStream(), []
        new = pyarrow.ipc.new_file if footed else pyarrow.ipc.new_stream
        with new(sink, self.table().schema) as writer:
            for batch in self.table().to_batches(max_chunksize=10):
                writer.write_batch(batch)
                ends.append(sink.tell())
        return sink.getvalue().to_pybytes(), ends

    def parquet(self, **options):
        import pyarrow
        import pyarrow.parquet

        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(
            self.table(), sink, compression="none", use_dictionary=False, **options
        )
        return sink.getvalue().to_pybytes()

    def test_damage_is_blamed_on_its_file(self):
        words = ("is it damaged?",)
        for footed in (False, True):
            raw, ends = self.stream(footed)
            said = words if footed else ("the end of an Arrow stream",)
            self.refused(raw[: ends[2] - 40], "cut.arrow: ", *said, name="cut.arrow")
            at = raw.index(b"ring")
            bad = raw[:at] + b"\xff" + raw[at + 1 :]
            self.refused(bad, "bad.arrow: ", "UTF8", *words, name="bad.arrow")
        self.refused(b"x" * 300, "x.arrow: ", name="x.arrow")
        raw = self.parquet()
        self.refused(raw[:-60], "cut.parquet: ", *words, name="cut.parquet")
        at = raw.rindex(b"ring", 0, len(raw) // 2)
        bad = raw[:at] + b"\xff" + raw[at + 1 :]
        self.refused(bad, "bad.parquet: ", "UTF8", *words, name="bad.parquet")

    def test_a_stream_cut_between_batches_is_refused(self):
        raw, ends = self.stream()
        words = ("cut.arrow: ", "end of an Arrow stream", "again")
        self.refused(raw[: ends[2]], *words, name="cut.arrow")
        self.refused(raw[:-4], *words, name="cut.arrow")

    def test_checksums_of_parquet_pages_are_verified(self):
        raw = self.parquet(write_page_checksum=True)
        with open(self.out("sound.parquet"), "wb") as f:
            f.write(raw)
        self.build(self.out("sound.parquet"), options=["--force"])
        at = raw.rindex(b"ring", 0, len(raw) // 2)  # in a page, not in its header
        bad = raw[:at] + b"R" + raw[at + 1 :]
        self.refused(bad, "bad.parquet: ", "is it damaged?", name="bad.parquet")


class OddTokenizers(Odd):
    def said_of(self, name, template, status=2, eos="<|im_end|>"):
        folder = self.make_tokenizer(name, "")
        with open(f"{folder}/tokenizer_config.json", "w") as f:
            json.dump({"chat_template": template, **({"eos_token": eos} if eos else {})}, f)
        path = self.lines([{"messages": self.CHAT}])
        said = self.build(path, tokenizer=folder, status=status, options=["--restart", "--force"])
        self.assertNotIn("Traceback", said)
        return said

    def test_broken_templates_are_named(self):
        said = self.said_of("open", "{% for m in messages %}")
        self.assertIn("chat template, line 1", said)
        self.assertIn(
            "chat.jsonl:1: the chat template refuses", self.said_of("zero", "{{ 1 / 0 }}")
        )
        endless = "{% for i in range(10 ** 9) %}{% endfor %}"
        self.assertIn("refuses", self.said_of("long", endless))
        listed = [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "x"}]
        self.assertIn("rag, tool_use", self.said_of("listed", listed))
        self.assertIn("names no eos_token", self.said_of("endless", PLAIN, 0, None))

    def test_a_tokenizer_without_nul_refuses_texts_that_have_it(self):
        from tokenizers import Tokenizer, models

        words = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ")}
        made = Tokenizer(models.BPE(vocab=words, merges=[]))
        made.save(f"{self.tokenizer}/tokenizer.json")
        rows = self.lines([{"text": "ring"}, {"text": "ring\0 stripe"}])
        error = self.build(rows, options=["--no-eos"], status=2)
        self.assertIn("chat.jsonl:2: 1 NUL character (U+0000)", error)
        said = self.build(rows, options=["--no-eos", "--restart", "--bad-rows", "skip"])
        self.assertIn("1 bad rows skipped", said)
        self.assertEqual([len(tokens) for tokens, _ in self.documents()], [4])

    def test_a_tokenizer_that_holds_no_tokens_is_named(self):
        for text in ("[]", "{}", '{"model": {"vocab": 3}}'):
            with open(f"{self.tokenizer}/tokenizer.json", "w") as f:
                f.write(text)
            error = self.build(self.lines([{"text": "a"}]), status=2)
            self.assertEqual(error.count("\n"), 1, error)
            self.assertIn("tokenizer.json: holds ", error)

    def test_a_broken_tokenizer_is_named(self):
        with open(f"{self.tokenizer}/tokenizer.json", "w") as f:
            json.dump({"model": {"type": "none", "vocab": {"a": 0}}}, f)
        error = self.build(self.lines([{"text": "a"}]), status=2)
        self.assertIn("tokenizer.json: ", error)
        self.assertNotIn("died", error)

    def test_leading_spaces_of_an_answer_carry_loss(self):
        trims = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        chains = {"type": "Sequence", "processors": [{**trims, "use_regex": True}]}
        for post in ({**trims, "use_regex": True}, chains):
            self.change("tokenizer.json", lambda stored, p=post: stored.update(post_processor=p))
            for answer in ("   stripe", " ", "  \n x"):
                chat = [self.CHAT[0], {"role": "assistant", "content": answer}]
                (learnt,) = self.learnt([{"messages": chat}])
                # A token may hold the line feed of the header as well.
                self.assertEqual(learnt.removeprefix("\n"), answer + "<|im_end|>")

    def test_samples_with_tools_take_the_template_for_them(self):
        tools = [{"type": "function", "function": {"name": "ring"}}]
        rows = [{"messages": self.CHAT}, {"messages": self.CHAT, "tools": tools}]
        for_tools = "{{ tools | tojson }}\n" + MARKED
        listed = [
            {"name": "default", "template": PLAIN},
            {"name": "tool_use", "template": for_tools},
        ]
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=listed))
        folder, texts = f"{self.tokenizer}/additional_chat_templates", []
        for in_files in (False, True):
            if in_files:
                self.change("tokenizer_config.json", lambda c: c.pop("chat_template"))
                os.makedirs(folder)
                for path, source in (("../chat_template", PLAIN), ("tool_use", for_tools)):
                    with open(f"{folder}/{path}.jinja", "w") as f:
                        f.write(source)
            self.assertEqual(self.learnt(rows), ["stripe 1234<|im_end|>"] * 2)
            texts.append([self.loaded().decode(tokens, False) for tokens, _ in self.documents()])
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(texts[0][1], json.dumps(tools) + "\n" + texts[0][0])

    def test_templates_know_documents(self):
        source = "{% if documents is none %}" + PLAIN + "{% endif %}"
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=source))
        self.assertEqual(self.learnt([self.CHAT]), ["stripe 1234<|im_end|>"])

    def test_special_tokens_in_a_file_of_their_own(self):
        self.change("tokenizer_config.json", lambda c: c.pop("eos_token"))
        source = "{{ bos_token }}" + PLAIN
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=source))
        named = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
        with open(f"{self.tokenizer}/special_tokens_map.json", "w") as f:
            json.dump(named, f)
        self.assertTrue(self.learnt([{"text": "ring"}])[0].endswith("<|im_end|>"))
        self.learnt([self.CHAT])
        begun = self.loaded().token_to_id("<|im_start|>")
        self.assertEqual(self.documents()[0][0][:2], [begun, begun])

    def test_added_tokens_that_tokenizer_json_lacks_are_named(self):
        rows = self.lines([self.CHAT])
        with open(f"{self.tokenizer}/added_tokens.json", "w") as f:
            json.dump({"<|im_end|>": 1, "<|turn|>": 600}, f)
        error = self.build(rows, status=2)
        self.assertIn("tokenizer.json lacks '<|turn|>', a token that added_tokens.json adds", error)
        added = {"1": {"content": "<|im_end|>"}, "600": {"content": "<|call|>"}}
        self.change("tokenizer_config.json", lambda c: c.update(added_tokens_decoder=added))
        error = self.build(rows, options=["--restart"], status=2)
        self.assertIn("tokenizer.json lacks '<|call|>'", error)
        self.assertIn("save_pretrained", error)

    def test_settings_that_change_ids_are_refused(self):
        rows = self.lines([{"text": "ring"}])
        config, tokens = "tokenizer_config.json", "tokenizer.json"
        for name, words, change, back in (
            (tokens, "dropout is 0.3", {"dropout": 0.3}, {"dropout": None}),
            (config, "split_special_tokens", {"split_special_tokens": True}, None),
            (config, "add_prefix_space is true, but false", {"add_prefix_space": True}, None),
        ):
            back = back or {next(iter(change)): False}
            part = lambda c: c.get("model", c)
            self.change(name, lambda c, v=change: part(c).update(v))
            error = self.build(rows, options=["--restart", "--force"], status=2)
            self.assertIn(words, error)
            self.assertIn(name, error)
            self.assertEqual(error.count("\n"), 1, error)
            self.change(name, lambda c, v=back: part(c).update(v))
            self.build(rows, options=["--restart", "--force"])


class OddPairs(Odd):
    def test_layouts_of_pairs(self):
        rng = random.Random(7)
        prompt = {"role": "user", "content": f"ring {rng.randrange(100)}"}
        good, bad = ({"role": "assistant", "content": c} for c in ("stripe", "1234"))
        rows = [
            {"prompt": prompt["content"], "chosen": [prompt, good], "rejected": [prompt, bad]},
            {"prompt": prompt["content"], "chosen": [good], "rejected": [bad]},
            {"prompt": [prompt], "chosen": good, "rejected": bad},
            {"prompt": [prompt], "chosen": [prompt, good], "rejected": [prompt, bad]},
            {"chosen": [prompt, good], "rejected": [prompt, bad]},
        ]
        told = self.learnt(rows, "--pairs")
        self.assertEqual(told, ["stripe<|im_end|>", "1234<|im_end|>"] * len(rows))
        same = self.documents()
        for i in range(2, len(same)):
            self.assertEqual(same[i], same[i % 2])

    def test_prompts_are_known_beside_ids_and_other_spellings(self):
        asked, good, bad = self.CHAT[0], self.CHAT[1], {"role": "assistant", "content": "x"}
        parts = {"role": "user", "content": [{"type": "text", "text": "ring"}]}
        rows = [{"prompt": "ring", "chosen": [good], "rejected": [bad]}]
        for one in ({**asked, "id": 1}, {**asked, "score": None}, parts):
            for two in ({**asked, "id": 2}, {"from": "human", "value": "ring"}):
                for told in ({"prompt": "ring"}, {"prompt": [asked]}, {}):
                    rows.append({**told, "chosen": [one, good], "rejected": [two, bad]})
        self.learnt(rows, "--pairs")
        same = self.documents()
        for i in range(2, len(same)):
            self.assertEqual(same[i], same[i % 2])
        row = {"prompt": "ring", "chosen": [asked, good], "rejected": [bad]}
        error = self.build(self.lines([row]), options=["--pairs"], out="no.h5", status=2)
        self.assertIn("chat.jsonl:1: beside the row's prompt, an answer begins", error)

    def test_texts_without_prompt_part_at_a_word(self):
        rows = [{"chosen": "Q: ring\nA: stripes", "rejected": "Q: ring\nA: strip"}]
        self.assertEqual(self.learnt(rows, "--pairs"), [" stripes<|im_end|>", " strip<|im_end|>"])

    def test_a_prompt_is_never_rendered_twice(self):
        asked, good, bad = self.CHAT[0], self.CHAT[1], {"role": "assistant", "content": "x"}
        spaced = {"role": "user", "content": " ring\n"}
        rows = [{"prompt": [asked], "chosen": [good], "rejected": [bad]}]
        for prompt in ("ring", [asked]):
            both = {"chosen": [spaced, good], "rejected": [spaced, bad]}
            rows.append({"prompt": prompt, **both})
        self.learnt(rows, "--pairs")
        begun = self.loaded().token_to_id("<|im_start|>")
        self.assertEqual([tokens.count(begun) for tokens, _ in self.documents()], [2] * 6)
        other = {"role": "user", "content": "stripe"}
        row = {"prompt": "ring", "chosen": [other, good], "rejected": [other, bad]}
        error = self.build(self.lines([row]), options=["--pairs", "--restart", "--force"], status=2)
        self.assertIn("chat.jsonl:1: beside the row's prompt, an answer begins", error)
        row = json.dumps({"prompt": [asked], "completion": [asked, good]}).encode()
        self.refused(row, "odd.jsonl:1: beside the row's prompt")

    def test_a_system_column_and_a_system_message(self):
        first = {"role": "system", "content": "chunk"}
        self.learnt([{"system": "chunk", "messages": self.CHAT}, {"messages": [first, *self.CHAT]}])
        one, two = self.documents()
        self.assertEqual(one, two)
        self.learnt([{"system": "chunk", "messages": [first, *self.CHAT]}])
        self.assertEqual(self.documents(), [one])
        row = json.dumps({"system": "other", "messages": [first, *self.CHAT]}).encode()
        self.refused(row, "odd.jsonl:1", "two system messages")
