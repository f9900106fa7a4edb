"""Rows as samples: conversations in the layouts that are in use, prompts with completions, text."""
import json
from dataclasses import dataclass

import strict_json
from errors import RowError
from tools import calls_of, tools_of

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}
KNOWN_ROLES = {*ROLES, *ROLES.values(), "system", "developer"}
PROMPT_ROLES = ("user", "system", "developer")
CONVERSATIONS = ("messages", "conversations", "conversation")
# Names of the text that an answer was thought out in.
REASONING = ("reasoning_content", "thinking", "reasoning")
INSTRUCTIONS = (("input", "output"), ("context", "response"))  # Alpaca's columns, Dolly's


@dataclass
class Chat:
    """messages[i] carries loss where weights[i] is 1, and by its role where it is None."""

    messages: list
    weights: list
    tools: list = None


@dataclass
class Text:
    """Loss lies on what follows the first `prompt` characters."""

    text: str
    prompt: int = 0


class SameAnswers(RowError):
    """A pair of which nothing can be learnt."""


def sample(row, key=None):
    """The sample of a row.  Errors: RowError where the row has no layout that is known."""
    if isinstance(row, str):
        return Text(row)
    if isinstance(row, list):
        return chat(row, {})
    if not isinstance(row, dict):
        raise RowError(f"a row is a {type(row).__name__}, not an object")
    if key is not None:
        if row.get(key) is None:
            raise RowError(f"the row has no {key!r}; it has {', '.join(map(repr, row))}")
        value = listed_in_text(row[key])
        return chat(value, row) if isinstance(value, list) else text(value, key)
    for name in CONVERSATIONS:
        if row.get(name) is not None:
            return chat(listed_messages(row[name], name), row)
    if row.get("completion") is not None and row.get("prompt") is not None:
        refuse_second_prompt(row["completion"])
        return completion(row["prompt"], row["completion"], row)
    for asked_of, answer in INSTRUCTIONS:
        if row.get("instruction") is not None and row.get(answer) is not None:
            return instruction(row, asked_of, answer)
    if row.get("text") is not None:
        return text(row["text"], "text")
    if row.get("chosen") is not None and row.get("rejected") is not None:
        raise RowError(f"the row has {columns(row)}; --pairs reads rows of preferences, for DPO")
    raise RowError(
        f"the row has {columns(row)}; known are messages or"
        " conversations, prompt with completion, instruction with output, and text; --key names"
        " another column"
    )


def columns(row):
    return ", ".join(f"{k!r}{' (empty)' * (v is None)}" for k, v in row.items()) or "nothing"


def listed_messages(value, name):
    """A list of messages, which tables often hold as JSON."""
    if isinstance(value, str):
        try:
            value = strict_json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{name!r} holds text that is no JSON: {error}") from error
    if not isinstance(value, list):
        raise RowError(f"{name!r} holds a {type(value).__name__}, not a list of messages")
    return value


def listed_in_text(value):
    """The messages that a text holds as JSON; the text itself where it holds none."""
    try:
        listed = json.loads(value) if isinstance(value, str) and value[:1] == "[" else None
    except (ValueError, RecursionError):
        return value
    messages = listed and all(isinstance(m, dict) and m.keys() & {"role", "from"} for m in listed)
    return listed if messages else value


def pair(row):
    """(chosen, rejected) samples of a row of preferences: prompt, chosen and rejected as texts or
    as lists of messages; what both lists begin with, or both texts where there is no prompt, is the
    prompt."""
    if not isinstance(row, dict) or row.get("chosen") is None or row.get("rejected") is None:
        raise RowError("a row of preferences has chosen, rejected and usually prompt")
    chosen, rejected, prompt = (
        listed_in_text([v] if isinstance(v, dict) else v)
        for v in (row["chosen"], row["rejected"], row.get("prompt") or None)
    )
    if type(chosen) is not type(rejected) or not isinstance(chosen, (str, list)):
        raise RowError("chosen and rejected must both be text or both be lists of messages")
    if alike(chosen, rejected):
        raise SameAnswers("both answers of a row of preferences are the same")
    if prompt is None or (isinstance(chosen, list) and begins_with(chosen, rejected, prompt)):
        same = common(chosen, rejected)
        if same and same in (len(chosen), len(rejected)):
            raise RowError(
                "an answer of a row of preferences is the beginning of the other one, so none of it"
                " is left behind what both begin with; put the prompt into a column of its own, and"
                " leave it out of the answers"
            )
        if same == 0:
            raise RowError("a row of preferences without a prompt")
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
    else:
        refuse_second_prompt(chosen)
        refuse_second_prompt(rejected)
        if isinstance(chosen, list) and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise RowError(f"the {name} answer of a row of preferences is empty")
    return completion(prompt, chosen, row), completion(prompt, rejected, row)


