"""What a file of ballast-data holds beside its tokens, what a build and inspect print of it, and
where inputs and samples are cut."""
import os
import re
import resource
import subprocess
import sys
import unittest

import h5py

from test_data import MARKED, PLAIN, PROGRAM
from test_data_rows import Odd


class Stored(Odd):
    """Reads of out.h5."""

    SHARDS = ("--shard-mib", "0.001")  # 1048 bytes of input each

    def stored(self, name):
        with h5py.File(self.out("out.h5"), "r") as f:
            return f[name][:].tolist()

    def attribute(self, name):
        with h5py.File(self.out("out.h5"), "r") as f:
            return f.attrs[name].item()


class Letters(Stored):
    """A tokenizer that makes one token of every letter, so that lengths are known."""

    def setUp(self):
        super().setUp()
        from tokenizers import Tokenizer, models

        letters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ")}
        Tokenizer(models.BPE(vocab=letters, merges=[])).save(f"{self.tokenizer}/tokenizer.json")

    def made(self, *texts, options=()):
        rows = self.lines([{"text": text} for text in texts])
        return self.build(rows, options=["--no-eos", *options])

    def test_an_edge_of_the_histogram_belongs_to_its_bin(self):
        self.made("ring", "rings")
        self.assertEqual(self.stored("lengths/edges"), [4, 8])
        self.assertEqual(self.stored("lengths/counts"), [1, 1])

    def test_splitting_loses_no_token_of_a_text(self):
        self.made("a" * 120, options=["--max-tokens", "50"])
        self.assertEqual([len(tokens) for tokens, _ in self.documents()], [50, 50, 20])

    def test_the_first_token_carries_no_loss(self):
        self.assertIn("4 tokens; 3 tokens (75.0 %) carry loss", self.made("ring"))
        self.assertEqual(self.attribute("loss_tokens"), 3)
        command = [sys.executable, PROGRAM, "inspect", self.out("out.h5")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        self.assertIn("4 tokens, 3 with loss", done.stdout)

    def test_shares_are_of_tokens_and_means_of_samples(self):
        """Samples of 4 and 8 tokens, 3 and 7 with loss."""
        said = self.made("ring", "rings of")
        self.assertIn("2 samples, 12 tokens; 10 tokens (83.3 %) carry loss", said)
        self.assertEqual(self.attribute("loss_tokens"), 10)
        self.assertEqual(self.attribute("mean_tokens"), 6)


class Places(Stored):
    def test_rows_are_counted_through_all_shards(self):
        """Every tenth row makes several documents."""
        texts = [f"ring {i} " + "stripe " * (40 * (i % 10 == 0)) for i in range(200)]
        options = [*self.SHARDS, "--max-tokens", "30"]
        self.build(self.lines([{"text": text} for text in texts]), options=options)
        rows = self.stored("rows")
        self.assertGreater(len(rows), 200)
        self.assertEqual(rows, sorted(rows))
        self.assertEqual(sorted(set(rows)), list(range(200)))

    def test_counts_are_of_all_shards(self):
        said = self.build(self.lines([self.CHAT] * 60), options=self.SHARDS)
        self.assertIn("  60 conversations masked by rendered prefixes", said)

    def test_a_row_that_begins_at_a_cut_is_read_once(self):
        """16 rows of 1024 bytes in shards of 4096."""
        with open(self.out("even.jsonl"), "w") as f:
            for i in range(16):
                f.write(f'{{"text": "ring {i}"}}'.ljust(1023) + "\n")
        options = ["--no-eos", "--shard-mib", str(4096 / 2**20)]
        self.build(self.out("even.jsonl"), options=options)
        texts = [self.loaded().decode(tokens) for tokens, _ in self.documents()]
        self.assertEqual(texts, [f"ring {i}" for i in range(16)])

    def test_messages_are_counted_by_documents(self):
        """Two messages, then four: the places and roles of each."""
        for template in (PLAIN, MARKED):
            self.change("tokenizer_config.json", lambda c, t=template: c.update(chat_template=t))
            rows = self.lines([self.CHAT, self.CHAT * 2])
            self.build(rows, options=["--restart", "--force"])
            self.assertEqual(self.stored("messages/offsets"), [0, 2, 6])
            with h5py.File(self.out("out.h5"), "r") as f:
                names = h5py.check_enum_dtype(f["messages/role"].dtype)
            speakers = [names["user"], names["assistant"]] * 3
            self.assertEqual(self.stored("messages/role"), speakers)
            begins = self.stored("messages/begin")
            for of_one in (begins[:2], begins[2:]):
                self.assertEqual(of_one[0], 0)
                self.assertEqual(of_one, sorted(set(of_one)))

    def test_the_mark_of_a_recipe_is_that_of_the_bytes_it_makes(self):
        """Sizes of shards change no byte; an input of other text and equal size does."""
        marks = []
        for text, size in (("ring", "1"), ("ring", "2"), ("gnir", "1")):
            rows = self.lines([{"text": text}])
            self.build(rows, options=["--force", "--restart", "--shard-mib", size])
            marks.append(self.attribute("recipe_crc32"))
        self.assertEqual(marks[0], marks[1])
        self.assertNotEqual(marks[0], marks[2])


class Full(Stored):
    """A disk of 96 KiB, which only root can make, and a limit of a file's size."""

    def stop(self, rows, words, **options):
        line = self.line(self.lines([{"text": "ring stripe " * 100}] * rows), **options)
        done = subprocess.run([*line, "--workers", "1"], **self.said, preexec_fn=self.limit)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        last = done.stderr.splitlines()[-1]
        self.assertTrue(last.startswith("ballast-data: "), done.stderr)
        self.assertIn(words, last)
        return done.stderr

    def setUp(self):
        super().setUp()
        self.said = {"capture_output": True, "text": True, "timeout": 120}
        self.limit = None

    @unittest.skipIf(os.geteuid() != 0, "only root can mount a disk")
    def test_a_full_disk_is_one_line_with_the_remedy(self):
        disk = self.out("disk")
        os.makedirs(disk)
        mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", disk]
        if subprocess.run(mount, **self.said).returncode != 0:
            self.skipTest("no disk can be mounted here")
        try:
            # While the file is assembled, and while shards are written.
            for rows in (60, 100):
                said = self.stop(rows, "free some space: the same command goes on", out="disk/o.h5")
                self.assertEqual(said.count("\n"), 1, said)
                subprocess.run(["rm", "-rf", f"{disk}/o.h5.parts"], check=True)
        finally:
            subprocess.run(["umount", disk], check=True)

    def test_a_file_that_hdf5_cannot_write_ends_without_a_crash(self):
        self.limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        self.stop(40, "File too large", options=("--shard-mib", "0.004"))


class Cuts(Stored):
    def test_an_answer_that_just_fits_is_kept(self):
        """The limit is where the second of three answers ends."""
        rows = self.lines([self.CHAT * 3])
        self.build(rows)
        ((whole, mask),) = self.documents()
        ends = [i for i in range(1, len(mask)) if mask[i - 1] > mask[i]]
        end = ends[1]
        options = ["--force", "--long", "truncate", "--max-tokens", str(end)]
        self.build(rows, options=options)
        self.assertEqual(self.documents(), [(whole[:end], mask[:end])])

    def test_a_pair_of_which_one_answer_is_dropped_is_left_out(self):
        sound = {"prompt": "ring ", "chosen": "a", "rejected": "b"}
        rows = self.lines([{**sound, "rejected": "stripe " * 60}, sound])
        options = ["--pairs", "--max-tokens", "40", "--long", "drop"]
        self.assertIn("  1 pairs left out\n", self.build(rows, options=options))
        self.assertEqual(self.stored("rows"), [1, 1])

    def test_packs_of_pairs_hold_two_of_the_longest_answers(self):
        long = {"prompt": "ring ", "chosen": "1 " * 300, "rejected": "b"}
        said = self.build(self.lines([long]), options=["--pairs"])
        longest = max(len(tokens) for tokens, _ in self.documents())
        self.assertGreater(longest, 256)
        planned = re.search(r"planned on 8 data-parallel ranks, packs of (\d+) tokens", said)
        self.assertEqual(int(planned[1]), 2 * longest)


class Rendered(Stored):
    def test_an_input_follows_its_instruction_after_an_empty_line(self):
        asked = {"role": "user", "content": "ring\n\nchunk of"}
        row = {"instruction": "ring", "input": "chunk of", "output": "stripe 1234"}
        self.learnt([row, [asked, self.CHAT[1]]])
        one, two = self.documents()
        self.assertEqual(one, two)

    def test_the_line_feed_behind_a_tag_is_no_text(self):
        """Templates are read as Transformers reads them: trim_blocks."""
        self.learnt([self.CHAT])
        plain = self.documents()
        source = "{% if true %}\n" + PLAIN + "{% endif %}\n"
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=source))
        self.learnt([self.CHAT])
        self.assertEqual(self.documents(), plain)


if __name__ == "__main__":
    unittest.main()
