"""The thought before an answer, <think> ... </think>: templates of models that think cut it off an
answer, or open it in what generation begins with, or both.  The last answer of a conversation is
what a model is to write behind that beginning, so its thought is put back here."""
import re

from errors import RowError

OPEN, CLOSE = "<think>", "</think>"
TAG = re.compile("</?think>")
OPENED, CLOSED = re.compile(OPEN + r"\s*\Z"), re.compile(CLOSE + r"\s*\Z")


class LostThought(RowError):
    def __init__(self, number):
        super().__init__(
            f"the chat template leaves out the thinking in the content of message {number}; a"
            " template that keeps it (--chat-template FILE) renders it; else take it out of the"
            " rows"
        )


def whole(text, prompt, message, number):
    """(text, whether the answer has no thought but gets an empty one) of a conversation that ends
    with the answer `message`, the one of that number: `text` as the template renders it, and with
    the thought where that lacks it.  prompt: the messages before, with what generation begins with.

    Errors: RowError of a thought that the prompt rules out, or that has no place."""
    content, opened = message.get("content") or "", OPENED.search(prompt)
    if CLOSED.search(prompt):
        refuse_thought(content, message, number)
        return text, False  # what the content has is an empty thought, as the prompt does
    opened = opened[0] if opened else ""
    head = prompt[: len(prompt) - len(opened)]
    rest = text[len(head) :]
    if not text.startswith(head) or (
        rest.startswith(opened) and (CLOSE not in content or CLOSE in rest)
    ):
        return text, False
    begun = head + opened
    if opened and rest.startswith(OPEN):
        return begun + rest.removeprefix(OPEN).lstrip("\n"), False
    if opened and CLOSE in rest.removeprefix(CLOSE):
        return begun + rest, False
    rest = rest.removeprefix(CLOSE) if opened else rest
    line = "\n" if opened.endswith("\n") else ""
    if opened and (told := message.get("reasoning_content")):
        if CLOSE in content:
            raise RowError(
                f"message {number} has </think> in its content and a thought beside it; leave"
                " one out"
            )
        rest = rest.lstrip("\n") if line else rest
        return f"{begun}{told.strip() if line else told}{line}{CLOSE}{line * 2}{rest}", False
    if CLOSE not in content:
        return f"{begun}{line}{CLOSE}{line * 2}{rest}", True
    return begun + cut_off(content, rest, opened, number) + rest, False


def cut_off(content, rest, opened, number):
    """What the template cuts off the content, without what the prompt opens."""
    places = [place.end() for place in re.finditer(CLOSE, content)]
    for at in reversed(places):
        answer = content[at:]
        if not rest.startswith(answer):
            if not rest.startswith(answer.strip()):
                continue
            at += len(answer) - len(answer.lstrip())  # white space that the template strips
        thought = content[:at]
        if opened and thought.lstrip().startswith(OPEN):
            thought = thought.lstrip().removeprefix(OPEN).removeprefix(opened.removeprefix(OPEN))
        return thought
    raise LostThought(number)


def opens_without_end(message, number):
    """Whether an answer opens a thought behind its beginning and does not end it; text may speak of
    <think> there.  Errors: RowError where the answer begins with such a thought."""
    behind = (message.get("content") or "").rpartition(CLOSE)[2]
    if behind.lstrip().startswith(OPEN):
        raise RowError(
            f"message {number} opens a thought with {OPEN} that has no {CLOSE}, and a model would"
            " learn to end its turn inside one; end the thought, or leave the row out with"
            " --bad-rows skip"
        )
    return OPEN in behind


def refuse_lost_part(message, number, answer):
    """Errors: RowError of a content with a thought, of which the answer as rendered lacks a part:
    templates keep one thought and what is behind the last one."""
    content, at = message.get("content") or "", 0
    for part in TAG.split(content) if CLOSE in content else ():
        if (found := answer.find(part.strip(), at)) < 0:
            raise RowError(
                f"the chat template leaves out {part.strip()[:40]!r} of the content of message"
                f" {number}, which has more than one thought or text before it; write one thought"
                " in front of the answer, or leave the row out with --bad-rows skip"
            )
        at = found + len(part.strip())


def thought_of(content):
    return content.rpartition(CLOSE)[0].replace(OPEN, "").strip()


def refuse_thought(content, message, number):
    """Errors: RowError of an answer with a thought behind a prompt that rules thoughts out."""
    if thought_of(content) or message.get("reasoning_content", "").strip():
        raise RowError(
            f"message {number} holds thinking, but what the chat template begins its answer with"
            f" ends in {CLOSE}, which rules it out; turn thinking on (--template-arg"
            " enable_thinking=true or thinking=true, as the template calls it), or take it out of"
            " the rows"
        )
