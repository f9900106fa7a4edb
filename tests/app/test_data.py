"""ballast-data: masks beside a brute force, bytes that do not depend on workers or kills, what
becomes of long samples, refusals, and training on what it wrote.  The tokenizer is made here."""
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import unittest

import h5py
import numpy

import preloaded
from runs import BALLAST, RunCase

PROGRAM = os.path.join(os.environ["BALLAST_ROOT"], "app", "data")
MISSING = [m for m in ("jinja2", "tokenizers") if importlib.util.find_spec(m) is None]
HEAD = "{{ '<|im_start|>' + m['role'] + '\n' }}"
PLAIN = (
    "{% for m in messages %}"
    + HEAD
    + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}"
    + HEAD
    + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Leaves the thinking of earlier turns out, as Qwen3's does.
FORGETFUL = (
    "{% for m in messages %}"
    + HEAD
    + "{{ m['content'] if loop.last or m['role'] != 'assistant' else"
    " m['content'].split('</think>')[-1] }}"
    + "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ["ring", "stripe", " a", "\n", "\n\n", "  x", "é", "日本", "🙂", "1234", "chunk of", ".", " "]


def phrase(rng, most=12):
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, most))) or "."


def conversation(rng, turns=4, most=12):
    messages = [{"role": "system", "content": phrase(rng, most)}] if rng.random() < 0.4 else []
    for _ in range(rng.randint(1, turns)):
        messages.append({"role": "user", "content": phrase(rng, most)})
        if rng.random() < 0.2:
            messages.append({"role": "tool", "content": phrase(rng, most)})
        messages.append({"role": "assistant", "content": phrase(rng, most)})
        if rng.random() < 0.3:
            messages[-1]["weight"] = rng.randint(0, 1)
    return messages


