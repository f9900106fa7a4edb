"""Commands printed in Markdown: taken out of ```sh blocks, and compared with what the programs
know: subcommands, options, decks, cases and keys.  Nothing is run but --help."""
import functools
import os
import re
import shlex
import subprocess
import tomllib

ROOT = os.environ["BALLAST_ROOT"]
BALLAST = os.environ["BALLAST_PROGRAM"]
TOOLS = ["ballast", "ballast-report", "ballast-data"]
LAUNCHERS = {"mpiexec": 2, "srun": 2}  # words of the launcher before the command: -n N
# Programs of the system, whose words are not looked at.
SYSTEM = (
    "apptainer cat cd cmake cp ctest docker export git lfs ls mkdir mkdocs pip scancel spack squeue"
    " sudo tail unzip"
).split()
SETTINGS_OF_BENCH = re.compile(r"^[a-z_0-9]+=")
# What a page writes where the reader puts a word of their own.
PLACEHOLDER = re.compile(r"^(\.\.\.|\$.*|[A-Z][A-Z_0-9/.]*(\.\.\.)?|\[.*|.*\.\.\.\]?)$")


def blocks(text):
    """(line number, text) of the shell blocks of a page, without here-documents."""
    for block in re.finditer(r"^```sh\n(.*?)^```", text, re.M | re.S):
        body = re.sub(r"<<'?(\w+)'?.*?^\1$", "", block.group(1), flags=re.M | re.S)
        yield text[: block.start()].count("\n") + 2, body


def commands(body):
    """Word lists of the simple commands of a shell block."""
    for line in body.replace("\\\n", " ").split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";|&()"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


