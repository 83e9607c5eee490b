"""Frozen dataclasses as JSON, and back: every field checked once, where the bytes come in; and reading free-form JSON.

A class that derives from ``Record`` is decoded strictly: a missing, unknown or mistyped field, text for a number, a
fraction for an integer, NaN and infinity are errors. pydantic is loaded by the first use, not by an import of this
module; callers do not depend on it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar, cast

from annotated_types import Interval, MinLen

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    #: A JSON value. To use one, narrow it.
    Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
else:
    Json = Any  # a field of this type takes every JSON value: recursive aliases cannot be resolved when running

JsonObject: TypeAlias = Mapping[str, Json]
_Record = TypeVar("_Record")

INT64_MAX = 2**63 - 1
#: What a number in a message can be at most, so that nothing computed from it overflows.
Int64: TypeAlias = Annotated[int, Interval(ge=-(2**63), le=INT64_MAX)]
Count: TypeAlias = Annotated[int, Interval(ge=0, le=INT64_MAX)]
#: A step; -1: none yet.
Step: TypeAlias = Annotated[int, Interval(ge=-1, le=INT64_MAX)]
Port: TypeAlias = Annotated[int, Interval(ge=0, le=65535)]
#: Thirty years at most: in nanoseconds it still fits 64 bits.
Seconds: TypeAlias = Annotated[float, Interval(ge=0.0, le=1e9)]
#: Text that is not empty.
Name: TypeAlias = Annotated[str, MinLen(1)]


class Unreadable(ValueError):
    """Bytes that do not hold what was expected: one line that names the field and says what is wrong with it."""


@dataclass(frozen=True)
class Record:
    """Base of the dataclasses that travel as JSON."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


def encode(value: object) -> bytes:
    """``value`` (a Record) as compact JSON. Raises ValueError where a field holds what JSON has no word for."""
    return _adapter(type(value)).dump_json(value)


def decode(cls: type[_Record], data: bytes | str) -> _Record:
    """``data`` as a value of ``cls``.

    Raises:
        Unreadable: no JSON, or a field that is missing, unknown or of another type.
    """
    from pydantic import ValidationError

    try:
        return cast(_Record, _adapter(cls).validate_json(data))
    except ValidationError as error:
        raise Unreadable(reason(error)) from None


def prepare(*classes: type) -> None:
    """Build now what encodes and decodes these, which otherwise the first use of each does (milliseconds)."""
    for cls in classes:
        _adapter(cls)


def convert(cls: type[_Record], value: JsonObject) -> _Record:
    """``value``, an object of JSON values, as one of ``cls``. Raises Unreadable, as ``decode``."""
    from pydantic_core import PydanticSerializationError, to_json

    try:
        return decode(cls, to_json(value, inf_nan_mode="constants"))
    except PydanticSerializationError as error:
        raise Unreadable(str(error)) from None


def parse_object(data: bytes | str) -> JsonObject:
    """``data`` as a JSON object of any content. Raises Unreadable."""
    try:
        result = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON: {error}") from None
    if not isinstance(result, dict):
        raise Unreadable(f"not a JSON object but {type(result).__name__}")
    return result


def at(value: Json, *path: str | int) -> Json:
    """What is there, by keys and indices; None where nothing is."""
    for part in path:
        if isinstance(part, str):
            value = value.get(part) if isinstance(value, Mapping) else None
        else:
            value = value[part] if isinstance(value, list) and -len(value) <= part < len(value) else None
    return value


def child(value: Json, *path: str | int) -> JsonObject:
    """The object there; an empty one where there is none."""
    found = at(value, *path)
    return found if isinstance(found, Mapping) else {}


def children(value: Json, *path: str | int) -> list[JsonObject]:
    """The objects of the list there; none where there is no list."""
    found = at(value, *path)
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []


def texts(value: Json, *path: str | int) -> list[str]:
    """The texts of the list there; none where there is no list."""
    found = at(value, *path)
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


def text(value: Json, *path: str | int, default: str = "") -> str:
    """The text or number there, as text; ``default`` where neither is."""
    found = at(value, *path)
    return str(found) if isinstance(found, (str, int, float)) and not isinstance(found, bool) else default


def whole(value: Json, *path: str | int, default: int = 0) -> int:
    """The whole number there, written as a number or as text; ``default`` where nothing is. Raises ValueError."""
    return int(text(value, *path, default=str(default)))


def changed(value: JsonObject, new: Json, *path: str) -> dict[str, Json]:
    """A copy with ``new`` there; objects on the way are made where they are absent."""
    key, *rest = path
    return {**value, key: changed(child(value, key), new, *rest) if rest else new}


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}
_LOCK = threading.Lock()


def _adapter(cls: type) -> TypeAdapter[Any]:
    found = _ADAPTERS.get(cls)
    if found is None:
        from pydantic import TypeAdapter

        with _LOCK:
            found = _ADAPTERS.setdefault(cls, TypeAdapter(cls))
    return found


def reason(error: Any) -> str:
    """The first thing that is wrong, of pydantic's ValidationError, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    text = f"{path}: {first['msg']}" if path else str(first["msg"])
    return " ".join(text.split())  # a field's name may hold line breaks
