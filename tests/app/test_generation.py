"""Texts at evaluations: tokens are those of a model in numpy, the same on every mesh and under
every batching method, greedily and drawn; where they are written; what is refused."""
import json
import os
import unittest

import h5py
import numpy as np

from runs import DECK, RunCase
from test_dpo import Policy

PROMPTS = ["ring stripe", "b"]
TEXTS = [
    "eval.every_steps=2",
    "eval.generate_tokens=7",
    'eval.generate_prompts=["' + '","'.join(PROMPTS) + '"]',
    "eval.generate_samples=1",
    "eval.generate_prefix_tokens=20",
]
# Room for prompts of 264 tokens and 37 more, the last of which is read by nothing.
GROUPS = ["batching.method=hbp", "batching.groups=[300]", "batching.group_ranks=[1]"]
GROUPS += ["eval.generate_prefix_tokens=264"]


class Numpy(Policy):
    def logits(self, tokens):
        x = self.weights["model.embed_tokens.weight"][tokens]
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(x, number)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self.norm(x, "model.norm.weight")[-1] @ head.T


class Generation(RunCase):
    def train(self, name, *settings, ranks=1, **values):
        run = self.out(name)
        mesh = {
            "dp": 1,
            **{k: values.pop(k) for k in list(values) if k in ("dp", "cp_inner", "sp")},
        }
        deck = self.deck(name + ".toml", steps=2, **mesh, **values)
        self.run_ballast(ranks, "train", deck, "-d", run, *TEXTS, *settings)
        return run

    def texts(self, run):
        with open(os.path.join(run, "steps.jsonl")) as file:
            (line,) = [row for row in map(json.loads, file) if "generated" in row]
        self.assertEqual(line["step"], 2)
        return line["generated"]

    def exported(self, run):
        folder = self.out("exported")
        last = os.path.join(run, "checkpoints", "step_00000002.h5")
        self.run_ballast(1, "export", last, folder, "--dtype", "f32")
        return Numpy(folder)

    def test_greedy_tokens_are_those_of_numpy(self):
        run = self.train("greedy")
        texts, model = self.texts(run), self.exported(run)
        self.assertEqual([t.get("sample", -1) >= 0 for t in texts], [False, False, True])
        self.assertEqual([t["prompt_text"] for t in texts[:2]], PROMPTS)
        self.assertEqual(len(texts[2]["prompt"]), 20)
        for text in texts:
            tokens = list(text["prompt"])
            self.assertEqual(len(text["tokens"]), 7)
            for token in text["tokens"]:
                self.assertEqual(token, int(np.argmax(model.logits(tokens))))
                tokens.append(token)

    def test_every_mesh_and_method_writes_the_same(self):
        draw = ["run.precision=fp64", "eval.generate_temperature=1.5"]
        alone = self.texts(self.train("alone", *draw))
        self.assertNotEqual(alone, self.texts(self.train("seed", *draw, "eval.generate_seed=2")))
        for name, ranks, mesh, settings in (
            ("dp", 4, {"dp": 4}, []),
            ("ring", 4, {"dp": 2, "cp_inner": 2}, []),
            ("ulysses", 2, {"sp": 2}, []),
            ("pipeline", 4, {"dp": 2}, ["mesh.pp=2"]),
            ("balanced", 2, {"dp": 2}, ["batching.method=balanced"]),
            ("chunks", 2, {"dp": 2}, ["batching.method=chunkflow", "chunk.tokens=16"]),
        ):
            texts = self.texts(self.train(name, *draw, *settings, ranks=ranks, **mesh))
            self.assertEqual(texts, alone, name)

    def test_draws_follow_the_softmax(self):
        """Of many prompts alike the first drawn token is as often as it is likely, and the second
        is drawn by another number: where both fall in their sums of shares says nothing of each
        other."""
        count, temperature = 300, 0.5
        run = self.train(
            "many", f'eval.generate_prompts=[{",".join(["~x~"] * count)}]'.replace("~", '"'),
            "eval.generate_tokens=2", f"eval.generate_temperature={temperature}",
            "eval.generate_samples=0", "model.initial_std=0.2", "optimizer.learning_rate=1e-30",
        )  # fmt: skip
        texts, model = self.texts(run), self.exported(run)

        def shares(tokens):
            logits = model.logits(tokens) / temperature
            share = np.exp(logits - logits.max())
            return share / share.sum()

        drawn = np.array([t["tokens"] for t in texts])
        self.assertEqual(drawn.shape, (count, 2))
        share = shares([ord("x")])
        top = np.argsort(share)[-8:]
        expected, found = share[top].sum(), np.isin(drawn[:, 0], top).mean()
        deviation = np.sqrt(expected * (1 - expected) / count)
        self.assertLess(abs(found - expected), 5 * deviation, f"{found}, expected {expected}")
        places = [np.cumsum(share)[drawn[:, 0]], []]
        for first, second in drawn:
            places[1].append(np.cumsum(shares([ord("x"), first]))[second])
        self.assertLess(abs(np.corrcoef(places)[0, 1]), 5 / np.sqrt(count))

    def test_log_trace_and_eval_hold_them(self):
        run = self.train("told", ranks=2, dp=2)
        texts = self.texts(run)
        with open(os.path.join(run, "log.txt")) as file:
            lines = [line for line in file if line.startswith("# generated, ")]
        self.assertEqual(len(lines), len(texts))
        self.assertIn(json.dumps(PROMPTS[0]), lines[0])
        self.assertEqual(self.stored(run, "generated"), {2: texts})
        self.assertEqual(self.stored(run, "generated", rank=1), {})
        twin = self.out("eval.json")
        done = self.run_ballast(
            1, "eval", self.deck("e.toml", dp=1), "-d", run, "-r", "latest", *TEXTS, "--json", twin
        )
        self.assertIn("generated, prompt: ", done.stdout)
        with open(twin) as file:
            again = json.load(file)["generated"]
        self.assertEqual([t["tokens"] for t in again[:2]], [t["tokens"] for t in texts[:2]])

    def test_a_stop_token_ends_a_text(self):
        plain = self.texts(self.train("plain"))
        stop = plain[0]["tokens"][2]
        texts = self.texts(self.train("stop", f"eval.generate_stop_token={stop}"))
        at = plain[0]["tokens"].index(stop)
        self.assertEqual(texts[0]["tokens"], plain[0]["tokens"][:at])
        self.assertTrue(texts[0]["stopped"])

    def test_a_text_that_stops_changes_no_other(self):
        prompts = 'eval.generate_prompts=["ring","stripe","anchor"]'
        drawn = [prompts, "eval.generate_temperature=1", "eval.generate_samples=0"]
        plain = [t["tokens"] for t in self.texts(self.train("plain", *drawn))]
        stop = plain[0][1]
        kept = [t[: (t + [stop]).index(stop)] for t in plain]
        self.assertEqual(len(kept[0]), 1)
        self.assertGreater(min(len(t) for t in kept[1:]), 3)
        stopped = self.texts(self.train("stop", *drawn, f"eval.generate_stop_token={stop}"))
        self.assertEqual([t["tokens"] for t in stopped], kept)

    def test_the_prompt_of_a_sample_without_a_mask_is_its_first_quarter(self):
        run = self.train("told")
        prompts = []
        for prefix in (10**6, 0):  # as long as the sample is
            settings = [f"eval.generate_prefix_tokens={prefix}", "eval.generate_tokens=1"]
            twin, deck = self.out("eval.json"), self.deck("e.toml", dp=1)
            self.run_ballast(
                1, "eval", deck, "-d", run, "-r", "latest", *TEXTS, *settings, "--json", twin
            )
            with open(twin) as file:
                prompts.append(json.load(file)["generated"][-1]["prompt"])
        self.assertGreater(len(prompts[0]), 8)
        self.assertEqual(prompts[1], prompts[0][: len(prompts[0]) // 4])

    def token_file(self):
        path, rng = self.out("tokens.h5"), np.random.default_rng(3)
        with h5py.File(path, "w") as file:
            file["tokens"] = rng.integers(0, 200, 20 * 40).astype("<i4")
            file["loss_mask"] = np.tile(np.arange(40) >= 12, 20).astype("u1")
            file["offsets"] = np.arange(0, 20 * 40 + 1, 40).astype("<i8")
        return ["data.source=hdf5", "data.path=" + path]

    def test_the_prompt_of_a_conversation_ends_where_loss_begins(self):
        run = self.train(
            "chat", *self.token_file(), "eval.generate_prompts=[]",
            "eval.generate_prefix_tokens=0", "eval.generate_samples=2",
        )  # fmt: skip
        texts = self.texts(run)
        self.assertEqual([len(t["prompt"]) for t in texts], [12, 12])
        self.assertNotIn("text", texts[0])

    def test_pairs_have_prompts_too(self):
        from test_dpo import PAIRS

        rng, path = np.random.default_rng(5), self.out("pairs.h5")
        tokens, mask, offsets = [], [], [0]
        for _ in range(PAIRS):
            prompt = rng.integers(0, 200, 9)
            for _ in range(2):
                answer = rng.integers(0, 200, rng.integers(2, 9))
                tokens += [*prompt, *answer]
                mask += [0] * len(prompt) + [1] * len(answer)
                offsets.append(len(tokens))
        with h5py.File(path, "w") as file:
            file["tokens"] = np.array(tokens, "<i4")
            file["loss_mask"] = np.array(mask, "u1")
            file["offsets"] = np.array(offsets, "<i8")
            file.attrs["pairs"] = np.int64(1)
        for name, prefix in (("asked", 0), ("longer", 30)):
            run = self.train(
                name, "data.source=hdf5", "data.path=" + path, "eval.generate_prompts=[]",
                f"eval.generate_prefix_tokens={prefix}", "loss.kind=dpo",
                "dpo.reference_free=true", "data.long=truncate", "data.validation_share=0.2",
                ranks=2, dp=2, text=DECK.replace("global_tokens = 1500", "global_samples = 4"),
            )  # fmt: skip
            (text,) = self.texts(run)
            begin, end = offsets[2 * text["sample"] :][:2]  # of the answer that was preferred
            expected = tokens[begin:end] if prefix else tokens[begin : begin + 9]
            self.assertEqual(text["prompt"], [int(t) for t in expected])

    def test_what_cannot_be_written_is_an_error_before_the_first_step(self):
        for number, (settings, said) in enumerate(
            (
                (self.token_file(), "eval.generate_prompts are texts"),
                (["eval.generate_prompts=[]", "eval.generate_samples=0"], "nothing to continue"),
                (["data.validation_share=0"], "needs held-out samples"),
                (['eval.generate_prompts=[""]'], "an empty text"),
                (GROUPS + ["eval.generate_tokens=38"], "longest group's 300"),
            )
        ):
            checked = self.run_ballast(1, "check", self.deck(dp=1), *TEXTS, *settings, status=1)
            self.assertIn(said, checked.stderr)
            run = self.out(f"refused{number}")
            done = self.run_ballast(
                1, "train", self.deck(dp=1), "-d", run, *TEXTS, *settings, status=None
            )
            self.assertNotEqual(done.returncode, 0, said)
            self.assertIn(said, done.stdout + done.stderr)
            self.assertNotIn("step 1/", done.stdout)
        fits = GROUPS + ["eval.generate_tokens=37"]
        self.run_ballast(1, "check", self.deck(dp=1), *TEXTS, *fits)


if __name__ == "__main__":
    unittest.main()
