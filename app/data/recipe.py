"""What a data set is made of: inputs, tokenizer, template and options, as one value that the
journal keeps, so that a run goes on only with what it began with."""
import datetime
import json
import os
import zlib

import conversation
import readers
import template
from errors import DataError, refuse_pointer

VERSION = 5
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def checksum(text):
    return zlib.crc32(text.encode("utf-8", errors="surrogatepass"))


def token_table(folder):
    """{id: token} of a folder's tokenizer.json, added tokens included."""
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        raise DataError(
            f"{path}: no such file; --tokenizer names a Hugging Face folder with tokenizer.json"
        )
    stored = template.read_json(path)
    try:
        vocabulary = stored["model"]["vocab"]
        if isinstance(vocabulary, dict):
            table = {number: token for token, number in vocabulary.items()}
        else:
            table = {number: entry[0] for number, entry in enumerate(vocabulary)}
        table.update((t["id"], t["content"]) for t in stored.get("added_tokens") or [])
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"{path}: holds no table of tokens (model.vocab, added_tokens); is it a Hugging Face"
            " tokenizer's?"
        ) from error
    return table


def table_checksum(table):
    """CRC-32 of "ID, tab, token, newline" in the order of ids: the same for a tokenizer.json that
    another version of the libraries has written.  Twin: io/data/token_table.cpp."""
    return checksum("".join(f"{number}\t{table[number]}\n" for number in sorted(table)))


def file_mark(path):
    """Size, checksum of both ends and time of the last change (ns): tells a changed input from the
    one that was begun with."""
    with open(path, "rb") as stream:
        status = os.fstat(stream.fileno())
        first = stream.read(1 << 16)
        refuse_pointer(path, first)
        mark = zlib.crc32(first)
        stream.seek(max(0, status.st_size - (1 << 16)))
        mark = zlib.crc32(stream.read(1 << 16), mark)
    return [path, status.st_size, mark, status.st_mtime_ns]


def files_of_tokenizer(folder):
    """{name: CRC-32} of the files that decide ids beside the table: merges, how added tokens match,
    names of special tokens."""
    made = {}
    for name in template.TOKENIZER_FILES:
        if os.path.isfile(path := os.path.join(folder, name)):
            with open(path, "rb") as stream:
                made[name] = zlib.crc32(stream.read())
    return made


def template_arguments(listed):
    """NAME=VALUE as JSON, or as Python's words for it; other bare words as text."""
    made = {}
    for entry in listed:
        name, equal, value = entry.partition("=")
        if not equal or not name:
            raise DataError(f"--template-arg {entry}: expected NAME=VALUE")
        if name in template.OWN_VALUES:
            raise DataError(f"--template-arg {entry}: {name} is what the rows say")
        try:  # False as a word would be true
            made[name] = json.loads(PYTHON_WORDS.get(value, value))
        except ValueError:
            made[name] = value
    return made


def roles(listed):
    """Names of roles in the spelling that messages have."""
    named = {conversation.role_of(name) for name in listed.split(",") if name.strip()}
    if not named:
        raise DataError("--loss-on names no role")
    return sorted(named)


def make(options, paths):
    """The recipe of the options of `ballast-data build` over the files `paths`."""
    table = token_table(options.tokenizer)
    source, tokens = template.find(options.tokenizer, options.chat_template)
    date = options.date or datetime.date.today().isoformat()
    try:
        datetime.date.fromisoformat(date)
    except ValueError as error:
        raise DataError(f"--date {date}: expected YYYY-MM-DD") from error
    return {
        "version": VERSION,
        "inputs": [file_mark(path) for path in paths],
        "tokenizer": options.tokenizer,
        "tokenizer_tokens": len(table),
        "tokenizer_crc32": table_checksum(table),
        "tokenizer_files": files_of_tokenizer(options.tokenizer),
        "template": source,
        "template_tokens": tokens,
        "template_arguments": template_arguments(options.template_arg),
        # Templates that print the day are the only ones whose output changes with it.
        "date": date if source and "strftime_now" in source else "2000-01-01",
        "key": options.key,
        "loss_on": roles(options.loss_on),
        "turns": options.turns,
        "pairs": options.pairs,
        "max_tokens": options.max_tokens,
        "long": options.long,
        "eos": options.eos,
        "bad_rows": options.bad_rows,
        "shard_mib": options.shard_mib,
    }


def difference(a, b):
    """Names of the entries in which two recipes differ."""
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))


def digest(recipe):
    """CRC-32 of all that decides what the file holds; paths and times do not."""
    named = {
        **recipe,
        "inputs": [m[1:3] for m in recipe["inputs"]],
        "tokenizer": None,
        "shard_mib": None,
    }
    return checksum(json.dumps(named, sort_keys=True))


def chat_template(recipe):
    if not recipe["template"]:
        return None
    return template.ChatTemplate(
        recipe["template"], recipe["template_tokens"], recipe["template_arguments"], recipe["date"]
    )


def end_token(recipe, tokenizer):
    """Id of the token that ends a text, or None."""
    if not recipe["eos"]:
        return None
    name = recipe["template_tokens"].get("eos_token")
    number = tokenizer.token_to_id(name) if name else None
    if name and number is None:
        raise DataError(f"{recipe['tokenizer']}: eos_token {name!r} is not in tokenizer.json")
    return number


def files_of(options):
    return readers.files(options.inputs, options.split)
