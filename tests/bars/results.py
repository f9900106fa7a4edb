"""What bars are made of: commands, figures, and the results of commands in a folder."""
import glob
import json
import os
import re
import statistics
from dataclasses import dataclass, field
from typing import Callable, List, Optional

INPUTS = os.path.join(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "inputs"
)
REFERENCE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "reference")


def deck(*parts):
    return os.path.join(INPUTS, *parts)


@dataclass
class Figure:
    """A measured value beside what it should be; `bar` None: for information."""

    what: str
    value: Optional[float]
    bar: Optional[float] = None
    goal: Optional[float] = None
    at_most: bool = False

    def held(self):
        if self.bar is None:
            return "" if self.value is not None else "no figure"
        if self.value is None:
            return "no figure"
        return (
            "held"
            if (self.value <= self.bar if self.at_most else self.value >= self.bar)
            else "MISSED"
        )


@dataclass
class Command:
    """One process (or, with ranks, one launch); its output goes to NAME.txt of the bar's folder,
    {out} stands for that folder."""

    name: str
    line: List[str]
    ranks: int = 0
    limit_s: int = 120
    environment: dict = field(default_factory=dict)


@dataclass
class Bar:
    name: str
    what: str
    gpus: List[int]  # numbers of GPUs on which it is measured; [0]: anywhere, it needs none
    seconds: int  # expected
    commands: Callable[["Setting"], List[Command]]
    figures: Callable[["Results"], List[Figure]]
    host: bool = False  # commands have a laptop size

    @property
    def anywhere(self):
        return self.gpus == [0]


@dataclass(frozen=True)
class Setting:
    gpus: int  # ranks, too
    host: bool  # laptop size on the host backend
    ballast: str  # program
    kernels: str  # the standalone attention benchmark, "" when it could not be built
    lengths: str  # file of sample lengths, "" when none was given


class Results:
    """What the commands of one bar left."""

    def __init__(self, folder, gpus):
        self.folder, self.gpus = folder, gpus

    def text(self, name):
        try:
            with open(os.path.join(self.folder, name + ".txt"), errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def value(self, name, key):
        """Number of a JSON twin, by key at any depth, of its first case."""
        return self.find(name, key, (int, float))

    def values(self, name, key):
        """List of a JSON twin, likewise; empty without one."""
        return self.find(name, key, list) or []

    def find(self, name, key, kind):
        try:
            with open(os.path.join(self.folder, name + ".json")) as file:
                found = json.load(file)
        except (OSError, ValueError):
            return None
        pending = [found]
        while pending:
            node = pending.pop(0)
            if isinstance(node, dict):
                if isinstance(node.get(key), kind):
                    return node[key]
                pending += list(node.values())
            elif isinstance(node, list):
                pending += node
        return None

    def match(self, name, pattern):
        """Last number that the pattern's first group finds in NAME.txt."""
        found = re.findall(pattern, self.text(name), re.M)
        return float(found[-1]) if found else None

    def matches(self, name, pattern):
        """The numbers of all groups, wherever the pattern fits."""
        return [tuple(map(float, found)) for found in re.findall(pattern, self.text(name), re.M)]

    def log(self, name, key):
        """A key of every step of the `ballast train` whose run folder is run-NAME."""
        pattern = rf"^step=.*?\b{key}=([0-9.e+-]+)"
        return [float(v) for v in re.findall(pattern, self.run_log("run-" + name), re.M)]

    def schedule_times(self, run):
        """(measured, predicted) seconds of the schedules of every step of a run folder."""
        pattern = r"^step=.*?\bschedule_s=([0-9.e+-]+) predicted_schedule_s=([0-9.e+-]+)"
        return [tuple(map(float, p)) for p in re.findall(pattern, self.run_log(run), re.M)]

    def run_log(self, run):
        """log.txt of a run folder: the screen has less."""
        return self.text(os.path.join(run, "log"))

    def names(self, prefix):
        return sorted(
            os.path.basename(f)[:-4] for f in glob.glob(os.path.join(self.folder, prefix + "*.txt"))
        )


def ratio(a, b):
    return a / b if a is not None and b else None


def step_ratio(r, slow, fast):
    """Median over steps of the time of `slow` / `fast`, two cases of `bench step` on the same
    samples; steps differ in work, so medians of times would compare different ones."""
    a, b = (r.values(name, "steps_s") for name in (slow, fast))
    return statistics.median(x / y for x, y in zip(a, b)) if a and len(a) == len(b) else None