def alike(chosen, rejected):
    """Whether templates read the same in both answers."""
    if isinstance(chosen, str) or len(chosen) != len(rejected):
        return chosen == rejected
    return all(read(one) == read(other) for one, other in zip(chosen, rejected))


def common(chosen, rejected):
    """How much both begin with; of texts to the end of a word, as a token may hold a space and a
    word; of messages by what templates read, since sets put ids and scores beside it."""
    if isinstance(chosen, list):
        chosen, rejected = ([read(entry) for entry in answer] for answer in (chosen, rejected))
    least = min(len(chosen), len(rejected))
    same = next((i for i in range(least) if chosen[i] != rejected[i]), least)
    while isinstance(chosen, str) and same and not chosen[same - 1].isspace():
        same -= 1
    return same - (same > 0 and chosen[same - 1] == " ")


def read(entry):
    """What templates read of a message."""
    one = message(entry)[0]
    return [one.get(k) for k in ("role", "content", "name", "tool_calls", "reasoning_content")]


def begins_with(chosen, rejected, prompt):
    """Whether both lists of messages hold the row's prompt already, as UltraFeedback's; white space
    around it may differ."""
    shared = [spoken(entry) for entry in chosen[: common(chosen, rejected)]]
    if isinstance(prompt, list):
        asked = [spoken(entry) for entry in prompt]
        return 0 < len(asked) <= len(shared) and shared[: len(asked)] == asked
    return isinstance(prompt, str) and ("user", prompt.strip()) in shared


def spoken(entry):
    """(role, text) of a message."""
    one = message(entry)[0]
    return one["role"], (one.get("content") or "").strip()


def refuse_second_prompt(answer):
    """Errors: RowError of an answer, beside a prompt, that begins as a prompt does."""
    if isinstance(answer, list) and answer and (role := spoken(answer[0])[0]) in PROMPT_ROLES:
        raise RowError(
            f"beside the row's prompt, an answer begins with a message of the {role}, which is not"
            " the prompt's; take the prompt out of the answers, or leave the column prompt out"
        )


def text(value, key):
    if not isinstance(value, str):
        raise RowError(f"{key!r} holds a {type(value).__name__}, not text")
    return Text(value)


def completion(prompt, answer, row):
    if isinstance(prompt, str) and isinstance(answer, str):
        if row.get("system"):
            raise RowError(
                "the column system has no place beside a prompt and an answer that are texts; make"
                " them lists of messages, or leave the column out"
            )
        return Text(prompt + answer, len(prompt))
    if not (isinstance(prompt, list) and isinstance(answer, list)):
        raise RowError("prompt and completion must both be text or both be lists of messages")
    joined = chat(prompt + answer, row)
    given = len(joined.weights) - len(answer)  # with the system message of the row
    joined.weights[:given] = [0] * given
    return joined


def instruction(row, asked_of, answer):
    parts = {name: row.get(name) for name in ("instruction", asked_of)}
    for name, value in parts.items():
        if value is not None and not isinstance(value, str):
            raise RowError(f"{name} is a {type(value).__name__}, not text")
    asked = "\n\n".join(filter(None, parts.values()))
    messages = history(row.get("history"))
    messages.append({"role": "user", "content": asked})
    return chat([*messages, {"role": "assistant", "content": row[answer]}], row)


def history(value):
    """Messages of the earlier turns of a row with instruction: [[question, answer], ...]."""
    messages = []
    for turn in value if isinstance(value, list) else [value] if value else []:
        if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
            raise RowError("history is no list of [question, answer], both of them text")
        messages += ({"role": r, "content": t} for r, t in zip(("user", "assistant"), turn))
    return messages


