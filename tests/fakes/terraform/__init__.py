"""Terraform's texts held against the provider's schema: every resource, block and argument, with its type."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SCHEMA: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "provider_google.json").read_text())
OF_LANGUAGE = {"depends_on", "for_each", "lifecycle", "__is_block__"}
REFERENCE = re.compile(r"\b((?:data\.)?(?:google|helm)_\w+)\.(\w+)")


def complaints(parsed: dict[str, Any]) -> list[str]:
    """What the provider would not know, or would miss, in a file as python-hcl2 reads it."""
    found = []
    for row in parsed.get("resource", []):
        ((kind, labelled),) = row.items()
        ((name, body),) = labelled.items()
        kind, where = kind.strip('"'), f"{kind}.{name}".replace('"', "")
        if kind == "helm_release":
            continue
        if kind not in SCHEMA:
            found.append(f"{where}: no such resource")
            continue
        found += _block(body, SCHEMA[kind], where)
    return found


def _block(body: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    found = []
    for name, value in body.items():
        at = f"{where}.{name}"
        if name in OF_LANGUAGE:
            continue
        rule = schema.get(name)
        if rule is None:
            found.append(f"{at}: no such argument")
        elif isinstance(rule, str):
            found += [] if _fits(value, rule.rstrip("!")) else [f"{at}: {value!r} is no {rule}"]
        elif not isinstance(value, list) or not all(isinstance(row, dict) and "__is_block__" in row for row in value):
            found.append(f"{at}: is a block")
        elif len(value) > 1 and not rule["many"]:
            found.append(f"{at}: more than one")
        else:
            found += [line for row in value for line in _block(row, rule["block"], at)]
    for name, rule in schema.items():
        needed = rule["required"] if isinstance(rule, dict) else rule.endswith("!")
        if needed and name not in body:
            found.append(f"{where}: misses {name}")
    return found


def _fits(value: Any, kind: str) -> bool:
    """Whether a literal has the type; an expression (``${...}``) may have any."""
    if isinstance(value, str) and value.startswith("${"):
        return True
    if kind == "string":
        return isinstance(value, str) and value.startswith('"')
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "list(string)":
        return isinstance(value, list) and all(_fits(one, "string") for one in value)
    if kind == "list(number)":
        return isinstance(value, list) and all(_fits(one, "number") for one in value)
    assert kind == "map(string)", kind
    return isinstance(value, dict) and "__is_block__" not in value and all(_fits(v, "string") for v in value.values())


def dangling(texts: list[str], parsed: list[dict[str, Any]]) -> set[str]:
    """References to what no file has."""
    there = {
        f"{prefix}{kind}.{name}".replace('"', "")
        for file in parsed
        for section, prefix in (("resource", ""), ("data", "data."))
        for row in file.get(section, [])
        for kind, labelled in row.items()
        for name in labelled
    }
    used = {f"{kind}.{name}" for text in texts for kind, name in REFERENCE.findall(text)}
    return used - there
