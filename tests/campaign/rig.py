"""Small runs of the ballast program under a deadline, and what they leave."""
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time

try:
    import h5py
except ImportError:  # then losses alone are compared
    h5py = None

BALLAST = os.environ.get("BALLAST_PROGRAM", "ballast")
MPIEXEC = os.environ.get("BALLAST_MPIEXEC", "mpiexec")
DEADLINE_S = 60  # of one start of the program: hang_timeout_s and the load of the machine
HANG_S = 5

DECK = """[run]
seed = 7
steps = {steps}
hang_timeout_s = {hang}
[mesh]
{mesh}
[model]
layers = 2
hidden = 16
intermediate = 32
query_heads = 4
kv_heads = 2
head_dim = 8
vocabulary = 128
[data]
source = "lengths"
lengths = [90, 120, 60, 75, 130, 40, 88, 101, 66, 93]
[batching]
method = "packed"
micro_batch_tokens = 140
global_tokens = 400
[optimizer]
learning_rate = 0.01
decay_steps = 100
zero = 1
[checkpoint]
every_steps = {every}
keep = {keep}
max_failures = {failures}
[trace]
enabled = {trace}
"""


class Rig:
    """One trial's folder."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.folder = tempfile.mkdtemp(prefix="ballast-campaign-")
        self.run = os.path.join(self.folder, "run")

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def deck(self, mesh="dp = 2", steps=8, every=1, keep=3, trace="false", failures=3, hang=HANG_S):
        """A deck of a small run; `mesh` as lines of that block."""
        path = os.path.join(self.folder, "deck.toml")
        with open(path, "w") as file:
            file.write(
                DECK.format(
                    mesh=mesh,
                    steps=steps,
                    every=every,
                    keep=keep,
                    failures=failures,
                    trace=trace,
                    hang=hang,
                )
            )
        return path

    def start_words(self, ranks, *arguments):
        return [MPIEXEC, "-n", str(ranks), BALLAST, *arguments]

    def start(self, ranks, *arguments, **environment):
        return subprocess.Popen(
            self.start_words(ranks, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def end(self, process, deadline=DEADLINE_S):
        """(status, output), status None for a hang; nothing of the process group survives."""
        try:
            text, _ = process.communicate(timeout=deadline)
            return process.returncode, text
        except subprocess.TimeoutExpired:
            for pid in self.ranks():
                _signal(pid, signal.SIGKILL)
            _signal(-process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            return None, text

    def call(self, ranks, *arguments, deadline=DEADLINE_S, **environment):
        return self.end(self.start(ranks, *arguments, **environment), deadline)

    def ranks(self):
        """Process ids of this trial's ranks, in the order of their start."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
                if os.path.basename(words[0]) == b"ballast" and self.run.encode() in words:
                    found.append(int(pid))
            except OSError:
                continue
        return sorted(found)

    def alone(self, *words, deadline=DEADLINE_S, **environment):
        """(status, output) of a program that the launcher does not start."""
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, **environment},
            start_new_session=True,
        )
        return self.end(process, deadline)

    def wait_for_step(self, process, step, limit=40):
        end = time.time() + limit
        while time.time() < end and process.poll() is None:
            if any(s >= step for s in self.losses()):
                return True
            time.sleep(0.01)
        return process.poll() is None

    def losses(self):
        """Step -> (loss, gradient norm) as printed, the latest of each step."""
        rows = {}
        try:
            with open(os.path.join(self.run, "log.txt")) as file:
                for line in file:
                    if line.startswith("step=") and "grad_norm=" in line:
                        fields = dict(part.split("=", 1) for part in line.split())
                        rows[int(fields["step"])] = (fields["loss"], fields["grad_norm"])
        except (OSError, ValueError, KeyError):
            pass
        return rows

    def checkpoints(self):
        try:
            names = os.listdir(os.path.join(self.run, "checkpoints"))
        except OSError:
            return []
        return sorted(n for n in names if n.startswith("step_") and n.endswith(".h5"))

    def path(self, name):
        return os.path.join(self.run, "checkpoints", name)

    def sums(self, name):
        """Checksums of a checkpoint's elements, None where h5py is missing."""
        if h5py is None:
            return None
        with h5py.File(self.path(name), "r") as file:
            return file["checksums"][()].tobytes()


def _signal(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def signal_ranks(pids, number):
    for pid in pids:
        _signal(pid, number)


def is_stopped(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def crashed(status, text):
    """Whether a process ended by a fault of its own: by a signal that nobody sent."""
    return (
        status in (-11, -6, -7, -8, 6, 7, 8, 11, 134, 135, 136, 139)
        or "SIGSEGV" in text
        or "Segmentation fault" in text
        or "Sanitizer" in text
    )
