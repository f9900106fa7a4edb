"""Chat templates of Hugging Face tokenizers, with what they expect of their surroundings."""
import datetime
import json
import os

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from errors import DataError, RowError, refuse_irregular, refuse_pointer

# Stand around what {% generation %} marks while a template renders; no text may hold them, since
# Unicode gives them no character.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
OWN_VALUES = ("messages", "tools", "add_generation_prompt")  # of every rendering
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# Stands between a template and the one that is for samples with tools.
FOR_TOOLS = "\n{# For samples with tools: #}\n"


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: what the model itself writes."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("marked")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    @staticmethod
    def marked(caller):
        return OPEN + caller() + CLOSE


def environment(date):
    """As Transformers sets it up."""

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = refuse
    day = datetime.datetime.fromisoformat(date)
    made.globals["strftime_now"] = day.strftime
    return made


def compiled(made, source):
    try:
        template = made.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"chat template, line {error.lineno}: {error.message}") from error
    # A plain dictionary: making a context of the environment's chain costs as much as a render.
    template.globals = dict(template.globals)
    return template


class ChatTemplate:
    """Renders conversations.  Errors: RowError with what the template says."""

    def __init__(self, source, tokens, arguments, date):
        made, (source, _, for_tools) = environment(date), source.partition(FOR_TOOLS)
        self.sources = {False: source, True: for_tools or source}  # by whether there are tools
        self.templates = {tools: compiled(made, one) for tools, one in self.sources.items()}
        self.values = {"documents": None, **tokens, **arguments}

    def marks(self, tools):
        """Whether the template marks answers."""
        return "endgeneration" in self.sources[bool(tools)]

    def reads_tools(self):
        """Whether the template for samples with tools names them."""
        return "tools" in self.sources[True]

    def thinks(self, tools):
        """Whether the template knows of thoughts."""
        return "think>" in self.sources[bool(tools)]

    def render(self, messages, tools=None, prompt=False):
        """Text of the messages; prompt: with what comes before an answer."""
        try:
            return self.rendered(messages, tools, prompt)
        except Exception as error:  # a template is a program: any error may come of it
            # Some tell calls by a content that is none, and fail where there is no content.
            stated = [m if "content" in m else dict(m, content=None) for m in messages]
            try:
                if stated != messages:
                    return self.rendered(stated, tools, prompt)
            except Exception:
                pass
            raise RowError(f"the chat template refuses: {error}") from error

    def rendered(self, messages, tools, prompt):
        """What Template.render does, without copies of the values."""
        template = self.templates[bool(tools)]
        values = dict(self.values, messages=messages, tools=tools, add_generation_prompt=prompt)
        return "".join(template.root_render_func(template.new_context(values)))

    def plain(self, messages, tools=None, prompt=False):
        """The same without marks."""
        text = self.render(messages, tools, prompt)
        return text.replace(OPEN, "").replace(CLOSE, "") if self.marks(tools) else text

    def spans(self, messages, tools=None):
        """(text, spans): what the template marks, in characters."""
        parts = self.render(messages, tools).split(OPEN)
        text, found = parts[0], []
        for part in parts[1:]:
            inside, mark, outside = part.partition(CLOSE)
            if not mark or CLOSE in outside:
                raise RowError("the chat template nests {% generation %}")
            found.append((len(text), len(text) + len(inside)))
            text += inside + outside
        return text, found


def read_json(path):
    """The object in a file of a tokenizer's folder; {} where there is none."""
    if not os.path.isfile(path):
        return {}
    with open(path, "rb") as stream:
        raw = stream.read()
    refuse_pointer(path, raw)
    try:
        read = json.loads(raw)
    except ValueError as error:
        raise DataError(f"{path}: no JSON: {error}") from error
    if not isinstance(read, dict):
        raise DataError(f"{path}: holds a {type(read).__name__} where an object {{...}} belongs")
    return read


def find(folder, file=None):
    """(source, special tokens) of a tokenizer's folder, or the source of `file`: the template
    `default`, and after FOR_TOOLS the one named tool_use; None where there is none."""
    config = read_json(os.path.join(folder, "tokenizer_config.json"))
    # Older folders keep names of special tokens in a file of their own, as Transformers reads them.
    older = "added_tokens_decoder" not in config
    named = read_json(os.path.join(folder, "special_tokens_map.json")) if older else {}
    tokens = {}
    for name, value in [*config.items(), *named.items()]:
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    if file:
        return read_template(file), tokens
    named = template_files(folder) or named_templates(config.get("chat_template"), folder)
    source = named.get("default")
    if source is None and named:
        raise DataError(
            f"{folder} has the chat templates {', '.join(named)} and none named default;"
            " --chat-template FILE names one"
        )
    return source + FOR_TOOLS + named["tool_use"] if "tool_use" in named else source, tokens


def read_template(path):
    """The template of a file; also of a JSON file that holds it under chat_template."""
    refuse_irregular(path, "copy the template to a file")
    try:
        with open(path, encoding="utf-8-sig") as stream:
            source = stream.read()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a folder, not the file of a template") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: no UTF-8: {error.reason} at byte {error.start}") from error
    refuse_pointer(path, source.encode())
    if not path.endswith(".json"):
        return source
    held = read_json(path).get("chat_template")
    if not isinstance(held, str):
        raise DataError(f"{path}: no text is under chat_template")
    return held


def template_paths(folder):
    """{name: path} of a folder's *.jinja."""
    path, more = (
        os.path.join(folder, name) for name in ("chat_template.jinja", "additional_chat_templates")
    )
    found = {"default": path} if os.path.isfile(path) else {}
    for name in sorted(os.listdir(more)) if os.path.isdir(more) else []:
        if name.endswith(".jinja"):
            found[name.removesuffix(".jinja")] = os.path.join(more, name)
    return found


def template_files(folder):
    """{name: source} of a folder's *.jinja, which go before tokenizer_config.json."""
    return {name: read_template(where) for name, where in template_paths(folder).items()}


def files_read(folder, file=None):
    """Paths of all that is read of a tokenizer's folder, and of `file`, a template."""
    found = [os.path.join(folder, name) for name in TOKENIZER_FILES]
    found += [*template_paths(folder).values(), *([file] if file else [])]
    return [path for path in found if os.path.isfile(path)]


def named_templates(value, folder):
    """{name: source} of the chat_template of tokenizer_config.json."""
    if value is None or isinstance(value, str):
        return {"default": value} if value else {}
    try:
        return {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{folder}/tokenizer_config.json: chat_template is neither text nor a list of"
            ' {"name": ..., "template": ...}; --chat-template FILE goes in its place'
        ) from error