@unittest.skipIf(MISSING, f"no {', '.join(MISSING)}: jobs/data_environment.sh was not run")
class Data(RunCase):
    def setUp(self):
        super().setUp()
        self.tokenizer = self.make_tokenizer("tokenizer", PLAIN)

    def make_tokenizer(self, name, template, size=400):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        folder = self.out(name)
        os.makedirs(folder)
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        rng = random.Random(1)
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator((phrase(rng, 40) for _ in range(200)), trainer)
        made.save(os.path.join(folder, "tokenizer.json"))
        config = {"eos_token": "<|im_end|>", "chat_template": template}
        with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
            json.dump(config, f)
        return folder

    def loaded(self, folder=None):
        from tokenizers import Tokenizer

        return Tokenizer.from_file(os.path.join(folder or self.tokenizer, "tokenizer.json"))

    def lines(self, rows, name="chat.jsonl"):
        path = self.out(name)
        with open(path, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return path

    def chats(self, count=60, seed=3, **shape):
        rng = random.Random(seed)
        return [{"messages": conversation(rng, **shape)} for _ in range(count)]

    def line(self, *inputs, out="out.h5", tokenizer=None, options=()):
        command = [sys.executable, PROGRAM, "build", *inputs, "--out", self.out(out)]
        return command + ["--tokenizer", tokenizer or self.tokenizer, *options]

    def build(self, *inputs, out="out.h5", tokenizer=None, options=(), status=0):
        line = self.line(*inputs, out=out, tokenizer=tokenizer, options=options)
        done = preloaded.run(line[1], line[2:], timeout=120)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout if status == 0 else done.stderr

    def documents(self, out="out.h5"):
        """[(tokens, mask)] of a file."""
        with h5py.File(self.out(out), "r") as f:
            offsets, tokens = f["offsets"][:], f["tokens"][:]
            mask = f["loss_mask"][:] if "loss_mask" in f else numpy.ones(len(tokens), "u1")
        return [(tokens[a:b].tolist(), mask[a:b].tolist()) for a, b in zip(offsets, offsets[1:])]

    def brute_force(self, messages, roles=("assistant",)):
        """Tokens and mask from every character's flag: text written down without a template."""
        text, flags = "", []
        for m in messages:
            head, body = f"<|im_start|>{m['role']}\n", m["content"] + "<|im_end|>"
            learnt = m.get("weight", m["role"] in roles)
            # The header of an answer is what generation begins with; that of others is a part.
            begun = head + body + "\n"
            of_head = bool(learnt) and m["role"] != "assistant"
            text += begun
            flags += [of_head] * len(head) + [bool(learnt)] * len(body) + [False]
        encoded = self.loaded().encode(text, add_special_tokens=False)
        return encoded.ids, [int(any(flags[a:b])) for a, b in encoded.offsets]


class Masks(Data):
    def check(self, folder, options=(), roles=("assistant",)):
        rows = self.chats()
        said = self.build(self.lines(rows), tokenizer=folder, options=options)
        expected = [self.brute_force(row["messages"], roles) for row in rows]
        expected = [(t, m) for t, m in expected if any(m[1:])]
        self.assertGreater(len(expected), 40)
        found = self.documents()
        self.assertEqual([t for t, _ in found], [t for t, _ in expected])
        for (_, mask), (_, wanted) in zip(found, expected):
            self.assertEqual(mask, wanted)
        return said

    def test_prefixes_beside_a_brute_force(self):
        self.assertIn("rendered prefixes", self.check(self.tokenizer))

    def test_generation_marks_beside_a_brute_force(self):
        self.assertIn("generation marks", self.check(self.make_tokenizer("marked", MARKED)))

    def test_other_roles(self):
        roles = ("assistant", "tool")
        self.check(self.tokenizer, ["--loss-on", ",".join(roles)], roles)

    def test_a_template_that_forgets(self):
        folder = self.make_tokenizer("forgetful", FORGETFUL)
        think = "<think>x</think>"
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": think + "b"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": think + "d"},
        ]
        path = self.lines([{"messages": messages}])
        error = self.build(path, tokenizer=folder, status=2)
        self.assertIn("chat.jsonl:1", error)
        self.assertIn("--turns", error)
        said = self.build(path, tokenizer=folder, options=["--turns"])
        self.assertIn("1 conversations rendered turn by turn", said)
        first, second = self.documents()
        tokenizer = self.loaded()
        learnt = [tokenizer.decode([t for t, m in zip(*d) if m], False) for d in (first, second)]
        self.assertEqual(learnt, [think + "b<|im_end|>", think + "d<|im_end|>"])
        whole = tokenizer.decode(second[0], skip_special_tokens=False)
        self.assertIn("assistant\nb<|im_end|>", whole)

    def test_text_and_completions(self):
        rows = [{"text": "ring é"}, {"prompt": "stripe 1234", "completion": " chunk of"}]
        self.build(self.lines(rows))
        tokenizer = self.loaded()
        (text, all_of_it), (pair, answer) = self.documents()
        self.assertEqual(tokenizer.decode(text, False), "ring é<|im_end|>")
        self.assertEqual(set(all_of_it), {1})
        learnt = tokenizer.decode([t for t, m in zip(pair, answer) if m], False)
        self.assertEqual(learnt, " chunk of<|im_end|>")


