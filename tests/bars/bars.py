"""The bars that Ballast holds itself to on GPUs: for each the commands that measure it and the
figures that come out.

A bar's commands write into a folder of its own; `figures` reads that folder alone, so that figures
can be computed later, elsewhere.
On the host (`--host`) the same commands run at laptop size, to see that everything works; such
figures mean nothing."""
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
    gpus: List[int]  # numbers of GPUs on which it is measured
    seconds: int  # expected
    commands: Callable[["Setting"], List[Command]]
    figures: Callable[["Results"], List[Figure]]
    host: bool = False  # commands have a laptop size


@dataclass
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

    def log(self, name, key):
        """A key of every step's line of `ballast train`."""
        return [
            float(v) for v in re.findall(rf"^step=.*?\b{key}=([0-9.e+-]+)", self.text(name), re.M)
        ]

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


# --- kernels --------------------------------------------------------------------------------------

PEER_ATTENTION = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "reference", "peer_attention.py"
)
PEER_STEP = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "reference", "peer_step.py"
)


def attention_commands(s):
    lengths = [s.lengths] if s.lengths else []
    return [
        Command("check", [s.kernels, "check"], limit_s=200),
        Command("time", [s.kernels, "time", *lengths], limit_s=200),
        Command("peers", ["python3", PEER_ATTENTION], limit_s=200),
    ]


def attention_figures(r):
    number = r"\s*([0-9.]+)"

    def ours(case, what):
        return r.match("time", rf"^{re.escape(case)}\s.*?\b{what}{number} ms")

    def ours_rate(case, what):
        return r.match("time", rf"^{re.escape(case)}\s.*?\b{what}\s*[0-9.]+ ms{number} TF/s")

    def peer(case, what):
        return r.match("peers", rf"^{re.escape(case)}\s.*?\b{what}{number} ms")

    def peer_rate(case, what):
        return r.match("peers", rf"^{re.escape(case)}\s.*?\b{what}\s*[0-9.]+ ms{number} TF/s")

    figures = [
        Figure(
            "wrong results of the kernels' own check",
            r.match("check", r"^(\d+) failures"),
            0,
            at_most=True,
        )
    ]
    for tokens in ("8K", "32K", "128K"):
        bars = (0.80, 0.70) if tokens == "32K" else (None, None)
        for what, name, bar in (("fwd", "forward", bars[0]), ("bwd", "backward", bars[1])):
            figures.append(
                Figure(
                    f"dense {tokens} {name}, x cuDNN",
                    ratio(peer(f"cudnn {tokens}", what), ours(f"dense {tokens} D128 16/2", what)),
                    bar,
                    1.0 if bar else None,
                )
            )
    for kind in ("aligned runs of 2", "free runs of 2", "single blocks"):
        bars = (1.2, 1.0, 1.5, 1.3) if kind == "aligned runs of 2" else (None,) * 4
        for i, (what, name) in enumerate((("fwd", "forward"), ("bwd", "backward"))):
            figures.append(
                Figure(
                    f"5 % of 128K, {kind}, {name}, per pair, x FlexAttention",
                    ratio(ours_rate(f"5% of 128K, {kind}", what), peer_rate("flex 5%", what)),
                    bars[i],
                    bars[2 + i],
                )
            )
    figures.append(
        Figure(
            "packed lengths, forward + backward, x own dense rate",
            r.match("time", r"^packed, all:.*= ([0-9.]+) of dense"),
            0.78,
            0.88,
        )
    )
    # MTraining's kernels on the same GPU and pattern took these times (ms), conversion included.
    for tokens, forward, backward in (("128K", 14.6, 73.0), ("256K", 29.0, 141.8)):
        case = f"vertical slash {tokens}, built here"
        figures.append(
            Figure(
                f"vertical slash {tokens}, index + forward, x MTraining's kernels",
                ratio(forward, r.match("time", rf"^{case}.*?\+ fwd =\s*([0-9.]+) ms")),
                1.3,
                1.7,
            )
        )
        figures.append(
            Figure(
                f"vertical slash {tokens}, backward, x MTraining's kernels",
                ratio(backward, r.match("time", rf"^{case}.*?\| bwd\s*([0-9.]+) ms")),
                2.0,
                3.0,
            )
        )
    return figures


