"""Sound inputs of every kind, made once by small runs of the program, and the words that hand an
input of a kind to the program."""
import os
import shutil
import sys

import h5py
import numpy as np
from common import once
from rig import BALLAST, Rig

REPORT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "app", "report")
TUNE = """[run]
steps = 1
hang_timeout_s = 20
[model]
weights = "{weights}"
[data]
source = "lengths"
lengths = [30, 40]
[batching]
method = "packed"
micro_batch_tokens = 64
global_tokens = 70
[checkpoint]
at_end = false
every_steps = 0
[trace]
enabled = false
"""
DATA = ("hdf5", "lengths", "megatron")


@once
def home():
    """Folder of the sound inputs: kind -> the file that is damaged."""
    rig = Rig(0)
    status, text = rig.call(1, "train", rig.deck("dp = 1", steps=1, trace="true"), "-d", rig.run)
    if status != 0:
        raise RuntimeError(text[-2000:])
    model = os.path.join(rig.folder, "model")
    status, text = rig.call(1, "export", rig.path(rig.checkpoints()[-1]), model)
    if status != 0:
        raise RuntimeError(text[-2000:])
    place = lambda *parts: os.path.join(rig.folder, *parts)
    with h5py.File(place("data.h5"), "w") as file:
        file["tokens"] = np.arange(300, dtype="i4") % 100
        file["offsets"] = np.array([0, 100, 180, 300])
        file["loss_mask"] = np.ones(300, "u1")
    with open(place("lengths.txt"), "w") as file:
        file.write("# lengths\n10\n20\n30\n")
    os.makedirs(place("mega"))
    write_megatron(place("mega", "data"))
    return {
        "deck": rig.deck("dp = 1"),
        "checkpoint": rig.path(rig.checkpoints()[-1]),
        "safetensors": place("model", "model.safetensors"),
        "config": place("model", "config.json"),
        "hdf5": place("data.h5"),
        "lengths": place("lengths.txt"),
        "megatron": place("mega", "data.idx"),
        "trace": os.path.join(rig.run, "trace", "trace_00000.h5"),
    }


def sound(kind):
    with open(home()[kind], "rb") as file:
        return file.read()


def write_megatron(prefix):
    lengths = np.array([50, 70, 30], "i4")
    with open(prefix + ".bin", "wb") as file:
        file.write((np.arange(150) % 100).astype("i4").tobytes())
    with open(prefix + ".idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + np.uint64(1).tobytes() + np.uint8(4).tobytes())
        file.write(np.uint64(3).tobytes() + np.uint64(4).tobytes() + lengths.tobytes())
        file.write(np.array([0, 200, 480], "i8").tobytes() + np.array([0, 1, 2, 3], "i8").tobytes())


def copy_of(rig, kind, name):
    """A copy of a sound input with all that belongs to it: the path of the file to damage."""
    source = home()[kind]
    folder = os.path.join(rig.folder, name)
    if kind in ("safetensors", "config", "megatron"):
        shutil.copytree(os.path.dirname(source), folder)
    elif kind == "trace":
        shutil.copytree(os.path.dirname(os.path.dirname(source)), folder)
        return os.path.join(folder, "trace", os.path.basename(source))
    else:
        os.makedirs(folder)
        shutil.copy(source, folder)
    return os.path.join(folder, os.path.basename(source))


def argument(kind, path):
    """What names an input to its parser."""
    if kind == "config":
        return os.path.dirname(path)
    return path[: -len(".idx")] if kind == "megatron" else path


def words(rig, kind, path):
    """The command that reads an input."""
    if kind == "deck":
        return [BALLAST, "check", path]
    if kind == "checkpoint":
        return [BALLAST, "export", path, os.path.join(rig.folder, "exported")]
    if kind == "trace":
        run = os.path.dirname(os.path.dirname(path))
        out = os.path.join(rig.folder, "report")
        return [sys.executable, "-B", REPORT, run, "--out", out, "--no-simulator"]
    train = [BALLAST, "train"]
    if kind in DATA:
        key = "data.lengths_file" if kind == "lengths" else "data.path"
        train += [
            rig.deck("dp = 1", steps=1), f"data.source={kind}", f'{key}="{argument(kind, path)}"',
            # A damaged length may be a sound one of a sample that takes minutes.
            "data.max_tokens=4096", "data.long=truncate",
            "data.lengths=[]", "checkpoint.every_steps=0", "checkpoint.at_end=false",
        ]  # fmt: skip
    else:
        deck = os.path.join(rig.folder, "tune.toml")
        with open(deck, "w") as file:
            file.write(TUNE.format(weights=os.path.dirname(path)))
        train.append(deck)
    return [*train, "-d", os.path.join(rig.folder, "run-" + os.path.basename(path))]
