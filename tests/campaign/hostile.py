"""Inputs that were made to harm, by name: the kind and what turns a sound input at a path into one
(it may return another path).  All of them must be refused, by the name of a file, in time."""
import json
import os
import shutil
import struct

import h5py
import numpy as np


def _write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def _text(change):
    """A deck after `change` of its text."""

    def make(path):
        with open(path) as file:
            text = file.read()
        _write(path, change(text).encode())

    return make


def _replaced(old, new):
    def change(text):
        assert old in text, old
        return text.replace(old, new, 1)

    return _text(change)


def _bytes(data):
    return lambda path: _write(path, data)


def _fifo(path):
    os.remove(path)
    os.mkfifo(path)


def _folder(path):
    os.remove(path)
    os.makedirs(path)


def _loop(path):
    os.remove(path)
    os.symlink(path, path)


def _zeros(path):
    """A file without an end."""
    os.remove(path)
    os.symlink("/dev/zero", path)


def _hdf5(change):
    def make(path):
        with h5py.File(path, "r+") as file:
            change(file)

    return make


def _swap(name, **how):
    """Stores a dataset in another way."""

    def change(file):
        old = file[name][()]
        del file[name]
        how.setdefault("data", old)
        file.create_dataset(name, **how)

    return _hdf5(change)


def _external(file):
    del file["tokens"]
    file.create_dataset("tokens", (300,), "i1", external=[("/etc/passwd", 0, 300)])


def _soft_link(file):
    file.move("tokens", "rows")
    file["tokens"] = h5py.SoftLink("/rows")


def _external_link(path):
    shutil.copy(path, path + ".other")
    with h5py.File(path, "r+") as file:
        del file["tokens"]
        file["tokens"] = h5py.ExternalLink(path + ".other", "/tokens")


def _never_written(file):
    del file["tokens"]
    file.create_dataset("tokens", (1 << 40,), "i4")


def _ids(file):
    file["tokens"][17] = 1 << 30


def _negative_mask(file):
    mask = file["loss_mask"][()].astype("i2")
    del file["loss_mask"]
    mask[3] = -1
    file["loss_mask"] = mask


def _patch(offset, form, value):
    def make(path):
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(struct.pack(form, value))

    return make


def _safetensors(change):
    """Header and data of the weights after `change(header, data)`, which may return new data."""

    def make(path):
        with open(path, "rb") as file:
            raw = file.read()
        size = struct.unpack("<Q", raw[:8])[0]
        header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
        data = change(header, data) or data
        text = json.dumps(header).encode()
        _write(path, struct.pack("<Q", len(text)) + text + data)

    return make


