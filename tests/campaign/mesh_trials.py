"""A run that continues on another mesh, under each way of batching."""
import shutil

from common import STEPS, judge, once
from rig import Rig

# name -> (meshes with their ranks, settings)
HBP = ["batching.method=hbp", "batching.groups=[70,140,280]"]
FLAT = (("dp = 1", 1), ("dp = 2", 2), ("dp = 4", 4), ("cp_inner = 2", 2), ("pp = 2", 2))
WIDE = (*FLAT, ("dp = 2\ncp_inner = 2", 4), ("dp = 2\npp = 2", 4), ("sp = 2", 2))
METHODS = {
    "packed": (WIDE, ["batching.method=packed"]),
    "hbp": (WIDE, HBP),
    "hbp over ranks": (
        (("dp = 2", 2), ("dp = 4", 4)),
        [*HBP, "batching.group_ranks=[1,1,2]"],
    ),
    "chunkflow": (WIDE, ["batching.method=chunkflow", "chunk.tokens=64"]),
    "balanced": (WIDE, ["batching.method=balanced"]),
    "longalign": (
        WIDE,
        [
            "batching.method=packed", "batching.window=4", "batching.window_rule=sorted",
            "loss.normaliser=sequence_mean",
        ],
    ),
}  # fmt: skip


def pairs():
    """Every way of batching with every two meshes in turn, those that differ most at first."""
    return [
        (name, meshes[i], meshes[(i + apart) % len(meshes)])
        for apart in (1, 2, 3)
        for i in range(len(WIDE))
        for name, (meshes, _) in METHODS.items()
        if i < len(meshes) and apart < len(meshes)
    ]


def _train(rig, mesh, steps, name, *more):
    lines, ranks = mesh
    deck = rig.deck(lines, steps=steps)
    words = ("run.precision=fp64", *METHODS[name][1])
    return rig.call(ranks, "train", deck, "-d", rig.run, *words, *more)


@once
def whole(mesh, name):
    """Losses and gradient norms, as printed, of a run that stays on its mesh."""
    rig = Rig(0)
    try:
        status, text = _train(rig, mesh, STEPS, name)
        if status != 0:
            raise RuntimeError(f"{name} on {mesh} ended with {status}: {text[-1500:]}")
        return rig.losses()
    finally:
        rig.close()


def mesh_change(rig, number):
    """A run in fp64 continues on another mesh: every printed digit stays."""
    name, first, second = pairs()[number % len(pairs())]
    note = f"{name}, {first[0]!r} then {second[0]!r}: "
    for mesh, steps, more in ((first, 3, ()), (second, STEPS, ("-r", "latest"))):
        status, text = _train(rig, mesh, steps, name, *more)
        if status != 0:
            bad = judge(status, text) or ("wrong", text[-600:])
            return bad[0], note + bad[1]
    if rig.losses() == whole(first, name):
        shutil.rmtree(rig.run)
        return "ok", ""
    return "wrong", note + f"{rig.losses()} where {whole(first, name)} were expected"
