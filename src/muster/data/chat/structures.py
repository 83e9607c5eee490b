"""Chats by structure: conversations that differ only in their words share the text that a template writes around them.

The first conversation of a structure is rendered in full, with sentinels in the place of its words, and what the
template asks about these is recorded. Another conversation whose words give the same answers takes the same branches:
its text is put together without rendering. What is not understood is rendered in full.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller

from muster.core.typed_json import JsonObject as Row
from muster.data.chat.answers import Answer
from muster.data.chat.masks import ChatText
from muster.data.chat.rows import REASONING, Conversation, RowRefusal
from muster.data.chat.template import Span, Template
from muster.data.chat.traced import Question, Trace, Traced

#: The first rows of a structure, and each so many-th, are rendered in full, too, and compared.
_FIRST, _EVERY = 8, 64
_MOST = 512
#: What templates do to words.
_TRIMS = [methodcaller(name, *args) for name in ("strip", "lstrip", "rstrip") for args in ((), ("\n",))]
_PADDED = ("\n \n{0}\n \n", " \n {0} \n ", '{0}"\\<&\n{0}')
Render = Callable[[Conversation, Counter[str]], list[ChatText]]
Trim = Callable[[str], str]
Place = tuple[int, int]
"""Characters of literals before it, and slots."""


class Differs(Exception):
    """A structure's text is not what the template writes: it is rendered in full from here on."""


@dataclass(frozen=True)
class _Slot:
    leaf: int
    trim: Trim | None = None

    def words(self, leaves: Sequence[str]) -> str:
        return leaves[self.leaf] if self.trim is None else self.trim(leaves[self.leaf])


@dataclass(frozen=True)
class _AnswerPlace:
    answer: Answer
    prompt: Place
    end: Place
    marked: tuple[tuple[Place, Place], ...]


@dataclass(frozen=True)
class _Skeleton:
    """A ``ChatText`` with slots for words."""

    literals: tuple[str, ...]
    """One more than slots."""
    slots: tuple[_Slot, ...]
    answers: tuple[_AnswerPlace, ...]
    spans: tuple[tuple[Place, Place], ...]
    stop: str

    def filled(self, leaves: Sequence[str]) -> ChatText:
        parts, lengths, length = [self.literals[0]], [0], 0
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            words = slot.words(leaves)
            parts += (words, literal)
            length += len(words)
            lengths.append(length)
        text = "".join(parts)
        answers = []
        for each in self.answers:
            start, end = each.prompt[0] + lengths[each.prompt[1]], each.end[0] + lengths[each.end[1]]
            shape = each.answer
            marked = _spans(each.marked, lengths) if each.marked else ()
            answers.append(Answer(text[:start], text[start:end], shape.stop, shape.rest, marked, shape.drops_reasoning))
        return ChatText(text, tuple(answers), _spans(self.spans, lengths), self.stop)


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
    render: Render
    """The exact path."""
    _known: dict[object, _Structure | None] = field(default_factory=dict)

    def texts(self, found: Conversation, changes: Counter[str]) -> list[ChatText]:
        """As ``render``. Raises RowRefusal, and Differs: the rows before this one are to be done again."""
        parted = None if found.has_special else _parted(found)
        if parted is None or not self.template.is_traceable:
            return self.render(found, changes)
        key, leaves = parted
        if key not in self._known and len(self._known) < _MOST:
            self._known[key] = self._learned(found, leaves)
        structure = self._known.get(key)
        if structure is None or not all(ask(leaves[leaf]) == answer for leaf, ask, answer in structure.questions):
            return self.render(found, changes)
        texts = [skeleton.filled(leaves) for skeleton in structure.skeletons]
        structure.rows += 1
        if structure.rows <= _FIRST or structure.rows % _EVERY == 0:
            own: Counter[str] = Counter()
            if self.render(found, own) != texts or own != structure.changes:
                self._known[key] = None
                raise Differs
        for change, count in structure.changes.items():
            changes[change] += count
        return texts

    def _learned(self, found: Conversation, leaves: Sequence[str]) -> _Structure | None:
        """None: its text depends on words in a way that is not understood."""
        base = 5_718_281
        while str(base) in self.template.text:
            base += 1
        names = [f"{base}{number:05}" for number in range(len(leaves))]
        trace, changes = Trace(), Counter[str]()
        sentinel = re.compile(f"{base}(\\d{{5}})")
        versions = [[form.format(name) for name in names] for form in _PADDED]
        try:
            plain = self.render(_with(found, [Traced.of(name, trace, at) for at, name in enumerate(names)]), changes)
            if not trace.is_known:
                return None
            skeletons = [_skeleton(text, sentinel) for text in plain]
            padded = [self.render(_with(found, version), Counter()) for version in versions]
            result = [
                _trimmed(skeleton, versions[0], text.text) for skeleton, text in zip(skeletons, padded[0], strict=True)
            ]
        except (RowRefusal, ValueError):
            return None
        for version, texts in zip([names, *versions], [plain, *padded], strict=True):
            if [skeleton.filled(version) for skeleton in result] != texts:
                return None
        changes += Counter()  # without zeros
        return _Structure(result, changes, trace.questions())