def step_commands(s):
    if s.host:
        return [
            Command(
                "laptop",
                [
                    s.ballast,
                    "bench",
                    "step",
                    deck("bench", "step.toml"),
                    "--case",
                    "laptop",
                    "model.layers=1",
                    "repeats=1",
                    "warmup=0",
                    "--json",
                    "{out}/laptop.json",
                ],
                ranks=1,
            )
        ]
    commands = []
    for size in ("0.5b", "3b"):
        commands.append(
            Command(
                size,
                [
                    s.ballast,
                    "bench",
                    "step",
                    deck("bench", "step.toml"),
                    "--case",
                    f"qwen2.5-{size}-8k",
                    "repeats=7",
                    "warmup=3",
                    "--json",
                    f"{{out}}/{size}.json",
                ],
                ranks=1,
            )
        )
        commands.append(Command(f"peer-{size}", ["python3", PEER_STEP, f"qwen2.5-{size}", "8192"]))
    return commands


def step_figures(r):
    if r.text("laptop"):
        return [Figure("laptop step, mfu", r.value("laptop", "mfu"))]
    return [
        Figure(
            f"Qwen2.5-{size} step, 8K tokens, x Transformers",
            ratio(
                r.value(size, "tokens_per_s_per_rank"),
                r.match(f"peer-{size}", r"([0-9]+) tokens/s"),
            ),
            1.0,
            1.5,
        )
        for size in ("0.5b", "3b")
    ]


# --- rings ----------------------------------------------------------------------------------------


def ring_commands(s):
    shape = (
        ["tokens=2048", "q_heads=2", "kv_heads=1", "repeats=2"]
        if s.host
        else [
            "backend=cuda",
            "tokens=131072",
            "q_heads=16",
            "kv_heads=16",
            "head_dim=128",
            "repeats=7",
        ]
    )
    commands = [
        Command(
            "flat", [s.ballast, "bench", "ring", *shape, "--json", "{out}/flat.json"], ranks=s.gpus
        )
    ]
    if s.gpus == 4:
        commands.append(
            Command(
                "two-levels",
                [s.ballast, "bench", "ring", *shape, "outer=2", "--json", "{out}/two-levels.json"],
                ranks=4,
            )
        )
    return commands


def ring_figures(r):
    return [
        Figure(
            f"ring of {r.gpus}, dense 128K, one GPU's time / {r.gpus} / the ring's",
            r.value("flat", "efficiency"),
            0.90,
            0.97,
        ),
        Figure("the same in two levels", r.value("two-levels", "efficiency")),
    ][: 2 if r.gpus == 4 else 1]


def long_step(s, tokens):
    """step512k.toml at this length on all ranks."""
    return [
        f"data.lengths=[{tokens}]",
        f"batching.micro_batch_tokens={tokens}",
        f"batching.global_tokens={tokens}",
        f"mesh.cp_inner={s.gpus}",
    ]


def shallow(s):
    return [] if s.gpus == 4 else ["model.layers=12"]


def sparse_step_commands(s):
    path, pre = deck("mtraining", "step512k.toml"), "laptop " if s.host else ""
    size = (
        ["mesh.cp_inner=" + str(s.gpus)] if s.host else long_step(s, 131072 * s.gpus) + shallow(s)
    )
    commands = [
        Command(
            "dense",
            [
                s.ballast,
                "bench",
                "step",
                path,
                "--case",
                pre + "dense",
                "warmup=0",
                "repeats=1",
                *size,
                "--json",
                "{out}/dense.json",
            ],
            ranks=s.gpus,
            limit_s=200,
        ),
        Command(
            "sparse",
            [
                s.ballast,
                "bench",
                "step",
                path,
                "--case",
                pre + "flat",
                "warmup=1",
                "repeats=2",
                *size,
                "--json",
                "{out}/sparse.json",
            ],
            ranks=s.gpus,
            limit_s=200,
        ),
    ]
    for layout in ("striped", "shuffled"):
        commands.append(
            Command(
                f"trace-{layout}",
                [
                    s.ballast,
                    "train",
                    path,
                    "--case",
                    pre + "flat",
                    *size,
                    f"ring.layout={layout}",
                    "run.steps=2",
                    "trace.enabled=true",
                    "checkpoint.at_end=false",
                    "-d",
                    f"{{out}}/run-{layout}",
                ],
                ranks=s.gpus,
                limit_s=150,
            )
        )
        commands.append(
            Command(
                f"report-{layout}",
                [
                    os.path.join(os.path.dirname(s.ballast), "ballast-report"),
                    f"{{out}}/run-{layout}",
                    "--json",
                    f"{{out}}/report-{layout}.json",
                ],
            )
        )
    return commands


