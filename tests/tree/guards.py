"""Checks of the tree itself: python3 tests/tree [CHECK...] [--shrink] | --tokens [ROOT]

Without names all checks run.  exceptions.txt holds what is known to be wrong, one line each: check,
place, and the size that it may have.  It may only shrink: a new place, a larger size, or a line
that is no longer needed fails.  --shrink removes and lowers lines that are too generous; it adds
nothing.  --tokens prints the size of the product, one line a room, of this tree or of one
unpacked at ROOT.
Status 0: all hold; 1: something does not; 77: nothing could be checked here."""
import os
import sys

import checks
import sources
import tokens

EXCEPTIONS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "exceptions.txt")


def read_exceptions():
    """{(check, place): size}; the comment lines on top come back too."""
    with open(EXCEPTIONS, encoding="utf-8") as stream:
        lines = stream.read().split("\n")
    comments = [line for line in lines if line.startswith("#")]
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {(row[0], row[1]): int(row[2]) for row in rows}, comments


def judge(findings, allowed):
    """Problems of one check: `findings` {place: Finding} against `allowed` {place: size}."""
    problems = []
    for place, finding in sorted(findings.items()):
        if place not in allowed:
            problems.append(finding.text)
        elif finding.size > allowed[place]:
            problems.append(f"{finding.text}; its exception allows {allowed[place]}")
    for place in sorted(set(allowed) - set(findings)):
        problems.append(f"{place}: its exception is no longer needed, run tests/tree --shrink")
    return problems


def main(arguments):
    if arguments[:1] == ["--tokens"] and len(arguments) <= 2:
        sources.ROOT = os.path.abspath((arguments + [sources.ROOT])[1])
        tokens.show(sources.files())
        return 0
    by_name = {check.__name__: check for check in checks.CHECKS}
    chosen = [name for name in arguments if not name.startswith("--")] or list(by_name)
    unknown = [name for name in chosen if name not in by_name] + [
        option for option in arguments if option.startswith("--") and option != "--shrink"
    ]
    if unknown:
        sys.exit(
            f"unknown: {' '.join(unknown)}; checks: {' '.join(by_name)}; options: --shrink,"
            " --tokens"
        )
    exceptions, comments = read_exceptions()
    failed = ran = 0
    for name in chosen:
        try:
            findings = {finding.key: finding for finding in by_name[name]()}
        except checks.Skipped as reason:
            print(f"{name}: skipped: {reason}")
            continue
        ran += 1
        allowed = {place: size for (check, place), size in exceptions.items() if check == name}
        if "--shrink" in arguments:
            for place, size in allowed.items():
                del exceptions[name, place]
                if place in findings:
                    exceptions[name, place] = min(size, findings[place].size)
                    allowed[place] = exceptions[name, place]
            allowed = {place: size for place, size in allowed.items() if place in findings}
        problems = judge(findings, allowed)
        failed += bool(problems)
        state = "FAILED" if problems else "ok"
        print(f"{name}: {state}, {len(allowed)} exceptions. {by_name[name].__doc__}")
        for problem in problems:
            print(f"  {problem}")
    if "--shrink" in arguments:
        with open(EXCEPTIONS, "w", encoding="utf-8") as stream:
            rows = [f"{name} {place} {size}" for (name, place), size in exceptions.items()]
            stream.write("\n".join(comments + sorted(rows)) + "\n")
    return 1 if failed else 0 if ran else 77
