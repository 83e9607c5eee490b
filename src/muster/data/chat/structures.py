"""Chats by structure: conversations that differ only in their words share the text that a template writes around them.

The first conversations of a structure are rendered in full, with sentinels in the place of their words, and what the
template asks about these is recorded. Another conversation whose words give the same answers takes the same branches:
its text is put together without rendering. What is not understood is rendered in full.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import methodcaller

from muster.core.typed_json import Json
from muster.data.chat.masks import ChatText, Learned
from muster.data.chat.rows import Conversation, RowRefusal, with_words
from muster.data.chat.template import Span, Template
from muster.data.chat.traced import Question, Trace, Traced

#: The first rows of a structure, and each so many-th, are rendered in full, too, and compared.
_FIRST, _EVERY = 8, 256
_MOST = 512
_PADDED = ("\n \n{0}\n \n", " \n {0} \n ", '{0}"\\<&é\n{0}')
Change = Callable[[str], str]
Render = Callable[[Conversation, Counter[str]], list[ChatText]]
Place = tuple[int, int]
"""Characters of literals before it, and slots."""


def _in_json(words: str) -> str:
    return json.dumps(words, ensure_ascii=False)[1:-1]


#: What templates do to words.
_CHANGES: list[Change] = [methodcaller(name, *args) for name in ("strip", "lstrip", "rstrip") for args in ((), ("\n",))]
_CHANGES += [_in_json]


class Differs(Exception):
    """A structure's text is not what the template writes: it is rendered in full from here on."""


@dataclass(frozen=True)
class _Skeleton:
    """A ``ChatText`` with slots for words."""

    form: str
    """``%s`` in the place of words."""
    slots: tuple[tuple[int, Change | None], ...]
    """Number of the words, and what is done to them."""
    answers: tuple[tuple[Place, Place, Place, str, tuple[tuple[Place, Place], ...]], ...]
    """As ``Learned``."""
    spans: tuple[tuple[Place, Place], ...]
    stop: str

    def filled(self, leaves: Sequence[str]) -> ChatText:
        words = [leaves[leaf] if change is None else change(leaves[leaf]) for leaf, change in self.slots]
        at = [0, *accumulate(map(len, words))]
        answers = [
            Learned(m + at[n], a + at[b], c + at[d], stop, _spans(marked, at) if marked else ())
            for (m, n), (a, b), (c, d), stop, marked in self.answers
        ]  # fmt: skip
        return ChatText(self.form % tuple(words), tuple(answers), _spans(self.spans, at), self.stop)


@dataclass
class _Structure:
    skeletons: list[_Skeleton]
    changes: Counter[str]
    questions: list[tuple[int, Question, object]]
    """Leaf, what is asked of it, and the answer that this structure gives."""
    rows: int = 0