def sparse_step_figures(r):
    bar = (5.0, 8.0) if r.gpus == 4 else (None, None)
    figures = [
        Figure(
            f"{128 * r.gpus}K tokens, 95 % sparse, x dense step",
            ratio(r.value("dense", "median_s"), r.value("sparse", "median_s")),
            *bar,
        )
    ]
    for layout in ("striped", "shuffled"):
        figures.append(
            Figure(
                f"worker imbalance, {layout}",
                r.value(f"report-{layout}", "worker_imbalance"),
                1.05 if layout == "striped" else None,
                at_most=True,
            )
        )
        figures.append(
            Figure(
                f"step imbalance, {layout}",
                r.value(f"report-{layout}", "step_imbalance"),
                at_most=True,
            )
        )
        times = r.log(f"trace-{layout}", "step_time_s")
        figures.append(Figure(f"step with trace, {layout} (s)", times[-1] if times else None))
    return figures


NODE = (
    'if [ "${PMI_RANK:-0}" -lt 2 ]; then export NCCL_HOSTID=node-a; else export NCCL_HOSTID=node-b;'
    ' fi; exec "$@"'
)


def nodes_commands(s):
    """Four ranks; on two GPUs each node's two share them with the other node's, and the sequence
    and the model are shorter."""
    sockets = {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
    }
    size = long_step(s, 131072 * s.gpus) + shallow(s)
    commands = []
    for case, inner in (("flat", 4), ("hierarchical", 2)):
        commands.append(
            Command(
                case,
                [
                    "sh",
                    "-c",
                    NODE,
                    "node",
                    s.ballast,
                    "bench",
                    "step",
                    deck("mtraining", "step512k.toml"),
                    "--case",
                    case,
                    *size,
                    f"mesh.cp_inner={inner}",
                    "warmup=1",
                    "repeats=2",
                    "--json",
                    f"{{out}}/{case}.json",
                ],
                ranks=4,
                limit_s=170,
                environment=sockets,
            )
        )
    for tokens in (32768, 131072):
        for outer in (1, 2):
            name = f"ring-{tokens}-outer-{outer}"
            commands.append(
                Command(
                    name,
                    [
                        "sh",
                        "-c",
                        NODE,
                        "node",
                        s.ballast,
                        "bench",
                        "ring",
                        "backend=cuda",
                        f"tokens={tokens}",
                        "q_heads=16",
                        "kv_heads=2",
                        "head_dim=128",
                        f"outer={outer}",
                        "repeats=5",
                        "--json",
                        f"{{out}}/{name}.json",
                    ],
                    ranks=4,
                    limit_s=60,
                    environment=sockets,
                )
            )
    return commands


def nodes_figures(r):
    bar = (1.25, 1.3) if r.gpus == 4 else (None, None)
    figures = [
        Figure(
            f"two emulated nodes, {128 * r.gpus}K tokens, 95 % sparse step: hierarchical, x flat",
            ratio(r.value("flat", "median_s"), r.value("hierarchical", "median_s")),
            *bar,
        )
    ]
    for tokens in (32768, 131072):
        flat, two = (r.value(f"ring-{tokens}-outer-{outer}", "efficiency") for outer in (1, 2))
        figures.append(
            Figure(
                f"two emulated nodes, dense ring of {tokens // 1024}K tokens: hierarchical, x flat",
                ratio(two, flat),
            )
        )
    return figures


def index_commands(s):
    commands = []
    size = [
        "data.bin_tokens=[131071,131072]",
        "batching.global_tokens=131072",
        "batching.micro_batch_tokens=131072",
        "run.steps=3",
    ]
    for case in ("dense", "slash", "moba", "moba+dst", "xattention"):
        commands.append(
            Command(
                case,
                [
                    s.ballast,
                    "train",
                    deck("sparsebalance", "one_gpu.toml"),
                    "--case",
                    case,
                    *size,
                    "trace.enabled=true",
                    "checkpoint.at_end=false",
                    "-d",
                    f"{{out}}/run-{case}",
                ],
                ranks=1,
            )
        )
        commands.append(
            Command(
                f"report-{case}",
                [
                    os.path.join(os.path.dirname(s.ballast), "ballast-report"),
                    f"{{out}}/run-{case}",
                    "--json",
                    f"{{out}}/report-{case}.json",
                ],
            )
        )
    return commands


