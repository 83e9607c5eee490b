"""Random details of any event kind, from the types of its fields."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from random import Random
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from muster.core.event_detail import Detail
from muster.core.layout import Layout
from muster.core.snapshots import SnapshotCopy


def random_detail(cls: type[Detail], rng: Random, *, optional: float = 0.3) -> dict[str, Any]:
    """The JSON object of a detail; each field that may be absent is there with the probability ``optional``."""
    hints = get_type_hints(cls)
    return {
        each.name: random_value(hints[each.name], rng)
        for each in fields(cls)
        if each.name != "more"
        and ((each.default is MISSING and each.default_factory is MISSING) or rng.random() < optional)
    }


def random_value(kind: Any, rng: Random) -> Any:
    """A JSON value that a field of this type takes."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return random_value(rng.choice(inner), rng)
    if origin is Literal:
        return rng.choice(inner)
    if origin is tuple:
        return [random_value(inner[0], rng) for _ in range(rng.randint(0, 3))]
    if origin is not None and issubclass(origin, Mapping):
        return {f"host-{number}": random_value(inner[1], rng) for number in range(rng.randint(0, 3))}
    if kind is SnapshotCopy:
        return {"step": 8, "attempt": 1, "rank": 0, "layout": Layout(dp_shard=2).key, "host": "host-1", "tier": "peer"}
    if is_dataclass(kind):
        return {name: random_value(hint, rng) for name, hint in get_type_hints(kind).items() if name[0] != "_"}
    if issubclass(kind, StrEnum):
        return rng.choice(list(kind)).value
    return _PLAIN[kind](rng)


_PLAIN: dict[Any, Any] = {
    Any: lambda rng: rng.choice([1, "a word", None]),
    types.NoneType: lambda _: None,
    bool: lambda rng: rng.random() < 0.5,
    int: lambda rng: rng.choice([0, 1, 2]),
    float: lambda rng: rng.uniform(0, 1000),
    str: lambda rng: rng.choice(["a word", "grüße\n\u2028", ""]),
}
