"""Every table and figure of the four papers beside what Ballast gives: docs/results.md, from the
figures stored beside this file.

    python3 tests/results            prints the page
    python3 tests/results --write    writes docs/results.md
    python3 tests/results --check    fails where docs/results.md is another text
    python3 tests/results --run [PAPER...]  runs every command whose figures are planned or
            simulated (no ranks, no GPU; a minute) and fails where one is off by more than 1 %;
            --write stores what it gives

PAPER.json holds the figures; README.md of this folder says what each member means."""
import argparse
import collections
import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PAGE = os.path.join(ROOT, "docs", "results.md")
PAPERS = ["mtraining", "sparsebalance", "hbp", "chunkflow"]


def load(name):
    with open(os.path.join(HERE, name + ".json")) as file:
        return json.load(file)


def store(name, paper):
    with open(os.path.join(HERE, name + ".json"), "w") as file:
        json.dump(paper, file, indent=1, ensure_ascii=False)
        file.write("\n")


def figures(paper):
    for item in paper["items"]:
        for figure in item.get("figures", []):
            yield item, figure


def shown(value, figure, form):
    if isinstance(value, str):
        return value
    unit = figure.get("unit", "").replace("us ", "µs ")
    return f"{value:{form}} {unit}".rstrip()


def kind(figure):
    """How a figure came about: kind, mesh, machine, commit."""
    where = [figure["on"]] if "on" in figure else []
    if "path" not in figure:
        where.append(figure["at"])
    return ", ".join([figure["kind"], *where])


def section(paper):
    yield f"## {paper['name']}\n\n"
    yield f"“{paper['title']}”. {paper['about']}\n"
    for item in paper["items"]:
        if "figures" not in item:
            continue
        yield f"\n### {paper['name']} {item['item']}: {item['shows']}\n\n"
        yield "| what | paper | Ballast | kind |\n|---|---|---|---|\n"
        for figure in item["figures"]:
            cells = [
                figure["what"],
                shown(figure.get("paper", ""), figure, "g"),
                shown(figure["ours"], figure, f".{figure.get('digits', 2)}f"),
                kind(figure),
            ]
            yield "| " + " | ".join(cells) + " |\n"
        lines = dict.fromkeys(f["command"] for f in item["figures"] if "command" in f)
        if lines:
            yield "\n```sh\n" + "".join(line + "\n" for line in lines) + "```\n"
        if "why" in item:
            yield f"\n{item['why']}\n"
    rest = [item for item in paper["items"] if "figures" not in item]
    yield f"\n### {paper['name']}: without a figure of ours\n\n"
    yield "| item | shows | status | what it would take |\n|---|---|---|---|\n"
    for item in rest:
        take = item.get("why", "")
        if "command" in item:
            take = (take + " " if take else "") + f"`{item['command']}`"
        yield f"| {item['item']} | {item['shows']} | {item['status']} | {take} |\n"


def summary(papers):
    yield "| paper | items | with a figure | not measured | needs weights | not built |"
    yield " no figure |\n|---|---|---|---|---|---|---|\n"
    for paper in papers:
        count = collections.Counter(item.get("status", "figure") for item in paper["items"])
        names = ["figure", "not measured", "needs weights", "not built", "no figure"]
        cells = [paper["name"], str(len(paper["items"])), *(str(count[n]) for n in names)]
        yield "| " + " | ".join(cells) + " |\n"


HEAD = """# Results beside the four papers

Every table and figure of the four papers that Ballast brings together, the paper's number and
Ballast's. This page is made: `python3 tests/results --write` writes it from the figures stored in
`tests/results`, and a default test runs the planned ones again.

What stands under *kind*:

- **measured**: a run on the machine named, at the commit named. GPUs are H200s.
- **simulated**: the plan that the command makes, timed or counted without ranks. Times come from
  stated costs, not from a machine, and hold no overheads.
- **generated**: measured or simulated on made-up sparse patterns (the attention of random weights
  is not sparse), so it says how fast such a pattern runs, not that a model would choose it.

Items without a figure of ours say why: **not measured** (nobody has, the command would), **needs
weights** (pretrained weights, benchmarks and their data, which are not here), **not built**
(Ballast lacks what it takes), **no figure** (notation, illustrations, settings).

A simulated figure whose batches `ballast train` does not run says so: *plan only*. Commands are
written for `ballast` on the PATH, from the root of the repository. How the measurements were made
stands on the pages named with them.

"""


def page():
    papers = [load(name) for name in PAPERS]
    stamp = papers[0]["simulated"]
    text = HEAD + "".join(summary(papers))
    text += f"\nSimulated figures: commit {stamp['commit']}, {stamp['date']}.\n\n"
    return text + "\n".join("".join(section(paper)) for paper in papers)


def pick(tree, path):
    """The number at a path: members joined by dots, [NAME] for the case or row of that name, and
    A / B for the ratio of two."""
    if " / " in path:
        above, below = (pick(tree, part) for part in path.split(" / "))
        return above / below
    for member, name in re.findall(r"([\w]+)|\[([^\]]*)\]", path):
        if member:
            tree = tree[member]
        elif name.isdigit():
            tree = tree[int(name)]
        else:
            tree = next(row for row in tree if row["name"] == name)
    return tree


def run(line, ballast):
    """The JSON twin of a command that starts no ranks."""
    with tempfile.TemporaryDirectory() as folder:
        twin = os.path.join(folder, "twin.json")
        words = shlex.split(line)
        assert words[0] == "ballast", line
        done = subprocess.run(
            [ballast, *words[1:], "--json", twin],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
        )
        if done.returncode != 0:
            raise SystemExit(f"tests/results: {line} failed:\n{done.stdout}{done.stderr}")
        with open(twin) as file:
            return json.load(file)


def rerun(ballast, names, write):
    """Runs the commands of all figures that have a path; the number that are off."""
    outputs, off = {}, 0
    for name in names or PAPERS:
        paper = load(name)
        for item, figure in figures(paper):
            if "path" not in figure:
                continue
            line = figure["command"]
            if line not in outputs:
                outputs[line] = run(line, ballast)
            now = pick(outputs[line], figure["path"]) * figure.get("scale", 1)
            if abs(now - figure["ours"]) > 0.01 * abs(figure["ours"]) + 1e-4:
                print(f"{paper['name']} {item['item']}, {figure['what']}: {now}, stored", end=" ")
                print(figure["ours"])
                off += 1
            figure["ours"] = float(f"{now:.6g}")
        if write:
            store(name, paper)
    print(f"tests/results: {len(outputs)} commands run, {off} figures off")
    return 0 if write else off


def check():
    with open(PAGE) as file:
        stored = file.read()
    lines = difflib.unified_diff(
        stored.splitlines(),
        page().splitlines(),
        "docs/results.md",
        "tests/results",
        lineterm="",
        n=0,
    )
    lines = list(lines)
    print("\n".join(lines[:20]))
    return len(lines)


def main():
    parser = argparse.ArgumentParser(
        prog="tests/results",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("papers", nargs="*", choices=[*PAPERS, []], metavar="PAPER")
    for flag in ("--write", "--check", "--run"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument(
        "--ballast",
        default=os.path.join(ROOT, "build", "bin", "ballast"),
        help="the program (default: build/bin/ballast)",
    )
    asked = parser.parse_args()
    if asked.run and rerun(asked.ballast, asked.papers, asked.write):
        return 1
    if asked.write:
        with open(PAGE, "w") as file:
            file.write(page())
    elif asked.check:
        return 1 if check() else 0
    elif not asked.run:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
