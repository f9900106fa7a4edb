"""Bars of ring attention, of sparse steps, of two emulated nodes and of the sparse index."""
import itertools
import os
import statistics

from results import REFERENCE, Command, Figure, deck, ratio

PEER_RING = os.path.join(REFERENCE, "peer_ring.py")


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
    if not s.host:
        torchrun = ["python3", "-m", "torch.distributed.run", f"--nproc-per-node={s.gpus}"]
        commands.append(Command("peer", [*torchrun, PEER_RING, "131072", "16"]))
    return commands


def ring_figures(r):
    figures = [
        Figure(
            f"ring of {r.gpus}, dense 128K, one GPU's time / {r.gpus} / the ring's",
            r.value("flat", "efficiency"),
            0.95,
            0.97,
        ),
    ]
    if r.text("peer"):
        ours, peer_ms = r.find("flat", "both", dict), r.match("peer", r"ring ([0-9.]+) ms")
        figures += [
            Figure(
                "its forward + backward, x PyTorch's context_parallel over cuDNN",
                ratio(peer_ms, ours and 1e3 * ours["median_s"]),
                1.0,
                1.05,
            ),
            Figure("efficiency of that", r.match("peer", r"efficiency ([0-9.]+)")),
        ]
    if r.gpus == 4:
        figures.append(Figure("the ring in two levels", r.value("two-levels", "efficiency")))
    return figures


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
        times = r.log(layout, "step_time_s")
        figures.append(Figure(f"step with trace, {layout} (s)", times[-1] if times else None))
    return figures


def sockets(threads, each, chunk_kib):
    """A loopback link with so many of NCCL's threads and sockets a connection, and KiB that it
    sends at a time."""
    return {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_NTHREADS": str(threads),
        "NCCL_NSOCKS_PERTHREAD": str(each),
        "NCCL_P2P_NET_CHUNKSIZE": str(chunk_kib << 10),
    }


# By levels of the ring: two connections cross the link in a flat one, four in one of two levels,
# and the link should carry as much in both, 5 to 8 GB/s; `nodes/link-*` measures what each setting
# carries.  NCCL's own chunk is 128 KiB.
NODES_SOCKETS = sockets(4, 4, 128)
FIGURE6_SOCKETS = {1: sockets(4, 4, 64), 2: sockets(4, 4, 48)}
LINKS = [(1, 1, 128), (2, 1, 128), (2, 2, 128), (4, 2, 128), (4, 4, 128), (4, 4, 64), (4, 4, 48)]
NODE = (
    'if [ "${PMI_RANK:-0}" -lt 2 ]; then export NCCL_HOSTID=node-a; else export NCCL_HOSTID=node-b;'
    ' fi; exec "$@"'
)


def over_nodes(name, line, environment, limit_s):
    launched = ["sh", "-c", NODE, "node", *line, "--json", f"{{out}}/{name}.json"]
    return Command(name, launched, ranks=4, limit_s=limit_s, environment=environment)


def nodes_commands(s):
    """Four ranks; on two GPUs each node's two share them with the other node's, and the sequence
    and the model are shorter."""
    size = long_step(s, 131072 * s.gpus) + shallow(s)
    step = [s.ballast, "bench", "step", deck("mtraining", "step512k.toml"), *size]
    step += ["warmup=2", "repeats=3"]
    commands = [
        over_nodes(case, [*step, "--case", case, f"mesh.cp_inner={4 // outer}"], NODES_SOCKETS, 170)
        for case, outer in (("flat", 1), ("hierarchical", 2))
    ]
    shape = ["q_heads=16", "kv_heads=2", "head_dim=128", "repeats=5"]
    ring = [s.ballast, "bench", "ring", "backend=cuda", *shape]
    for tokens, outer in itertools.product((32768, 131072), (1, 2)):
        line = [*ring, f"tokens={tokens}", f"outer={outer}"]
        commands.append(over_nodes(f"ring-{tokens}-outer-{outer}", line, NODES_SOCKETS, 60))
    for (threads, each, chunk), outer in itertools.product(LINKS, (1, 2)):
        line = [*ring, "tokens=131072", f"outer={outer}", "check=false"]
        name = f"link-{outer}-{threads}x{each}-{chunk}k"
        commands.append(over_nodes(name, line, sockets(threads, each, chunk), 60))
    return commands


def link_figure(r, outer, name):
    """Of all hops that cross at once: two of a flat ring's, one of each rank with rings in
    nodes."""
    what, key, hops = {
        1: ("flat", "hop_inner_gb_per_s", 2),
        2: ("hierarchical", "hop_outer_gb_per_s", 4),
    }[outer]
    rate = r.value(name, key)
    return Figure(f"emulated link, {what}, {name}: GB/s", rate * hops if rate else None)