def _parted(found: Conversation) -> tuple[object, list[str]] | None:
    """A conversation's structure and its words; None: it is one of those that are rendered in full."""
    if found.tools:
        return None
    key: list[object] = [found.untrained]
    leaves: list[str] = []
    for message in found.messages:
        thought = message.get(REASONING[0])
        for name, value in message.items():
            if name == "role":
                key.append(value)
            elif not isinstance(value, str) or not (name == "content" or (name in REASONING and value == thought)):
                return None
            else:
                key += (name, bool(value))
                if value and (name == "content" or name == REASONING[0]):
                    if value.isspace() or "<think>" in value:
                        return None
                    leaves.append(value)
    return tuple(key), leaves


def _with(found: Conversation, words: Sequence[str]) -> Conversation:
    """The conversation with other words, in the order of ``_parted``."""
    left = iter(words)
    messages: list[Row] = []
    for message in found.messages:
        changed: Row = {
            name: next(left) if value and name in ("content", REASONING[0]) else value
            for name, value in message.items()
        }
        thought = changed.get(REASONING[0])
        messages.append({name: thought if name in REASONING else value for name, value in changed.items()})
    return found._replace(messages=messages)


def _skeleton(text: ChatText, sentinel: re.Pattern[str]) -> _Skeleton:
    """Raises ValueError: a border is within words."""
    found = list(sentinel.finditer(text.text))
    borders = [0, *(border for each in found for border in each.span()), len(text.text)]
    literals = [text.text[first:last] for first, last in zip(borders[::2], borders[1::2], strict=True)]

    def place(at: int) -> Place:
        before = [each for each in found if each.end() <= at]
        if any(each.start() < at < each.end() for each in found):
            raise ValueError("a border within words")
        return at - sum(len(each[0]) for each in before), len(before)

    def places(spans: Sequence[Span]) -> tuple[tuple[Place, Place], ...]:
        return tuple((place(first), place(last)) for first, last in spans)

    answers = [
        _AnswerPlace(each, place(len(each.prompt)), place(len(each.prompt + each.text)), places(each.marked))
        for each in text.answers
    ]
    slots = tuple(_Slot(int(each[1])) for each in found)
    return _Skeleton(tuple(literals), slots, tuple(answers), places(text.spans), text.stop)


def _trimmed(skeleton: _Skeleton, words: Sequence[str], text: str) -> _Skeleton:
    """With what is done to the words before they are written, seen in a ``text`` of padded ones. Raises ValueError."""
    trims: list[Trim | None] = [None, *_TRIMS]
    pattern = re.escape(skeleton.literals[0])
    for slot, literal in zip(skeleton.slots, skeleton.literals[1:], strict=True):
        forms = [re.escape(_Slot(slot.leaf, trim).words(words)) for trim in trims]
        pattern += f"({'|'.join(forms)}){re.escape(literal)}"
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError("words that are neither as they are nor trimmed")
    slots = []
    for slot, written in zip(skeleton.slots, match.groups(), strict=True):
        of_slot = [_Slot(slot.leaf, trim) for trim in trims]
        slots.append(next(each for each in of_slot if each.words(words) == written))
    return replace(skeleton, slots=tuple(slots))


def _spans(places: Sequence[tuple[Place, Place]], lengths: Sequence[int]) -> tuple[Span, ...]:
    return tuple((a[0] + lengths[a[1]], b[0] + lengths[b[1]]) for a, b in places)