class Formats(Data):
    def test_one_conversation_in_every_layout(self):
        rows = [{"messages": [m for m in row["messages"]]} for row in self.chats(40)]
        for row in rows:
            for m in row["messages"]:
                m.pop("weight", None)
        names = {"user": "human", "assistant": "gpt", "tool": "tool", "system": "system"}
        sharegpt = [
            {
                "conversations": [
                    {"from": names[m["role"]], "value": m["content"]} for m in row["messages"]
                ]
            }
            for row in rows
        ]
        with open(self.out("rows.json"), "w") as f:
            json.dump(rows, f, indent=1)
        shards = ["--shard-mib", "0.002"]
        self.build(self.lines(rows), out="a.h5", options=shards)
        self.build(self.out("rows.json"), out="b.h5", options=shards)
        self.build(self.lines(sharegpt, "s.jsonl"), out="c.h5", options=shards)
        for out in ("b.h5", "c.h5"):
            self.assertEqual(self.documents(out), self.documents("a.h5"))

    @unittest.skipIf(importlib.util.find_spec("pyarrow") is None, "no pyarrow")
    def test_parquet_and_saved_datasets(self):
        import pyarrow
        import pyarrow.parquet

        rows = self.chats(50)
        table = pyarrow.Table.from_pylist(rows)
        self.build(self.lines(rows), out="a.h5")
        os.makedirs(self.out("hub/data"))
        for split, part in (("train", table), ("test", table.slice(0, 2))):
            path = self.out(f"hub/data/{split}-00000-of-00001.parquet")
            pyarrow.parquet.write_table(part, path, row_group_size=7)
        said = self.build(self.out("hub"), out="b.h5", options=["--shard-mib", "0.001"])
        self.assertIn("split train of test, train", said)
        saved = self.out("saved/train")
        os.makedirs(saved)
        with pyarrow.OSFile(os.path.join(saved, "data-00000-of-00001.arrow"), "wb") as sink:
            with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=6)
        for path, value in (
            ("saved/dataset_dict.json", {"splits": ["test", "train"]}),
            ("saved/train/state.json", {"_data_files": [{"filename": os.listdir(saved)[0]}]}),
        ):
            with open(self.out(path), "w") as f:
                json.dump(value, f)
        self.build(self.out("saved"), out="c.h5", options=["--shard-mib", "0.001"])
        for out in ("b.h5", "c.h5"):
            self.assertEqual(self.documents(out), self.documents("a.h5"))


