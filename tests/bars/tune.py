"""Bar of `ballast tune`: what the clock predicts of configurations drawn before measuring."""
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import tempfile

from results import Command, Figure, deck

CONFIGURATIONS = 24
# Steps of a run that count come behind others in which kernels are loaded and the GPU gets as hot
# as the profile's sustained times say.
WARM, STEPS = 5, 5
SEED = 16  # of the draw, before anything is measured
CARD_BYTES = 76 * 2**30  # what a plan may take of the smallest card, one of 80 GB
APART = 1.03  # measured times that differ by less have no order

# By number of GPUs: meshes that its runs may take.
MESHES = {
    1: [{}],
    2: [{"dp": 2}, {"pp": 2}, {"cp_inner": 2}, {"sp": 2}],
    4: [
        {"dp": 4},
        {"pp": 4},
        {"cp_inner": 4},
        {"dp": 2, "sp": 2},
        {"dp": 2, "cp_inner": 2},
        {"dp": 2, "pp": 2},
        {"pp": 2, "sp": 2},
        {"pp": 2, "cp_inner": 2},
    ],
}


def product_of(gpus, host):
    """Settings of every configuration: a mesh and what `ballast tune` chooses beside it."""
    unit = 128 if host else 8192
    batching = [
        *(["batching.method=packed", f"batching.micro_batch_tokens={n * unit}"] for n in (1, 2)),
        *(["batching.method=balanced", f"batching.micro_batch_tokens={n * unit}"] for n in (1, 2)),
        ["batching.method=hbp", f"batching.groups=[{unit},{8 * unit}]"],
        *(
            ["batching.method=chunkflow", f"chunk.tokens={n * unit // 2}", f"chunk.k={k}"]
            for n, k in ((1, 2), (2, 4))
        ),
    ]
    recompute = ["none", "full"]
    product = []
    for mesh, how, mode, zero in itertools.product(MESHES[gpus], batching, recompute, (0, 1)):
        schedules, layouts = ["1f1b"], ["document_zigzag"]
        chunks = "chunkflow" in how[0]
        if chunks or mesh.get("pp", 1) > 1:
            schedules = ["1f1b", "state_aware_1f1b"]
        if "balanced" in how[0] and mesh.get("pp", 1) > 1:
            schedules = ["1f1b"]
        if mesh.get("cp_inner", 1) > 1:
            layouts = ["document_zigzag", "striped"]
        for schedule, layout in itertools.product(schedules, layouts):
            product.append(
                [
                    *(f"mesh.{d}={mesh.get(d, 1)}" for d in ("dp", "pp", "cp_inner", "sp")),
                    *how,
                    f"recompute.mode={mode}",
                    f"optimizer.zero={zero}",
                    f"pipeline.schedule={schedule}",
                    f"ring.layout={layout}",
                ]
            )
    return product


def shape(gpus, host):
    """Deck, case and overrides that all configurations share."""
    if host:
        return [deck("tune.toml"), "data.max_tokens=1024", "batching.global_tokens=4096"]
    return [
        deck("hbp", "speed_gpu.toml"),
        "--case",
        "hbp",
        "model.layers=12",
        "data.max_tokens=65536",
        "recompute.layers=-1",
        f"batching.global_tokens={98304 * gpus}",
        "batching.group_ranks=[]",
        "batching.group_recompute=[]",
    ]


def fits(s, settings):
    """Whether `ballast check` says that a card holds the configuration's fullest rank."""
    with tempfile.TemporaryDirectory() as folder:
        said = os.path.join(folder, "check.json")
        subprocess.run(
            [s.ballast, "check", "--elsewhere", *shape(s.gpus, s.host), *settings, "--json", said],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        with open(said) as file:
            return json.load(file)["largest_rank_bytes"] <= CARD_BYTES


@functools.cache
def configurations(s):
    """The drawn configurations: those that fit, in the order of the draw."""
    product = product_of(s.gpus, s.host)
    drawn = random.Random(SEED).sample(product, len(product))
    if not s.host and os.path.exists(s.ballast):
        drawn = (settings for settings in drawn if fits(s, settings))
    return list(itertools.islice(drawn, CONFIGURATIONS))


def tune_commands(s):
    shared = shape(s.gpus, s.host)
    lengths = "[64,128,256,512,1024]" if s.host else "[256,1024,4096,8192,16384,32768,65536]"
    prefixes = "[128,512]" if s.host else "[8192,16384,49152]"
    commands = [
        Command(
            "profile",
            [
                s.ballast,
                "profile",
                *shared,
                f"mesh.dp={s.gpus}",
                "profile.recompute=[none,full]",
                f"profile.lengths={lengths}",
                f"profile.prefixes={prefixes}",
                "profile.repair_limit=0.5",
                "-d",
                "{out}/profile",
                "--json",
                "{out}/profile.json",
            ],
            ranks=s.gpus,
            limit_s=200,
        )
    ]
    for number, settings in enumerate(configurations(s)):
        name = f"run-{number:02}"
        commands.append(
            Command(
                name,
                [
                    s.ballast,
                    "train",
                    *shared,
                    *settings,
                    f"run.steps={WARM + STEPS}",
                    "checkpoint.at_end=false",
                    "profile.table={out}/profile/profile.h5",
                    "-d",
                    f"{{out}}/{name}",
                ],
                ranks=s.gpus,
            )
        )
    return commands


def times(r, name):
    """Medians of the measured and predicted seconds of a run's schedules; None where there are
    none."""
    pairs = r.schedule_times(name)[WARM:]
    if not pairs:
        return None
    return tuple(statistics.median(p[i] for p in pairs) for i in (0, 1))


def ordered(runs):
    """Share of pairs, of those apart, that are predicted in the order in which they were
    measured."""
    right = [
        (a[0] < b[0]) == (a[1] < b[1])
        for a, b in itertools.combinations(runs, 2)
        if max(a[0], b[0]) > APART * min(a[0], b[0])
    ]
    return sum(right) / len(right) if right else None


def tune_figures(r):
    runs = [pair for name in r.names("run-") if (pair := times(r, name))]
    errors = sorted(abs(p / m - 1) for m, p in runs)
    return [
        Figure(
            "predicted step time, median error",
            statistics.median(errors) if errors else None,
            0.05,
            at_most=True,
        ),
        Figure(
            "95th percentile of errors",
            errors[min(len(errors) - 1, int(0.95 * len(errors)))] if errors else None,
            0.15,
            at_most=True,
        ),
        Figure("pairs in the right order, of those 3 % apart", ordered(runs), 0.9),
        Figure("configurations that ran", len(runs)),
    ]
