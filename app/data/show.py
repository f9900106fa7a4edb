"""ballast-data inspect: samples of a file with their masks in colour."""
import os
import sys

import h5py

import recipe as recipes
from errors import DataError, refuse_irregular

LEARNT, GIVEN, HEADING, END = "\033[1;32m", "\033[2m", "\033[1;36m", "\033[0m"


def tokenizer_of(file, path, folder):
    """The tokenizer named on the command line, checked against the file's mark."""
    if not folder:
        return None
    import tokenizers

    if recipes.table_checksum(recipes.token_table(folder)) != file.attrs.get("tokenizer_crc32"):
        raise DataError(f"{folder}: not the tokenizer {path} was made with")
    return tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))


def runs(mask, begins, count):
    """(begin, end) of stretches with one mask and one message."""
    edges = {0, count, *(b for b in begins if b < count)}
    edges.update(i for i in range(1, count) if mask[i] != mask[i - 1])
    ordered = sorted(edges)
    return zip(ordered, ordered[1:])


def sample_lines(file, number, tokenizer, colour, most):
    begin, end = (int(v) for v in file["offsets"][number : number + 2])
    count = min(end - begin, most) if most else end - begin
    tokens = file["tokens"][begin : begin + count]
    mask = file["loss_mask"][begin : begin + count].tolist() if "loss_mask" in file else [1] * count
    first, last = (int(v) for v in file["messages/offsets"][number : number + 2])
    begins = file["messages/begin"][first:last].tolist()
    names = {v: k for k, v in h5py.check_enum_dtype(file["messages/role"].dtype).items()}
    roles = dict(zip(begins, (names[r] for r in file["messages/role"][first:last].tolist())))
    mask[:1] = [0]  # no token comes before the first, so nothing predicts it
    rest = file["loss_mask"][begin + count : end] if "loss_mask" in file else [1] * (end - begin)
    loss = sum(mask) + int(sum(rest[: end - begin - count]))
    answer = ("chosen, ", "rejected, ")[number % 2] if file.attrs.get("pairs") else ""
    heading = (
        f"sample {number}, {answer}row {file['rows'][number]}: {end - begin} tokens, {loss} with"
        " loss"
    )
    yield f"{HEADING}{heading}{END}" if colour else heading
    for a, b in runs(mask, begins, count):
        if a in roles:
            yield f"{HEADING}-- {roles[a]}{END}" if colour else f"-- {roles[a]}"
        ids = tokens[a:b].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else str(ids)
        if colour:
            yield f"{LEARNT if mask[a] else GIVEN}{text}{END}"
        else:
            yield f"[[{text}]]" if mask[a] else text
    if count < end - begin:
        yield f"({end - begin - count} more tokens; --tokens 0 shows all)"


def show(options):
    if min(options.first, options.samples, options.tokens) < 0:
        raise DataError("--first, --samples and --tokens must be at least 0")
    refuse_irregular(options.file, "inspect reads the HDF5 file that ballast-data build wrote")
    colour = options.color == "always" or (options.color == "auto" and sys.stdout.isatty())
    try:
        file = h5py.File(options.file, "r")
    except OSError as error:
        raise DataError(f"{options.file}: {' '.join(str(error).split())}") from error
    with file:
        if file.attrs.get("format") != "ballast tokens":
            raise DataError(f"{options.file} was not written by ballast-data")
        tokenizer = tokenizer_of(file, options.file, options.tokenizer)
        documents = len(file["offsets"]) - 1
        if documents > 0 and options.first >= documents:
            raise DataError(
                f"{options.file} has {documents} samples, 0 to {documents - 1}: none is"
                f" {options.first}"
            )
        for name in sorted(file.attrs):
            value = file.attrs[name]
            print(
                f"{name}: {value.decode(errors='replace') if isinstance(value, bytes) else value}"
            )
        print("loss lies on what is green" if colour else "loss lies on what stands in [[ ]]")
        for number in range(options.first, min(documents, options.first + options.samples)):
            for line in sample_lines(file, number, tokenizer, colour, options.tokens):
                print(line)
    return 0