def index_figures(r):
    dense, figures = r.value("report-dense", "attention"), []
    for case in ("slash", "moba", "moba+dst", "xattention"):
        attention, index = r.value(f"report-{case}", "attention"), r.value(
            f"report-{case}", "indexing"
        )
        saved = dense - attention if None not in (dense, attention) else None
        figures.append(
            Figure(
                f"{case}, 128K: choosing the index / attention saved",
                ratio(index, saved),
                0.10 if case == "slash" else None,
                at_most=True,
            )
        )
        figures.append(
            Figure(f"{case}, 128K: sparsity ratio", r.value(f"report-{case}", "sparsity_ratio"))
        )
    return figures


# --- chunks and pipelines -------------------------------------------------------------------------


def memory_commands(s):
    small = [
        "run.backend=host",
        "model.preset=custom",
        "model.layers=2",
        "model.hidden=64",
        "model.intermediate=128",
        "model.query_heads=4",
        "model.kv_heads=2",
        "model.head_dim=16",
        "model.vocabulary=512",
        "chunk.tokens=256",
        "chunk.window_tokens=1024",
    ]
    commands = []
    for case, tokens in (("32K", 2048), ("256K", 8192)):
        size = [*small, f"data.lengths=[{tokens}]", f"data.max_tokens={tokens}"] if s.host else []
        commands.append(
            Command(
                case,
                [
                    s.ballast,
                    "train",
                    deck("chunkflow", "table5.toml"),
                    "--case",
                    case,
                    "run.steps=1",
                    *size,
                    "-d",
                    f"{{out}}/run-{case}",
                ],
                ranks=1,
                limit_s=200,
            )
        )
    return commands


def memory_figures(r):
    short, long = r.log("32K", "memory_mib"), r.log("256K", "memory_mib")
    seconds = r.log("256K", "step_time_s")
    return [
        Figure(
            "peak memory of a 256K sequence / 32K, chunks of 2K, offloaded",
            ratio(long[-1], short[-1]) if long and short else None,
            1.05,
            at_most=True,
        ),
        Figure("step of the 256K sequence (s)", seconds[-1] if seconds else None),
    ]


SHAPE_7B = [
    "run.backend=cuda",
    "model.preset=qwen2.5-7b",
    "model.layers=8",
    "data.bin_tokens=[1024,4096,8192,32768,131072,262144]",
    "data.samples=4096",
    "batching.global_samples=256",
    "chunk.tokens=8192",
    "chunk.k=4",
    "optimizer.zero=1",
]


def figure8_meshes(s):
    return (
        {"pp4": ["mesh.pp=4"], "pp2-dp2": ["mesh.pp=2", "mesh.dp=2"]}
        if s.gpus == 4
        else {f"pp{s.gpus}": [f"mesh.pp={s.gpus}"]}
    )


def figure8_command(s, name, case, *more, limit_s=120):
    return Command(
        name,
        [
            s.ballast,
            "train",
            deck("chunkflow", "figure8.toml"),
            "--case",
            case,
            *([] if s.host else SHAPE_7B),
            *more,
            "-d",
            f"{{out}}/run-{name}",
        ],
        ranks=s.gpus,
        limit_s=limit_s,
    )


def figure8_commands(s):
    commands = []
    for mesh, keys in figure8_meshes(s).items():
        for case in ("baseline", "chunks", "zero-bubble"):
            commands.append(
                figure8_command(
                    s,
                    f"32K {mesh} {case}",
                    case,
                    *keys,
                    "run.steps=4",
                    *([] if s.host else ["data.max_tokens=32768"]),
                )
            )
    mesh, keys = list(figure8_meshes(s).items())[0]
    for case in () if s.host else ("baseline", "chunks"):
        commands.append(
            figure8_command(
                s,
                f"256K {mesh} {case}",
                case,
                *keys,
                "run.steps=1",
                "data.max_tokens=262144",
                "run.seed=3",
                limit_s=200,
            )
        )
    return commands


