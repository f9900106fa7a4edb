"""What a build prints at its end: counts, the histogram of lengths, and the planner's view."""
import json
import os
import shutil
import subprocess
import tempfile

import numpy as np

from assemble import lengths_histogram


def counters(records):
    total = {}
    for record in records:
        for what, number in record["counters"].items():
            total[what] = total.get(what, 0) + number
    return total


def absent_roles(records, loss_on):
    """Roles that carry loss and that no row has; none where a shard does not say what it has, as
    those that older versions began."""
    if not all("roles" in record for record in records) or not any(r["rows"] for r in records):
        return []
    met = {role for record in records for role in record["roles"]}
    return [role for role in loss_on if role not in met]


def histogram(lengths, width=40):
    """Lines of a histogram in powers of two, with the share of tokens beside the samples."""
    edges, counts = lengths_histogram(lengths)
    sums = np.bincount(np.searchsorted(edges, lengths), weights=lengths, minlength=len(edges))
    total = max(1, int(lengths.sum()))
    yield f"{'tokens up to':>12}  {'samples':>9}  share of tokens"
    for edge, count, tokens in zip(edges, counts, sums):
        share = tokens / total
        yield f"{edge:>12}  {count:>9}  {100 * share:5.1f} % {'#' * round(width * share)}".rstrip()


def text(records, lengths, loss_on):
    tokens, loss = (sum(r[k] for r in records) for k in ("tokens", "loss"))
    rows = sum(r["rows"] for r in records)
    yield (
        f"{rows} rows, {len(lengths)} samples, {tokens} tokens; {loss} tokens"
        f" ({100 * loss / max(1, tokens):.1f} %) carry loss"
    )
    for what, number in sorted(counters(records).items()):
        yield f"  {number} {what}"
    if absent := absent_roles(records, loss_on):
        many = "s" if len(absent) > 1 else ""
        yield f"  no row has the role{many} {', '.join(absent)}, which --loss-on names"
    if len(lengths):
        yield from histogram(lengths)


def planner():
    """The ballast program: BALLAST_PROGRAM, the one beside ballast-data, or the one on PATH."""
    beside = os.path.join(os.environ.get("BALLAST_DATA_FOLDER", ""), "ballast")
    for path in (os.environ.get("BALLAST_PROGRAM"), beside, shutil.which("ballast")):
        if path and os.path.isabs(path) and os.access(path, os.X_OK):
            return path
    return None


def plan(path, longest, ranks, pairs=False):
    """Lines on how `ballast pack` spreads the samples over ranks, in packs of the longest one; of
    pairs, of two such answers."""
    program = planner()
    if program is None:
        yield "no plan: the program ballast is not beside this one, on PATH or in BALLAST_PROGRAM"
        return
    capacity = max(256, int(longest) * (2 if pairs else 1))
    objective = '[loss]\nkind = "dpo"\n[dpo]\nreference_free = true\n' if pairs else ""
    with tempfile.TemporaryDirectory() as folder:
        deck, twin = os.path.join(folder, "deck.toml"), os.path.join(folder, "pack.json")
        with open(deck, "w", encoding="utf-8") as stream:
            stream.write(
                f'[mesh]\ndp = {ranks}\n[data]\nsource = "hdf5"\npath ='
                f" {json.dumps(os.path.abspath(path))}\n[batching]\nmethod ="
                f' "packed"\nmicro_batch_tokens = {capacity}\nglobal_tokens ='
                f" {4 * ranks * capacity}\n{objective}"
            )
        done = subprocess.run(
            [program, "pack", deck, "--json", twin], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            yield f"no plan: {program} pack: {done.stderr.strip()[-300:]}"
            return
        with open(twin, encoding="utf-8") as stream:
            made = json.load(stream)
    yield (
        f"planned on {ranks} data-parallel ranks, packs of {capacity} tokens, about 4 a rank and"
        f" step: {made['packs']} packs, {100 * made['pr']:.1f} % of their room is empty,"
        f" {100 * made['dbr']:.1f} % of the ranks' time is spent waiting (by tokens)"
    )