def nodes_figures(r):
    bar = (1.25, 1.3) if r.gpus == 4 else (None, None)
    figures = [
        Figure(
            f"two emulated nodes, {128 * r.gpus}K tokens, 95 % sparse step: hierarchical, x flat",
            ratio(r.value("flat", "median_s"), r.value("hierarchical", "median_s")),
            *bar,
        )
    ]
    for outer in (1, 2):
        for name in [f"ring-131072-outer-{outer}", *r.names(f"link-{outer}-")]:
            figures.append(link_figure(r, outer, name))
    for tokens in (32768, 131072):
        flat, two = (r.value(f"ring-{tokens}-outer-{outer}", "efficiency") for outer in (1, 2))
        figures.append(
            Figure(
                f"two emulated nodes, dense ring of {tokens // 1024}K tokens: hierarchical, x flat",
                ratio(two, flat),
            )
        )
    return figures


FIGURE6_STEPS, FIGURE6_TIMED = 150, 30  # the last ones, of a model that has learned
FIGURE6_CASES = ("dense zigzag", "dense striped", "moba", "xattention", "ours zigzag", "ours flat")
FIGURE6_NODES = ("ours zigzag", "ours flat", "ours")  # again, over two emulated nodes


def figure6_commands(s):
    """figure6.toml, by default a small model of 64K tokens a sequence on the CUDA toolkit's
    headers; dense methods first, each method for as many steps."""
    steps = 4 if s.host else FIGURE6_STEPS
    keys = [f"run.steps={steps}", "checkpoint.at_end=false", "run.log_every=1"]
    if s.host:
        keys += ["data.samples=50"]
    else:
        n = "65536"
        keys += ["run.backend=cuda", "run.precision=bf16", "model.layers=4", "model.hidden=1024"]
        keys += ["model.intermediate=2816", "model.query_heads=16", "model.kv_heads=2"]
        keys += ["model.head_dim=64", f"data.max_tokens={n}", f"data.min_tokens={n}"]
        keys += [f"batching.micro_batch_tokens={n}", f"batching.global_tokens={n}"]
        keys += ["attention.moba_block=512", "attention.moba_top_k=12", "recompute.mode=full"]
        keys += ["data.paths=['/usr/local/cuda/include','/usr/include']", "optimizer.zero=1"]
    commands = []
    for nodes, cases in (("", FIGURE6_CASES), (" nodes", () if s.host else FIGURE6_NODES)):
        for case in cases:
            line = [s.ballast, "train", deck("mtraining", "figure6.toml"), "--case", case, *keys]
            line += ["-d", f"{{out}}/run-{case}{nodes}"]
            launched = ["sh", "-c", NODE, "node", *line] if nodes else line
            environment = FIGURE6_SOCKETS[2 if case == "ours" else 1] if nodes else {}
            commands.append(Command(case + nodes, launched, ranks=4, environment=environment))
    for outer in () if s.host else (1, 2):
        ring = [s.ballast, "bench", "ring", "backend=cuda", "q_heads=16", "kv_heads=2"]
        ring += ["head_dim=64", "tokens=65536", "repeats=5", f"outer={outer}", "check=false"]
        commands.append(over_nodes(f"link-{outer}", ring, FIGURE6_SOCKETS[outer], 60))
    return commands


def figure6_seconds(r, name):
    times = r.log(name, "step_time_s")[-FIGURE6_TIMED:]
    return statistics.median(times) if times else None


def figure6_figures(r):
    figures = []
    for case in FIGURE6_CASES:
        losses = r.log(case, "loss")[-FIGURE6_TIMED:]
        mean = statistics.mean(losses) if losses else None
        figures += [
            Figure(f"{case}: loss, mean of the last steps", mean),
            Figure(f"{case}: s a step", figure6_seconds(r, case)),
        ]
    dense = figure6_seconds(r, "dense striped")
    figures.append(
        Figure("dense striped / ours flat", ratio(dense, figure6_seconds(r, "ours flat")))
    )
    ours = figure6_seconds(r, "ours nodes")
    for case in ("ours zigzag", "ours flat"):
        over = ratio(figure6_seconds(r, case + " nodes"), ours)
        bar = (1.25, 1.3) if case == "ours flat" else (None, None)
        figures.append(Figure(f"two emulated nodes: {case} / ours", over, *bar))
    return figures + [link_figure(r, outer, f"link-{outer}") for outer in (1, 2)]


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
