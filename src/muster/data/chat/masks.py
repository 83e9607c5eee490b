"""Chat texts as token ids with a mask.

An answer is learned from the first id after its prompt to its stop token. The ids before it must be those of the prompt
tokenised alone: of the joint text a token may lie across the border, which generation would never see.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from muster.data.chat.answers import Answer
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


class ChatText(NamedTuple):
    """One document as text."""

    text: str
    answers: tuple[Answer, ...] = ()
    """Learned ones, whose prompt and text it begins with."""
    spans: tuple[Span, ...] = ()
    """Characters that are learned besides: turns of other roles, or everything."""
    stop: str = ""
    """Ends the last answer, where everything is learned."""


class Masker:
    """Tokenises and masks with one tokenizer."""

    def __init__(self, encoder: ChatTokenizer) -> None:
        self._encoder = encoder
        self._encoded: dict[str, list[int]] = {}

    def documents(self, texts: Sequence[ChatText], encodings: Sequence[Any], stops: set[int]) -> list[Document]:
        """The documents of one row, whose ``texts`` were tokenised as ``encodings``; the ids that end its answers are
        added to ``stops``. Raises RowRefusal."""
        documents: list[Document] = []
        for each, encoding in zip(texts, encodings, strict=True):
            ids: list[int] = encoding.ids
            mask = bytearray(len(ids))
            for begin, end in each.spans:
                _learn(mask, encoding.offsets, begin, end)
            if each.stop:
                stops.add(self._id(each.stop))
            length = 0 if each.answers else len(ids)
            for answer in each.answers:
                stop = self._id(answer.stop)
                stops.add(stop)
                start = self._prompt_tokens(answer.prompt, ids, encoding)
                last = encoding.char_to_token(len(answer.prompt) + len(answer.text) - 1)
                if start is None or last is None or ids[last] != stop:
                    documents.append(self._apart(answer, stop))
                    continue
                length = len(ids) if answer is each.answers[-1] else last + 1
                if answer.marked:
                    for begin, end in answer.marked:
                        _learn(mask, encoding.offsets, begin, end)
                    mask[last] = 1
                else:
                    mask[start : last + 1] = b"\1" * (last + 1 - start)
            if length or each.spans:
                length = len(ids) if each.spans else length
                documents.append((ids[:length], mask[:length]))
        return documents

    def _prompt_tokens(self, prompt: str, ids: list[int], encoding: Any) -> int | None:
        """How many of ``ids`` are the prompt's, where it is tokenised alone to the same ids; else None.

        Special tokens cut a text before anything else, so ids up to the last of them do not depend on what follows.
        """
        for last in deque(self._cutting.finditer(prompt), maxlen=1):
            place = encoding.char_to_token(last.start())
            if place is not None and ids[place] == self._encoder.fast.token_to_id(last[0]):
                tail = self._encode(prompt[last.end() :])
                if ids[place + 1 : place + 1 + len(tail)] == tail:
                    return int(place) + 1 + len(tail)
        alone = self._encoder.encode([prompt])[0]
        return len(alone) if ids[: len(alone)] == alone else None

    @cached_property
    def _cutting(self) -> re.Pattern[str]:
        """Special tokens that take nothing of the text around them."""
        plain = [
            token.content for token in self._encoder.fast.get_added_tokens_decoder().values()
            if token.special and not (token.lstrip or token.rstrip or token.normalized or token.single_word)
        ]  # fmt: skip
        return any_of(plain)

    def _encode(self, text: str) -> list[int]:
        """Ids of the end of a prompt: a handful of texts in most templates."""
        if text not in self._encoded:
            if len(self._encoded) > 10_000:
                self._encoded.clear()
            self._encoded[text] = self._encoder.encode([text])[0]
        return self._encoded[text]

    def _apart(self, answer: Answer, stop: int) -> Document:
        """Prompt and answer tokenised apart, because one token would lie across their border. Raises RowRefusal."""
        prompt, whole = self._encoder.encode([answer.prompt, answer.prompt + answer.text])
        ids = [*prompt, *self._after(answer.text)]
        if ids[-1] != stop or self._text_of(ids) != self._text_of(whole):
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

    def _text_of(self, ids: Sequence[int]) -> str:
        return self._encoder.decode(ids, skip_special=False)

    def _id(self, stop: str) -> int:
        result = self._encoder.fast.token_to_id(stop)
        if result is None:
            raise RowRefusal(f"the token that ends an answer, {stop!r}, is not in the vocabulary")
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
