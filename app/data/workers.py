"""Processes that make shards, and the loop that hands out pieces and shows how far it is."""
import concurrent.futures
import ctypes
import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time

import numpy as np

import readers
import recipe as recipes
import template
from conversation import SameAnswers, pair, sample
from cutting import Cutter
from errors import DataError, RowError, Unreadable
from masks import Encoder, NotAPrefix
from shards import ShardWriter

# Samples encoded at once: enough to pay for the call, few enough to need little memory.
BLOCK_SAMPLES, BLOCK_CHARACTERS = 256, 1 << 19

# Such a pair's gradient is 0.
SAME = "pairs left out because both answers are the same"

STATE = {}  # of a worker process


def start(recipe, folder, parent):
    """A worker ends with its parent, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that call
        os._exit(1)
    gc.set_threshold(100000, 50, 100)  # rows make many small objects and hardly a cycle
    # Each worker is one core's.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    STATE.update(recipe=recipe, folder=folder)
    try:
        STATE["cutter"] = cutter_of(recipe)
    except DataError as error:  # told by the first shard: the pool hides what ends a start
        STATE["error"] = error
    except Exception as error:  # of settings in shapes that nothing here foresees
        STATE["error"] = DataError(
            f"{recipe['tokenizer']}: its tokenizer cannot be made ({type(error).__name__}:"
            f" {error}); is a file of it damaged?"
        )


def loaded_tokenizer(folder):
    """The tokenizer of a folder, whose tokens keep the places of their leading spaces."""
    import tokenizers

    path = os.path.join(folder, "tokenizer.json")
    stored = template.read_json(path)
    config = template.read_json(os.path.join(folder, "tokenizer_config.json"))
    refuse_lost_tokens(folder, config, stored)
    take_flags(config, stored)
    refuse_other_ids(folder, config, stored)
    keep_spaces(stored.get("post_processor"))
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(stored, ensure_ascii=False))
    except Exception as error:  # the library knows no narrower one
        raise DataError(f"{path}: {error}") from error


def refuse_lost_tokens(folder, config, stored):
    """Errors: DataError where Transformers would add tokens to those of tokenizer.json."""
    if "added_tokens_decoder" in config:
        name, table = "tokenizer_config.json", config["added_tokens_decoder"] or {}
        asked = [t.get("content") if isinstance(t, dict) else t for t in table.values()]
    else:
        name = "added_tokens.json"
        asked = list(template.read_json(os.path.join(folder, name)))
    known = {t.get("content") for t in stored.get("added_tokens") or []}
    if lacking := next((token for token in asked if token not in known), None):
        raise DataError(
            f"{folder}: tokenizer.json lacks {lacking!r}, a token that {name} adds; save the folder"
            " again with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )


def take_flags(config, stored):
    """How added tokens match, which Transformers takes from tokenizer_config.json."""
    table = (config.get("added_tokens_decoder") or {}).values()
    flags = {t["content"]: t for t in table if isinstance(t, dict) and "content" in t}
    for token in stored.get("added_tokens") or []:
        told = flags.get(token.get("content"), {})
        for flag in ("lstrip", "rstrip", "single_word", "normalized", "special"):
            if isinstance(told.get(flag), bool):
                token[flag] = told[flag]


def refuse_other_ids(folder, config, stored):
    """Errors: DataError of settings with which the ids would be random, or not Transformers'."""
    if dropout := stored["model"].get("dropout"):
        raise DataError(
            f"{folder}/tokenizer.json: model.dropout is {dropout}, which splits the same text at"
            ' random; set it to null ("dropout": null)'
        )
    if config.get("split_special_tokens"):
        raise DataError(
            f"{folder}/tokenizer_config.json: split_special_tokens takes a template's special"
            " tokens apart; remove it there"
        )
    before = stored.get("pre_tokenizer") or {}
    asked, done = config.get("add_prefix_space"), before.get("add_prefix_space")
    if isinstance(asked, bool) and isinstance(done, bool) and asked != done:
        asked, done = json.dumps(asked), json.dumps(done)
        raise DataError(
            f"{folder}/tokenizer_config.json: add_prefix_space is {asked}, but {done} in the"
            " pre_tokenizer of tokenizer.json; make both the same"
        )


def keep_spaces(part):
    """Spaces that trim_offsets cuts off a token's place would carry no loss; ids do not change."""
    for value in part if isinstance(part, list) else [part]:
        if isinstance(value, dict):
            if value.get("trim_offsets"):
                value["trim_offsets"] = False
            keep_spaces(value.get("processors"))


def cutter_of(recipe):
    tokenizer = loaded_tokenizer(recipe["tokenizer"])
    encoder = Encoder(
        tokenizer,
        recipes.chat_template(recipe),
        tuple(recipe["loss_on"]),
        recipe["turns"],
        recipes.end_token(recipe, tokenizer),
    )
    return Cutter(encoder, recipe["max_tokens"], recipe["long"])


def shard(number, group):
    """Makes one shard from its pieces; returns its record."""
    if "error" in STATE:
        raise STATE["error"]
    cutter, key = STATE["cutter"], STATE["recipe"]["key"]
    cutter.encoder.counters.clear()
    cutter.encoder.roles.clear()
    writer = ShardWriter(STATE["folder"], number)
    block, characters, row = [], 0, 0
    for piece in group:
        for where, value in readers.rows(piece):
            rendered = checked(where, lambda v=value: rendered_row(v, key))
            if rendered is not None:
                block.append((where, row, rendered))
                characters += sum(len(r.text) for r in rendered)
            row += 1
            if len(block) >= BLOCK_SAMPLES or characters >= BLOCK_CHARACTERS:
                write(writer, block)
                block, characters = [], 0
    write(writer, block)
    record = writer.close()
    record.update(rows=row, bytes=sum(p.size for p in group))
    record["counters"] = dict(sorted(cutter.encoder.counters.items()))
    record["roles"] = sorted(cutter.encoder.roles)
    return record


