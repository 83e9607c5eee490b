"""The filter of ``customJobs.list``: the documented fields and nothing else."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

TERM = re.compile(
    r"\s*(?P<field>display_name|state|create_time|labels\.[a-z0-9_-]+)\s*"
    r'(?P<how>!=|<=|>=|=|<|>|:)\s*(?P<value>"[^"]*"|[^\s()"]+)\s*'
)


class BadFilter(ValueError):
    """Google answers 400."""


def keeps(text: str, job: dict[str, Any]) -> bool:
    """Whether the filter lets the job through: terms with AND, OR and NOT; OR binds tighter, as in AIP-160."""
    if not text.strip():
        return True
    return all(any(_term(part, job) for part in re.split(r"\sOR\s", row)) for row in re.split(r"\sAND\s", text))


def _term(text: str, job: dict[str, Any]) -> bool:
    text, negated = re.subn(r"^\s*NOT\s+", "", text)
    hit = TERM.fullmatch(text.strip().removeprefix("(").removesuffix(")"))
    if hit is None:
        raise BadFilter(f"Invalid filter: {text.strip()}")
    value, how = hit["value"].strip('"'), hit["how"]
    if hit["field"] == "create_time":
        found = {"<": str.__lt__, "<=": str.__le__, ">": str.__gt__, ">=": str.__ge__}.get(how, str.__eq__)
        return bool(found(job["createTime"], value)) != bool(negated)
    if how not in ("=", "!=", ":") or (hit["field"] == "state" and how == ":"):
        raise BadFilter(f"Invalid filter: {text.strip()}")
    if hit["field"].startswith("labels."):
        actual = job.get("labels", {}).get(hit["field"].removeprefix("labels."))
        if how == ":" and value == "*":
            return (actual is not None) != bool(negated)
    else:
        actual = job["displayName" if hit["field"] == "display_name" else "state"]
    same = actual is not None and (fnmatch.fnmatchcase(actual, value) if how == ":" else actual == value)
    return (same != (how == "!=")) != bool(negated)
