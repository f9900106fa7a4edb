"""What tests of whole runs on GPUs share: the decks, and a comparison of runs with run.backend =
"cuda" with the same deck on the host.  Where there are fewer GPUs than ranks, ranks share them, so
that every mesh is tried even on one GPU."""
import os
import re
import subprocess
import unittest
from concurrent.futures import ThreadPoolExecutor

from runs import DECK, RunCase


def gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


GPUS = gpus()
# BALLAST_TEST_BACKEND=host runs the same list without a GPU, to try decks and meshes.
BACKEND = os.environ.get("BALLAST_TEST_BACKEND", "cuda")
WORKERS = int(os.environ.get("BALLAST_TEST_WORKERS", 3))  # runs at a time
PROCESSES = 12  # that use one GPU at a time: its channels run out at about 16
RUNS = os.environ.get(
    "BALLAST_TEST_RUNS", ""
)  # only runs whose title and overrides this expression finds
WIDE = (
    DECK.replace("hidden = 32", "hidden = 256")
    .replace("intermediate = 64", "intermediate = 512")
    .replace("head_dim = 8", "head_dim = 64")
)
LONG = (
    WIDE.replace("max_tokens = 300", "max_tokens = 900")
    .replace("micro_batch_tokens = 300", "micro_batch_tokens = 1800")
    .replace("global_tokens = 1500", "global_tokens = 3600")
)
# Forwards long enough that updates of small buckets run beside them.
BESIDE = (
    WIDE.replace("layers = 2", "layers = 6")
    .replace("max_tokens = 300", "max_tokens = 2000")
    .replace("micro_batch_tokens = 300", "micro_batch_tokens = 8192")
    .replace("global_tokens = 1500", "global_tokens = 32768")
)
RATE = "optimizer.learning_rate=0.001"


def ranks_of(mesh):
    ranks = 1
    for degree in ("dp", "sp", "cp_outer", "cp_inner", "pp"):
        ranks *= mesh.get(degree, 1)
    return ranks


@unittest.skipIf(GPUS == 0 and BACKEND == "cuda", "no GPU answers here (nvidia-smi lists none)")
class CudaCase(RunCase):
    def train(self, name, ranks, *overrides, text=WIDE, **mesh):
        run = self.out(name)
        values = {"dp": 1, "cp_outer": 1, "cp_inner": 1, "steps": 30, "every": 0}
        values.update(mesh)
        done = self.run_ballast(
            ranks,
            "train",
            self.deck(name + ".toml", text, **values),
            "-d",
            run,
            RATE,
            "run.hang_timeout_s=45",
            *overrides,
        )
        return run, done

    def curve(self, run):
        return [float(row["loss"]) for row in self.steps(run) if "loss" in row]

    def compare(self, title, reference, runs, **common):
        """Trains `reference` (overrides) on one host rank and every (mesh, overrides) of `runs` on
        GPUs, several at a time.  All of them run
        whatever fails; what differs is named: the run, the step, both values."""

        def label_of(mesh, overrides):
            return (
                f"{title},"
                f" {' '.join(f'{k} {v}' for k, v in mesh.items()) or 'one rank'}"
                f" {' '.join(overrides)}"
            )

        runs = [run for run in runs if re.search(RUNS, label_of(*run))]

        def one(number, mesh, overrides):
            values = {key: value for key, value in mesh.items() if key != "pp"}
            run, done = self.train(
                f"{title}-{number}".replace(" ", "-"),
                ranks_of(mesh),
                f"run.backend={BACKEND}",
                f"mesh.pp={mesh.get('pp', 1)}",
                *overrides,
                **common,
                **values,
            )
            self.assertNotIn("use the host backend", done.stdout)
            return self.steps(run)

        most = max((ranks_of(mesh) for mesh, _ in runs), default=1)
        with ThreadPoolExecutor(max(1, min(WORKERS, PROCESSES // most))) as pool:
            host = pool.submit(
                self.train, f"{title}-host".replace(" ", "-"), 1, *reference, **common
            )
            pending = [
                (mesh, overrides, pool.submit(one, number, mesh, overrides))
                for number, (mesh, overrides) in enumerate(runs)
            ]
            expected = [row for row in self.steps(host.result()[0]) if "loss" in row]
            for mesh, overrides, run in pending:
                label = label_of(mesh, overrides)
                with self.subTest(label):
                    found = [row for row in run.result() if "loss" in row]
                    self.assertEqual(len(found), len(expected), f"{label}: steps with a loss")
                    for row, host_row in zip(found, expected):
                        loss, host_loss = float(row["loss"]), float(host_row["loss"])
                        bound = 5e-3 if row is found[0] else 3e-2
                        self.assertLess(
                            abs(loss - host_loss),
                            bound * host_loss,
                            (
                                f"{label}: loss of step {row['step']} is {loss}, the host's"
                                f" {host_loss}"
                            ),
                        )
                    norm, host_norm = float(found[0]["grad_norm"]), float(expected[0]["grad_norm"])
                    self.assertLess(
                        abs(norm - host_norm),
                        5e-2 * host_norm,
                        (
                            f"{label}: gradient norm of the first step is {norm}, the host's"
                            f" {host_norm}"
                        ),
                    )
                    for row, host_row in zip(found, expected):
                        for key in ("recall", "drift"):
                            self.assertEqual(key in row, key in host_row, f"{label}: {key}")
                            if key in row:
                                self.assertLess(
                                    abs(float(row[key]) - float(host_row[key])),
                                    2e-2,
                                    f"{label}: {key} of step {row['step']}",
                                )
                    worst = max(
                        abs(float(a["loss"]) / float(b["loss"]) - 1)
                        for a, b in zip(found, expected)
                    )
                    print(
                        (
                            f"# {label}: loss {found[0]['loss']} to {found[-1]['loss']}, worst"
                            f" against the host {worst:.2e}, first gradient norm"
                            f" {norm / host_norm - 1:+.2e}"
                        ),
                        flush=True,
                    )
        return [float(row["loss"]) for row in expected]
