"""The report of 1,024 ranks, as the simulator times them: in 30 s and 2 GB, a page below 20 MB that
a browser shows."""
import os
import resource
import subprocess
import sys
import time
import unittest

import browser
import support

DECK = """[run]
backend = "cuda"
precision = "bf16"
[mesh]
dp = 64
pp = 4
cp_inner = 4
ranks_per_node = 8
[model]
preset = "qwen2.5-7b"
[data]
source = "distribution"
bin_tokens = [1024, 4096, 16384, 65536]
bin_share = [0.5, 0.3, 0.15, 0.05]
samples = 100000
[batching]
method = "packed"
micro_batch_tokens = 65536
global_tokens = 16777216
"""
MOST_SECONDS, MOST_KIB, MOST_PAGE = 30, 2 << 20, 20 << 20


class Thousand(support.RunTest):
    def test_time_memory_and_page(self):
        if not support.PROGRAM:
            self.skipTest("BALLAST_PROGRAM names no ballast")
        deck, run = self.folder / "deck.toml", self.folder / "run"
        deck.write_text(DECK)
        check = [support.PROGRAM, "check", deck, "--steps", "8", "--trace", run]
        subprocess.run(check, check=True, stdout=subprocess.DEVNULL)
        begin = time.monotonic()
        environment = {**os.environ, "BALLAST_PROGRAM": support.PROGRAM}
        subprocess.run(
            [sys.executable, support.REPORT, run],
            check=True,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        seconds = time.monotonic() - begin
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        page = run / "report" / "report.html"
        print(f"{seconds:.1f} s, {memory >> 10} MiB, page of {page.stat().st_size >> 10} KiB")
        self.assertLess(seconds, MOST_SECONDS)
        self.assertLess(memory, MOST_KIB)
        self.assertLess(page.stat().st_size, MOST_PAGE)
        verdict = self.metrics(run / "report")["verdict"]
        self.assertIn("Simulated", verdict["headline"])
        self.assertGreater(verdict["changes"][0]["simulated_gain"], 0.05)
        if not browser.find():
            return
        with browser.Browser(page) as shown:
            shown.wait("document.body && document.body.dataset.drawn")
            self.assertEqual(shown.errors, [])


if __name__ == "__main__":
    unittest.main()
