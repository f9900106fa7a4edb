"""The folder FILE.parts of ballast-data: what it goes on with, and what it never removes."""
import fcntl
import json
import os
import shutil
import unittest

from test_data_rows import Odd


class Parts(Odd):
    OPTIONS = ("--shard-mib", "0.001")

    def stopped(self):
        """The input of a build that stops behind some shards."""
        path = self.lines(self.chats(20))
        with open(path, "a") as f:
            f.write("{broken\n")
        self.build(path, options=self.OPTIONS, status=2)
        self.assertGreater(len(self.held()), 4)
        return path

    def held(self):
        return sorted(os.listdir(self.out("out.h5.parts")))

    def write(self, name, text):
        os.makedirs(self.out("out.h5.parts"), exist_ok=True)
        with open(self.out(f"out.h5.parts/{name}"), "w") as f:
            f.write(text)

    def read(self, name):
        with open(self.out(f"out.h5.parts/{name}")) as f:
            return f.read()


class NothingLeft(Parts):
    def test_a_build_that_left_no_sample_is_not_gone_on_with(self):
        question = {"messages": [{"role": "user", "content": "ring"}]}
        error = self.build(self.lines([question]), status=2)
        self.assertIn("no sample is left", error)
        self.assertFalse(os.path.exists(self.out("out.h5.parts")))
        self.build(self.lines(self.chats(3)))  # the same command, its input corrected


class OtherTokenizer(Parts):
    def test_a_build_does_not_go_on_with_other_files_of_the_tokenizer(self):
        path = self.stopped()
        error = self.build(path, options=self.OPTIONS, status=2)
        self.assertIn("no JSON", error)  # it goes on, to the row that stopped it
        kept = {}
        for name in ("tokenizer.json", "tokenizer_config.json"):
            with open(os.path.join(self.tokenizer, name)) as f:
                kept[name] = f.read()

        def without_merge(stored):
            stored["model"]["merges"].pop()

        def takes_space(stored):
            stored["added_tokens_decoder"] = {"0": {"content": "<|im_start|>", "lstrip": True}}

        for name, change in (
            ("tokenizer.json", without_merge),  # the table of tokens stays as it is
            ("tokenizer_config.json", takes_space),
        ):
            self.change(name, change)
            error = self.build(path, options=self.OPTIONS, status=2)
            self.assertIn("begun with other tokenizer_files; --restart begins anew", error)
            with open(os.path.join(self.tokenizer, name), "w") as f:
                f.write(kept[name])
        # With its first files again it goes on.
        self.assertIn("no JSON", self.build(path, options=self.OPTIONS, status=2))


class OtherBuilds(Parts):
    def test_a_restart_takes_nothing_from_a_build_at_work(self):
        path = self.stopped()
        held = self.held()
        lock = os.open(self.out("out.h5.parts"), os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            error = self.build(path, options=[*self.OPTIONS, "--restart"], status=2)
            self.assertIn("another ballast-data is at work here", error)
            self.assertEqual(self.held(), held)
        finally:
            os.close(lock)
        sound = self.lines(self.chats(20), name="sound.jsonl")
        said = self.build(sound, options=["--restart"])
        self.assertNotIn("going on", said)
        self.assertFalse(os.path.exists(self.out("out.h5.parts")))

    def test_a_restart_removes_the_shards_that_it_will_not_write(self):
        self.stopped()
        sound = self.lines(self.chats(20), name="sound.jsonl")
        self.build(sound, options=["--restart", "--shard-mib", "1"])
        self.assertFalse(os.path.exists(self.out("out.h5.parts")))


class OtherFiles(Parts):
    def test_files_of_others_stay_and_are_told(self):
        path = self.lines(self.chats(20))
        for options in ([], ["--restart"], ["--restart", "--force"]):
            if "--force" not in options and os.path.exists(self.out("out.h5")):
                os.remove(self.out("out.h5"))
            self.write("notes.txt", "mine")
            self.write("000000.tokens.txt", "mine too")
            said = self.build(path, options=options)
            self.assertIn("out.h5.parts stays: it holds 000000.tokens.txt, notes.txt", said)
            self.assertEqual(self.held(), ["000000.tokens.txt", "notes.txt"])
            self.assertEqual(self.read("notes.txt"), "mine")

    def test_a_file_that_was_complete_leaves_them_too(self):
        path = self.stopped()
        parts = self.out("out.h5.parts")
        shutil.copytree(parts, self.out("kept"))
        self.build(path, options=[*self.OPTIONS, "--bad-rows", "skip", "--restart"])
        # As a build leaves them that is stopped between the file and the end of its shards.
        shutil.copytree(self.out("kept"), parts)
        os.remove(os.path.join(parts, "journal.jsonl"))
        self.write("notes.txt", "mine")
        said = self.build(path, options=[*self.OPTIONS, "--bad-rows", "skip"])
        self.assertIn("out.h5 is complete", said)
        self.assertEqual(self.held(), ["notes.txt"])

    def test_a_journal_of_something_else_is_not_overwritten(self):
        path = self.lines(self.chats(20))
        for text in ("mine\n", "[1]\n", json.dumps({"day": 1}) + "\n", '{"a": 1}\n{"b": 2}\n'):
            self.write("journal.jsonl", text)
            error = self.build(path, status=2)
            self.assertIn("journal.jsonl is no journal of ballast-data; --restart", error)
            self.assertEqual(self.read("journal.jsonl"), text)
        self.build(path, options=["--restart"])

    def test_a_folder_elsewhere_that_a_link_names(self):
        os.makedirs(self.out("elsewhere"))
        os.symlink(self.out("elsewhere"), self.out("out.h5.parts"))
        self.build(self.lines(self.chats(20)))
        self.assertEqual(os.listdir(self.out("elsewhere")), [])


if __name__ == "__main__":
    unittest.main()