@functools.lru_cache(None)
def help_of(*line):
    if line[0] == "ballast-data":  # may lack its Python packages; the options stand in its source
        with open(os.path.join(ROOT, "app", "data", "__main__.py")) as file:
            return re.sub(r"""["']""", " ", file.read())
    program = os.path.join(os.path.dirname(BALLAST), line[0])
    done = subprocess.run(
        [program, *line[1:], "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


@functools.lru_cache(None)
def deck_keys():
    done = subprocess.run([BALLAST, "--help", "deck"], capture_output=True, text=True, check=True)
    keys, block = set(), ""
    for line in done.stdout.split("\n"):
        if found := re.match(r"\[(\w+)\]", line):
            block = found.group(1)
        elif block and (found := re.match(r"  (\w+) = ", line)):
            keys.add(f"{block}.{found.group(1)}")
    return keys


def knows_option(help_text, option):
    return re.search(rf"(^|[\s,\[]){re.escape(option)}($|[\s,=\]])", help_text, re.M)


def wrong_in_ballast(words):
    """What is wrong in the words after a tool's name."""
    tool, words = words[0], list(words[1:])
    subcommand, decks, keys, case = [], [], [], None
    if tool != "ballast-report" and words and not words[0].startswith("-"):
        if not re.search(rf"(^ +|add_parser\( ){re.escape(words[0])} ", help_of(tool), re.M):
            yield f"{tool} has no subcommand {words[0]}"
            return
        subcommand = [words.pop(0)]
    bench = subcommand == ["bench"]
    known = help_of(tool, *subcommand)
    while words:
        word = words.pop(0)
        if word == "--case":
            case = words.pop(0) if words else ""
        elif word == "--help":
            break
        elif re.match(r"--?[a-z]", word):
            if not knows_option(known, word.split("=")[0]):
                yield f"{' '.join([tool, *subcommand])} has no option {word}"
        elif word.endswith(".toml") and "=" not in word and "/" in word:
            decks.append(word)
        elif re.match(r"[a-z_0-9]+\.[a-z_0-9]+=", word):
            keys.append(word.split("=")[0])
        elif "=" in word and not (bench and SETTINGS_OF_BENCH.match(word)) and tool == "ballast":
            if not PLACEHOLDER.match(word) and not os.path.sep in word:
                yield f"{word} is no block.key=value"
    for deck in decks:
        if deck.startswith(("inputs/", "/opt/ballast/share/ballast/inputs/")):
            path = os.path.join(ROOT, deck[deck.index("inputs/") :])
            yield from wrong_in_deck(path, deck, case)
    for key in keys:
        if key not in deck_keys():
            yield f"no deck key {key}"


def wrong_in_deck(path, deck, case):
    if "*" in deck:
        return
    if not os.path.isfile(path):
        yield f"no deck {deck}"
    elif case and not PLACEHOLDER.match(case):
        with open(path, "rb") as file:
            names = [c.get("name") for c in tomllib.load(file).get("case", [])]
        if case not in names:
            yield f"{deck} has no case {case}"


def wrong(words):
    """What is wrong with one simple command."""
    words = [w for w in words if w not in ("<", ">", ">>", "do", "then", "time", "\\")]
    while words and re.match(r"[A-Za-z_]+=", words[0]):
        words.pop(0)
    if not words or words[0] in ("for", "done", "if", "fi", "while") or PLACEHOLDER.match(words[0]):
        return
    program = words[0]
    if program in LAUNCHERS:
        yield from wrong(words[1 + LAUNCHERS[program] :])
    elif program == "sbatch":
        yield from wrong([w for w in words[1:] if not w.startswith("--")])
    elif program in ("bash", "sh", "."):
        yield from wrong(words[1:])
    elif program == "env":
        yield from wrong(words[1:])
    elif os.path.basename(program) in TOOLS:
        if "/" in program and not re.match(r"(build[-a-z]*|PREFIX)/bin/|\$", program):
            yield f"{program} is not where programs are built"
        yield from wrong_in_ballast([os.path.basename(program), *words[1:]])
    elif program.startswith(("python3", "build/python/bin/python")):
        if len(words) > 1 and words[1].startswith(("tests/", "app/")):
            if not os.path.exists(os.path.join(ROOT, words[1])):
                yield f"no {words[1]}"
    elif program.startswith(("build/tests/", "try/")) or program in SYSTEM:
        return
    elif "/" in program:
        path = os.path.join(ROOT, program)
        if not os.path.isfile(path):
            yield f"no script {program}"
            return
        with open(path) as file:
            text = file.read()
        for word in words[1:]:
            if re.match(r"--[a-z]", word) and word.split("=")[0] not in text:
                yield f"{program} has no option {word}"
            elif word.startswith("inputs/"):
                yield from wrong_in_deck(os.path.join(ROOT, word), word, None)
            elif re.match(r"[a-z_0-9]+\.[a-z_0-9]+=", word):
                if word.split("=")[0] not in deck_keys():
                    yield f"no deck key {word.split('=')[0]}"
    elif not re.match(r"(test_\w+|\./\w+|perf)$", program):
        yield f"unknown program {program}"


def plans_of_page(path):
    """Words after `ballast plan` of a page's commands, those within sentences too, that any machine
    can run: of decks here, without words that a reader or a loop fills in and files of a run."""

    def elsewhere(words):
        return re.search(r"\$|\bruns/|\.\.\.", " ".join(words))

    with open(os.path.join(ROOT, path)) as file:
        text = file.read()
    found = [words for _, body in blocks(text) for words in commands(body)]
    sentences = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    found += [shlex.split(line) for line in re.findall(r"`(ballast plan [^`]*)`", sentences)]
    for words in found:
        program, command, deck = [os.path.basename(words[0]), *words[1:3], "", ""][:3]
        if (program, command) == ("ballast", "plan") and deck.startswith("inputs/"):
            with open(os.path.join(ROOT, deck)) as file:
                if not elsewhere(words) and not elsewhere(re.findall(r'"(runs/.*)"', file.read())):
                    yield words[2:]


def wrong_in_page(path):
    """Complaints about all commands of a page, each with its place."""
    with open(os.path.join(ROOT, path)) as file:
        text = file.read()
    for line, body in blocks(text):
        for words in commands(body):
            for complaint in wrong(words):
                yield f"{path}, block at line {line}: {complaint}: {' '.join(words)}"