def figure8_figures(r):
    figures = []
    for name in r.names("*baseline"):
        limit, mesh, _ = name.split(" ", 2)
        first = (
            1 if limit == "32K" else 0
        )  # the first step warms libraries up; at 256K it is the only one
        baseline = sum(r.log(name, "step_time_s")[first:])
        for case in ("chunks", "zero-bubble"):
            if r.text(f"{limit} {mesh} {case}"):
                bars = (
                    ((1.4, None) if limit == "32K" else (2.2, None))
                    if case == "chunks" and r.gpus == 4
                    else (None, None)
                )
                figures.append(
                    Figure(
                        f"Table 2 mix to {limit}, {mesh}: {case}, x Megatron-style baseline",
                        ratio(
                            baseline, sum(r.log(f"{limit} {mesh} {case}", "step_time_s")[first:])
                        ),
                        *bars,
                    )
                )
        losses = [r.log(f"{limit} {mesh} {case}", "loss")[:1] for case in ("baseline", "chunks")]
        if all(losses):
            figures.append(
                Figure(
                    f"Table 2 mix to {limit}, {mesh}: first losses, difference",
                    abs(losses[0][0] - losses[1][0]),
                    0.01,
                    at_most=True,
                )
            )
    return figures


def prediction_commands(s):
    keys = [f"mesh.pp={s.gpus}"]
    lengths = (
        "profile.lengths=[8,16,32,64,128,256,512]"
        if s.host
        else "profile.lengths=[16,64,128,256,512,1024,2048,4096,8192,16384,32768]"
    )
    prefixes = "profile.prefixes=[128,256,384]" if s.host else "profile.prefixes=[8192,16384,24576]"
    commands = [
        Command(
            "profile",
            [
                s.ballast,
                "profile",
                deck("chunkflow", "figure8.toml"),
                *([] if s.host else SHAPE_7B),
                *keys,
                lengths,
                prefixes,
                'profile.recompute=["none","full"]',
                "profile.repeats=5",
                "profile.held_out=8",
                "profile.target_s=40",
                "profile.repair_limit=0.5",
                "-d",
                "{out}/profile",
                "--json",
                "{out}/profile.json",
            ],
            ranks=s.gpus,
            limit_s=150,
        )
    ]
    for case in ("baseline", "chunks", "zero-bubble"):
        for k in (4, 1) if case != "baseline" else (4,):
            size = [f"chunk.k={k}"] + (
                [] if s.host else ["data.max_tokens=32768", "batching.global_samples=64"]
            )
            commands.append(
                figure8_command(
                    s,
                    f"run {case} K {k}",
                    case,
                    *keys,
                    "run.steps=4",
                    *size,
                    "profile.table={out}/profile/profile.h5",
                )
            )
    return commands


def prediction_figures(r):
    errors, figures = [], []
    for name in r.names("run "):
        pairs = [
            (float(m), float(p))
            for m, p in re.findall(
                r"^step=.*?\bschedule_s=([0-9.e+-]+) predicted_schedule_s=([0-9.e+-]+)",
                r.text(name),
                re.M,
            )
        ][1:]
        mine = [p / m for m, p in pairs if m > 0]
        if mine:
            figures.append(
                Figure(
                    f"{name[4:]}: predicted / measured, median of steps", statistics.median(mine)
                )
            )
            errors += [abs(x - 1) for x in mine]
    return [
        Figure(
            "predicted step time, median error",
            statistics.median(errors) if errors else None,
            0.10,
            at_most=True,
        ),
        *figures,
    ]


# --- packing and balance --------------------------------------------------------------------------


def hbp_commands(s):
    if s.host:
        path, common = deck("hbp", "speed.toml"), ["warmup=0", "repeats=1"]
    else:
        path, common = deck("hbp", "speed_gpu.toml"), [
            "warmup=1",
            "repeats=4",
            "model.layers=12",
            "recompute.layers=0",
            "batching.group_recompute=[0,0]",
        ]
    isf1 = [] if s.host else ["recompute.layers=6"]
    if s.gpus == 4:
        cases = {"hbp": [], "isf-sp1": isf1, "isf-sp2": [], "isf-sp4": []}
    else:
        common += ["batching.global_tokens=8192" if s.host else "batching.global_tokens=393216"]
        cases = {
            "hbp": ["mesh.dp=2", "batching.group_ranks=[1,2]"],
            "isf-sp1": ["mesh.dp=2", *isf1],
            "isf-sp2": ["mesh.dp=1"],
        }
    return [
        Command(
            case,
            [
                s.ballast,
                "bench",
                "step",
                path,
                "--case",
                case,
                *common,
                *keys,
                "--json",
                f"{{out}}/{case}.json",
            ],
            ranks=s.gpus,
        )
        for case, keys in cases.items()
    ]


