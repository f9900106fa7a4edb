"""Asks `ballast check` what a change of the deck would bring: its simulator is the only clock."""
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

STEPS = 3
MOST_SECONDS = 12.0  # for all questions about a run
LEAST_GAIN = 0.01


def find_program():
    named = os.environ.get("BALLAST_PROGRAM", "")
    return named if named and Path(named).is_file() else shutil.which("ballast")


def given(deck_text):
    """The keys of an effective deck that the user gave: a default that is written out would count
    as given, so that default costs would stand in for the device's."""
    blocks = []
    for line in deck_text.splitlines():
        if line.startswith("["):
            blocks.append([line])
        elif blocks and "=" in line and not re.search(r"\s# default(;|$)", line):
            blocks[-1].append(line)
    return "".join("\n".join(block) + "\n" for block in blocks if len(block) > 1)


class Simulator:
    """The simulator for one deck; every answer is a twin of `ballast check`."""

    def __init__(self, program, deck_text):
        self.program, self.deck_text = program, given(deck_text)
        self.until = time.monotonic() + MOST_SECONDS

    def ask(self, settings):
        """(twin, "") or (None, why there is none)."""
        left = self.until - time.monotonic()
        if left <= 0:
            return None, f"not asked, {MOST_SECONDS:.0f} s were over"
        with tempfile.TemporaryDirectory(prefix="ballast-report-") as folder:
            deck, twin = Path(folder) / "deck.toml", Path(folder) / "twin.json"
            deck.write_text(self.deck_text, encoding="utf-8")
            changes = [f"{key}={value}" for key, value in settings.items()]
            command = [self.program, "check", deck, *changes, "--steps", STEPS, "--plans", 0]
            try:
                done = subprocess.run(
                    [str(part) for part in [*command, "--json", twin]],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=left,
                )
            except subprocess.TimeoutExpired:
                return None, f"not answered when {MOST_SECONDS:.0f} s were over"
            except OSError as error:
                return None, f"{self.program}: {error}"
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                return None, lines[0].replace(f"{deck}:", "") if lines else "it failed"
            answer = json.loads(twin.read_text(encoding="utf-8"))
        if "simulated" not in answer:
            return None, answer.get("simulation_refused", "the deck has no data to plan with")
        return answer, ""

    def judge(self, changes):
        """Fills the changes with what the simulator says of them, and adds the best ones together.
        Returns (simulated seconds of a step as it is, why there are none)."""
        now, why = self.ask({})
        if now is None:
            return None, why
        for change in changes:
            self._judge(change, now)
        useful = sorted((c for c in changes if (c.gain or 0) > LEAST_GAIN), key=lambda c: -c.gain)
        best = useful[0] if useful else None
        for change in useful[1:]:
            if best.settings.keys() & change.settings.keys():
                continue
            both = type(best)({**best.settings, **change.settings}, "these together")
            self._judge(both, now)
            if (both.gain or 0) > best.gain + LEAST_GAIN:
                best = both
        if best and best not in changes:
            changes.append(best)
        return now["simulated"]["step_s"], ""

    def _judge(self, change, now):
        then, change.unanswered = self.ask(change.settings)
        if then is None:
            return
        rate = [twin["simulated"]["tokens_per_s"] for twin in (now, then)]
        change.gain = rate[1] / rate[0] - 1
        change.step_s = tuple(twin["simulated"]["step_s"] for twin in (now, then))
        change.bytes = tuple(twin["largest_rank_bytes"] for twin in (now, then))
