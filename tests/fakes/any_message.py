"""Strategies for messages: any value that a class of ``protocol`` can hold."""

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval, MinLen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.core.layout import Layout
from muster.core.typed_json import JsonObject

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
LAYOUTS = st.builds(Layout, dp_replicate=st.integers(1, 9), dp_shard=st.integers(1, 9), tp=st.integers(1, 9))


def example(cls):
    """Some value of ``cls``, the same one each time."""
    found = []

    @settings(max_examples=1, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(messages(cls))
    def first(message):
        found.append(message)

    first()
    return found[0]


def messages(cls: type) -> st.SearchStrategy[Any]:
    """Every field filled, or left to its default."""
    if cls is Layout:
        return LAYOUTS
    hints = get_type_hints(cls, include_extras=True)
    given = {field.name: _values(hints[field.name]) for field in fields(cls)}
    return st.builds(cls, **given)


def _values(hint: Any) -> st.SearchStrategy[Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is JsonObject or hint == JsonObject:
        return st.dictionaries(st.text(max_size=3), JSON, max_size=2)
    if origin is Annotated:
        return _constrained(inner[0], inner[1:])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.one_of(*(_values(one) for one in inner))
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(_values(inner[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(_values(one) for one in inner))
    if origin is Mapping:
        return st.dictionaries(_values(inner[0]), _values(inner[1]), max_size=2)
    if is_dataclass(hint):
        return messages(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    return {
        int: st.integers(-(2**63), 2**63 - 1),
        str: st.text(max_size=5),
        bool: st.booleans(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        type(None): st.none(),
    }[hint]


def _constrained(hint: Any, notes: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    bounds = [note for note in notes if isinstance(note, Interval)]
    if bounds and hint is int:
        return st.integers(bounds[0].ge, bounds[0].le)
    if bounds:
        return st.floats(bounds[0].ge, bounds[0].le)
    if MinLen(1) in notes:
        return st.text(min_size=1, max_size=5)
    if any(not isinstance(note, str) for note in notes):  # a layout's key is the only other one
        return LAYOUTS.map(lambda layout: layout.key)
    return _values(hint)
