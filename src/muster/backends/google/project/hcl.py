"""Terraform's language, written as ``terraform fmt`` lays it out: blocks, arguments, values. No templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Word:
    """An expression as it stands: a reference, or a string with references in it."""

    text: str


Value = str | int | float | bool | Word | Sequence["Value"] | Mapping[str, "Value"]


@dataclass(frozen=True, kw_only=True)
class Block:
    """``kind "label" "label" { ... }``; in ``body`` each is an argument with its name, or an inner block."""

    kind: str
    labels: tuple[str, ...] = ()
    body: Sequence[tuple[str, Value] | Block] = field(default_factory=tuple)
    comment: str = ""
    """Lines before it."""


def document(blocks: Iterable[Block], *, comment: str = "") -> str:
    """A whole file."""
    head = [_comment(comment, "")] if comment else []
    return "\n\n".join([*head, *("\n".join(_block(block, "")) for block in blocks)]) + "\n"


def quoted(text: str) -> str:
    """A string that holds no references, whatever is in it."""
    return json.dumps(text, ensure_ascii=False).replace("${", "$${").replace("%{", "%%{")


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}# {line}".rstrip() for line in text.splitlines())


def _block(block: Block, indent: str) -> list[str]:
    head = " ".join([block.kind, *(quoted(label) for label in block.labels)])
    lines = [_comment(block.comment, indent)] if block.comment else []
    if not block.body:
        return [*lines, f"{indent}{head} {{}}"]
    return [*lines, f"{indent}{head} {{", *_body(block.body, indent + "  "), f"{indent}}}"]


def _body(body: Sequence[tuple[str, Value] | Block], indent: str) -> list[str]:
    """Arguments first, an empty line before each inner block."""
    arguments = [row for row in body if not isinstance(row, Block)]
    lines = _aligned([(name, _value(value, indent)) for name, value in arguments], indent)
    for block in (row for row in body if isinstance(row, Block)):
        lines += [*([""] if lines else []), *_block(block, indent)]
    return lines


def _aligned(rows: Sequence[tuple[str, str]], indent: str) -> list[str]:
    """Signs of equality stand below each other in a row of lines; a value of several lines ends the row."""
    lines: list[str] = []
    run: list[tuple[str, str]] = []

    def close() -> None:
        width = max((len(name) for name, _ in run), default=0)
        lines.extend(f"{indent}{name.ljust(width)} = {value}" for name, value in run)
        run.clear()

    for name, value in rows:
        if "\n" in value:
            close()
            lines.append(f"{indent}{name} = {value}")
        else:
            run.append((name, value))
    close()
    return lines


def _value(value: Value, indent: str) -> str:
    if isinstance(value, Word):
        return value.text
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    inner = indent + "  "
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        rows = [(_key(name), _value(one, inner)) for name, one in value.items()]
        return "\n".join(["{", *_aligned(rows, inner), f"{indent}}}"])
    short = "[" + ", ".join(_value(one, inner) for one in value) + "]"
    if len(short) + len(indent) <= 100 and "\n" not in short:
        return short
    return "\n".join(["[", *(f"{inner}{_value(one, inner)}," for one in value), f"{indent}]"])


def _key(name: str) -> str:
    return name if name.replace("_", "a").replace("-", "a").isalnum() else quoted(name)
