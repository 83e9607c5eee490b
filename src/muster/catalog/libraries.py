"""Which versions of torch, transformers and flash-attn fit together: refused, tested, or never tried."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from muster.catalog import rows
from muster.core.errors import UsageError

PACKAGES = ("torch", "transformers", "flash-attn", "flash-attn-4")
Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Tested:
    """Versions that were run together, and how."""

    torch: str
    transformers: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Versions of a package that do not work."""

    package: str
    below: str
    reason: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Libraries:
    """The table."""

    date: str
    tested: tuple[Tested, ...]
    refused: tuple[Refused, ...]


@cache
def libraries() -> Libraries:
    """The table, read once."""
    table = rows.table("libraries.yaml")
    tested = (Tested(**{key: str(value) for key, value in row.items()}) for row in table["tested"])
    refused = (Refused(**row) for row in table["refused"])
    return Libraries(date=str(table["date"]), tested=tuple(tested), refused=tuple(refused))


def installed() -> dict[str, str]:
    """Package -> version, of those that the table is about; nothing is imported."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def refuse(found: Mapping[str, str], *, attention: str = "auto") -> None:
    """Raise UsageError where a version in ``found`` is known not to work for ``model.attention``: ``attention``."""
    flash = attention in ("auto", "flash_attention_2")
    for row in libraries().refused:
        version = found.get(row.package)
        if version is None or release(version) >= release(row.below) or (row.package == "flash-attn" and not flash):
            continue
        raise UsageError(f"{row.package} {version} cannot be used: {row.reason}", hint=row.hint)
    if flash and "flash-attn-4" in found and "flash-attn" not in found:
        # Both are imported as flash_attn, and transformers takes only the older one for flash_attention_2.
        raise UsageError(
            f"flash-attn-4 {found['flash-attn-4']} is installed without flash-attn: it looks like flash attention 2",
            hint="set model.attention: varlen, or uninstall it",
        )


def untested(found: Mapping[str, str]) -> str | None:
    """One line about an untested combination of torch and transformers; None: it was tested, or one is absent."""
    torch, transformers = found.get("torch"), found.get("transformers")
    if torch is None or transformers is None:
        return None
    tried = [release(row.transformers)[:2] for row in libraries().tested if same_minor(row.torch, torch)]
    if tried and min(tried) <= release(transformers)[:2] <= max(tried):
        return None
    tested = ", ".join(f"{row.torch} with {row.transformers}" for row in libraries().tested)
    return f"torch {torch} with transformers {transformers} is not tested with Muster (tested: {tested})"


def same_minor(one: str, other: str) -> bool:
    return release(one)[:2] == release(other)[:2]


def release(version: str) -> Version:
    """``2.13.0+cu130`` -> (2, 13, 0); what follows the numbers does not count."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(word) for word in numbers[0].split(".")) if numbers else ()
