"""Bar of checkpoints beside training: the rate of writing against dd in turns on the same disk, how
long training pauses, and what steps cost while one is written."""
import re
import statistics

from results import Command, Figure, deck

TURNS = 3
EVERY = {True: 6, False: 150}  # steps from one checkpoint to the next, by host


def dd(s, turn):
    """As many bytes as the state has; the checkpoints of the turn before make room."""
    count = 140 if s.host else 500
    return Command(
        f"dd-{turn}",
        [
            "sh",
            "-c",
            (
                "rm -rf {out}/run-*/checkpoints {out}/dd.bin; exec dd if=/dev/zero"
                f" of={{out}}/dd.bin bs=16M count={count} conv=fsync"
            ),
        ],
        limit_s=200,
    )


def train(s, turn):
    """Two checkpoints, with steps enough behind the second that the run's end need not wait."""
    every = EVERY[s.host]
    more = ["--case", "laptop"] if s.host else []
    return Command(
        f"train-{turn}",
        [
            s.ballast, "train", deck("bench", "checkpoint.toml"), *more, f"mesh.dp={s.gpus}",
            f"checkpoint.every_steps={every}", f"run.steps={3 * every - 1}",
            "-d", f"{{out}}/run-train-{turn}",
        ],
        ranks=s.gpus,
        limit_s=300,
    )  # fmt: skip


def checkpoint_commands(s):
    return [command for turn in range(TURNS) for command in (train(s, turn), dd(s, turn))]


WRITTEN = re.compile(
    r"^# checkpoint .*?step_0*(\d+)\.h5 +([0-9.]+) MB written in ([0-9.]+) s .*?"
    r"waited ([0-9.]+) s"
)
STEP = re.compile(r"^step=(\d+) .*?\bstep_time_s=([0-9.]+)")


class Turn:
    """What a run's log says of its checkpoints."""

    def __init__(self, r, turn):
        log = r.run_log(f"run-train-{turn}")
        self.rates, self.pauses, beside, apart = [], [], [], []
        since = []  # steps since the last checkpoint's line: (step, seconds)
        for line in log.splitlines():
            if step := STEP.match(line):
                since.append((int(step[1]), float(step[2])))
            elif found := WRITTEN.match(line):
                due, size, seconds, waited = (float(x) for x in found.groups())
                self.rates.append(size / seconds)
                self.pauses.append(waited / seconds)
                beside += [t for s, t in since if s > due]
                apart += [t for s, t in since if s <= due and s > 1]
                since = []
        apart += [t for _, t in since]
        self.slower = (
            statistics.median(beside) / statistics.median(apart) if beside and apart else None
        )
        copied = r.match(f"dd-{turn}", r"copied, ([0-9.]+) s")
        size = r.match(f"dd-{turn}", r"^(\d+) bytes")
        self.dd = size * 1e-6 / copied if copied and size else None


def median(values):
    values = [v for v in values if v is not None]
    return statistics.median(values) if values else None


def checkpoint_figures(r):
    turns = [Turn(r, turn) for turn in range(TURNS)]
    on_gpu = "(sm_" in r.run_log("run-train-0")  # as the log names a GPU
    ratios = [median(t.rates) / t.dd if t.rates and t.dd else None for t in turns]
    return [
        Figure("bytes a second, x dd bs=16M conv=fsync", median(ratios), 0.8),
        Figure("MB/s of checkpoints", median([median(t.rates) for t in turns])),
        Figure("MB/s of dd", median([t.dd for t in turns])),
        Figure(
            "pause of training, share of the time to write",
            median([p for t in turns for p in t.pauses]),
            0.05 if on_gpu else 0.25,
            at_most=True,
        ),
        Figure(
            "step while one is written, x other steps",
            median([t.slower for t in turns]),
            1.1 if on_gpu else None,
            at_most=True,
        ),
    ]
