"""The filter of Compute Engine's lists: ``field = value`` and the like, side by side or with AND."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

TERM = re.compile(r'\(?\s*([\w.-]+)\s*(=|!=|:|\beq\b|\bne\b|>=|<=|>|<)\s*("[^"]*"|[^\s()]+)\s*\)?')


class BadFilter(ValueError):
    """Google answers 400."""


def keeps(text: str, body: dict[str, Any]) -> bool:
    rest = text.strip()
    while rest:
        hit = TERM.match(rest)
        if hit is None:
            raise BadFilter(f"Invalid value for field 'filter': '{text}'. Invalid list filter expression.")
        if not _holds(hit[1], hit[2], hit[3].strip('"'), body):
            return False
        rest = re.sub(r"^\s*AND\s+", "", rest[hit.end() :]).strip()
    return True


def _holds(at: str, how: str, value: str, body: dict[str, Any]) -> bool:
    found: Any = body
    parts = at.split(".")
    while parts and isinstance(found, dict):
        found = found.get(parts.pop(0))
    if how == ":":
        return found is not None and (value == "*" or fnmatch.fnmatchcase(str(found), value))
    if how in ("=", "eq"):
        return found is not None and bool(fnmatch.fnmatchcase(str(found), value) or re.fullmatch(value, str(found)))
    if how in ("!=", "ne"):
        return str(found) != value
    if found is None:
        return False
    return {">": str(found) > value, "<": str(found) < value, ">=": str(found) >= value, "<=": str(found) <= value}[how]
