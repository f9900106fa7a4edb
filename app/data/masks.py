"""Samples as tokens with a loss mask: where an answer begins and ends in a rendered conversation,
and which tokens that makes.

A span comes from the template's generation marks where it has them; else an answer begins where
the messages before it end, rendered with the generation prompt, and ends where the messages up to
it do.  For that the rendered beginning must be a beginning of the whole."""
from array import array
from dataclasses import dataclass, field

import numpy as np

import thinking
from conversation import REASONING, Chat
from errors import DataError, RowError
from template import CLOSE, OPEN

ROLES = ("text", "system", "user", "assistant", "tool", "other")
USUAL_ROLES = {*ROLES, "developer"} - {"text", "other"}


@dataclass
class Rendered:
    """Text of a sample with spans in characters."""

    sample: object
    text: str
    loss: list  # (begin, end)
    begins: list  # (begin, role), ascending, the first at 0


@dataclass
class Document:
    tokens: np.ndarray  # int32
    mask: np.ndarray  # uint8, 1 where a token carries loss
    begins: list  # (token, role)
    loss: list  # (begin, end) in tokens


class NotAPrefix(RowError):
    """The place of an answer is not known, or it is not what it was when it was asked."""

    def __init__(self, reason):
        self.reason = reason
        super().__init__(
            reason + "; --turns makes every answer a sample of its own, rendered as it was asked"
        )


def other_beginning(message, part, whole):
    same = next((i for i, (a, b) in enumerate(zip(part, whole)) if a != b), len(whole))
    return NotAPrefix(
        f"the chat template renders the conversation before message {message} otherwise when"
        f" more follows (...{part[max(0, same - 20) : same + 20]!r} against"
        f" ...{whole[max(0, same - 20) : same + 20]!r}), so the answer's place is not known"
    )


