"""Objects to YAML text that every parser reads alike.

Kubernetes reads YAML 1.1, where ``on``, ``012`` and ``1:30`` are not strings; most Python writers emit 1.2. So every
string that is not plainly a word is written in JSON's quotes. ``Expression`` is written as it stands: the chart's
Go templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*")
_WORDS_WITH_A_MEANING = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class Expression(str):
    """A Go template expression, written without quotes."""


class Line(Expression):
    """A line of its own among a mapping's keys or a sequence's items (with the value None)."""


def dump(documents: Iterable[Mapping[str, object]]) -> str:
    """A YAML stream of ``documents``; keys keep their order."""
    return "---\n".join("".join(f"{line}\n" for line in _mapping(document)) for document in documents)


def scalar(value: object) -> str:
    """One value on one line."""
    if isinstance(value, Expression):
        return str.__str__(value)
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_WITH_A_MEANING:
        return value
    return "".join(map(_escaped, json.dumps(value, ensure_ascii=False)))


def _escaped(character: str) -> str:
    """YAML's own escape for what a parser may refuse; JSON's pairs of surrogates mean something else there."""
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _mapping(value: Mapping[str, object]) -> list[str]:
    lines: list[str] = []
    for key, item in value.items():
        lines += [str.__str__(key)] if isinstance(key, Line) else _item(f"{scalar(key)}:", item)
    return lines


def _item(head: str, item: object) -> list[str]:
    if isinstance(item, Expression):
        return [f"{head} {item}"]
    if isinstance(item, Mapping):
        return [head, *("  " + line for line in _mapping(item))] if item else [f"{head} {{}}"]
    if isinstance(item, Sequence) and not isinstance(item, str):
        return [head, *("  " + line for line in _sequence(item))] if item else [f"{head} []"]
    if isinstance(item, str) and "\n" in item and _fits_a_block(item):
        chomp = "|" if item.endswith("\n") else "|-"
        return [f"{head} {chomp}", *(f"  {line}" if line else "" for line in item.removesuffix("\n").split("\n"))]
    return [f"{head} {scalar(item)}"]


def _sequence(items: Sequence[object]) -> list[str]:
    lines: list[str] = []
    for item in items:
        if isinstance(item, Line):
            lines.append(item)
        elif isinstance(item, Mapping) and item:
            first, *rest = _mapping(item)
            lines += [f"- {first}", *("  " + line if line else "" for line in rest)]
        else:
            lines += _item("-", item)
    return lines


def _fits_a_block(text: str) -> bool:
    """A literal block keeps the text exactly: no line starts with a blank before any other, none ends in one."""
    body = text.removesuffix("\n")
    printable = all(character == "\n" or character.isprintable() for character in text)
    return printable and bool(body) and body[0] not in " \n" and not body.endswith("\n")
