"""Reads the tree: its files, C++ text without comments, and the functions in it."""
import ast
import os
import re
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CPP = (".cpp", ".hpp", ".cu", ".cuh")


def files():
    """Files of the tree, relative to its root: those git tracks or would track, and in an unpacked
    archive those outside build folders."""
    root = ROOT
    try:
        command = ["git", "-C", root, "ls-files", "-z", "-co", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        found = sorted(set(listed.split("\0")) - {""})
    except (OSError, subprocess.CalledProcessError):
        found = []
        for folder, folders, names in os.walk(root):
            folders[:] = [f for f in folders if f not in (".git", ".carry", "__pycache__", "runs")]
            if folder == root:
                folders[:] = [f for f in folders if not f.startswith("build")]
            found += [os.path.relpath(os.path.join(folder, name), root) for name in names]
        found.sort()
    return [f for f in found if os.path.isfile(os.path.join(root, f))]


def read(file):
    with open(os.path.join(ROOT, file), encoding="utf-8", errors="replace") as stream:
        return stream.read()


TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'",
    re.S,
)


def blank(text):
    """The text with everything but newlines replaced by blanks."""
    return re.sub(r"[^\n]", " ", text)


def without_comments(text, strings=True):
    """C++ text of the same shape without comments, and without strings unless `strings`."""

    def replace(match):
        comment = match.group().startswith(("//", "/*"))
        return blank(match.group()) if comment or not strings else match.group()

    return TOKEN.sub(replace, text)


def without_directives(text):
    """The text without preprocessor lines; of #if and #else only the first branch stays, so that
    braces match."""
    kept, skipping, depth = [], [], 0
    continued = False
    for line in text.split("\n"):
        word = re.match(r"\s*#\s*(\w+)", line)
        if continued or word:
            if word and not continued:
                if word.group(1).startswith("if"):
                    depth += 1
                elif word.group(1) in ("else", "elif"):
                    if depth not in skipping:
                        skipping.append(depth)
                elif word.group(1) == "endif":
                    if depth in skipping:
                        skipping.remove(depth)
                    depth -= 1
            continued = line.rstrip().endswith("\\")
            kept.append("")
        else:
            kept.append("" if skipping else line)
    return "\n".join(kept)


SCOPE = re.compile(
    r"^(?:(?:inline|static|typedef|export)\s+)*(?:namespace\b|extern\s*$|(?:class|struct|union)\b)"
)


def without_templates(head):
    """A declaration without its leading template parameter lists."""
    while re.match(r"template\s*<", head):
        depth = 0
        for end, letter in enumerate(head):
            depth += {"<": 1, ">": -1}.get(letter, 0)
            if letter == ">" and depth == 0:
                break
        head = head[end + 1 :].lstrip()
    return head


def outside_parentheses(head):
    depth, kept = 0, []
    for letter in head:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        kept.append(letter if depth == 0 and letter != ")" else "")
    return "".join(kept)


def function_name(head):
    """Name of the function that `head`, the text before its body, declares; None for anything else
    (a scope, an initialiser)."""
    head = without_templates(head.strip())
    if "(" not in head or SCOPE.match(head) or head.startswith("enum"):
        return None
    lambda_ = re.match(r"(?:[\w:<>&*]+\s+)*(\w+)\s*=\s*\[", head)
    if lambda_:
        return lambda_.group(1)
    plain = outside_parentheses(head)
    if re.search(r"(?<![=!<>])=(?!=)", re.sub(r"operator\s*\W+", "operator", plain)):
        return None
    before = head.split("(", 1)[0]
    if re.search(r"__launch_bounds__\s*$|\b(alignas|decltype|noexcept|requires)\s*$", before):
        named = r"^.*?\b(__launch_bounds__|alignas|decltype|requires)\s*\([^()]*\)"
        rest = re.sub(named, "", head, count=1)
        return function_name(rest)
    name = re.search(r"(operator\s*\S{0,3}|[\w~]+(?:<[^()<> ]*>)?(?:::[\w~]+)*)\s*$", before)
    return re.sub(r"\s+", "", name.group(1)) if name else None


def is_member_initialiser(head):
    """Whether the brace after `head` opens the initialiser of a member: `A::A() : x_`{...}."""
    plain = outside_parentheses(head)
    colon = re.search(r"(?<!:):(?!:)", plain)
    return (
        bool(colon)
        and "(" in head
        and bool(re.search(r"[\w>]\s*$", plain[colon.end() :]))
        and (head.rstrip()[-1] != ")")
    )


def cpp_functions(text):
    """(name, first line, lines, head) of every function of a C++ text outside other functions;
    lambdas inside count with the function that holds them."""
    text = without_directives(without_comments(text, strings=False))
    text = re.sub(r"\b(?:public|private|protected)\s*:(?!:)", lambda m: blank(m.group()), text)
    found, head_start, position, depth = [], 0, 0, 0
    while position < len(text):
        letter = text[position]
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "{" and depth > 0:  # a default argument or a call's list
            position = closing_brace(text, position)
        elif letter == "{":
            head = text[head_start:position]
            stripped = without_templates(head.strip())
            if SCOPE.match(stripped) and not stripped.rstrip().endswith((")", "=")):
                head_start = position + 1
            else:
                end = closing_brace(text, position)
                if is_member_initialiser(stripped):
                    position = end
                else:
                    name = function_name(stripped)
                    if name:
                        start = head_start + len(head) - len(head.lstrip())
                        first = text.count("\n", 0, start) + 1
                        last = text.count("\n", 0, end) + 1
                        found.append((name, first, last - first + 1, stripped))
                    position = end
                    head_start = end + 1
        elif letter in ";}" and depth <= 0:
            head_start, depth = position + 1, 0
        position += 1
    return found


def closing_brace(text, opening):
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return len(text) - 1


def python_functions(text):
    """(name, first line, lines, "") of every function of a Python text, methods by their class."""
    found = []

    def walk(node, scope):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = ".".join(scope + [child.name])
                found.append((name, child.lineno, child.end_lineno - child.lineno + 1, ""))
            elif isinstance(child, ast.ClassDef):
                walk(child, scope + [child.name])

    walk(ast.parse(text), [])
    return found