def hbp_figures(r):
    others = [step_ratio(r, name, "hbp") for name in r.names("isf-sp") if name != "isf-sp1"]
    return [
        Figure(
            "128K + short mix: hbp, x isf at SP 1",
            step_ratio(r, "isf-sp1", "hbp"),
            1.3 if r.gpus == 4 else None,
            1.4 if r.gpus == 4 else None,
        ),
        Figure(
            "the same, x isf at its best SP above 1",
            min((x for x in others if x is not None), default=None),
            1.0 if r.gpus == 4 else None,
        ),
    ]


def balance_commands(s):
    if s.host:
        path, keys = deck("sparsebalance", "training.toml"), ["warmup=0", "repeats=1"]
        keys += ["mesh.pp=1"] if s.gpus == 2 else []
        commands = []
    else:
        path, keys = deck("sparsebalance", "four_gpus.toml"), [
            "warmup=2",
            "repeats=6",
            "profile.table={out}/profile/profile.h5",
        ]
        keys += ["mesh.pp=1", "model.layers=9"] if s.gpus == 2 else []
        commands = [
            Command(
                "profile",
                [
                    s.ballast,
                    "profile",
                    deck("sparsebalance", "figure6.toml"),
                    "--case",
                    "h200",
                    "-d",
                    "{out}/profile",
                    "--json",
                    "{out}/profile.json",
                ],
                ranks=1,
                limit_s=150,
            )
        ]
    if not s.host and s.gpus == 1:
        return commands
    return commands + [
        Command(
            case,
            [
                s.ballast,
                "bench",
                "step",
                path,
                "--case",
                case,
                *keys,
                "--json",
                f"{{out}}/{case}.json",
            ],
            ranks=s.gpus,
        )
        for case in ("baseline", "dst", "sab", "sab+dst")
    ]


def balance_figures(r):
    figures = []
    if r.text("profile"):
        figures += [
            Figure(
                "layer latencies predicted by the table, held-out error",
                r.value("profile", "held_out_error"),
                0.10,
                at_most=True,
            ),
            Figure("by FLOPs alone", r.value("profile", "flops_error")),
            Figure("by length alone", r.value("profile", "length_error")),
            Figure("measuring the table (s)", r.value("profile", "measure_seconds")),
        ]
    if r.gpus == 1:
        return figures
    for case in ("dst", "sab", "sab+dst"):
        bar = (1.25, 1.33) if case == "sab+dst" and r.gpus == 4 else (None, None)
        figures.append(
            Figure(f"bimodal lengths: +{case}, x baseline", step_ratio(r, "baseline", case), *bar)
        )
    shares = [r.value("sab+dst", key) for key in ("dst_overhead_share", "sab_overhead_share")]
    return figures + [
        Figure(
            "overhead of DST and SAB, share of the step",
            sum(shares) if None not in shares else None,
            0.015,
            at_most=True,
        )
    ]


BARS = [
    Bar(
        "attention",
        "attention kernels against cuDNN, FlexAttention and MTraining's times",
        [1],
        260,
        attention_commands,
        attention_figures,
    ),
    Bar(
        "step",
        "training steps against Hugging Face Transformers",
        [1],
        100,
        step_commands,
        step_figures,
        host=True,
    ),
    Bar(
        "index",
        "cost of choosing sparse indexes against the attention saved",
        [1],
        120,
        index_commands,
        index_figures,
    ),
    Bar(
        "memory",
        "peak memory against the longest sequence",
        [1],
        90,
        memory_commands,
        memory_figures,
        host=True,
    ),
    Bar("ring", "dense ring attention", [2, 4], 25, ring_commands, ring_figures, host=True),
    Bar(
        "sparse-step",
        "a long sequence, 95 % sparse against dense",
        [2, 4],
        300,
        sparse_step_commands,
        sparse_step_figures,
        host=True,
    ),
    Bar(
        "nodes",
        "hierarchical against flat rings over two emulated nodes",
        [2, 4],
        270,
        nodes_commands,
        nodes_figures,
    ),
    Bar(
        "figure8",
        "chunks against a Megatron-style baseline",
        [2, 4],
        250,
        figure8_commands,
        figure8_figures,
        host=True,
    ),
    Bar(
        "prediction",
        "simulated against measured schedules",
        [1, 2, 4],
        150,
        prediction_commands,
        prediction_figures,
        host=True,
    ),
    Bar(
        "hbp",
        "Hierarchical Balance Packing against naive packing",
        [2, 4],
        180,
        hbp_commands,
        hbp_figures,
        host=True,
    ),
    Bar(
        "balance",
        "profile table; DST and SAB against the baseline",
        [1, 2, 4],
        400,
        balance_commands,
        balance_figures,
        host=True,
    ),
]
