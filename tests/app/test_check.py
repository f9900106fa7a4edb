"""Whole-program tests of the command line, `ballast check` and `ballast pack`: usage, help, damaged
decks, cases, and estimates that hold."""
import glob
import json
import os
import random
import subprocess
import unittest

from damaged_decks import damaged
from runs import BALLAST, DECK, RunCase


class CommandLine(RunCase):
    def ballast(self, *arguments, status=0):
        done = subprocess.run(
            [BALLAST, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
        )
        self.assertEqual(done.returncode, status, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done

    def test_bad_usage_says_what_and_exits_2(self):
        for arguments, mention in [
            ((), "subcommand"),
            (("chekc",), "did you mean check?"),
            (("check",), "DECK"),
            (("check", "d.toml", "--nonsense"), "--nonsense"),
            (("train", "d.toml", "-t", "soon"), "HH:MM:SS"),
            (("train", "d.toml", "-t", "00:99:00"), "HH:MM:SS"),
            (("train", "d.toml", "-r"), "-r"),
            (("tune", "d.toml", "--memory", "nan"), "finite"),
            (("check", "d.toml", "--steps", "010"), "without leading zeros"),
            (("check", "d.toml", "--plans", "0x10"), "without leading zeros"),
            (("--help", "deck", "msh"), "did you mean mesh?"),
            (("--help", "decks"), "did you mean deck?"),
            (("--help", "mesh"), "topics: deck [BLOCK], combinations"),
        ]:
            done = self.ballast(*arguments, status=2)
            self.assertIn(mention, done.stderr)
            self.assertEqual(done.stdout, "")

    def test_help_and_version(self):
        commands = self.ballast("--help").stdout
        for command in ("train", "check", "pack", "profile", "plan", "eval", "export", "bench"):
            self.assertIn(f"  {command} ", commands)
            self.assertIn("Usage: ballast " + command, self.ballast(command, "--help").stdout)
        self.assertIn("cp_outer", self.ballast("--help", "deck").stdout)
        self.assertIn("dst on with pattern dense", self.ballast("--help", "combinations").stdout)
        version = self.ballast("--version").stdout
        for part in ("ballast", "compiler", "MPI", "Kokkos", "CUDA", "NCCL", "HDF5"):
            self.assertIn(part, version)

    def test_usage_is_printed_once_however_many_ranks(self):
        done = self.run_ballast(3, "train", status=None)
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(done.stderr.count("DECK is required"), 1)
        self.assertEqual(self.run_ballast(3, "--version").stdout.count("Kokkos"), 1)

    def test_damaged_decks_name_the_place(self):
        sound = DECK.format(steps=6, dp=2, cp_outer=1, cp_inner=1, sp=1, every=2, data=self.data)
        seed = random.randrange(1 << 30)
        path = os.path.join(self.folder, "deck.toml")
        for what, content, mentions in damaged(sound, seed):
            with open(path, "wb") as f:
                f.write(content)
            message = self.ballast("check", "deck.toml", status=1).stderr
            self.assertTrue(
                any(m in message for m in mentions),
                f"{what}, seed {seed}: none of {mentions} in\n{message}",
            )
            self.assertEqual(
                message.count("problems in the deck") + message.count("problem in the deck"),
                1,
                message,
            )

    def test_a_key_of_many_parts_is_refused(self):
        """The parser of TOML would end in a stack overflow."""
        deck = self.out("deep.toml")
        long = ".a" * 200000
        for text in (
            "[x" + ".y" * 50000 + "]\n",
            "\n" + "a." * 50000 + "a = 1\n",
            f"name = {{a{long} = 1}}\n",
            f'"a=b"{long} = 1\n',
            f't = {{x = """a"""", a{long} = 1}}\n',  # a text that ends with a quote of its own
        ):
            with open(deck, "w") as f:
                f.write(text)
            done = self.run_ballast(1, "check", deck, status=1)
            self.assertIn("deep.toml:", done.stderr)
            self.assertIn("block.key", done.stderr)
        with open(self.deck(dp=1)) as f:
            sound = f.read()
        some = long[:50000]
        with open(deck, "w") as f:  # texts and comments may have any dots
            f.write(f'# {some}\n{sound}\n[eval]\ngenerate_prompts = [\'{some}\', """{some}"""]\n')
        self.run_ballast(1, "check", deck)

    def test_ranks_share_one_message_about_a_damaged_deck(self):
        path = self.deck(text=DECK + "[mesh2]\n")
        done = self.run_ballast(3, "train", path, status=None)
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(done.stderr.count("unknown block mesh2"), 1, done.stderr)
        done = self.run_ballast(2, "train", os.path.join(self.folder, "none.toml"), status=None)
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(done.stderr.count("No such file"), 1, done.stderr)
        done = self.run_ballast(2, "train", self.deck(dp=1), "mesh.tp=2", status=None)
        self.assertNotEqual(done.returncode, 0)
        refused = "tensor parallelism cannot be run by this version"
        self.assertEqual(done.stderr.count(refused), 1, done.stderr)

    def test_check_refuses_what_train_refuses_with_the_same_words(self):
        path = self.deck(dp=1)
        for override in ("mesh.tp=2", "batching.scope=epoch"):
            trained = self.run_ballast(1, "train", path, override, status=1)
            checked = self.run_ballast(1, "check", path, override, status=1)
            problem = [line for line in trained.stderr.splitlines() if override in line]
            self.assertEqual(len(problem), 1, trained.stderr)
            self.assertIn(problem[0], checked.stderr)
            if override == "mesh.tp=2":  # nothing times it, so nothing is planned of it either
                for command in ("plan", "pack", "tune"):
                    planned = self.run_ballast(1, command, path, override, status=1)
                    self.assertIn(problem[0], planned.stderr)


class Check(RunCase):
    def check(self, *arguments):
        twin = self.out("twin.json")
        done = subprocess.run(
            [BALLAST, "check", *arguments, "--json", twin],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(twin) as f:
            return done.stdout, json.load(f)

    def test_patterns_whose_drift_is_measured_stay_on_a_gpu(self):
        deck = self.deck(dp=1, steps=1)
        keys = ["attention.pattern=moba", "attention.moba_block=64", "attention.moba_top_k=2"]
        keys += ["data.validation_share=0.3", "trace.recall_every=1"]
        # Heads that kernels take.
        gpu = ["run.backend=cuda", "model.head_dim=64", "model.hidden=256"]

        def workspace(*more):
            stages = self.check(deck, *keys, *more)[1]["stages"]
            return sum(stage["memory"]["workspace_bytes"] for stage in stages)

        drift = "trace.recall_drift=true"
        self.assertGreater(workspace(*gpu, drift), workspace(*gpu))
        self.assertEqual(
            workspace(*gpu, drift, "trace.recall_every=0"), workspace(*gpu, "trace.recall_every=0")
        )
        none = self.run_ballast(1, "check", deck, *keys, drift, "data.validation_share=0", status=1)
        self.assertIn("trace.recall_drift needs a held-out sample", none.stderr)

    def test_a_ring_of_many_ranks_is_checked_in_seconds(self):
        """Ranks with like shards are looked at once: some 1 s, where each by itself took 40."""
        deck = self.deck(dp=1, steps=2)
        done = self.run_ballast(1, "check", deck, "mesh.cp_outer=16384", timeout=25)
        self.assertIn("all 16384 ranks", done.stdout)

    def test_held_out_samples_need_a_token_that_carries_loss(self):
        """A sample of one token predicts nothing: a loss of 0 would be the best for ever."""
        rng = random.Random(1)
        lengths = [1] * 30 + [200]
        rng.shuffle(lengths)
        deck = self.deck(dp=1, steps=1)
        keys = ['data.source="lengths"', f"data.lengths={lengths}", "data.validation_share=0.5"]
        keys += ["data.min_tokens=1", "eval.samples=1", "batching.global_tokens=100"]
        words = "none of the 1 held-out samples that an evaluation takes has a token that carries"
        for command in (["check"], ["train", "-d", self.out("run")]):
            done = self.run_ballast(
                1, command[0], deck, *command[1:], *keys, "eval.every_steps=1", status=1
            )
            self.assertIn(words, done.stderr)
        self.run_ballast(1, "train", deck, "-d", self.out("run"), *keys, "checkpoint.every_steps=1")
        done = self.run_ballast(
            1, "eval", deck, "-d", self.out("run"), "-r", "latest", *keys, status=1
        )
        self.assertIn(words, done.stderr)

    def test_the_files_are_opened(self):
        deck = self.deck()
        text, facts = self.check(deck)
        self.assertGreater(facts["data"]["loss_share"], 0.9)  # all but the last token of a file
        self.assertLess(facts["data"]["loss_share"], 1)
        self.assertIn("of the tokens carry loss", text)
        held_out, _ = self.check(deck, "data.validation_share=0.3")
        self.assertRegex(held_out, r"; \d+ samples for training, [1-9]\d* held out")
        missing = ['data.paths=["nowhere/x"]']
        refused = self.run_ballast(1, "check", deck, *missing, status=1)
        self.assertIn("nowhere/x", refused.stderr)
        self.assertIn("no problems", self.run_ballast(1, "check", deck).stdout)
        elsewhere = self.run_ballast(1, "check", deck, *missing, "--elsewhere")
        self.assertIn("nowhere/x", elsewhere.stdout)
        weights = self.run_ballast(1, "check", deck, f"model.weights={self.data}", status=1)
        self.assertIn(self.data, weights.stderr)

    def test_what_train_would_stop_at_is_refused(self):
        one = os.path.join(self.data, "000.txt")
        with open(one, "w") as f:
            f.write("balance " * 100)
        pairs = ["loss.kind=dpo", "dpo.reference_free=true", "data.long=truncate"]
        hbp = ["batching.method=hbp", "batching.groups=[100]", "batching.long=split"]
        for settings, said in (
            ([f'data.paths=["{one}"]', "data.max_tokens=0", "eval.every_steps=1"], "held out"),
            (["attention.index=recorded", f"attention.recorded={self.out('none')}"], "none"),
            (
                pairs + ["batching.method=balanced", "batching.micro_batch_tokens=60"],
                "does not fit one micro-batch",
            ),
            (["batching.method=balanced", "profile.table=nowhere.h5"], "nowhere.h5 does not exist"),
            (pairs + ["dpo.reference=some.h5"], "does without dpo.reference"),
            (hbp + ["data.max_tokens=300", "data.long=drop"], "above the longest group's 100"),
            (
                ["eval.every_steps=1", "data.validation_share=0.3", "eval.generate_tokens=2"]
                + ["eval.generate_samples=1", "eval.generate_stop_token=300"],
                "its vocabulary of 256",
            ),
            (
                ["data.source=lengths", "data.lengths=[1,1,1,1,1,1]"],
                "0.0 % of the tokens carry loss",
            ),
        ):
            deck = self.deck(dp=1)
            for command in ("check", "train"):
                folder = ["-d", self.out("refused-" + said[:4])] if command == "train" else []
                done = self.run_ballast(1, command, deck, *settings, *folder, status=1)
                self.assertIn(said, done.stderr, f"{command} {settings}")

    def test_a_step_that_cannot_be_planned_is_refused_for_any_machine(self):
        deck = self.deck(dp=1)
        tiny = ["data.source=lengths", "data.lengths=[2,2]", "batching.global_tokens=17179869184"]
        for more in ([], ["--elsewhere"], ["profile.table=nowhere.h5", "--elsewhere"]):
            done = self.run_ballast(1, "check", deck, *tiny, *more, status=None)
            if "profile.table=nowhere.h5" in more:  # no step is planned without its costs
                self.assertIn("nowhere.h5", done.stdout)
                continue
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertIn("step 1 cannot be planned: batching.global_tokens", done.stderr)
            self.assertIn("`train` would stop there", done.stderr)

    def test_an_id_beyond_the_vocabulary_is_refused_before_the_first_step(self):
        try:
            import h5py
        except ImportError:
            self.skipTest("h5py is not installed")
        data = self.out("ids.h5")
        with h5py.File(data, "w") as f:
            f["tokens"] = [1, 2, 3] * 300 + [256] + [4] * 99
            f["offsets"] = list(range(0, 1001, 100))
        settings = ["data.source=hdf5", f"data.path={data}", "data.max_tokens=0"]
        done = self.run_ballast(1, "check", self.deck(dp=1), *settings, status=1)
        self.assertIn("document 9: token 0 has id 256, outside the vocabulary of 256", done.stderr)
        self.run_ballast(1, "check", self.deck(dp=1), *settings, "model.vocabulary=257")

    def test_a_late_pair_that_no_group_holds_is_refused_before_the_first_step(self):
        folder = os.path.join(self.data, "pairs")
        os.mkdir(folder)
        for i in range(24):
            with open(os.path.join(folder, f"{i:02}.txt"), "w") as f:
                f.write("balance " * (30 if i > 21 else 5))
        settings = [f'data.paths=["{folder}"]', "data.max_tokens=0", "batching.shuffle=false"]
        settings += ["loss.kind=dpo", "dpo.reference_free=true", "batching.method=balanced"]
        settings += ["batching.micro_batch_tokens=200", "batching.global_tokens=200", "mesh.dp=2"]
        said = set()
        for command, more in (("check", []), ("train", ["-d", self.out("late-pair")])):
            done = self.run_ballast(2, command, self.deck(), *settings, *more, status=1)
            self.assertNotIn("step 1/", done.stdout)
            said |= {line for line in done.stderr.splitlines() if "pair 11 of 480 tokens" in line}
        self.assertEqual(len(said), 1, said)
        self.assertIn("holds 400 at most", said.pop())

    def test_commands_name_overrides_that_no_case_reads(self):
        note = "chunk.k has no effect with batching.method"
        deck, override = self.deck(), ["batching.method=packed", "chunk.k=2"]
        self.assertIn(note, self.run_ballast(1, "check", deck, *override).stdout)
        self.assertEqual(self.run_ballast(1, "pack", deck, *override).stderr.count(note), 1)
        for keys, unread in (
            (["trace.enabled=false", "trace.indexes_every=1"], "trace.indexes_every"),
            (["attention.index=generated", "attention.last_q=16"], "attention.last_q"),
            (["batching.method=none", "batching.micro_batch_tokens=64"], "micro_batch_tokens"),
            (["batching.method=packed", "batching.select_lengths=[64]"], "select_lengths"),
            (["batching.method=balanced", "batching.select_memory_gib=1"], "select_memory_gib"),
            (
                ["batching.method=chunkflow", "mesh.dp=1", "mesh.pp=2", "chunk.tokens=64"]
                + ["pipeline.schedule=state_aware_1f1b", "batching.micro_batch_tokens=64"],
                "micro_batch_tokens",
            ),
        ):
            done = self.run_ballast(1, "check", deck, "attention.pattern=vertical_slash", *keys)
            self.assertIn(f"{unread} has no effect", done.stdout)
        stages = [
            "mesh.dp=1",
            "mesh.pp=2",
            "batching.method=none",
            "batching.micro_batch_tokens=64",
        ]
        self.assertNotIn("has no effect", self.run_ballast(1, "check", deck, *stages).stdout)
        step = ["bench", "step", deck, "warmup=0", "repeats=1", "mesh.dp=2"]
        self.assertEqual(self.run_ballast(2, *step, *override).stderr.count(note), 1)
        cases = self.out("cases.toml")
        with open(deck) as read, open(cases, "w") as write:
            write.write(read.read())
            for name in ("packed", "chunkflow"):
                write.write(f'[[case]]\nname = "{name}"\nbatching.method = "{name}"\n')
        for case, count in ([], 0), (["--case", "packed"], 1):
            packed = self.run_ballast(1, "pack", cases, "chunk.k=2", *case)
            self.assertEqual(packed.stderr.count(note), count)

    def test_commands_tell_keys_of_a_deck_that_others_take_the_place_of(self):
        deck = self.deck()
        with open(deck, "a") as write:
            write.write('[attention]\npattern = "moba"\nselection = "causal"\n')
        note = 'attention.selection = "causal" has no effect with attention.pattern = "moba"'
        self.assertEqual(self.run_ballast(1, "check", deck).stdout.count("note: " + note), 1)
        self.assertEqual(self.run_ballast(1, "pack", deck).stderr.count("note: " + note), 1)
        done = self.run_ballast(2, "train", deck, "run.steps=1", "-d", self.out("told"))
        self.assertEqual(done.stdout.count("note: " + note), 1)
        cuda = ["run.backend=cuda", "model.head_dim=64"]
        told = 'note: run.precision = "fp32" is for the host'
        self.assertNotIn(told, self.run_ballast(1, "check", deck, *cuda).stdout)
        cuda.append("run.precision=fp32")
        self.assertIn(told, self.run_ballast(1, "check", deck, *cuda).stdout)

    def test_memory_counts_chunks_of_samples_that_no_group_holds(self):
        with open(os.path.join(self.data, "long.txt"), "w") as f:
            f.write("balance " * 128)
        twins = [
            self.check(self.deck(), "batching.method=balanced", f"data.max_tokens={tokens}")[1]
            for tokens in (300, 1024)  # a micro-batch; four, which two ranks do not hold whole
        ]
        stored = [twin["stages"][0]["memory"]["kv_store_bytes"] for twin in twins]
        self.assertEqual(stored[0], 0)
        self.assertGreater(stored[1], 0)

    def test_memory_counts_the_micro_batches_of_short_samples(self):
        short = ["data.source=lengths", "data.lengths=[3]", "data.max_tokens=0", "data.paths=[]"]
        twins = [
            self.check(self.deck(dp=1), *short, "mesh.pp=2", "pipeline.schedule=gpipe", *more)[1]
            for more in ([], ["attention.pattern=vertical_slash"])  # whose blocks hold one each
        ]
        held = [twin["stages"][0]["memory"]["activations_bytes"] for twin in twins]
        self.assertGreater(held[1], 5 * held[0])

    def test_any_mesh_without_ranks(self):
        text, facts = self.check(
            self.deck(),
            "mesh.dp=6",
            "mesh.pp=2",
            "mesh.cp_outer=4",
            "mesh.cp_inner=5",
            "mesh.sp=2",
            "mesh.ranks_per_node=20",
            "batching.micro_batch_tokens=1003",
        )
        self.assertEqual(facts["ranks"], 6 * 2 * 4 * 5 * 2)
        self.assertEqual(len(facts["rank_table"]), facts["ranks"])
        self.assertEqual(
            len(
                {
                    tuple(sorted((k, v) for k, v in row.items() if k not in ("rank", "node")))
                    for row in facts["rank_table"]
                }
            ),
            facts["ranks"],
        )
        self.assertEqual([row["rank"] for row in facts["rank_table"]], list(range(facts["ranks"])))
        self.assertEqual(facts["rank_table"][45]["node"], 2)
        self.assertIn("464 more", text)
        self.assertEqual(sum(s["tokens"] for s in facts["shards"]), 1003)
        held = sorted(p for s in facts["shards"] for p in s["pieces"])
        self.assertEqual([held[0][0], held[-1][1]], [0, 1003])
        self.assertTrue(all(a[1] == b[0] for a, b in zip(held, held[1:])))
        self.assertEqual(sum(s["pairs"] for s in facts["shards"]), 1003 * 1004 / 2)
        self.assertEqual(
            sorted(step["shard"] for step in facts["ring"]["forward"]), list(range(20))
        )
        self.assertEqual([s["layer_begin"] for s in facts["stages"]], [0, 1])

    def test_a_very_large_mesh_is_no_trouble(self):
        text, facts = self.check(
            self.deck(),
            "mesh.dp=1024",
            "mesh.cp_inner=64",
            "mesh.cp_outer=16",
            "ring.layout=striped",
            "ring.stripe=1",
            "batching.micro_batch_tokens=524288",
        )
        self.assertEqual(facts["ranks"], 1 << 20)
        self.assertLess(len(text), 20000)

    def test_memory_of_steps_given_in_samples_counts_every_chunk_that_may_live(self):
        # Each of 16 samples may give four chunks, of which k live; whether another micro-batch is
        # under way depends on how many the other samples fill.
        with open(os.path.join(self.data, "long.txt"), "w") as f:
            f.write("balance " * 1024)
        text, facts = self.check(
            self.deck(),
            "mesh.dp=2",
            "mesh.pp=2",
            "batching.method=chunkflow",
            "chunk.tokens=512",
            "chunk.k=4",
            "pipeline.schedule=state_aware_1f1b",
            "data.max_tokens=2048",
            "batching.global_samples=32",
        )
        self.assertEqual(
            [s["live_micro_batches"] for s in facts["stages"]], [5, 4]
        )  # k + P - 1 - s
        self.assertIn("about 64 micro-batches", text)

    def test_cases_print_a_row_each(self):
        deck = self.deck(
            text=DECK + '[[case]]\nname = "one"\n[[case]]\nname = "two"\nmesh.cp_inner = 2\n'
        )
        text, facts = self.check(deck)
        self.assertEqual(
            [(c["name"], c["ranks"]) for c in facts["cases"]], [("one", 2), ("two", 4)]
        )
        self.assertIn("two", text)
        self.assertEqual(self.check(deck, "--case", "two")[1]["ranks"], 4)

    def test_the_twin_replaces_nothing_that_is_read_or_written(self):
        deck, other = self.deck(), self.out("best.toml")
        with open(deck) as file:
            text = file.read()
        for line in (
            ["check", deck, "--json", os.path.join(self.folder, ".", os.path.basename(deck))],
            ["tune", deck, "--json", other, "--write", other],
            ["check", deck, "--json", os.path.join(self.data, "000.txt")],
        ):
            done = self.run_ballast(1, *line, status=1)
            self.assertIn("choose another name", done.stderr)
        with open(deck) as file:
            self.assertEqual(file.read(), text)
        self.assertFalse(os.path.exists(other))

    def test_no_data_no_simulated_trace(self):
        deck = self.out("bare.toml")
        with open(self.deck()) as read, open(deck, "w") as write:
            text = read.read()
            write.write(text[: text.index("[data]")] + text[text.index("[batching]") :])
        self.run_ballast(1, "check", deck)
        done = self.run_ballast(1, "check", deck, "--trace", self.out("none"), status=1)
        self.assertIn("has no block data", done.stderr)

    def test_a_refused_simulation_leaves_no_folder(self):
        deck, folder = self.deck(), self.out("simulated")
        for stands in (False, True):
            if stands:
                os.mkdir(folder)
            line = ["check", deck, "data.paths=['/no/such']", "--elsewhere", "--trace", folder]
            done = self.run_ballast(1, *line, status=1)
            self.assertIn("no trace of simulated steps", done.stderr)
            self.assertEqual(os.path.isdir(folder), stands)

    def test_simulated_steps_become_traces_of_all_ranks(self):
        import h5py

        folder = os.path.join(self.folder, "simulated")
        deck = self.deck(dp=2, cp_inner=2)
        pipeline = ["mesh.pp=2", "batching.global_tokens=3000"]
        found = self.check(deck, *pipeline, "--steps", "3", "--trace", folder)[1]["simulated"]
        self.assertEqual(found["steps"], 3)
        self.assertAlmostEqual(sum(found["terms"].values()), found["step_s"], places=9)
        paths = sorted(glob.glob(os.path.join(folder, "trace", "trace_*.h5")))
        self.assertEqual(len(paths), 8)
        sent = received = 0
        for path in paths:
            with h5py.File(path, "r") as f:
                events = f["events"][()]
                kinds = h5py.check_enum_dtype(events.dtype["kind"])
                steps = events[events["kind"] == kinds["step"]]
                spans = steps["end_s"] - steps["begin_s"]
                self.assertAlmostEqual(spans.mean(), found["step_s"], places=9)
                for step in steps:
                    inside = events[events["step"] == step["step"]]
                    self.assertGreaterEqual(inside["begin_s"].min(), step["begin_s"])
                    self.assertLessEqual(inside["end_s"].max(), step["end_s"] + 1e-12)
                sent += (events["kind"] == kinds["send"]).sum()
                received += (events["kind"] == kinds["recv"]).sum()
                self.assertEqual(f["sessions/000"].attrs["device"], b"simulated")
        self.assertGreater(sent, 0)
        self.assertEqual(sent, received)
        again = subprocess.run(
            [BALLAST, "check", deck, "--trace", folder], capture_output=True, text=True
        )
        self.assertNotEqual(again.returncode, 0)
        self.assertIn("give a new folder", again.stderr)

    def test_memory_estimate_is_close_to_the_measured_peak(self):
        try:
            import h5py
        except ImportError:
            self.skipTest("h5py is not installed")
        shape = [
            "model.layers=3",
            "model.hidden=96",
            "model.intermediate=256",
            "model.query_heads=6",
            "model.kv_heads=2",
            "model.head_dim=16",
            "data.max_tokens=1024",
            "batching.micro_batch_tokens=1024",
            "batching.global_tokens=4096",
            "model.head_chunk_tokens=128",
        ]
        for ranks, overrides in [
            (1, ["mesh.dp=1"]),
            (2, ["mesh.dp=1", "mesh.cp_inner=2", "recompute.mode=selective"]),
            (2, ["optimizer.zero=2", "recompute.mode=full", "run.precision=fp64"]),
        ]:
            for name in os.listdir(self.data):
                with open(os.path.join(self.data, name), "w") as f:
                    f.write("balance " * 128)
            run = self.out("run" + str(abs(hash(tuple(overrides)))))
            self.run_ballast(
                ranks, "train", self.deck(steps=2, every=0), "-d", run, *shape, *overrides
            )
            estimate = self.check(self.deck(), *shape, *overrides)[1]["largest_rank_bytes"]
            with h5py.File(
                sorted(glob.glob(os.path.join(run, "trace", "trace_*.h5")))[0], "r"
            ) as f:
                steps = f["steps"]
                values = steps["peak_bytes_total"][()]
                measured = float(max(values))
            self.assertLess(
                abs(estimate - measured),
                0.1 * measured,
                f"{overrides}: estimate {estimate}, measured {measured}",
            )

    def test_memory_is_that_of_the_longest_sample_and_of_a_gpus_context(self):
        deck = self.out("lengths.toml")
        with open(deck, "w") as f:
            f.write(
                "[model]\nlayers = 2\nhidden = 64\nintermediate = 128\nquery_heads = 1\n"
                'kv_heads = 1\nhead_dim = 64\nvocabulary = 256\n[data]\nsource = "lengths"\n'
                'lengths = [900, 5000, 100]\n[batching]\nmethod = "none"\n'
                "global_samples = 3\n"
            )
        twin = self.check(deck)[1]
        self.assertEqual(twin["micro_batch_tokens"], 5000)
        limited = self.check(deck, "data.max_tokens=900", "data.long=truncate")[1]
        self.assertEqual(limited["micro_batch_tokens"], 900)
        self.assertLess(3 * limited["largest_rank_bytes"], 2 * twin["largest_rank_bytes"])
        self.assertEqual([s["memory"]["context_bytes"] for s in twin["stages"]], [0])
        gpu = self.check(deck, "run.backend=cuda")[1]
        self.assertGreater(gpu["stages"][0]["memory"]["context_bytes"], 1 << 30)
        self.assertGreater(gpu["largest_rank_bytes"], 1 << 30)


class Pack(RunCase):
    def test_metrics_of_a_length_file(self):
        with open(self.out("lengths.txt"), "w") as f:
            f.write("\n".join(str(n) for n in [2048, 2048, 1024, 1024, 1024, 1024]))
        deck = self.out("pack.toml")
        with open(deck, "w") as f:
            f.write(
                '[mesh]\ndp = 2\n[data]\nsource = "lengths"\n[batching]\nmicro_batch_tokens ='
                ' 4096\nglobal_samples = 6\n[[case]]\nname = "none"\nbatching.method ='
                ' "none"\n[[case]]\nname = "packed"\nbatching.method = "packed"\n'
            )
        twin = self.out("twin.json")
        done = subprocess.run(
            [BALLAST, "pack", deck, "data.lengths_file=" + self.out("lengths.txt"), "--json", twin],
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(twin) as f:
            cases = {c["name"]: c for c in json.load(f)["cases"]}
        for c in cases.values():
            self.assertEqual((c["samples"], c["tokens"], c["batches"]), (6, 8192, 1))
        self.assertEqual(cases["none"]["packs"], 6)
        self.assertEqual(cases["packed"]["packs"], 2)
        self.assertEqual(cases["packed"]["pr"], 0)
        self.assertEqual(cases["packed"]["dbr"], 0)
        self.assertAlmostEqual(
            cases["packed"]["abr"], 0.25
        )  # {2K, 2K} beside {1K, 1K, 1K, 1K}: the paper's example


if __name__ == "__main__":
    unittest.main()