def _offsets(which, change):
    def apply(header, _):
        names = sorted(
            (n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"]
        )
        entry = header[names[which]]
        entry["data_offsets"] = change(entry["data_offsets"], header[names[which - 1]])

    return _safetensors(apply)


def _dtype(header, _):
    next(entry for name, entry in header.items() if name != "__metadata__")["dtype"] = "Q7"


def _not_finite(_, data):
    return data[:64] + b"\xff" * 8 + data[72:]


def _raw_header(text):
    return _bytes(struct.pack("<Q", len(text)) + text + b"\0" * 64)


def _twice(path):
    with open(path, "rb") as file:
        raw = file.read()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    name = next(n for n in header if n != "__metadata__")
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    _write(path, struct.pack("<Q", len(text)) + text.encode() + raw[8 + size :])


def _index(target):
    """Weights by an index that leads elsewhere."""

    def make(path):
        folder = os.path.dirname(path)
        with open(path, "rb") as file:
            raw = file.read()
        size = struct.unpack("<Q", raw[:8])[0]
        names = [n for n in json.loads(raw[8 : 8 + size]) if n != "__metadata__"]
        outside = os.path.join(folder, "..", "outside.safetensors")
        shutil.move(path, outside)
        where = target.replace("ABSOLUTE", os.path.abspath(outside))
        text = json.dumps({"metadata": {}, "weight_map": {n: where for n in names}})
        _write(os.path.join(folder, "model.safetensors.index.json"), text.encode())

    return make


def _config(**values):
    def make(path):
        with open(path) as file:
            config = json.load(file)
        _write(path, json.dumps({**config, **values}).encode())

    return make


def _other_hdf5(path):
    with h5py.File(path, "w") as file:
        file["tokens"] = np.arange(10)


def _cut(count):
    return lambda path: os.truncate(path, count)


def _longer(path):
    with open(path, "ab") as file:
        file.write(b"\0")


_DEEP = b"[" * 100000

HOSTILE = {
    "deck: a pipe": ("deck", _fifo),
    "deck: a folder": ("deck", _folder),
    "deck: a link to itself": ("deck", _loop),
    "deck: a file without an end": ("deck", _zeros),
    "deck: random bytes": ("deck", _bytes(bytes(range(256)) * 40)),
    "deck: nested without an end": ("deck", _text(lambda t: t + "\nx = " + _DEEP.decode())),
    "deck: not UTF-8": ("deck", _bytes(b"[run]\nsteps = 3\noutput = \"\xff\xfe\"\n")),
    "deck: 2^62 layers": ("deck", _replaced("layers = 2", f"layers = {1 << 62}")),
    "deck: fewer than no layers": ("deck", _replaced("layers = 2", "layers = -2")),
    "deck: 10^30 hidden": ("deck", _replaced("hidden = 16", "hidden = 1" + 30 * "0")),
    "deck: a rate that is no number": ("deck", _replaced("rate = 0.01", "rate = nan")),
    "deck: an infinite rate": ("deck", _replaced("rate = 0.01", "rate = inf")),
    "deck: an unknown block": ("deck", _text(lambda t: t + "\n[checkpiont]\nkeep = 3\n")),
    "deck: a key twice": ("deck", _replaced("seed = 7", "seed = 7\nseed = 8")),
    "deck: a list for a number": ("deck", _replaced("steps = 8", "steps = [8]")),
    "deck: too many ranks": ("deck", _replaced("dp = 1", f"dp = {1 << 40}")),
    "deck: lengths below zero": ("deck", _replaced("[90,", "[-90,")),
    "data: a pipe": ("hdf5", _fifo),
    "data: a folder": ("hdf5", _folder),
    "data: a file without an end": ("hdf5", _zeros),
    "data: tokens of another file": ("hdf5", _hdf5(_external)),
    "data: chunked tokens": ("hdf5", _swap("tokens", chunks=(50,))),
    "data: compressed tokens": ("hdf5", _swap("tokens", compression="gzip")),
    "data: tokens by a soft link": ("hdf5", _hdf5(_soft_link)),
    "data: tokens by a link outside": ("hdf5", _external_link),
    "data: one token alone": ("hdf5", _swap("tokens", data=np.int32(3))),
    "data: tokens in two dimensions": ("hdf5", _swap("tokens", data=np.zeros((30, 10), "i4"))),
    "data: broken numbers for tokens": ("hdf5", _swap("tokens", data=np.zeros(300))),
    "data: 2^40 tokens that nobody wrote": ("hdf5", _hdf5(_never_written)),
    "data: offsets that go back": ("hdf5", _swap("offsets", data=np.array([0, 200, 180, 300]))),
    "data: offsets beyond the end": ("hdf5", _swap("offsets", data=np.array([0, 100, 1 << 60]))),
    "data: ids beyond the vocabulary": ("hdf5", _hdf5(_ids)),
    "data: a mask below zero": ("hdf5", _hdf5(_negative_mask)),
    "data: a mask that is too short": ("hdf5", _swap("loss_mask", data=np.ones(299, "u1"))),
    "lengths: a pipe": ("lengths", _fifo),
    "lengths: below zero": ("lengths", _bytes(b"10\n-20\n")),
    "lengths: 10^30": ("lengths", _bytes(b"10\n1" + b"0" * 30 + b"\n")),
    "lengths: words": ("lengths", _bytes(b"10\nmany\n")),
    "megatron: a pipe": ("megatron", _fifo),
    "megatron: 2^61 sequences": ("megatron", _patch(18, "<Q", 1 << 61)),
    "megatron: an unknown type": ("megatron", _patch(17, "<B", 200)),
    "megatron: a length below zero": ("megatron", _patch(34, "<i", -1)),
    "weights: a pipe": ("safetensors", _fifo),
    "weights: overlap": (
        "safetensors", _offsets(1, lambda own, before: [o - 4 for o in own]),
    ),
    "weights: a hole": ("safetensors", _offsets(-1, lambda own, before: [o + 4 for o in own])),
    "weights: half bytes": ("safetensors", _offsets(0, lambda own, before: [own[0] + 0.5, own[1]])),
    "weights: bytes behind the last": ("safetensors", _longer),
    "weights: one name twice": ("safetensors", _twice),
    "weights: an unknown type": ("safetensors", _safetensors(_dtype)),
    "weights: values that are not finite": ("safetensors", _safetensors(_not_finite)),
    "weights: a header of 2^63 bytes": ("safetensors", _patch(0, "<Q", 1 << 63)),
    "weights: a header of null": ("safetensors", _raw_header(b"null")),
    "weights: a nested header": ("safetensors", _raw_header(_DEEP)),
    "weights: an index that climbs out": ("safetensors", _index("../outside.safetensors")),
    "weights: an index with a whole path": ("safetensors", _index("ABSOLUTE")),
    "config: a pipe": ("config", _fifo),
    "config: 2^31 layers": ("config", _config(num_hidden_layers=1 << 31)),
    "config: 2^60 hidden": ("config", _config(hidden_size=1 << 60)),
    "config: fewer than no heads": ("config", _config(num_attention_heads=-4)),
    "config: a text for a size": ("config", _config(hidden_size="16")),
    "config: a list for RoPE": ("config", _config(rope_parameters=[])),
    "config: nested": ("config", _bytes(_DEEP)),
    "checkpoint: a pipe": ("checkpoint", _fifo),
    "checkpoint: a folder": ("checkpoint", _folder),
    "checkpoint: a file without an end": ("checkpoint", _zeros),
    "checkpoint: empty": ("checkpoint", _bytes(b"")),
    "checkpoint: another HDF5 file": ("checkpoint", _other_hdf5),
    "checkpoint: the header alone": ("checkpoint", _cut(4096)),
    "checkpoint: one byte more": ("checkpoint", _longer),
    "checkpoint: 2^60 extents": ("checkpoint", _patch(48, "<Q", 1 << 60)),
    "trace: empty": ("trace", _bytes(b"")),
    "trace: a text": ("trace", _bytes(b"no trace\n" * 100)),
    "trace: another HDF5 file": ("trace", _other_hdf5),
    "trace: cut": ("trace", _cut(3000)),
}  # fmt: skip
