"""Damaged copies of a sound deck for the whole program; the in-process test of the reader has many
more."""
import random


def damaged(sound, seed):
    """Yields (what, bytes of the deck, texts of which one must be in the message); every deck is
    broken for certain."""
    rng = random.Random(seed)
    lines = sound.rstrip("\n").split("\n")
    keys = [i for i, line in enumerate(lines) if "=" in line]
    headers = [i for i, line in enumerate(lines) if line.startswith("[")]

    def changed(index, line):
        return "\n".join(lines[:index] + [line] + lines[index + 1 :]).encode() + b"\n"

    def place(index):
        return [f"deck.toml:{index + 1}:"]

    for _ in range(3):
        i = rng.choice(keys)
        key, value = lines[i].split(" = ", 1)
        yield "truncated", ("\n".join(lines[:i] + [key])).encode(), place(i)
        yield "misspelt key", changed(i, f"{key}x = {value}"), place(i)
        yield "wrong type", changed(i, f"{key} = {{ a = 1 }}"), place(i)
        yield "duplicate", (
            "\n".join(lines[: i + 1] + [lines[i]] + lines[i + 1 :])
        ).encode(), place(i + 1)
        yield "garbage value", changed(i, f"{key} = ") + bytes(
            rng.randrange(128, 256) for _ in range(40)
        ), ["deck.toml:"]
        i = rng.choice(headers)
        yield "misspelt block", changed(i, lines[i][:-1] + "q]"), place(i)
        yield "open header", changed(i, lines[i][:-1]), place(i)
        yield "garbage", bytes([0]) + rng.randbytes(300), ["deck.toml:"]
    for number in ("-1", "99999999999999999999999", "1e400"):
        i = next(i for i in keys if lines[i].startswith("steps ="))
        yield "number " + number, changed(i, f"steps = {number}"), place(i)
    yield "empty", b"", ["model.layers"]
    yield "deep", b"x = " + b"[" * 50000, ["deck.toml:1:"]
