"""What discovery says of a kind of object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Enough to address its objects."""

    api: str
    kind: str
    plural: str
    namespaced: bool


def root_of(api: str) -> str:
    """Path of a group and version."""
    return f"apis/{api}" if "/" in api else f"api/{api}"
