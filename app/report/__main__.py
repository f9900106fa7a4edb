"""ballast-report RUN_DIR... : imbalance report of one run, or of several side by side."""
import math
import os
import sys

NEEDED = {"h5py": "python3-h5py", "numpy": "python3-numpy", "plotly": "python3-plotly"}


def missing_packages():
    import importlib.util

    return [
        package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None
    ]


def arguments(argv):
    import argparse

    parser = argparse.ArgumentParser(
        prog="ballast-report",
        description="Imbalance report (HTML, CSV, JSON) from the traces of run folders.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN_DIR",
        help="run folder, as given to ballast train -d (or profile -d)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where to write (default: RUN_DIR/report, for several runs ./ballast-report)",
    )
    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        help="also write a timeline for ui.perfetto.dev or chrome://tracing",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the metrics here")
    parser.add_argument(
        "--no-simulator",
        action="store_true",
        help="do not ask `ballast check` what changes of the deck would bring",
    )
    return parser.parse_args(argv)


def main(argv):
    args = arguments(argv)
    from pathlib import Path

    import profile_page
    from load import ReportError

    paths = [Path(path) for path in args.runs]
    profiles = [path for path in paths if profile_page.is_profile(path)]
    if profiles and len(profiles) < len(paths):
        print(
            f"ballast-report: {profiles[0]} holds a profile and not a run; give it alone",
            file=sys.stderr,
        )
        return 2
    try:
        if profiles:
            lines = show_profiles(profiles, args.out)
        else:
            lines = show_runs(args)
    except ReportError as error:
        print(f"ballast-report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            (
                f"ballast-report: cannot write {error.filename or 'a file'}:"
                f" {error.strerror or error}; free some space there, or name another place (--out,"
                " --json, --perfetto)"
            ),
            file=sys.stderr,
        )
        return 1
    return printed(lines)


def printed(lines):
    """Prints them and returns the status: 1 where standard output does not take them.  Whoever
    closed a pipe has read enough."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(
                f"ballast-report: standard output cannot be written: {error.strerror}",
                file=sys.stderr,
            )
            return 1
    return 0


def show_profiles(paths, out):
    """Writes a page a profile; returns what to print."""
    from pathlib import Path

    import names
    import output
    import profile_page

    folders = [Path(out) if out else path / "report" for path in paths]
    if out and len(paths) > 1:
        folders = [Path(out) / name for name in names.distinct([path.name for path in paths])]
    for folder in folders:
        output.refuse_targets(folder, [])
    return [
        profile_page.write(path, profile_page.load(path), folder)
        for path, folder in zip(paths, folders)
    ]


def show_runs(args):
    """One page over all runs, metrics.json beside it, and what else was asked for; returns what to
    print."""
    import json
    from pathlib import Path

    import analysis
    import names
    import output
    import page
    import perfetto
    import simulator
    import verdict
    from load import load_run

    paths = [Path(path) for path in args.runs]
    if args.out:
        folder = Path(args.out)
    else:
        folder = paths[0] / "report" if len(paths) == 1 else Path("ballast-report")
    output.refuse_targets(folder, paths, args.json, args.perfetto)
    runs = [load_run(path) for path in paths]
    for run, name in zip(runs, names.distinct([run.name for run in runs])):
        run.name = name
    prefixes = names.file_prefixes([run.name for run in runs])
    output.refuse_tables(names.table_files(folder, prefixes), args.json, args.perfetto)
    analyses = [analysis.analyse(run) for run in runs]
    program = None if args.no_simulator else simulator.find_program()
    for a in analyses:
        a.verdict = verdict.judge(a, program)
    path = page.write(analyses, folder, prefixes)
    result = [{**analysis.summary(a), "verdict": verdict.summary(a.verdict)} for a in analyses]
    if len(runs) == 1:
        result = result[0]
    else:
        result = {"cases": [{"name": s["run"], **s} for s in result]}
    text = json.dumps(clean(result), indent=2, allow_nan=False) + "\n"
    for target in [folder / "metrics.json"] + ([Path(args.json)] if args.json else []):
        output.write_text(target, text)
    if args.perfetto:
        perfetto.write(runs, args.perfetto)
    return [f"note: {run.name}: {note}" for run in runs for note in run.notes] + [path]


def clean(value):
    """JSON knows no NaN and no infinity: such values are left out, in a list they are null."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items() if finite(v)}
    if isinstance(value, (list, tuple)):
        return [clean(v) if finite(v) else None for v in value]
    return value


def finite(value):
    return not isinstance(value, float) or math.isfinite(value)


if __name__ == "__main__":
    if absent := missing_packages():
        sys.exit(
            f"ballast-report: {sys.executable} lacks {', '.join(absent)}; install"
            f" {' '.join(absent)}, or name another interpreter in BALLAST_PYTHON"
        )
    if sys.stdout is None:  # closed
        sys.stdout = open(os.devnull, "w")
    # Names of files that are no UTF-8 are printed as they are.
    sys.stdout.reconfigure(errors="surrogateescape")
    sys.exit(main(sys.argv[1:]))
