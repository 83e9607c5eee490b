"""Text that records what a template asks about it.

A compiled template sees the words of a conversation only through the methods of ``str`` that it calls, so that two
conversations whose words give the same answers take the same branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

Call = tuple[str, tuple[object, ...]]
"""A method and its arguments."""
Question = Callable[[str], object]


@dataclass
class Trace:
    """What was asked about the words of a conversation."""

    is_known: bool = True
    """Nothing else was done to them that text could depend on."""
    _asked: dict[tuple[int, tuple[Call, ...], Call], object] = field(default_factory=dict)

    def add(self, words: Traced, name: str, args: tuple[object, ...], answer: object) -> None:
        self.is_known &= words.leaf >= 0 and all(type(arg) is str for arg in args)
        if self.is_known:
            self._asked[words.leaf, words.trims, (name, args)] = answer

    def questions(self) -> list[tuple[int, Question, object]]:
        """Number of the words, what is asked of them, the answer. (Words are never empty or blanks alone.)"""
        return [
            (leaf, _question((*trims, call)), answer)
            for (leaf, trims, call), answer in self._asked.items()
            if not (
                call == ("__bool__", ()) and all("".join(map(str, args)).isspace() or not args for _, args in trims)
            )
        ]


def _question(calls: tuple[Call, ...]) -> Question:
    steps = [bool if name == "__bool__" else methodcaller(name, *args) for name, args in calls]
    if len(steps) == 1:
        return steps[0]

    def ask(words: str) -> object:
        result: object = words
        for step in steps:
            result = step(result)
        return result

    return ask


class Traced(str):
    """Words of a conversation. Joined with other text they may be written, and nothing else."""

    trace: Trace
    leaf: int
    """Number of the words; -1: joined ones."""
    trims: tuple[Call, ...]
    """What has been cut off."""

    @classmethod
    def of(cls, text: str, trace: Trace, leaf: int, trims: tuple[Call, ...] = ()) -> Traced:
        result = cls(text)
        result.trace, result.leaf, result.trims = trace, leaf, trims
        return result

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        answer = str.__len__(self) > 0
        self.trace.add(self, "__bool__", (), answer)
        return answer

    def __iter__(self) -> Iterator[str]:  # templates ask whether it can be iterated over
        self.trace.is_known = False
        yield from str.__iter__(self)

    def __add__(self, other: str) -> str:
        return Traced.of(str.__add__(self, other), self.trace, -1)

    def __radd__(self, other: str) -> str:
        return Traced.of(str.__add__(other, self), self.trace, -1)


def joined(parts: Iterable[str]) -> str:
    """As jinja2 joins what a template or a macro writes."""
    parts = list(parts)
    traced = next((part for part in parts if isinstance(part, Traced)), None)
    if traced is None:
        return "".join(parts)
    return traced if len(parts) == 1 else Traced.of("".join(parts), traced.trace, -1)


def _recorded(name: str, kind: str) -> Callable[..., object]:
    """The method ``name``, which ``asks`` for something, ``cuts`` at the ends, or does something ``else``."""

    def method(self: Traced, *args: Any, **kwargs: object) -> object:
        answer: object = getattr(str, name)(self, *args, **kwargs)
        if kind == "asks":
            self.trace.add(self, name, args, answer)
            return answer
        self.trace.is_known &= kind == "cuts" and self.leaf >= 0
        return Traced.of(str(answer), self.trace, self.leaf, (*self.trims, (name, args))) if kind == "cuts" else answer

    return method


_OPERATORS = ("hash", "len", "getitem", "mod", "mul", "lt", "le", "gt", "ge", "format")
_KINDS = {
    **dict.fromkeys([name for name in dir(str) if not name.startswith("_")], "else"),
    **dict.fromkeys([f"__{name}__" for name in _OPERATORS], "else"),
    **dict.fromkeys(("__contains__", "__eq__", "__ne__", "startswith", "endswith"), "asks"),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), "cuts"),
}
for _name, _kind in _KINDS.items():
    setattr(Traced, _name, _recorded(_name, _kind))