@dataclass
class Encoder:
    """Renders and encodes.  loss_on: roles that carry loss; turns: what to do where a beginning
    is no beginning of the whole; chat: a ChatTemplate or None."""

    tokenizer: object
    chat: object
    loss_on: tuple = ("assistant",)
    turns: bool = False
    eos: int = None
    counters: dict = field(default_factory=dict)
    roles: set = field(default_factory=set)  # those of loss_on that were met

    def __post_init__(self):
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.special = tuple(t.content for t in added if t.special)
        unknown = getattr(self.tokenizer.model, "unk_token", None)
        self.unknown = self.tokenizer.token_to_id(unknown) if unknown else None
        self.special_ids = {self.tokenizer.token_to_id(content) for content in self.special}
        # A vocabulary of characters without an unknown token leaves out what it lacks.
        self.drops_nul = not self.tokenizer.encode("\0", add_special_tokens=False).ids

    def count(self, what, number=1):
        self.counters[what] = self.counters.get(what, 0) + number

    # Rendering

    def rendered(self, sample):
        """List of Rendered: one, or one an answer where turns are rendered on their own.  Errors:
        RowError of a text that would lose its NUL characters."""
        made = self.rendered_sample(sample)
        if self.drops_nul and (lost := sum(one.text.count("\0") for one in made)):
            raise RowError(
                f"{lost} NUL character{'s' if lost > 1 else ''} (U+0000), for which the tokenizer"
                " has no token: take them out of the text, or leave the row out with --bad-rows"
                " skip"
            )
        return made

    def rendered_sample(self, sample):
        if not isinstance(sample, Chat):
            self.meet(("assistant",))  # a text, or its completion, is what the model itself writes
            begins = [(0, "user"), (sample.prompt, "assistant")] if sample.prompt else [(0, "text")]
            return [Rendered(sample, sample.text, [(sample.prompt, len(sample.text))], begins)]
        self.meet(m["role"] for m in sample.messages)
        self.count_unusual_roles(sample)
        if self.chat is None:
            raise DataError(
                "the rows are conversations, but the tokenizer's folder has no chat template;"
                " --chat-template FILE names one"
            )
        if self.chat.marks(sample.tools) and any(
            mark in (m.get(key) or "")
            for m in sample.messages
            for key in ("content", "reasoning_content")
            for mark in (OPEN, CLOSE)
        ):
            raise RowError("a message holds U+FDD0 or U+FDD1, which no text may hold")
        if sample.tools and not self.chat.reads_tools():
            self.count("conversations with tools, which the chat template does not read")
        sample = self.without_skipped_calls(sample)
        self.refuse_open_thoughts(sample)
        self.refuse_lost_reasoning(sample)
        if self.chat.marks(sample.tools) and not self.asked_of_others(sample):
            return [self.by_marks(sample)]
        try:
            return [self.by_prefixes(sample)]
        except NotAPrefix:
            if not self.turns:
                raise
            self.count("conversations rendered turn by turn")
            return self.by_turns(sample)

    def without_skipped_calls(self, chat):
        """The conversation without messages of nothing but tool calls which the template skips.
        Errors: RowError of other messages whose tool calls it does not render."""
        lost = self.lost_calls(chat)
        if not lost:
            return chat
        messages = chat.messages
        kept = [i for i in range(len(messages)) if i not in lost]
        left = Chat([messages[i] for i in kept], [chat.weights[i] for i in kept], chat.tools)
        said = [messages[i].get(k) for i in lost for k in ("content", "reasoning_content")]
        if kept and not any(said) and self.render_alike(chat, left):
            self.count("messages of tool calls alone, which the chat template skips", len(lost))
            return left
        raise RowError(
            f"the chat template renders nothing of the tool calls of message {lost[0] + 1}; a"
            " template that knows tool calls (--chat-template FILE), calls written into the"
            " content, or a content of null where the template asks for it keep them"
        )

    def render_alike(self, one, other):
        try:
            texts = [self.chat.plain(chat.messages, chat.tools) for chat in (one, other)]
        except RowError:
            return False
        return texts[0] == texts[1]

    def lost_calls(self, chat):
        """Messages whose tool calls the template does not render, seen by other names of their
        functions."""
        messages, named = list(chat.messages), {}
        for i, m in enumerate(messages):
            if m["role"] == "assistant" and m.get("tool_calls"):
                calls, name = m["tool_calls"], f"call_of_message_{i}_"
                renamed = [renamed_call(c, name) for c in calls] if isinstance(calls, list) else []
                if renamed and None not in renamed:
                    messages[i], named[i] = {**m, "tool_calls": renamed}, name
        if not named:
            return []
        try:
            text = self.chat.plain(messages, chat.tools)
        except RowError:  # by the names that stand here, or as the sample itself will
            return []
        return [i for i, name in named.items() if name not in text]

    def refuse_lost_reasoning(self, chat):
        """Errors: RowError where the template does not render reasoning, seen by another text in
        its last place, as the last turn: of earlier turns templates leave it out on purpose."""
        thought = [i for i, m in enumerate(chat.messages) if m.get("reasoning_content")]
        if not thought:
            return
        last, other = thought[-1], "reasoning_of_this_message"
        changed = {name: other for name in REASONING if name in chat.messages[last]}
        messages = [*chat.messages[:last], {**chat.messages[last], **changed}]  # no turn behind it
        try:
            lost = other not in self.whole(messages, chat.tools)[0]
        except RowError:  # as the sample itself will, where that turn carries loss
            return
        if lost:
            raise RowError(
                f"the chat template renders nothing of the reasoning of message {last + 1}; a"
                " template that reads reasoning_content (--chat-template FILE) or reasoning written"
                " into the content keep it; else take it out of the rows"
            )

    def refuse_open_thoughts(self, chat):
        """Errors: RowError of an answer that begins with a thought which does not end.  Counts
        thoughts that are opened later."""
        for i, message in enumerate(chat.messages):
            answer = message["role"] == "assistant" and self.wanted(chat, i)
            if answer and self.chat.thinks(chat.tools):
                if thinking.opens_without_end(message, i + 1):
                    self.count("answers with <think> behind their beginning and no </think>")

    def refuse_lost_thought(self, chat, i, answer):
        """Errors: RowError of a thought in the content of a message that has none, or not all of
        it, as rendered."""
        if thinking.CLOSE in (chat.messages[i].get("content") or ""):
            if thinking.CLOSE not in answer:
                raise thinking.LostThought(i + 1)
            thinking.refuse_lost_part(chat.messages[i], i + 1, answer)

    def count_unusual_roles(self, chat):
        """Names that are misspelt carry no loss, so they are told; a few of them."""
        for role in (m["role"] for m in chat.messages):
            if role not in USUAL_ROLES and role not in self.loss_on:
                what = f"messages of role {role[:20]!r}, which carries no loss"
                if what not in self.counters and len(self.counters) > 20:
                    what = "messages of other roles that carry no loss"
                self.count(what)

    def meet(self, roles):
        """Keeps which roles of loss_on are there, so that the others can be told."""
        self.roles.update(role for role in roles if role in self.loss_on)

    def wanted(self, chat, i):
        weight = chat.weights[i]
        return chat.messages[i]["role"] in self.loss_on if weight is None else bool(weight)

    def asked_of_others(self, chat):
        """Whether a message that is no answer carries loss, which no mark of the template shows."""
        return any(
            self.wanted(chat, i) and m["role"] != "assistant" for i, m in enumerate(chat.messages)
        )

    def by_marks(self, chat):
        text, spans = self.chat.spans(chat.messages, chat.tools)
        answers = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
        if len(answers) != len(spans):
            raise RowError(
                f"the chat template marks {len(spans)} answers of {len(answers)} messages of the"
                " assistant"
            )
        begins = [] if answers[:1] == [0] else [(0, chat.messages[0]["role"])]
        for i, (begin, end) in zip(answers, spans):
            begins.append((begin if begins else 0, "assistant"))
            if i + 1 < len(chat.messages) and end < len(text):
                begins.append((end, chat.messages[i + 1]["role"]))
        loss = [span for i, span in zip(answers, spans) if self.wanted(chat, i)]
        if answers and self.wanted(chat, answers[-1]):
            before = spans[-2][1] if len(spans) > 1 else 0
            self.refuse_lost_thought(chat, answers[-1], text[before : spans[-1][1]])
        self.count("conversations masked by the template's generation marks")
        return Rendered(chat, text, loss, begins)

    def by_prefixes(self, chat):
        messages, count = chat.messages, len(chat.messages)
        if self.wanted(chat, count - 1):
            text, thoughtless = self.whole(messages, chat.tools)
        else:
            text, thoughtless = self.chat.plain(messages, chat.tools), False
        # ends[i]: where the messages before i end, None where it is not known and not needed.
        ends = [0] + [None] * (count - 1) + [len(text)]
        begins, loss = [], []
        for i in range(1, count):
            needed = self.wanted(chat, i - 1) or (
                self.wanted(chat, i) and messages[i]["role"] != "assistant"
            )
            if needed or messages[i]["role"] != "assistant":
                ends[i] = self.end_of(chat, i, False, text, needed)
        for i in range(count):
            begin, wanted = ends[i], self.wanted(chat, i)
            if messages[i]["role"] == "assistant":
                begin = self.end_of(chat, i, True, text, wanted)
            if begin is None:
                continue
            if wanted:
                loss.append((begin, self.without_space(text, begin, ends[i + 1])))
                self.refuse_cut_thought(chat, i, text[slice(*loss[-1])])
                thinking.refuse_lost_part(messages[i], i + 1, text[slice(*loss[-1])])
            begins.append((begin if begins else 0, messages[i]["role"]))
        self.count("conversations masked by rendered prefixes")
        self.count_thoughtless(thoughtless)
        return Rendered(chat, text, loss, begins)

    def whole(self, messages, tools):
        """(text, whether its last answer gets an empty thought) of a conversation, with the thought
        of the last answer where the template cuts it off."""
        text = self.chat.plain(messages, tools)
        # Only a template that knows of thoughts cuts them off, and rendering costs.
        answers = messages[-1]["role"] == "assistant" and self.chat.thinks(tools)
        if not answers or self.chat.marks(tools):
            return text, False
        prompt = self.chat.plain(messages[:-1], tools, True)
        return thinking.whole(text, prompt, messages[-1], len(messages))

    def refuse_cut_thought(self, chat, i, answer):
        """Errors: NotAPrefix of an earlier answer that the template cuts its thought off."""
        message = chat.messages[i]
        content = message.get("content") or ""
        cut = thinking.CLOSE in content and thinking.CLOSE not in answer
        if i + 1 == len(chat.messages):  # an empty one may stand in the prompt
            cut = cut and bool(thinking.thought_of(content))
        if not cut and (told := message.get("reasoning_content")):
            # Other templates may write reasoning in a form of their own.
            cut = self.chat.thinks(chat.tools) and told.strip() not in answer
        if cut:
            raise NotAPrefix(
                f"the chat template leaves out the thinking of message {i + 1}, which is not the"
                " last one"
            )

    def count_thoughtless(self, thoughtless):
        if thoughtless:
            self.count("answers without a thought, which the prompt opens: an empty one is learnt")

    def end_of(self, chat, i, prompt, whole, needed):
        """Where the messages before i end in the whole.  Errors: NotAPrefix, if it is needed."""
        if i == 0 and not prompt:
            return 0
        try:
            part = self.chat.plain(chat.messages[:i], chat.tools, prompt)
        except RowError:
            if needed:
                raise
            return None
        if not whole.startswith(part):
            if needed:
                raise other_beginning(i, part, whole)
            return None
        return len(part)

    def without_space(self, text, begin, end):
        """The end of an answer: what templates put after the end-of-turn token is not learnt."""
        shorter = text[begin:end].rstrip()
        return begin + len(shorter) if shorter.endswith(self.special) else end

    def by_turns(self, chat):
        if self.asked_of_others(chat):
            raise RowError("turn by turn, only answers of the assistant can carry loss")
        made = []
        for i, message in enumerate(chat.messages):
            if message["role"] == "assistant" and self.wanted(chat, i):
                turn = Chat(chat.messages[: i + 1], [0] * i + [1], chat.tools)
                text, thoughtless = self.whole(turn.messages, chat.tools)
                self.count_thoughtless(thoughtless)
                begin = self.end_of(turn, i, True, text, True)
                span = (begin, self.without_space(text, begin, len(text)))
                thinking.refuse_lost_part(message, i + 1, text[slice(*span)])
                begins = [(0, chat.messages[0]["role"]), (begin, "assistant")][0 if begin else 1 :]
                made.append(Rendered(turn, text, [span], begins))
        return made

    # Encoding

    def encoded(self, rendered):
        """Documents of a list of Rendered, in its order."""
        documents = [None] * len(rendered)
        for chats in (True, False):
            chosen = [i for i, r in enumerate(rendered) if isinstance(r.sample, Chat) == chats]
            # A chat template writes special tokens itself.
            texts = [rendered[i].text for i in chosen]
            made = self.tokenizer.encode_batch(texts, add_special_tokens=not chats)
            for i, encoding in zip(chosen, made):
                documents[i] = self.document(rendered[i], encoding, chats)
        return documents

    def document(self, rendered, encoding, is_chat):
        # By way of an array: a third of the time that NumPy takes over a list.
        tokens = np.frombuffer(array("i", encoding.ids), np.int32)
        text, count = rendered.text, len(tokens)
        if self.unknown is not None and (lost := np.count_nonzero(tokens == self.unknown)):
            self.count("tokens that stand for what the tokenizer does not know", int(lost))
        if is_chat or rendered.sample.prompt:
            spans = [tokens_of(encoding, text, b, e, self.special_ids) for b, e in rendered.loss]
            loss = [span for span in spans if span]
        else:
            loss = [(0, count)]
        begins = [(first_token(encoding, text, b) if b else 0, r) for b, r in rendered.begins]
        if not is_chat and self.eos is not None and (count == 0 or tokens[-1] != self.eos):
            tokens = np.append(tokens, np.int32(self.eos))
            if loss:
                loss[-1] = (loss[-1][0], count + 1)
        elif not is_chat and loss:
            loss[-1] = (loss[-1][0], count)  # the end token that the tokenizer itself adds
        mask = np.zeros(len(tokens), np.uint8)
        for begin, end in loss:
            mask[begin:end] = 1
        return Document(tokens, mask, begins, loss)


def renamed_call(call, name):
    """The tool call with another name of its function; None where it names none."""
    if not isinstance(call, dict):
        return None
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": {**function, "name": name}} if "name" in function else None
    return {**call, "name": name} if "name" in call else None


def first_token(encoding, text, position):
    """First token that reaches beyond the characters before `position`."""
    for at in range(position, len(text)):
        if (token := encoding.char_to_token(at)) is not None:
            return token
    return len(encoding)


def tokens_of(encoding, text, begin, end, special):
    """Tokens that hold any of the characters [begin, end); None where there are none."""
    first, last = first_token(encoding, text, begin), first_token(encoding, text, end)
    # A special token of the header stays its own, also where it takes white space behind it.
    if first < len(encoding) and encoding.ids[first] in special:
        first += encoding.token_to_chars(first)[0] < begin
    # A token may hold characters of both sides; then it belongs to the answer.
    while last < len(encoding) and (place := encoding.token_to_chars(last)) and place[0] < end:
        last += 1
    return (first, last) if first < last else None
