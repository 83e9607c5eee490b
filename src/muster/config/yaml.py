"""YAML 1.2 text to plain values, with the line of every key. No tags, no merge keys, no duplicate keys.

Nodes are composed by ruamel.yaml and turned into values here, so that everything that is wrong is
collected with its line instead of stopping at the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from muster.core.errors import Problem, first_line
from muster.core.typed_json import Json

KeyPath = tuple[str | int, ...]

#: More nodes than any run file has; aliases of aliases ("billion laughs") stop here.
MAX_NODES = 100_000
_PREFIX = "tag:yaml.org,2002:"


@dataclass
class Parsed:
    """What a text holds: its value (None where unreadable), the line of each path, and what is wrong."""

    source: str
    value: Json = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0

    def wrong(self, path: KeyPath, message: str, *, line: int | None, hint: str | None = None) -> None:
        """Note a problem."""
        self.problems.append(Problem(dotted(path), message, line=line, source=self.source, hint=hint))


def dotted(path: KeyPath) -> str:
    """``data.sources.0.rows``."""
    return ".".join(str(part) for part in path)


def key_path(key: str) -> KeyPath:
    """The inverse of ``dotted``."""
    return tuple(int(part) if part.isdigit() else part for part in key.split(".")) if key else ()


def parse(text: str, *, source: str) -> Parsed:
    """Read one YAML document. Never raises: what is wrong is in ``problems``."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    result = Parsed(source=source)
    try:
        node = YAML(typ="safe", pure=True).compose(text)
        if node is not None:
            result.value = _build(node, result, (), ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        hint = "indent with spaces" if "'\\t'" in message else "quote a text that contains ': '" if (
            "mapping values" in message
        ) else None  # fmt: skip
        result.wrong((), f"not YAML: {message}", line=mark.line + 1 if mark else None, hint=hint)
    except (YAMLError, RecursionError, OverflowError) as error:
        result.wrong((), f"not YAML: {first_line(error)}", line=None)
    return result


def scalar(text: str) -> Json:
    """The value of ``text`` as YAML (flow style allowed). Raises ValueError."""
    result = parse(text, source="value")
    if result.problems:
        raise ValueError(result.problems[0].message)
    return result.value


def _build(node: Any, result: Parsed, path: KeyPath, above: tuple[int, ...]) -> Json:
    line = node.start_mark.line + 1
    result.lines.setdefault(path, line)
    result.nodes += 1
    if result.nodes > MAX_NODES or id(node) in above:
        if result.nodes <= MAX_NODES + 1:
            result.nodes = MAX_NODES + 2
            result.wrong(path, "aliases repeat each other without end", line=line)
        return None
    if isinstance(node.value, str):
        return _scalar(node, result, path, line)
    if str(node.tag) not in (_PREFIX + "map", _PREFIX + "seq"):
        result.wrong(path, f"the tag {node.tag} is not allowed", line=line, hint="plain YAML values only")
        return None
    inside = (*above, id(node))
    if str(node.tag) == _PREFIX + "seq":
        return [_build(child, result, (*path, index), inside) for index, child in enumerate(node.value)]
    return _mapping(node, result, path, inside)


def _mapping(node: Any, result: Parsed, path: KeyPath, inside: tuple[int, ...]) -> dict[str, Json]:
    built: dict[str, Json] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node.value, str):
            result.wrong(path, "a key must be text", line=line)
            continue
        key = key_node.value
        if str(key_node.tag) == _PREFIX + "merge":
            result.wrong((*path, key), "merge keys are not supported", line=line, hint="write the keys out")
            continue
        if key in built:
            first = result.lines[(*path, key)]
            result.wrong((*path, key), f"given twice, first on line {first}", line=line, hint="remove one")
            continue
        result.lines[(*path, key)] = line
        built[key] = _build(value_node, result, (*path, key), inside)
    return built


def _scalar(node: Any, result: Parsed, path: KeyPath, line: int) -> Json:
    kind = str(node.tag).removeprefix(_PREFIX)
    text: str = node.value
    if kind == "null":
        return None
    if kind in ("str", "timestamp"):
        return text
    if kind == "bool":
        return text.lower() in ("true", "yes", "on", "y")
    try:
        if kind == "int":
            plain = text.replace("_", "")
            return int(plain, 0) if plain.lstrip("+-").lower()[:2] in ("0x", "0o", "0b") else int(plain)
        if kind == "float":
            number = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
            if not math.isfinite(number):
                raise ValueError
            return number
    except ValueError:
        result.wrong(path, f"must be a finite number, got {text[:40]}", line=line)
        return None
    result.wrong(path, f"the tag {node.tag} is not allowed", line=line, hint="plain YAML values only")
    return None
