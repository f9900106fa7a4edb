"""Measures Ballast's bars on the GPUs of this machine, each against its peer in the same run, and
prints one table.

    python3 tests/bars [NAME...]  all bars for this number of GPUs, or those named;
            BAR/COMMAND picks commands: 'sparse-step/trace-*'
    python3 tests/bars --list                what there is, and the seconds that each takes
    python3 tests/bars --out FOLDER --again  makes the figures from an earlier run's
            folder (with traces: where h5py is installed)
    python3 tests/bars --resume  only what has not ended well in the folder, after a run that
            was cut short
    python3 tests/bars --host  the same commands at laptop size on the host backend: shows
            that they work, the figures mean nothing
    python3 tests/bars --check  `ballast check` of every deck with the overrides used here

    python3 tests/bars placement --lengths FILE  simulated: on any machine, without a GPU

Needs the built program; the attention bars also nvcc, PyTorch and a file of sample lengths
(--lengths, one a line)."""
import argparse
import concurrent.futures
import fnmatch
import itertools
import json
import os
import signal
import subprocess
import sys
import time

sys.dont_write_bytecode = True
from bars import BARS
from results import Results, Setting

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def arguments():
    parser = argparse.ArgumentParser(
        prog="tests/bars", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="bars to measure")
    parser.add_argument(
        "--programs",
        default=os.path.join(ROOT, "build", "bin"),
        help="folder of ballast (default: build/bin)",
    )
    parser.add_argument(
        "--out", default="runs/bars", help="folder for logs and figures (default: runs/bars)"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        help=(
            "ranks, one a GPU (default: as many GPUs as nvidia-smi lists, at most 4; with --host 2)"
        ),
    )
    parser.add_argument(
        "--lengths", default="", help="file of sample lengths for the packed attention bar"
    )
    parser.add_argument(
        "--seconds", type=int, default=0, help="start no command after this many seconds"
    )
    for flag in ("--list", "--again", "--resume", "--host", "--check"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def gpus_here():
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def build_kernels(out):
    """The attention benchmark, built with nvcc alone; "" where that fails."""
    program = os.path.join(out, "attention_bench")
    with open(os.path.join(out, "build.txt"), "w") as log:
        try:
            built = (
                subprocess.run(
                    [
                        "sh",
                        os.path.join(ROOT, "kernels", "cuda", "standalone", "build.sh"),
                        program,
                    ],
                    stdout=log,
                    stderr=log,
                    check=False,
                ).returncode
                == 0
            )
        except OSError:
            built = False
    return program if built else ""


ENDED_WELL = "\n# ended well\n"


def ended_well(command, folder):
    try:
        with open(os.path.join(folder, command.name + ".txt"), errors="replace") as log:
            return log.read().endswith(ENDED_WELL)
    except OSError:
        return False


def launch(command, folder):
    line = [part.replace("{out}", folder) for part in command.line]
    if command.ranks:
        line = [os.environ.get("BALLAST_MPIEXEC", "mpiexec"), "-n", str(command.ranks), *line]
    environment = {
        "OPENBLAS_NUM_THREADS": "1",
        "NCCL_NVLS_ENABLE": "0",
        **os.environ,
        **command.environment,
    }
    begin = time.time()
    with open(os.path.join(folder, command.name + ".txt"), "w") as log:
        log.write("# " + " ".join(line) + "\n")
        log.flush()
        try:
            # A launcher that is stopped politely takes its ranks along; so it is when this program
            # is stopped, lest they disturb who measures next.
            process = subprocess.Popen(
                ["timeout", "-k", "10", str(command.limit_s), *line],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            try:
                code = process.wait()
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        except OSError as problem:
            log.write(str(problem) + "\n")
            code = 127
    print(
        (
            f"  {command.name}: {'ok' if code == 0 else f'failed ({code})'},"
            f" {time.time() - begin:.0f} s"
        ),
        flush=True,
    )
    if code == 0:
        with open(os.path.join(folder, command.name + ".txt"), "a") as log:
            log.write(ENDED_WELL)
    else:
        with open(os.path.join(folder, command.name + ".txt"), errors="replace") as log:
            print(
                "    " + "\n    ".join(line.rstrip()[:200] for line in log.readlines()[-4:]),
                flush=True,
            )
    return code == 0


def deck_of(command):
    """[deck, case and overrides] of a command that reads a deck, as `ballast check` takes them."""
    at = next((i for i, part in enumerate(command.line) if part.endswith(".toml")), None)
    if at is None:
        return None
    kept, skip = [command.line[at]], False
    # Settings of `bench step`, and what makes a repetition.
    own = ("warmup=", "repeats=", "run.seed=")
    for i, part in enumerate(command.line[at + 1 :], at + 1):
        if skip:
            skip = False
        elif part in ("-d", "--json"):
            skip = True
        elif not part.startswith((*own, "profile.table=")):
            kept.append(part)
    return kept


def check_decks(ballast):
    """As many at a time as there are cores; what several bars run alike is checked once."""
    asked = []  # (what it is of, its keys)
    for bar in BARS:
        for gpus, host in itertools.product(bar.gpus, (False, True) if bar.host else (False,)):
            for command in bar.commands(Setting(gpus, host, ballast, "attention_bench", "")):
                if (keys := deck_of(command)) is not None:
                    kind = "host ranks" if host else "GPUs"
                    asked.append((f"{bar.name}, {gpus} {kind}, {command.name}", tuple(keys)))

    def run(keys):
        line = [ballast, "check", "--elsewhere", *keys]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    unlike = list(dict.fromkeys(keys for _, keys in asked))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        done = dict(zip(unlike, pool.map(run, unlike)))
    for what, keys in asked:
        print(f"{what}: {'ok' if done[keys].returncode == 0 else done[keys].stderr.strip()}")
    return all(one.returncode == 0 for one in done.values())


def table(rows):
    lines = [("bar", "figure", "measured", "bar", "goal", "")]
    number = lambda x: "" if x is None else f"{x:.4g}"
    for name, f in rows:
        bar = "" if f.bar is None else ("<= " if f.at_most else ">= ") + number(f.bar)
        lines.append((name, f.what, number(f.value), bar, number(f.goal), f.held()))
    widths = [max(len(line[i]) for line in lines) for i in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines
    )


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked = arguments()
    ballast = os.path.join(os.path.abspath(asked.programs), "ballast")
    if asked.check:
        return 0 if check_decks(ballast) else 1
    gpus = asked.gpus or (2 if asked.host else min(gpus_here(), 4))
    if gpus == 3:
        gpus = 2
    wanted = {}  # bar: patterns of its commands
    for name in asked.names or [bar.name for bar in BARS if gpus in bar.gpus or bar.anywhere]:
        bar, _, command = name.partition("/")
        wanted.setdefault(bar, []).append(command or "*")
    unknown = set(wanted) - {bar.name for bar in BARS}
    if unknown:
        print(
            f"tests/bars: no bar named {', '.join(sorted(unknown))}; --list shows them",
            file=sys.stderr,
        )
        return 2
    if asked.list:
        for bar in BARS:
            print(
                f"{bar.name:12} {'/'.join(map(str, bar.gpus)):6} GPUs  about {bar.seconds:3} s "
                f" {bar.what}"
            )
        return 0
    anywhere = all(bar.anywhere for bar in BARS if bar.name in wanted)
    if gpus == 0 and not anywhere:
        print(
            "tests/bars: no GPU answers here (nvidia-smi lists none); --host shows the commands at"
            " laptop size"
        )
        return 77
    out = os.path.abspath(asked.out)
    os.makedirs(out, exist_ok=True)
    chosen = [bar for bar in BARS if bar.name in wanted and (bar.host or not asked.host)]
    kernels = ""
    if not asked.again and not asked.host and any(bar.name == "attention" for bar in chosen):
        kernels = build_kernels(out)
        if not kernels:
            print(f"attention: the benchmark was not built, see {asked.out}/build.txt")
            chosen = [bar for bar in chosen if bar.name != "attention"]
    setting = Setting(
        gpus, asked.host, ballast, kernels, os.path.abspath(asked.lengths) if asked.lengths else ""
    )
    begin, failed, rows = time.time(), [], []
    for bar in chosen:
        folder = os.path.join(out, bar.name)
        os.makedirs(folder, exist_ok=True)
        if not asked.again:
            print(f"{bar.name}: {bar.what}", flush=True)
            for command in bar.commands(setting):
                if not any(
                    fnmatch.fnmatchcase(command.name, pattern) for pattern in wanted[bar.name]
                ):
                    continue
                if asked.resume and ended_well(command, folder):
                    print(f"  {command.name}: kept from before")
                elif asked.seconds and time.time() - begin > asked.seconds:
                    print(f"  {command.name}: not started, {asked.seconds} s are over")
                    failed.append(f"{bar.name}/{command.name}")
                elif not launch(command, folder):
                    failed.append(f"{bar.name}/{command.name}")
        elif os.path.isdir(folder):
            for command in bar.commands(
                setting
            ):  # what reads traces may run here though it could not there
                if command.name.startswith("report-"):
                    launch(command, folder)
        rows += [(bar.name, figure) for figure in bar.figures(Results(folder, gpus))]
    print("\n" + table(rows))
    if asked.host and not anywhere:
        print("laptop sizes on the host: figures mean nothing")
    with open(os.path.join(out, "figures.json"), "w") as file:
        json.dump(
            [{"bar": name, **vars(figure), "held": figure.held()} for name, figure in rows],
            file,
            indent=1,
        )
    if failed:
        print("failed: " + ", ".join(failed))
    missed = any(figure.held() in ("MISSED", "no figure") for _, figure in rows)
    return 1 if failed or (missed and (anywhere or not asked.host)) else 0


sys.exit(main())