def chat(listed, row):
    messages, weights = [], []
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise RowError(f"the column system holds a {type(system).__name__}, not text")
    if system and not has_system(listed, system):
        messages.append({"role": "system", "content": system})
        weights.append(None)
    for entry in listed:
        one, weight = message(entry)
        messages.append(one)
        weights.append(weight)
    if not messages:
        raise RowError("a conversation without messages")
    return Chat(messages, weights, tools_of(row.get("tools")))


def has_system(listed, system):
    """Whether the messages begin with the system message of the row's column.  Errors: RowError
    where they begin with another one."""
    role, content = spoken(listed[0]) if listed else (None, None)
    if role == "system" and content != system.strip():
        raise RowError(
            "the column system and the first of the messages are two system messages; leave one out"
        )
    return role == "system"


def role_of(name):
    """The usual name of a role; one that is not known keeps its own."""
    if name in KNOWN_ROLES and name not in ROLES:
        return name
    role = name.strip().lower()
    return ROLES.get(role, role if role in KNOWN_ROLES else name.strip())


def message(entry):
    """(message, weight) in the form that templates expect."""
    if not isinstance(entry, dict):
        raise RowError(f"a message is a {type(entry).__name__}, not an object")
    # Parquet gives every message every column of any; templates ask whether the content is none.
    one = {k: v for k, v in entry.items() if v is not None or k == "content"}
    if "role" not in one and "from" in one:
        one["role"] = one.pop("from")
    if one.get("content") is None and "value" in one:
        one["content"] = one.pop("value")
    if not isinstance(one.get("role"), str):
        raise RowError("a message without role (or from)")
    one["role"] = role_of(one["role"])
    weight = one.pop("weight", None)
    if weight not in (None, 0, 1):
        raise RowError(f"weight {weight!r}: a loss mask holds 0 or 1 alone")
    if "tool_calls" in one or "function_call" in one:
        calls = calls_of(one)
        one = {k: v for k, v in one.items() if k not in ("tool_calls", "function_call")}
        if calls:
            one["tool_calls"] = calls
    if "content" not in one and "tool_calls" not in one:
        if not entry.keys() & {"value", *REASONING}:
            raise RowError(f"a message without content (or value); it has {columns(entry)}")
    content = one.get("content")
    if isinstance(content, list):
        one["content"] = "".join(map(text_of_part, content))
    elif content is None and one.get("tool_calls"):
        one.pop("content", None)  # as Transformers 5 gives it: templates would write the word None
    elif content is None:
        one["content"] = ""
    elif content is not None and not isinstance(content, str):
        raise RowError(f"content is a {type(content).__name__}, not text")
    return with_reasoning(one), None if weight is None else int(weight)


def text_of_part(part):
    """Text of a part of a content, {"type": "text", "text": ...}; chat templates write parts one
    after the other.  Errors: RowError of a part that is no text, such as an image."""
    told = part.get("text") if isinstance(part, dict) else None
    if isinstance(told, str) and part.get("type") in (None, "text"):
        return told
    kind = part.get("type") if isinstance(part, dict) else None
    what = f"of type {kind!r}" if kind else f"that is a {type(part).__name__}"
    what = "of type 'text' whose text is none" if kind == "text" else what
    raise RowError(
        f"a message holds a part {what}, that is no text, which is all that is trained on; take"
        " such parts out, or leave their rows out with --bad-rows skip"
    )


def with_reasoning(one):
    """The message with its reasoning under the names that templates read, as Transformers 5 gives
    it.  Errors: RowError of reasoning of which a part would be lost."""
    told = {name: one[name] for name in REASONING if one.get(name) not in (None, "")}
    if not told:
        return {k: v for k, v in one.items() if k not in REASONING}
    name, reasoning = next(iter(told.items()))
    if not isinstance(reasoning, str):
        raise RowError(f"{name} of a message is a {type(reasoning).__name__}, not text")
    if any(other != reasoning for other in told.values()):
        raise RowError(
            f"a message has {' and '.join(told)}, which differ, and templates read one; leave the"
            " others out"
        )
    begun, close, _ = (one.get("content") or "").partition("</think>")
    if close and begun.lstrip().startswith("<think>"):  # templates would write both
        if begun.lstrip().removeprefix("<think>").strip() != reasoning.strip():
            raise RowError(
                f"a message has {name} and another thought in its content; leave one out"
            )
        return {k: v for k, v in one.items() if k not in REASONING}
    return {**one, "thinking": reasoning, "reasoning_content": reasoning}
