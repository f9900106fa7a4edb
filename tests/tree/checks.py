"""The checks.  Each yields Finding(key, size, text): the key names the place in exceptions.txt, and
the size is what an exception bounds."""
import collections
import functools
import os
import re
import shutil
import subprocess

import layout
import sources

Finding = collections.namedtuple("Finding", "key size text")


class Skipped(Exception):
    """The check cannot run here; the text says why."""


@functools.lru_cache(None)
def tree():
    return sources.files()


@functools.lru_cache(None)
def code(file):
    """C++ text of a file without comments."""
    return sources.without_comments(sources.read(file))


def product():
    """C++ files of the rooms; tests may include and call what they like."""
    return [f for f in tree() if f.endswith(sources.CPP) and f.split("/")[0] in layout.ROOMS]


def within(path, folders):
    return any(path == f or path.startswith(f + "/") for f in folders)


def level(folder):
    """(room, level) of a folder, or None where layout.py does not know it."""
    room = folder.split("/")[0]
    for depth, folders in enumerate(layout.LEVELS[room]):
        if folder in folders:
            return depth
    return None


def includes():
    """Rooms and folders include downward only (layout.ROOMS, LEVELS, READERS)."""
    for file in product():
        folder, room = os.path.dirname(file), file.split("/")[0]
        if level(folder) is None:
            yield Finding(folder, 1, f"{folder} has no level in tests/tree/layout.py")
            continue
        for header in re.findall(r'^\s*#\s*include\s*"([^"]+)"', code(file), re.M):
            other = os.path.dirname(header)
            if header not in tree() or other == folder:
                continue
            reason = None
            if not within(header, layout.ROOMS[room]):
                reason = f"{room} may include {', '.join(layout.ROOMS[room])}"
            elif other.startswith(room + "/") and level(other) >= level(folder):
                reason = f"{folder} does not stand above {other}"
            for guarded, readers in layout.READERS.items():
                if within(header, [guarded]) and not within(file, readers):
                    reason = f"only {', '.join(readers)} may include {guarded}"
            if reason:
                yield Finding(f"{file}>{header}", 1, f"{file} includes {header}: {reason}")


def included(header):
    """Files of the tree that `header` includes between quotes."""
    return [
        h for h in re.findall(r'^\s*#\s*include\s*"([^"]+)"', code(header), re.M) if h in tree()
    ]


def device_headers():
    """CUDA sources reach no header of layout.HOST_HEADERS: nvcc with g++ 12 refuses them."""
    pattern = re.compile(r"^\s*#\s*include\s*<(" + layout.HOST_HEADERS + ")", re.M)
    for file in product():
        if not file.endswith((".cu", ".cuh")):
            continue
        came_from, to_do = {file: None}, [file]
        for header in to_do:
            for other in included(header):
                if other not in came_from:
                    came_from[other] = header
                    to_do.append(other)
            found = pattern.search(code(header))
            if found:
                way = [header]
                while came_from[way[0]]:
                    way.insert(0, came_from[way[0]])
                yield Finding(file, 1, f"{' > '.join(way)} includes <{found.group(1)}...>")
                break


def libraries():
    """MPI, HDF5, NCCL and CUDA are called where layout.LIBRARIES says."""
    for file in product():
        text = sources.without_comments(sources.read(file), strings=False)
        for name, (pattern, callers) in layout.LIBRARIES.items():
            found = sorted(set(re.findall(pattern, text)))
            if found and not within(file, callers):
                text_of = f"{file} names {', '.join(found[:4])}: {name} belongs to {callers}"
                yield Finding(f"{file}:{name}", 1, text_of)


# A key is block.name.
DECK_READ = re.compile(
    r"(?:\.|->)\s*(?:text|get<[\w:\s<>,]+>|value|is_set)\(\s*" r'"[a-z_]+\.[a-z0-9_]+"'
)


def deck_keys():
    """Deck keys are read in layout.DECK_READERS alone."""
    for file in product():
        count = len(DECK_READ.findall(code(file)))
        if count and not within(file, layout.DECK_READERS):
            yield Finding(file, count, f"{file} reads {count} deck keys by name")


NAME_ROW = re.compile(r'\{\s*(\w+)::\w+\s*,\s*"([a-z0-9_.-]+)"\s*\}')


def choices():
    """Choices are compared as enums: no == with a word of a table of names (EnumNames)."""
    words = {}
    for file in product():
        if "EnumNames<" in sources.read(file):
            words.update({word: enum for enum, word in NAME_ROW.findall(code(file))})
    for file in product():
        compared = re.findall(r'[!=]=\s*"([a-z0-9_.-]+)"', code(file))
        found = sorted({word for word in compared if word in words})
        if found:
            text = f"{file} compares text with {', '.join(found)}: names of {words[found[0]]} ..."
            yield Finding(file, len(found), text)


def functions():
    """No function above layout.MOST_LINES_OF_A_FUNCTION lines outside tables and GPU kernels."""
    longest = {}
    for file in tree():
        if file in product():
            found = sources.cpp_functions(sources.read(file))
        elif file.endswith(".py") and file.startswith("app/"):
            found = sources.python_functions(sources.read(file))
        else:
            continue
        for name, first, lines, head in found:
            key = f"{file}:{name}"
            kernel = "__global__" in head or "__device__" in head
            if lines > layout.MOST_LINES_OF_A_FUNCTION and not kernel and file not in layout.TABLES:
                text = f"{file}:{first}: {name} has {lines} lines"
                if key not in longest or longest[key].size < lines:
                    longest[key] = Finding(key, lines, text)
    yield from longest.values()


CODE = sources.CPP + (".py", ".sh", ".sbatch", ".cmake", ".in", "CMakeLists.txt", ".toml")