class Bytes(Data):
    SHARDS = ("--shard-mib", "0.01", "--max-tokens", "300")

    def read(self, out):
        with open(self.out(out), "rb") as f:
            return f.read()

    def test_any_number_of_workers(self):
        path = self.lines(self.chats(400))
        for workers in (1, 3):
            options = [*self.SHARDS, "--workers", str(workers)]
            self.build(path, out=f"{workers}.h5", options=options)
        self.assertEqual(self.read("1.h5"), self.read("3.h5"))
        self.assertFalse(os.path.exists(self.out("1.h5.parts")))

    def test_killed_and_continued(self):
        path = self.lines(self.chats(3000))
        self.build(path, out="whole.h5", options=self.SHARDS)
        rng, journal = random.Random(4), self.out("out.h5.parts/journal.jsonl")
        known = 0
        for _ in range(4):
            process = subprocess.Popen(
                self.line(path, options=self.SHARDS),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            end = time.time() + 60
            while process.poll() is None and time.time() < end:
                if os.path.exists(journal) and self.shards(journal) >= known + 2:
                    time.sleep(0.02 * rng.random())
                    break
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.wait()
            if process.returncode == 0:
                break
            self.assertTrue(self.group_ends(process.pid), "a worker outlived its parent")
            self.assertGreaterEqual(self.shards(journal), known)
            known = self.shards(journal)
            with open(journal, "ab") as f:
                f.write(b'{"shard": 1')  # as a kill within a write leaves it
        self.assertGreaterEqual(known, 2)
        if not os.path.exists(self.out("out.h5")):
            said = self.build(path, options=self.SHARDS)
            self.assertRegex(said, r"going on: \d+ of \d+ shards")
        self.assertEqual(self.read("out.h5"), self.read("whole.h5"))

    @staticmethod
    def shards(journal):
        with open(journal, "rb") as f:
            return f.read().count(b'"documents"')

    @staticmethod
    def group_ends(group):
        end = time.time() + 20
        while time.time() < end:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False

    def test_another_recipe_does_not_go_on(self):
        path = self.lines(self.chats(20))
        with open(path, "a") as f:
            f.write("{broken\n")
        self.build(path, options=["--shard-mib", "0.001"], status=2)
        error = self.build(path, options=["--shard-mib", "0.001", "--no-eos"], status=2)
        self.assertIn("begun with other eos", error)
        self.lines(self.chats(21))
        error = self.build(path, options=["--shard-mib", "0.001"], status=2)
        self.assertIn("begun with other inputs", error)
        self.build(path, options=["--restart"])
        self.assertIn("--force", self.build(path, status=2))


class Long(Data):
    LIMIT = 120

    def cut(self, policy, rows=None, status=0, **shape):
        self.rows = rows or self.chats(40, turns=12, **shape)
        for row in self.rows:
            for m in row["messages"]:
                m.pop("weight", None)
        options = ["--max-tokens", str(self.LIMIT), "--long", policy, "--force"]
        return self.build(self.lines(self.rows), options=options, status=status)

    def test_splitting_keeps_answers_with_their_prompts(self):
        said = self.cut("split")
        self.assertIn("pieces made by splitting", said)
        with h5py.File(self.out("out.h5"), "r") as f:
            rows = f["rows"][:].tolist()
        tokenizer, pieces = self.loaded(), {}
        for row, (tokens, mask) in zip(rows, self.documents()):
            self.assertLessEqual(len(tokens), self.LIMIT)
            pieces.setdefault(row, []).append(tokenizer.decode(tokens, False))
        self.assertGreater(sum(len(p) > 1 for p in pieces.values()), 10)
        for row, texts in pieces.items():
            messages = self.rows[row]["messages"]
            head = messages[0]["role"] == "system"
            system = f"<|im_start|>system\n{messages[0]['content']}<|im_end|>\n" if head else ""
            whole = ""
            for text in texts:
                # Every piece begins as the conversation does, and then the user speaks.
                self.assertTrue(text.startswith(system + "<|im_start|>user\n"), text)
                whole += text[len(system) :]
            said = "".join(
                f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[head:]
            )
            self.assertEqual(whole, said)

    def test_truncating_ends_after_an_answer(self):
        self.cut("truncate")
        cut = 0
        for row, (tokens, mask) in zip(self.rows, self.documents()):
            whole, wanted = self.brute_force(row["messages"])
            self.assertEqual((tokens, mask), (whole[: len(tokens)], wanted[: len(tokens)]))
            if len(tokens) < len(whole):
                cut += 1
                self.assertEqual(mask[-1], 1)
                after = wanted[len(tokens) : self.LIMIT]
                # Another whole answer would not have fitted.
                self.assertFalse(any(a == 1 and b == 0 for a, b in zip(after, after[1:])))
        self.assertGreater(cut, 5)

    def test_an_exchange_that_is_too_long(self):
        rows = [
            {"messages": [{"role": r, "content": c * n} for r, c, n in zip(names, "ab", sizes)]}
            for names, sizes in ((("user", "assistant"), s) for s in ((10, 900), (900, 10)))
        ]
        said = self.cut("split", rows)
        self.assertIn("1 answers cut at the limit", said)
        self.assertIn("1 samples dropped because the prompt alone is too long", said)
        ((tokens, mask),) = self.documents()
        self.assertEqual((len(tokens), mask[-1]), (self.LIMIT, 1))

    def test_dropping_and_refusing(self):
        said = self.cut("drop")
        self.assertIn("dropped because they are too long", said)
        self.assertTrue(all(len(t) <= self.LIMIT for t, _ in self.documents()))
        self.assertRegex(self.cut("refuse", status=2), r"chat.jsonl:\d+: .* above --max-tokens")


class Refusals(Data):
    def refused(self, row, *words, options=()):
        path = self.lines([{"text": "sound"}, row])
        error = self.build(path, options=[*options, "--restart"], status=2)
        for word in ("chat.jsonl:2", *words):
            self.assertIn(word, error)

    def test_rows(self):
        self.refused({"body": "x"}, "'body'", "--key")
        self.refused({"messages": [{"content": "x"}]}, "without role")
        message = {"role": "assistant", "content": "x"}
        self.refused({"messages": [dict(message, weight=0.5)]}, "0 or 1")
        self.refused({"messages": [dict(message, content=[{"type": "image"}])]}, "no text")
        self.refused({"messages": []}, "without messages")
        path = self.lines([{"text": "sound"}, {"body": "x"}])
        said = self.build(path, options=["--bad-rows", "skip", "--restart"])
        self.assertIn("1 bad rows skipped", said)

    def test_files_and_folders(self):
        self.assertIn("no such file", self.build(self.out("none.jsonl"), status=2))
        path = self.lines(self.chats(2))
        self.assertIn("tokenizer.json", self.build(path, tokenizer=self.folder, status=2))
        os.remove(os.path.join(self.tokenizer, "tokenizer_config.json"))
        self.assertIn("no chat template", self.build(path, status=2))
        with open(self.out("broken.jsonl"), "w") as f:
            f.write('{"text": "a"}\n{"text": \n')
        self.assertIn("broken.jsonl:2", self.build(self.out("broken.jsonl"), out="b.h5", status=2))


class Pairs(Data):
    def pairs(self, rng, count):
        """Rows of preferences in every layout, and the two conversations that each stands for."""
        rows, whole = [], []
        for i in range(count):
            prompt = [m for m in conversation(rng, turns=2)][:-1]
            prompt = [{k: m[k] for k in ("role", "content")} for m in prompt]
            answers = [[{"role": "assistant", "content": f"{i} {k} {phrase(rng)}"}] for k in "cr"]
            if i % 2:
                rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
            else:
                rows.append({"chosen": prompt + answers[0], "rejected": prompt + answers[1]})
            whole += [
                {"messages": [{**m, "weight": 0} for m in prompt] + answer} for answer in answers
            ]
        return rows, whole

    def test_pairs_are_their_answers_one_after_the_other(self):
        rows, whole = self.pairs(random.Random(11), 20)
        self.build(self.lines(rows), out="pairs.h5", options=("--pairs",))
        self.build(self.lines(whole, "whole.jsonl"), out="whole.h5")
        with h5py.File(self.out("pairs.h5")) as pairs, h5py.File(self.out("whole.h5")) as one:
            self.assertEqual(pairs.attrs["pairs"], 1)
            self.assertNotIn("pairs", one.attrs)
            for name in ("tokens", "offsets", "loss_mask"):
                numpy.testing.assert_array_equal(pairs[name][:], one[name][:])
            numpy.testing.assert_array_equal(pairs["rows"][:], numpy.arange(40) // 2)

    def test_texts_and_what_does_not_fit(self):
        rows = [
            {"prompt": "ring 1234 stripe 1234 ", "chosen": "chunk of", "rejected": "stripe"},
            {"prompt": "ring " * 60, "chosen": "a", "rejected": "b"},
        ]
        options = ("--pairs", "--max-tokens", "40")
        said = self.build(self.lines(rows), out="texts.h5", options=options)
        self.assertIn("1 pairs left out", said)
        with h5py.File(self.out("texts.h5")) as file:
            self.assertEqual(len(file["offsets"]), 3)
        told = [
            self.loaded().decode([t for t, m in zip(*document) if m])
            for document in self.documents("texts.h5")
        ]
        self.assertEqual([text.strip() for text in told], ["chunk of", "stripe"])
        for row in ({"prompt": "a", "chosen": "b"}, {"chosen": "a", "rejected": "b"}):
            said = self.build(self.lines([row]), out="bad.h5", options=("--pairs",), status=2)
            self.assertIn("row of preferences", said)
        said = self.build(self.lines(rows[:1]), out="bad.h5", status=2)
        self.assertIn("--pairs reads rows of preferences", said)


class Training(Data):
    MODEL = """[run]
steps = 1
[model]
layers = 1
hidden = 32
intermediate = 48
query_heads = 4
kv_heads = 2
head_dim = 8
vocabulary = 400
[data]
source = "distribution"
bin_tokens = [32]
bin_share = [1]
samples = 8
[batching]
micro_batch_tokens = 64
global_tokens = 64
[checkpoint]
every_steps = 1
"""
    TUNE = """[run]
steps = 3
[model]
weights = "{weights}"
[data]
source = "{source}"
path = "{path}"
paths = ["{path}"]
[batching]
micro_batch_tokens = 512
global_samples = 4
[optimizer]
learning_rate = 0.01
[checkpoint]
every_steps = 3
"""

    def model(self):
        """A Hugging Face folder with tokenizer, made by the program."""
        run, folder = self.out("base"), self.out("model")
        self.run_ballast(1, "train", self.deck("base.toml", self.MODEL), "-d", run)
        last = os.path.join(run, "checkpoints", self.checkpoints(run)[-1])
        self.run_ballast(1, "export", last, folder, "--dtype", "f32")
        for name in os.listdir(self.tokenizer):
            shutil.copy(os.path.join(self.tokenizer, name), folder)
        config = os.path.join(folder, "config.json")
        with open(config) as f:
            stated = json.load(f)
        with open(config, "w") as f:
            json.dump({**stated, "eos_token_id": 1}, f)
        with open(os.path.join(folder, "generation_config.json"), "w") as f:
            json.dump({"eos_token_id": [1]}, f)
        return folder

    def tune(self, weights, path, status=0, source="hdf5"):
        deck = self.deck("tune.toml", self.TUNE, weights=weights, path=path, source=source)
        shutil.rmtree(self.out("tuned"), ignore_errors=True)
        return self.run_ballast(1, "train", deck, "-d", self.out("tuned"), status=status)

    def test_from_chats_to_an_exported_folder(self):
        weights, chats = self.model(), self.lines(self.chats(40))
        self.build(chats, out="chats.h5", tokenizer=weights)
        said = self.tune(weights, self.out("chats.h5")).stdout
        share = [d for d in self.documents("chats.h5")]
        loss = sum(sum(m[1:]) for _, m in share) / sum(len(t) for t, _ in share)
        self.assertIn(f"{100 * loss:.1f} % of them carry loss", said)
        losses = self.losses(self.out("tuned"))
        self.assertLess(float(losses[3]), float(losses[1]))
        last = os.path.join(self.out("tuned"), "checkpoints")
        last = os.path.join(last, sorted(f for f in os.listdir(last) if f.endswith(".h5"))[-1])
        said = self.run_ballast(1, "export", last, self.out("done")).stdout
        self.assertIn("with the tokenizer of", said)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            with open(os.path.join(weights, name)) as a, open(self.out("done/" + name)) as b:
                self.assertEqual(a.read(), b.read())
        with open(self.out("done/config.json")) as f:
            self.assertEqual(json.load(f)["eos_token_id"], 1)
        self.refusals(weights, chats)

    def refusals(self, weights, chats):
        other = self.make_tokenizer("other", PLAIN, size=300)
        self.build(chats, out="other.h5", tokenizer=other)
        error = self.tune(weights, self.out("other.h5"), status=None)
        self.assertNotEqual(error.returncode, 0)
        self.assertIn("made with the tokenizer other", error.stderr + error.stdout)
        error = self.tune(weights, chats, status=None, source="files")
        self.assertIn("reads bytes", error.stderr + error.stdout)
        with h5py.File(self.out("chats.h5"), "a") as f:
            f["mask"] = numpy.zeros(3)
        error = self.tune(weights, self.out("chats.h5"), status=None)
        self.assertIn("/mask is not known", error.stderr + error.stdout)

    def test_inspect_and_plan(self):
        said = self.build(self.lines(self.chats(40)), options=["--ranks", "2"])
        self.assertIn("tokens up to", said)
        self.assertIn("planned on 2 data-parallel ranks", said)
        command = [sys.executable, PROGRAM, "inspect", self.out("out.h5"), "--samples", "2"]
        command += ["--tokenizer", self.tokenizer]
        for color, mark in (("never", "[["), ("always", "\033[1;32m")):
            done = subprocess.run(
                [*command, "--color", color], capture_output=True, text=True, check=True
            )
            self.assertIn(mark, done.stdout)
            self.assertIn("-- assistant", done.stdout)
            self.assertNotIn("sample 2,", done.stdout)
        self.assertTrue(os.access(BALLAST, os.X_OK))


if __name__ == "__main__":
    unittest.main()
