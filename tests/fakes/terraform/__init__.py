"""Terraform's files, as ``terraform fmt`` lays them out, held against the provider's schema: every resource, block and
argument with its type; every variable, local and attribute that is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "provider_google.json").read_text())
OF_LANGUAGE = {"count", "depends_on", "for_each"}
OPENS = re.compile(r'(\w+)((?: "[^"]+")*) \{(\})?')
ARGUMENT = re.compile(r"([\w-]+) *= (.*)")
REFERENCE = re.compile(r"\b((?:data\.)?(?:google|helm)_\w+)\.(\w+)")


@dataclass
class Block:
    kind: str
    labels: list[str]
    arguments: dict[str, str] = field(default_factory=dict)
    """Name -> expression as written."""
    blocks: list[Block] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join([*self.arguments.values(), *(one.text for one in self.blocks)])

    def inner(self) -> Iterator[tuple[str, Block, bool]]:
        """Name, body and whether there may be several of each inner block, ``dynamic`` ones included."""
        for block in self.blocks:
            if block.kind == "dynamic":
                (content,) = [one for one in block.blocks if one.kind == "content"]
                yield block.labels[0], content, True
            elif block.kind != "lifecycle":
                yield block.kind, block, False


def parse(text: str) -> list[Block]:
    """The top-level blocks. Raises AssertionError where a line is neither a block's nor an argument's."""
    top = Block("", [])
    stack, name, depth = [top], "", 0
    for line in (line.strip() for line in text.splitlines()):
        if depth:
            stack[-1].arguments[name] += "\n" + line
            depth += opened(line)
        elif not line or line.startswith("#"):
            continue
        elif line == "}":
            stack.pop()
        elif match := OPENS.fullmatch(line):
            block = Block(match[1], re.findall(r'"([^"]+)"', match[2]))
            stack[-1].blocks.append(block)
            stack += [] if match[3] else [block]
        else:
            match = ARGUMENT.fullmatch(line)
            assert match, f"not understood: {line}"
            name, stack[-1].arguments[match[1]] = match[1], match[2]
            depth = opened(match[2])
    assert stack == [top] and not depth, "a block is not closed"
    return top.blocks


def opened(line: str) -> int:
    line = re.sub(r'"(?:[^"\\]|\\.)*"', "", line)
    return sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))


def complaints(blocks: Iterable[Block]) -> list[str]:
    """What the provider would not know, or would miss."""
    result = []
    for block in blocks:
        if block.kind == "resource" and block.labels[0] != "helm_release":
            kind, where = block.labels[0], ".".join(block.labels)
            result += _block(block, SCHEMA[kind], where) if kind in SCHEMA else [f"{where}: no such resource"]
    return result


def _block(body: Block, schema: dict[str, Any], where: str) -> list[str]:
    result = []
    seen = [name for name, _, several in body.inner() if not several]
    for name, value in body.arguments.items():
        rule = schema.get(name)
        if name in OF_LANGUAGE:
            continue
        if not isinstance(rule, str):
            result.append(f"{where}.{name}: {'no such argument' if rule is None else 'is a block'}")
        elif not _fits(value, rule.rstrip("!")):
            result.append(f"{where}.{name}: {value} is no {rule}")
    for name, inner, _ in body.inner():
        rule = schema.get(name)
        if not isinstance(rule, dict):
            result.append(f"{where}.{name}: no such block")
        elif seen.count(name) > 1 and not rule["many"]:
            result.append(f"{where}.{name}: more than one")
        else:
            result += _block(inner, rule["block"], f"{where}.{name}")
    given = {*body.arguments, *(name for name, _, _ in body.inner())}
    required = {n for n, rule in schema.items() if (rule["required"] if isinstance(rule, dict) else rule.endswith("!"))}
    return result + [f"{where}: misses {name}" for name in sorted(required - given)]


def _fits(value: str, kind: str) -> bool:
    """Whether a literal has the type; an expression may have any."""
    try:
        literal = json.loads(value)
    except ValueError:
        return True
    if kind.startswith("list("):
        return isinstance(literal, list)
    types = {"string": str, "number": int | float, "bool": bool, "map(string)": dict}
    return isinstance(literal, types[kind]) and (kind == "bool" or not isinstance(literal, bool))


def dangling(blocks: list[Block]) -> set[str]:
    """What is read and is nowhere: resources, variables, locals, fields of a resource's variable."""
    resources = {".".join(one.labels) for one in blocks if one.kind == "resource"}
    there = resources | {f"data.{'.'.join(one.labels)}" for one in blocks if one.kind == "data"}
    variables = {one.labels[0]: one for one in blocks if one.kind == "variable"}
    known = {f"var.{name}" for name in variables}
    known |= {f"local.{name}" for one in blocks if one.kind == "locals" for name in one.arguments}
    result = set()
    for block in blocks:
        if block.kind in ("moved", "import"):
            continue
        result |= {f"{kind}.{name}" for kind, name in REFERENCE.findall(block.text)} - there
        result |= set(re.findall(r"\b(?:var|local)\.\w+", block.text)) - known
        over = re.fullmatch(r"var\.(\w+)", block.arguments.get("for_each", ""))
        if block.kind == "resource" and over and over[1] in variables:
            fields = set(re.findall(r"(\w+) *=", variables[over[1]].text))
            read = {
                name
                for path in re.findall(r"each\.value((?:\.\w+|\[\*\]|\[0\])+)", block.text)
                for name in re.findall(r"\w+", re.sub(r"\[.\]", "", path))
            }
            result |= {f"var.{over[1]}: {name}" for name in read - fields}
    return result


def addresses(blocks: Iterable[Block], values: dict[str, Any]) -> set[str]:
    """Every resource that these values make, one for each key of its ``for_each``."""
    result = set()
    for block in blocks:
        if block.kind != "resource":
            continue
        name = ".".join(block.labels)
        if matched := re.fullmatch(r"(?:toset\()?var\.(\w+)\)?", block.arguments.get("for_each", "")):
            result |= {f"{name}[{json.dumps(key)}]" for key in values.get(matched[1], ())}
        elif count := re.fullmatch(r"var\.(\w+) == null \? 0 : 1", block.arguments.get("count", "")):
            result |= {f"{name}[0]"} if values.get(count[1]) is not None else set()
        else:
            assert not {"for_each", "count"} & block.arguments.keys(), name
            result.add(name)
    return result
