"""Helpers of the whole-program tests: a tiny deck over real text files, runs of the ballast
program, and readers of what they leave."""
import glob
import hashlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
import unittest
import zlib

BALLAST = os.environ["BALLAST_PROGRAM"]
REPORT = os.path.join(os.path.dirname(BALLAST), "ballast-report")
MPIEXEC = os.environ.get("BALLAST_MPIEXEC", "mpiexec")

DECK = """# Tiny run for the tests.
[run]
seed = 11
steps = {steps}
[mesh]
dp = {dp}
cp_outer = {cp_outer}
cp_inner = {cp_inner}
sp = {sp}
[model]
layers = 2
hidden = 32
intermediate = 64
query_heads = 4
kv_heads = 2
head_dim = 8
vocabulary = 256
[data]
source = "files"
paths = ["{data}"]
extensions = [".txt"]
max_tokens = 300
long = "split"
validation_share = 0.1
[batching]
method = "packed"
micro_batch_tokens = 300
global_tokens = 1500
[ring]
layout = "zigzag"
[optimizer]
learning_rate = 0.01
warmup_steps = 3
clip_norm = 1.0
zero = 1
[checkpoint]
every_steps = {every}
keep = 3
"""


class RunCase(unittest.TestCase):
    """Each test gets a folder with data files and may start runs there."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="ballast-test-")
        self.data = os.path.join(self.folder, "data")
        os.makedirs(self.data)
        rng = random.Random(5)
        words = [
            "ring",
            "stripe",
            "anchor",
            "budget",
            "chunk",
            "segment",
            "stage",
            "bubble",
            "rank",
        ]
        for i in range(40):
            with open(os.path.join(self.data, f"{i:03}.txt"), "w") as f:
                f.write(" ".join(rng.choice(words) for _ in range(rng.randint(1, 150))))

    def tearDown(self):
        subprocess.run(["rm", "-rf", self.folder], check=False)

    def deck(self, name="deck.toml", text=None, **values):
        settings = {
            "steps": 6,
            "dp": 2,
            "cp_outer": 1,
            "cp_inner": 1,
            "sp": 1,
            "every": 2,
            "data": self.data,
        }
        settings.update(values)
        path = os.path.join(self.folder, name)
        with open(path, "w") as f:
            f.write((text or DECK).format(**settings))
        return path

    def out(self, name):
        return os.path.join(self.folder, name)

    def command(self, ranks, *arguments):
        return [MPIEXEC, "-n", str(ranks), BALLAST, *arguments]

    def run_ballast(self, ranks, *arguments, timeout=120, status=0, **options):
        done = subprocess.run(
            self.command(ranks, *arguments),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            **options,
        )
        if status is not None:
            self.assertEqual(
                done.returncode,
                status,
                f"{arguments}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}",
            )
        return done

    @staticmethod
    def environment(**values):
        return {**os.environ, **values}

    def start(self, ranks, *arguments, **options):
        return subprocess.Popen(
            self.command(ranks, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )

    def steps(self, run):
        """Step lines of RUN/log.txt as dictionaries, in order."""
        rows = []
        with open(os.path.join(run, "log.txt")) as f:
            for line in f:
                if line.startswith("step="):
                    rows.append(dict(field.split("=", 1) for field in line.split()))
        return rows

    def losses(self, run):
        return {int(r["step"]): r["loss"] for r in self.steps(run) if "loss" in r}

    def stored(self, run, kind="step", rank=0):
        """step -> the plan of that kind that a rank's trace stores, as loaded from JSON."""
        import h5py

        with h5py.File(os.path.join(run, "trace", f"trace_{rank:05}.h5"), "r") as f:
            counts, text = f["rows"][()], f["plan_text"][()].tobytes()
            rows = f["plans"][: int(counts["plans"])]
            plans = [
                (
                    json.loads(zlib.decompress(text[int(p["begin"]) :][: int(p["bytes"])]))
                    if p["kind"].decode() == kind
                    else None
                )
                for p in rows
            ]
            steps = f["plan_steps"][: int(counts["plan_steps"])]
            return {
                int(s["step"]): plans[int(s["plan"])]
                for s in steps
                if rows[int(s["plan"])]["kind"].decode() == kind
            }

    @staticmethod
    def ops(plan, dp, stage):
        """(kind, micro-batch, chunk) of every op of a stage of a step's plan."""
        columns = plan["schedules"][plan["lanes"][dp]["schedule"]][stage]
        kinds, places = columns["kind"], columns["micro_batch"]
        chunks = columns.get("chunk", [0] * len(kinds))
        return [(plan["op_kinds"][k], m, c) for k, m, c in zip(kinds, places, chunks)]

    def checkpoints(self, run):
        folder = os.path.join(run, "checkpoints")
        return sorted(f for f in os.listdir(folder) if f.endswith(".h5"))

    def tensors(self, path):
        """Digest of every tensor of a checkpoint, by name."""
        import h5py

        digests = {}
        with h5py.File(path, "r") as f:
            f["parameters"].visititems(
                lambda name, item: (
                    digests.__setitem__(name, hashlib.sha256(item[()].tobytes()).hexdigest())
                    if isinstance(item, h5py.Dataset)
                    else None
                )
            )
        return digests

    def wait_for_checkpoint(self, process, run, timeout=60):
        """Waits until `run` holds a checkpoint: they are written while training goes on."""
        end = time.time() + timeout
        while not glob.glob(os.path.join(run, "checkpoints", "step_*.h5")):
            self.assertIsNone(process.poll(), "the run ended early")
            self.assertLess(time.time(), end, f"no checkpoint within {timeout} s")
            time.sleep(0.02)

    def wait_for_step(self, process, run, step, timeout=60):
        """Waits until the log of `run` shows `step`."""
        end = time.time() + timeout
        while time.time() < end:
            if process.poll() is not None:
                self.fail(
                    "the run ended early with"
                    f" {process.returncode}:\n{process.stdout.read()[-4000:]}"
                )
            try:
                if any(s >= step for s in self.losses(run)):
                    return
            except FileNotFoundError:
                pass
            time.sleep(0.05)
        self.fail(f"no step {step} within {timeout} s")

    def ranks_of(self, run):
        """Process ids of the ranks that train into `run`."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as f:
                    words = f.read().decode(errors="replace").split("\0")
                if (
                    os.path.realpath(f"/proc/{pid}/exe") == os.path.realpath(BALLAST)
                    and run in words
                ):
                    found.append(int(pid))
            except OSError:
                continue  # it ended meanwhile
        return found

    def state_of(self, pid):
        """What a process does, for messages: its state letter and where it sleeps in the kernel."""
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/wchan") as wchan:
                return stat.read().rsplit(")", 1)[1].split()[0] + " " + wchan.read()
        except OSError:
            return "gone"

    def stop_group(self, process):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        process.stdout.close()
