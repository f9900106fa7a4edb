"""ballast-data build INPUT... : token files for training; ballast-data inspect FILE shows one."""
import argparse
import errno
import math
import os
import re
import sys

NEEDED = ("h5py", "numpy", "jinja2", "tokenizers")
MOST_TOKENS = (1 << 63) - 1  # of --max-tokens, which the file keeps in 64 bits


def arguments(argv):
    parser = argparse.ArgumentParser(
        prog="ballast-data",
        description='Makes the HDF5 files that data.source = "hdf5" reads, and shows them.',
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build_arguments(commands.add_parser("build", help="tokens and loss masks from data files"))
    look = commands.add_parser("inspect", help="show samples with their masks in colour")
    look.add_argument("file", metavar="FILE")
    look.add_argument("--tokenizer", metavar="FOLDER", help="to show text in place of ids")
    look.add_argument("--first", type=int, default=0, help="first sample (0)")
    look.add_argument("--samples", type=int, default=3, help="how many (3)")
    look.add_argument("--tokens", type=int, default=2000, help="of a sample; 0: all (2000)")
    look.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    return parser.parse_args(argv)


def build_arguments(build):
    add = build.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".jsonl, .json, .parquet, .arrow, .txt, .md, or a folder of these (Hugging Face's)",
    )
    add("--tokenizer", required=True, metavar="FOLDER", help="with tokenizer.json and template")
    add("--out", required=True, metavar="FILE", help="HDF5 file to write")
    add("--split", metavar="NAME", help="of a folder, such as train_sft (train)")
    add("--key", metavar="NAME", help="column of messages or text, if its name is not usual")
    add("--chat-template", metavar="FILE", help="in place of the tokenizer's own")
    add(
        "--template-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable of the template, such as enable_thinking=false",
    )
    add("--date", metavar="YYYY-MM-DD", help="for templates that print the day (today)")
    add(
        "--loss-on",
        default="assistant",
        metavar="ROLE,...",
        help='roles that carry loss (assistant); a message\'s own "weight" of 0 or 1 goes first',
    )
    add(
        "--turns",
        action="store_true",
        help="where a template renders earlier turns otherwise later, every answer is a sample",
    )
    add(
        "--pairs",
        action="store_true",
        help="preferences for DPO: rows with prompt, chosen and rejected",
    )
    add("--max-tokens", type=int, default=0, metavar="N", help="longest sample; 0: no limit (0)")
    add(
        "--long",
        choices=("refuse", "drop", "truncate", "split"),
        help=(
            "longer ones; split and truncate keep prompts with their answers (split; of pairs:"
            " truncate)"
        ),
    )
    add("--no-eos", dest="eos", action="store_false", help="no end token after a text")
    add("--bad-rows", choices=("refuse", "skip"), default="refuse", help="(refuse)")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=int, default=cores, metavar="N", help=f"processes ({cores})")
    add("--shard-mib", type=float, default=4, metavar="N", help="input of a shard, MiB (4)")
    add("--restart", action="store_true", help="leave what a stopped run made, and begin anew")
    add("--force", action="store_true", help="replace a FILE that exists")
    add("--ranks", type=int, default=8, metavar="N", help="that the plan at the end is for (8)")


def build(options):
    import readers
    import recipe as recipes
    import summary
    import template
    import workers
    from errors import DataError
    from shards import Journal

    refuse_numbers(options)
    if options.pairs and (options.turns or options.long == "split"):
        raise DataError("--pairs: both answers of a pair are one sample each, not several")
    if os.path.exists(options.out) and not os.path.isfile(options.out):
        raise DataError(f"{options.out} is no regular file; --out names the HDF5 file to write")
    options.long = options.long or ("truncate" if options.pairs else "split")
    paths, notes = recipes.files_of(options)
    read = template.files_read(options.tokenizer, options.chat_template)
    refuse_input_as_output([*paths, *read], options.out)
    for note in notes:
        print(note)
    made = recipes.make(options, paths)
    if options.eos and "eos_token" not in made["template_tokens"]:
        print(f"{options.tokenizer} names no eos_token: texts get no end token")
    folder = options.out + ".parts"
    if os.path.exists(options.out) and not options.force:
        if not options.restart and finished(options.out, made, folder):
            print(f"{options.out} is complete")
            return 0
        raise DataError(f"{options.out} exists; --force replaces it")
    groups = readers.pieces(paths, int(options.shard_mib * (1 << 20)))
    journal = Journal(folder, made, options.restart)
    if journal.records:
        print(f"going on: {len(journal.records)} of {len(groups)} shards are there")
    workers.make_shards(groups, made, journal, options.workers)
    return finish(options, made, journal, summary)


