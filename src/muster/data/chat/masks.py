"""Chat texts as token ids with a mask.

An answer is learned from the first id after its prompt to its stop token. The ids before it must be those of the prompt
tokenised alone: of the joint text a token may lie across the border, which generation would never see.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

from muster.data.chat.rows import RowRefusal
from muster.data.chat.template import Span

Document = tuple[list[int], bytearray]
"""Token ids, and 1 for each that is learned."""


class ChatTokenizer(Protocol):
    """What chats need of an ``Encoder``."""

    @property
    def fast(self) -> Any: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def template_variables(self) -> dict[str, str]: ...
    @property
    def special_tokens(self) -> tuple[str, ...]: ...
    @property
    def eos_id(self) -> int | None: ...
    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


class Learned(NamedTuple):
    """An answer in the text of a document, as characters of it."""

    special: int
    """Where the last special token of its prompt begins; -1: its prompt has none."""
    start: int
    """Where its prompt ends."""
    end: int
    """Behind its stop token."""
    stop: str
    marked: tuple[Span, ...] = ()
    """What ``{% generation %}`` marks of it; empty: all is learned."""


class ChatText(NamedTuple):
    """One document as text."""

    text: str
    answers: tuple[Learned, ...] = ()
    spans: tuple[Span, ...] = ()
    """Characters that are learned besides: turns of other roles, or everything."""
    stop: str = ""
    """Ends the last answer, where everything is learned."""


class Masker:
    """Tokenises and masks with one tokenizer."""

    def __init__(self, encoder: ChatTokenizer) -> None:
        self._encoder = encoder
        self._headers: dict[str, list[int]] = {}
        self._ids: dict[str, int] = {}

    def documents(self, texts: Sequence[ChatText], encodings: Sequence[Any], stops: set[int]) -> list[Document]:
        """The documents of one row, whose ``texts`` were tokenised as ``encodings``; the ids that end its answers are
        added to ``stops``. Raises RowRefusal."""
        documents: list[Document] = []
        for (text, answers, spans, last_stop), encoding in zip(texts, encodings, strict=True):
            ids: list[int] = encoding.ids
            mask = bytearray(len(ids))
            for begin, end in spans:
                _learn(mask, encoding.offsets, begin, end)
            if last_stop:
                stops.add(self._id(last_stop))
            length = 0 if answers and not spans else len(ids)
            for answer in answers:
                stop = self._ids.get(answer.stop) or self._id(answer.stop)
                stops.add(stop)
                start = self._prompt_tokens(text, answer, ids, encoding)
                last = encoding.char_to_token(answer.end - 1)
                if start is None or last is None or ids[last] != stop:
                    documents.append(self._apart(text[: answer.start], text[answer.start : answer.end], stop))
                    continue
                length = len(ids) if spans or answer is answers[-1] else last + 1
                if answer.marked:
                    for begin, end in answer.marked:
                        _learn(mask, encoding.offsets, begin, end)
                    mask[last] = 1
                else:
                    mask[start : last + 1] = b"\1" * (last + 1 - start)
            if length:
                documents.append((ids, mask) if length == len(ids) else (ids[:length], mask[:length]))
        return documents

    def last_special(self, text: str) -> int:
        """Where the last special token of ``text`` begins; -1: it has none."""
        return max((each.start() for each in self._cutting.finditer(text)), default=-1)

    def _prompt_tokens(self, text: str, answer: Learned, ids: list[int], encoding: Any) -> int | None:
        """How many of ``ids`` are the prompt's, where it is tokenised alone to the same ids; else None.

        Special tokens cut a text before anything else, so ids up to the last of them do not depend on what follows.
        """
        if answer.special >= 0:
            header = text[answer.special : answer.start]
            tokens = self._headers.get(header)
            if tokens is None:
                if len(self._headers) > 10_000:
                    self._headers.clear()
                tokens = self._headers[header] = self._encoder.encode([header])[0]
            place = encoding.char_to_token(answer.special)
            if place is not None and ids[place : place + len(tokens)] == tokens:
                return int(place) + len(tokens)
        alone = self._encoder.encode([text[: answer.start]])[0]
        return len(alone) if ids[: len(alone)] == alone else None

    @cached_property
    def _cutting(self) -> re.Pattern[str]:
        """Special tokens that take nothing of the text around them."""
        plain = [
            token.content for token in self._encoder.fast.get_added_tokens_decoder().values()
            if token.special and not (token.lstrip or token.rstrip or token.normalized or token.single_word)
        ]  # fmt: skip
        return any_of(plain)

    def _apart(self, asked: str, text: str, stop: int) -> Document:
        """Prompt and answer tokenised apart, because one token would lie across their border. Raises RowRefusal."""
        prompt, whole = self._encoder.encode([asked, asked + text])
        ids = [*prompt, *self._after(text)]
        text_of = partial(self._encoder.decode, skip_special=False)
        if ids[-1] != stop or text_of(ids) != text_of(whole):
            raise RowRefusal("the tokenizer cannot write an answer after its prompt without changing the text")
        mask = bytearray(len(prompt)) + b"\1" * (len(ids) - len(prompt))
        return ids, mask

    def _after(self, text: str) -> list[int]:
        """Ids of a text within a longer one: tokenizers with Metaspace put a blank before a text's first word."""
        line, letter, both = self._encoder.encode(["\n", "a", "\na"])
        if line + letter == both and self._encoder.decode(letter) == "a":
            return self._encoder.encode([text])[0]
        ids = self._encoder.encode(["\n" + text])[0]
        return ids[len(line) :] if ids[: len(line)] == line else self._encoder.encode([text])[0]

    def _id(self, stop: str) -> int:
        result = self._encoder.fast.token_to_id(stop)
        if result is None:
            raise RowRefusal(f"the token that ends an answer, {stop!r}, is not in the vocabulary")
        self._ids[stop] = int(result)
        return int(result)


def any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches the longest of ``tokens``, as tokenizers do; nothing where there are none."""
    longest_first = sorted(tokens, key=lambda token: -len(token))
    return re.compile("|".join(map(re.escape, longest_first)) if tokens else r"(?!)")


def _learn(mask: bytearray, offsets: Sequence[Span], start: int, end: int) -> None:
    """Mark the tokens within these characters."""
    for number, (first, last) in enumerate(offsets):
        if start <= first and last <= end:
            mask[number] = 1
