"""Samples longer than the limit: dropped, cut, or split so that every answer keeps its prompt."""
import numpy as np

from conversation import Chat
from errors import RowError
from masks import Document

PROMPT_ROLES = ("system", "developer")


def clipped(document, count):
    """The first `count` tokens."""
    return Document(
        document.tokens[:count],
        document.mask[:count],
        [(b, r) for b, r in document.begins if b < count],
        [(b, min(e, count)) for b, e in document.loss if b < count],
    )


class Cutter:
    """Makes documents of at most max_tokens (0: any length) from rendered samples."""

    def __init__(self, encoder, max_tokens, long):
        self.encoder, self.max_tokens, self.long = encoder, max_tokens, long
        self.count = encoder.count

    def documents(self, samples):
        """Documents of samples, a list for each, with those left out counted."""
        rendered = [self.encoder.rendered(sample) for sample in samples]
        encoded = iter(self.encoder.encoded([r for some in rendered for r in some]))
        made = []
        for some in rendered:
            fitting = []
            for one in some:
                fitting += self.fitted(one, next(encoded))
            made.append(fitting)
        return made

    def fitted(self, rendered, document):
        """Pieces of one document that fit and carry loss."""
        if len(document.tokens) == 0:
            self.count("empty samples left out")
            return []
        if not self.max_tokens or len(document.tokens) <= self.max_tokens:
            return self.with_loss([document])
        if self.long == "refuse":
            raise RowError(
                f"{len(document.tokens)} tokens are above --max-tokens {self.max_tokens}"
            )
        self.count(f"samples above {self.max_tokens} tokens")
        if self.long == "drop":
            self.count("samples dropped because they are too long")
            return []
        if isinstance(rendered.sample, Chat):
            if self.long == "split":
                return self.with_loss(self.split_chat(rendered.sample, document))
            return self.with_loss(self.after_answer(document))
        if self.long == "split" and not rendered.sample.prompt:
            return self.with_loss(self.split_text(document))
        return self.with_loss(self.after_answer(document))

    def with_loss(self, documents):
        """A first token has no predecessor to predict it."""
        kept = [d for d in documents if np.count_nonzero(d.mask[1:])]
        if len(kept) < len(documents):
            self.count("samples left out because no token carries loss", len(documents) - len(kept))
        return kept

    def split_text(self, document):
        pieces = []
        for begin in range(0, len(document.tokens), self.max_tokens):
            end = begin + self.max_tokens
            mask = document.mask[begin:end]
            pieces.append(Document(document.tokens[begin:end], mask, [(0, "text")], []))
        self.count("pieces made by splitting", len(pieces))
        return pieces

    def after_answer(self, document):
        """Cut after the last answer that fits; else inside the first one, if its prompt fits.  The
        answers behind the cut, such as those after a long reply of a tool, are counted."""
        ends = [end for _, end in document.loss if end <= self.max_tokens]
        cut, what = 0, "samples dropped because the prompt alone is too long"
        if ends:
            cut, what = ends[-1], "samples cut after an answer"
        elif document.loss and document.loss[0][0] < self.max_tokens:
            cut, what = self.max_tokens, "answers cut at the limit"
        self.count(what)
        if lost := sum(begin >= cut for begin, _ in document.loss):
            self.count("answers left out with what was cut or dropped", lost)
        return [clipped(document, cut)] if cut else []

    def split_chat(self, chat, document):
        """Pieces of whole exchanges, each with the system message in front, which the first one
        alone learns where it carries loss."""
        head, exchanges = exchanges_of(chat)
        if not exchanges:
            return self.after_answer(document)
        tokens_each = len(document.tokens) / max(1, sum(map(size_of, chat.messages)))
        pieces, at = [], 0
        while at < len(exchanges):
            sizes = [sum(size_of(chat.messages[i]) for i in e) for e in exchanges[at:]]
            guess, room = 0, self.max_tokens
            while guess < len(sizes) and room > 0:
                room -= sizes[guess] * tokens_each
                guess += room > 0
            taken, made = self.most(chat, head, exchanges[at:], max(1, guess))
            pieces += made
            at += taken
            weights = [0 if i in head else w for i, w in enumerate(chat.weights)]
            chat = Chat(chat.messages, weights, chat.tools)
        self.count("pieces made by splitting", len(pieces))
        return pieces

    def most(self, chat, head, exchanges, guess):
        """(how many of the exchanges fit, their documents); at least one exchange is taken, cut
        where it alone is too long."""
        made = self.encode(chat, head, exchanges[:guess])
        while guess > 1 and not self.fits(made):
            guess -= 1
            made = self.encode(chat, head, exchanges[:guess])
        while self.fits(made) and guess < len(exchanges):
            more = self.encode(chat, head, exchanges[: guess + 1])
            if not self.fits(more):
                break
            guess, made = guess + 1, more
        if self.fits(made):
            return guess, made
        return guess, [
            cut
            for d in made
            for cut in (self.after_answer(d) if len(d.tokens) > self.max_tokens else [d])
        ]

    def fits(self, documents):
        return all(len(d.tokens) <= self.max_tokens for d in documents)

    def encode(self, chat, head, exchanges):
        """Documents of some exchanges; several where turns are rendered on their own."""
        chosen = head + [i for exchange in exchanges for i in exchange]
        part = Chat(
            [chat.messages[i] for i in chosen], [chat.weights[i] for i in chosen], chat.tools
        )
        before = dict(self.encoder.counters)
        made = self.encoder.encoded(self.encoder.rendered(part))
        self.encoder.counters.clear()
        self.encoder.counters.update(before)  # the conversation is counted already
        return made


def size_of(message):
    return sum(len(message.get(k) or "") for k in ("content", "reasoning_content")) + 8


def exchanges_of(chat):
    """(head, exchanges): indices of the leading system messages, and of the messages of each
    exchange, which begins where the user speaks after the assistant or a tool."""
    roles = [m["role"] for m in chat.messages]
    first = next((i for i, r in enumerate(roles) if r not in PROMPT_ROLES), len(roles))
    exchanges = []
    for i in range(first, len(roles)):
        if not exchanges or (roles[i] == "user" and roles[i - 1] != "user"):
            exchanges.append([])
        exchanges[-1].append(i)
    return list(range(first)), exchanges