def refuse_numbers(options):
    """Errors: DataError of numbers out of bounds, before any row is read."""
    from errors import DataError

    if options.workers < 1 or options.ranks < 1:
        raise DataError("--workers and --ranks must be at least 1")
    if not 1e-3 <= options.shard_mib < math.inf:  # nan is not either
        raise DataError("--shard-mib must be a finite number of at least 0.001")
    if not 0 <= options.max_tokens <= MOST_TOKENS:
        raise DataError(f"--max-tokens must be from 0 (no limit) to {MOST_TOKENS}")


def refuse_input_as_output(paths, out):
    """Errors: DataError where the output would replace an input."""
    from errors import DataError

    if os.path.exists(out) and any(os.path.samefile(path, out) for path in paths):
        raise DataError(f"{out} is an input; --out names another file, the HDF5 file to write")


def finished(path, recipe, folder):
    """Whether a run was stopped between renaming the file and removing its shards.

    Errors: DataError where an input has changed since, or a build that replaces it was stopped."""
    import h5py

    from errors import DataError
    from recipe import digest
    from shards import JOURNAL, Journal

    if not os.path.isdir(folder):
        return False
    with h5py.File(path, "r") as file:
        same = file.attrs.get("recipe_crc32") == digest(recipe)
    if not same:
        return False
    journal = os.path.join(folder, JOURNAL)
    if os.path.exists(journal) and os.stat(journal).st_mtime_ns > os.stat(path).st_mtime_ns:
        raise DataError(f"{path}: a build that replaces it was stopped; --force goes on with it")
    for line in Journal(folder, recipe).remove():  # it knows the inputs' times, the file does not
        print(line)
    return True


def finish(options, recipe, journal, summary):
    import assemble
    from errors import DataError

    records = [journal.records[n] for n in sorted(journal.records)]
    if not any(r["documents"] for r in records):
        lengths = assemble.statistics(journal.folder, records)
        for line in [*journal.remove(), *summary.text(records, lengths, recipe["loss_on"])]:
            print(line)
        raise DataError("no sample is left")
    lengths = assemble.write(options.out, journal.folder, records, recipe)
    for line in [*journal.remove(), *summary.text(records, lengths, recipe["loss_on"])]:
        print(line)
    for line in summary.plan(options.out, lengths.max(), options.ranks, options.pairs):
        print(line)
    print(options.out)
    return 0


def of_output(place, out):
    """Whether a place is the output, lies beside it under its name, or is a folder on its way."""
    return (
        place == out or place.startswith(out + ".part") or out.startswith(place.rstrip("/") + "/")
    )


def of_hdf5(said):
    """The number of the system's error in HDF5's words; 0 where they have none."""
    found = re.search(r"\berrno = (\d+)", said)
    return int(found[1]) if found else 0


def of_system(error, options):
    """One line for what the system refuses.  HDF5's errors name no file, have many lines, and may
    be no OSError."""
    place = getattr(error, "filename", None) or getattr(options, "out", None) or options.file
    said = " ".join((getattr(error, "strerror", None) or str(error)).split())
    number = getattr(error, "errno", None) or of_hdf5(said)
    text = f"{place}: {said}"
    if options.command == "build" and number == errno.ENOSPC:
        return text + "; free some space: the same command goes on"
    if options.command == "build" and of_output(str(place), options.out):
        return text + "; --out names a file in a folder that can be written"
    return text


def printed(status):
    """The status of a command whose lines standard output has, or does not take."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"ballast-data: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return status or 2
    return status


def main(argv):
    import importlib.util

    options = arguments(argv)
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(
            (
                f"ballast-data: {sys.executable} lacks {', '.join(absent)}; jobs/setup.sh makes an"
                " environment that has them (it needs the network once), or name an interpreter in"
                " BALLAST_PYTHON after: pip install -r"
                f" {os.path.join(os.path.dirname(os.path.abspath(__file__)), 'requirements.txt')}"
            ),
            file=sys.stderr,
        )
        return 1
    from errors import DataError, UnclosedFile

    try:
        if options.command == "build":
            status = build(options)
        else:
            import show

            status = show.show(options)
        return printed(status)
    except DataError as error:
        print(f"ballast-data: {error}", file=sys.stderr)
        return 2
    except UnclosedFile as error:
        said = of_system(error.__cause__, options)
        print(f"ballast-data: {said}", file=sys.stderr, flush=True)
        printed(2)
        os._exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"ballast-data: {of_system(error, options)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nballast-data: stopped; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    if sys.stdout is None:  # closed
        sys.stdout = open(os.devnull, "w")
    # Names of files that are no UTF-8 are printed as they are.
    sys.stdout.reconfigure(errors="surrogateescape")
    sys.exit(main(sys.argv[1:]))
