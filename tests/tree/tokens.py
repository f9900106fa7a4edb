"""Size of the product in tokens, comments and blanks apart: lines change with the format, tokens do
not."""
import collections
import io
import re
import tokenize

import layout
import sources

CPP_TOKEN = re.compile(
    r'R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"'  # raw strings
    r'|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''  # strings and letters
    r"|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.]|'(?=\w))*"  # names and numbers
    r"|<<<|>>>|<=>|<<=|>>=|\.\.\.|->\*|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|##|\S",
    re.S,
)


def of_cpp(text):
    return sum(1 for _ in CPP_TOKEN.finditer(sources.without_comments(text)))


def of_python(text):
    """Docstrings are comments here."""
    ends = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
    kinds = [t.type for t in tokenize.generate_tokens(io.StringIO(text).readline)]
    kinds = [tokenize.NEWLINE] + [kind for kind in kinds if kind not in silent]
    return sum(
        1
        for before, kind, after in zip(kinds, kinds[1:], kinds[2:] + [tokenize.NEWLINE])
        if kind not in ends
        and not (kind == tokenize.STRING and before in ends and after == tokenize.NEWLINE)
    )


def of_rooms(files):
    """{room: [files, tokens]} of C++ and Python in the rooms of layout.ROOMS."""
    counts = collections.defaultdict(lambda: [0, 0])
    for file in files:
        room = file.split("/")[0]
        count = of_cpp if file.endswith(sources.CPP) else of_python
        if room in layout.ROOMS and file.endswith(sources.CPP + (".py",)):
            counts[room][0] += 1
            counts[room][1] += count(sources.read(file))
    return counts


def show(files):
    counts = of_rooms(files)
    for room in sorted(counts):
        print(f"{room:10} {counts[room][0]:5} files {counts[room][1]:8} tokens")
    total = [sum(column) for column in zip(*counts.values())]
    print(f"{'all':10} {total[0]:5} files {total[1]:8} tokens")