def file_lines():
    """No file of code above layout.MOST_LINES_OF_A_FILE lines, tables aside."""
    for file in tree():
        if file.endswith(CODE) and file not in layout.TABLES:
            lines = sources.read(file).count("\n")
            if lines > layout.MOST_LINES_OF_A_FILE:
                yield Finding(file, lines, f"{file} has {lines} lines")


def columns():
    """No line of code above layout.MOST_COLUMNS columns."""
    for file in tree():
        if file.endswith(CODE):
            long = [
                number
                for number, line in enumerate(sources.read(file).split("\n"), 1)
                if len(line) > layout.MOST_COLUMNS
            ]
            if long:
                yield Finding(file, len(long), f"{file}: {len(long)} long lines, first {long[0]}")


def headers():
    """UNIT.cpp and UNIT_ASPECT.cpp have a UNIT.hpp; layout.DECLARED_TOGETHER and main have none."""
    for file in product():
        together = layout.DECLARED_TOGETHER.get(os.path.dirname(file))
        if file.endswith(".cpp") and file not in layout.NO_HEADER and together not in tree():
            folder, name = os.path.split(file[:-4])
            names = name.split("_")
            units = ["_".join(names[:count]) for count in range(1, len(names) + 1)]
            if not any(f"{folder}/{unit}.hpp" in tree() for unit in units):
                yield Finding(file, 1, f"{file} has no header of its name")


def folders():
    """Every folder of code has a README.md; folders of tests mirror those and need none."""
    top = list(layout.ROOMS) + ["jobs", "docs", "inputs", "tests"]
    named = {os.path.dirname(f) for f in tree() if f.endswith(CODE)}
    for folder in sorted(named | set(top)):
        root = folder.split("/")[0]
        if root in layout.ROOMS or folder in top:
            if folder + "/README.md" not in tree():
                yield Finding(folder, 1, f"{folder} has no README.md")


def words():
    """Words that are not ours, and citations of what is not in the repository (layout.WORDS)."""
    for file in tree():
        if file in layout.SPEAKS_OF_WORDS or file.endswith((".png", ".safetensors")):
            continue
        text = sources.read(file)
        words = dict(layout.WORDS)
        if file.endswith(sources.CPP):
            words |= layout.WORDS_OF_CODE
        for pattern, instead in words.items():
            found = [match.group() for match in re.finditer(pattern, text)]
            if found:
                key = f"{file}:{found[0].replace(' ', '_')}"
                yield Finding(key, len(found), f"{file} says '{found[0]}'; write {instead}")


def mirror():
    """tests/FOLDER/test_UNIT or test_UNIT_ASPECT names a unit of FOLDER, but in tests/app."""
    homes = {"cuda": "kernels/cuda", "report": "app/report"}
    for file in tree():
        part = re.match(r"tests/(\w+)/((?:\w+/)*)test_(\w+)\.(cpp|py)$", file)
        if not part or part.group(1) in ("app", "tree"):
            continue
        home = homes.get(part.group(1), part.group(1))
        names = part.group(3).split("_")
        units = ["_".join(names[:count]) for count in range(1, len(names) + 1)]
        ends = sources.CPP + (".py",)
        if not any(f"{home}/{part.group(2)}{u}{end}" in tree() for u in units for end in ends):
            yield Finding(file, 1, f"{file} tests no unit of {home}/{part.group(2)}")


def tool(names, pattern):
    """First of the programs `names` that is here, with the version that it states."""
    for name in names:
        if shutil.which(name):
            stated = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
            version = re.search(pattern, stated)
            return name, int(version.group(1)) if version else 0
    raise Skipped(f"{names[-1]} is not installed (jobs/setup.sh --tests installs it)")


def clang_format():
    """C++ and CUDA follow .clang-format."""
    wanted = layout.CLANG_FORMAT_VERSION
    name, version = tool([f"clang-format-{wanted}", "clang-format"], r"version (\d+)")
    if version != wanted:
        raise Skipped(f"clang-format {version} is here; the tree is in the form of {wanted}")
    listed = [f for f in tree() if f.endswith(sources.CPP)]
    parts = [listed[start :: os.cpu_count() or 1] for start in range(os.cpu_count() or 1)]
    running = [
        subprocess.Popen(
            [name, "--dry-run"] + part, cwd=sources.ROOT, stderr=subprocess.PIPE, text=True
        )
        for part in parts
        if part
    ]
    counts = collections.Counter()
    for process in running:
        said = process.communicate()[1]
        counts.update(re.findall(r"^(\S+?):\d+:\d+: (?:warning|error):", said, re.M))
        if process.returncode != 0:
            raise RuntimeError(f"{name} left with {process.returncode}")
    for file, count in sorted(counts.items()):
        yield Finding(file, count, f"{file}: run {name} -i on it")


def black():
    """Python follows black with the options of pyproject.toml."""
    name, version = tool(["black"], r"(\d+)\.")
    if version != layout.BLACK_VERSION:
        raise Skipped(f"black {version} is here; the tree is in the form of {layout.BLACK_VERSION}")
    listed = [f for f in tree() if f.endswith(".py")]
    result = subprocess.run(
        [name, "--check"] + listed, cwd=sources.ROOT, capture_output=True, text=True
    )
    if result.returncode not in (0, 1):
        raise RuntimeError(result.stderr)
    for file in re.findall(r"^would reformat (.*)$", result.stderr, re.M):
        file = os.path.relpath(os.path.join(sources.ROOT, file), sources.ROOT)
        yield Finding(file, 1, f"{file}: run black on it")


CHECKS = [
    includes,
    device_headers,
    libraries,
    deck_keys,
    choices,
    functions,
    file_lines,
    columns,
    headers,
    folders,
    words,
    mirror,
    clang_format,
    black,
]