def rendered_row(value, key):
    """What is encoded of a row; of a pair the chosen answer, then the rejected one, and None where
    they are the same."""
    encoder = STATE["cutter"].encoder
    if isinstance(value, Unreadable):
        raise RowError(value.reason)
    if not STATE["recipe"]["pairs"]:
        return encoder.rendered(sample(value, key))
    try:
        return [encoder.rendered(answer)[0] for answer in pair(value)]
    except SameAnswers:
        encoder.count(SAME)
        return None
    except NotAPrefix as error:
        raise RowError(
            f"{error.reason}; pairs need a template that renders an answer alike whatever follows"
            " (--chat-template FILE), or answers of one message"
        ) from error


def write(writer, block):
    cutter = STATE["cutter"]
    try:
        encoded = iter(cutter.encoder.encoded([r for _, _, some in block for r in some]))
    except TypeError:  # what the tokenizer says of text that is no Unicode
        block = [entry for entry in block if checked(entry[0], lambda e=entry: unicode(e[2]))]
        encoded = iter(cutter.encoder.encoded([r for _, _, some in block for r in some]))
    made = []
    for where, row, some in block:
        parts = [(r, next(encoded)) for r in some]
        fitted = lambda: [d for r, document in parts for d in cutter.fitted(r, document)]
        documents = checked(where, fitted) or []
        if STATE["recipe"]["pairs"] and len(documents) != 2:
            cutter.count("pairs left out")
            continue
        if STATE["recipe"]["pairs"] and np.array_equal(*(d.tokens for d in documents)):
            cutter.count(SAME)  # as rendered, or as cut
            continue
        made += [(document, row) for document in documents]
    writer.add(made)


def unicode(rendered):
    """True.  Errors: RowError of a text that holds half of a surrogate pair (a lone \\ud83d)."""
    try:
        return all(one.text.encode() is not None for one in rendered)
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RowError(f"half of a surrogate pair, {ascii(half)}, which is no character") from error


def checked(where, make):
    """make(), with the place in its error; None where a bad row is to be skipped."""
    try:
        return make()
    except RowError as error:
        if STATE["recipe"]["bad_rows"] == "skip":
            STATE["cutter"].count(f"bad rows skipped: {str(error)[:60]}")
            return None
        raise DataError(f"{readers.place(where)}: {error}") from error


class Progress:
    """One line on standard error: in place on a terminal, every ten seconds elsewhere."""

    def __init__(self, total, done):
        self.total, self.begun_with, self.done = max(1, total), done, done
        self.started = self.shown = time.monotonic()
        self.tokens = self.documents = 0
        self.terminal = sys.stderr.isatty()

    def add(self, record):
        self.done += record["bytes"]
        self.tokens += record["tokens"]
        self.documents += record["documents"]
        now = time.monotonic()
        if now - self.shown > (0.2 if self.terminal else 10):
            self.shown = now
            self.show(now)

    def show(self, now):
        seconds = max(1e-3, now - self.started)
        speed = (self.done - self.begun_with) / seconds
        left = (self.total - self.done) / speed if speed else 0
        width = min(shutil.get_terminal_size().columns, 100)
        filled = int(20 * self.done / self.total)
        line = (
            f"[{'#' * filled}{'.' * (20 - filled)}] {100 * self.done // self.total} %"
            f"  {self.documents} samples  {self.tokens / 1e6:.1f} M tokens"
            f"  {speed / 1e6:.1f} MB/s  {left:.0f} s left"
        )
        line = line[: width - 1]
        print(f"\r{line:{width - 1}}" if self.terminal else line, end="", file=sys.stderr)
        print("" if self.terminal else "\n", end="", flush=True, file=sys.stderr)

    def close(self):
        if self.terminal:
            self.show(time.monotonic())
            print(file=sys.stderr)


def make_shards(groups, recipe, journal, workers):
    """Makes the shards that the journal lacks.  Errors: DataError of the first row that fails."""
    left = [n for n in range(len(groups)) if n not in journal.records]
    sizes = [sum(p.size for p in group) for group in groups]
    progress = Progress(sum(sizes), sum(sizes) - sum(sizes[n] for n in left))
    # A forked worker has read the modules; threads of Arrow's, which read tables, are not forked.
    context = multiprocessing.get_context("spawn" if "pyarrow" in sys.modules else "fork")
    pool = concurrent.futures.ProcessPoolExecutor(
        min(workers, max(1, len(left))), context, start, (recipe, journal.folder, os.getpid())
    )
    running, waiting = set(), iter(left)
    try:
        while True:
            # A bounded number waits, so that a data set of any size needs no memory.
            while len(running) < 2 * workers and (n := next(waiting, None)) is not None:
                running.add(pool.submit(shard, n, groups[n]))
            if not running:
                break
            done, running = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                record = future.result()
                journal.add(record)
                progress.add(record)
        progress.close()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise DataError(
            "a worker process died (out of memory?); the same command goes on"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
