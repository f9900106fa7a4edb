"""ballast-report RUN_DIR... : imbalance report of one run, or of several side by side."""
import sys

sys.dont_write_bytecode = True  # the folder may be a checkout or read-only

NEEDED = {"h5py": "python3-h5py", "numpy": "python3-numpy", "matplotlib": "python3-matplotlib"}


def missing_packages():
    import importlib.util

    return [
        package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None
    ]


def arguments(argv):
    import argparse

    parser = argparse.ArgumentParser(
        prog="ballast-report",
        description="Imbalance report (HTML, PNG, CSV, JSON) from the traces of run folders.",
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
    return parser.parse_args(argv)


def distinct_names(runs):
    """Folders of the same name get a number, so that columns and files stay apart."""
    seen = {}
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        if seen[run.name] > 1:
            run.name = f"{run.name} ({seen[run.name]})"


def main(argv):
    args = arguments(argv)
    import json
    from pathlib import Path

    import analysis
    import page
    import perfetto
    import profile_page
    from load import ReportError, load_run

    profiles = [Path(path) for path in args.runs if profile_page.is_profile(Path(path))]
    if profiles and len(profiles) < len(args.runs):
        print(
            f"ballast-report: {profiles[0]} holds a profile and not a run; give it alone",
            file=sys.stderr,
        )
        return 2
    try:
        for path in profiles:
            folder = (
                Path(args.out) / path.name
                if args.out and len(profiles) > 1
                else Path(args.out) if args.out else path / "report"
            )
            print(profile_page.write(path, profile_page.load(path), folder))
        if profiles:
            return 0
        runs = [load_run(path) for path in args.runs]
        distinct_names(runs)
        analyses = [analysis.analyse(run) for run in runs]
        folder = (
            Path(args.out)
            if args.out
            else (runs[0].path / "report" if len(runs) == 1 else Path("ballast-report"))
        )
        path = page.write(analyses, folder)
        summaries = [analysis.summary(a) for a in analyses]
        text = (
            json.dumps(
                clean(
                    summaries[0]
                    if len(runs) == 1
                    else {"cases": [{"name": s["run"], **s} for s in summaries]}
                ),
                indent=2,
            )
            + "\n"
        )
        for target in [folder / "metrics.json"] + ([Path(args.json)] if args.json else []):
            target.write_text(text, encoding="utf-8")
        if args.perfetto:
            perfetto.write(runs, args.perfetto)
    except ReportError as error:
        print(f"ballast-report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"ballast-report: cannot write {error.filename or ''}: {error.strerror or error}",
            file=sys.stderr,
        )
        return 1
    for run in runs:
        for note in run.notes:
            print(f"note: {run.name}: {note}")
    print(path)
    return 0


def clean(value):
    """JSON knows no NaN: such values are left out."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items() if v == v}
    return [clean(v) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    if absent := missing_packages():
        sys.exit(
            f"ballast-report: {sys.executable} lacks {', '.join(absent)}; install"
            f" {' '.join(absent)}, or name another interpreter in BALLAST_PYTHON"
        )
    sys.exit(main(sys.argv[1:]))