@dataclass
class Structures:
    """The structures seen so far."""

    template: Template
    odd: re.Pattern[str]
    """What must not be in words: the tokenizer's special tokens, and what the exact path itself looks for."""
    render: Render
    """The exact path."""
    _known: dict[object, _Structure | None] = field(default_factory=dict)
    _once: set[object] = field(default_factory=set)

    def texts(self, found: Conversation, changes: Counter[str]) -> list[ChatText]:
        """As ``render``. Raises RowRefusal, and Differs: the rows before this one are to be done again."""
        parted = self._parted(found) if self.template.is_traceable else None
        if parted is None:
            return self.render(found, changes)
        key, leaves = parted
        structure = self._known[key] if key in self._known else self._new(key, found, leaves)
        if structure is None or any(ask(leaves[leaf]) != answer for leaf, ask, answer in structure.questions):
            return self.render(found, changes)
        texts = [skeleton.filled(leaves) for skeleton in structure.skeletons]
        structure.rows += 1
        if structure.rows <= _FIRST or structure.rows % _EVERY == 0:
            own: Counter[str] = Counter()
            if self.render(found, own) != texts or +own != structure.changes:
                self._known[key] = None
                raise Differs
        if structure.changes:
            changes.update(structure.changes)
        return texts

    def _new(self, key: object, found: Conversation, leaves: Sequence[str]) -> _Structure | None:
        """That of a conversation which is the second of its kind; None: it has none yet, or never."""
        if key in self._once and len(self._known) < _MOST:
            self._known[key] = self._learned(found, leaves)
        elif len(self._once) < 64 * _MOST:
            self._once.add(key)
        return self._known.get(key)

    def _parted(self, found: Conversation) -> tuple[object, list[str]] | None:
        """A conversation's structure and its words; None: it is one of those that are rendered in full."""
        key: list[object] = [found.untrained, found.tools_text]
        leaves: list[str] = []

        def taken(words: str) -> Json:
            leaves.append(words)
            return "w"

        for message in found.messages:
            if len(message) == 2 and type(content := message.get("content")) is str and content:
                leaves.append(content)
                key.append(message["role"])
            else:
                key.append(repr(with_words(message, taken)))
        for words in leaves:
            if words.isspace() or self.odd.search(words):
                return None
        return tuple(key), leaves

    def _learned(self, found: Conversation, leaves: Sequence[str]) -> _Structure | None:
        """None: its text depends on words in a way that is not understood."""
        base = 5_718_281
        while str(base) in self.template.text:
            base += 1
        names = [f"{base}{number:05}" for number in range(len(leaves))]
        trace, changes = Trace(), Counter[str]()
        versions = [[form.format(name) for name in names] for form in _PADDED]
        try:
            plain = self.render(_with(found, [Traced.of(name, trace, at) for at, name in enumerate(names)]), changes)
            if not trace.is_known:
                return None
            padded = [self.render(_with(found, version), Counter()) for version in versions]
            skeletons = [
                _skeleton(text, re.compile(f"{base}(\\d{{5}})"), versions[0], other.text)
                for text, other in zip(plain, padded[0], strict=True)
            ]
        except (RowRefusal, ValueError):
            return None
        for version, texts in zip([names, *versions], [plain, *padded], strict=True):
            if [skeleton.filled(version) for skeleton in skeletons] != texts:
                return None
        return _Structure(skeletons, +changes, trace.questions())


def _with(found: Conversation, words: Sequence[str]) -> Conversation:
    """The conversation with other words, in the order of ``_parted``."""
    left = iter(words)
    return found._replace(messages=[with_words(message, lambda _: next(left)) for message in found.messages])


def _skeleton(text: ChatText, sentinel: re.Pattern[str], words: Sequence[str], padded: str) -> _Skeleton:
    """``padded``: the text with ``words`` in the place of sentinels, which shows what is done to them.

    Raises ValueError: that is not understood."""
    slots = list(sentinel.finditer(text.text))
    borders = [0, *(border for each in slots for border in each.span()), len(text.text)]
    literals = [text.text[first:last] for first, last in zip(borders[::2], borders[1::2], strict=True)]

    def place(at: int) -> Place:
        if any(each.start() < at < each.end() for each in slots):
            raise ValueError("a border within words")
        before = [each for each in slots if each.end() <= at]
        return at - sum(len(each[0]) for each in before), len(before)

    def places(spans: Sequence[Span]) -> tuple[tuple[Place, Place], ...]:
        return tuple((place(first), place(last)) for first, last in spans)

    changes: list[Change | None] = [None, *_CHANGES]
    forms = [
        [words[int(each[1])] if change is None else change(words[int(each[1])]) for change in changes] for each in slots
    ]
    pattern = re.escape(literals[0])
    for of_slot, literal in zip(forms, literals[1:], strict=True):
        pattern += f"({'|'.join(map(re.escape, of_slot))}){re.escape(literal)}"
    match = re.fullmatch(pattern, padded)
    if match is None:
        raise ValueError("words that are written in a way that is not known")
    return _Skeleton(
        form="%s".join(literal.replace("%", "%%") for literal in literals),
        slots=tuple(
            (int(each[1]), changes[of_slot.index(written)])
            for each, of_slot, written in zip(slots, forms, match.groups(), strict=True)
        ),
        answers=tuple(
            (place(each.special), place(each.start), place(each.end), each.stop, places(each.marked))
            for each in text.answers
        ),
        spans=places(text.spans),
        stop=text.stop,
    )  # fmt: skip


def _spans(places: Sequence[tuple[Place, Place]], lengths: Sequence[int]) -> tuple[Span, ...]:
    return tuple((a[0] + lengths[a[1]], b[0] + lengths[b[1]]) for a, b in places)
