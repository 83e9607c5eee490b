"""What the classes of event details (``core.event_details``) have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, ClassVar, TypeVar, get_type_hints

from muster.core.typed_json import JsonObject, Record, Unreadable, convert

_Detail = TypeVar("_Detail", bound="Detail")


@dataclass(frozen=True, kw_only=True)
class Detail(Record):
    """The ``detail`` of one kind of event.

    Fields with a default are optional. A field that no writer of an earlier version knew has one, so that logs stay
    readable.
    """

    kind: ClassVar[str]
    doc: ClassVar[str]
    """What the event means."""
    open: ClassVar[bool] = False
    """Further keys are allowed: they are in ``more``."""

    @classmethod
    def of(cls: type[_Detail], detail: JsonObject, *, skip_unknown: bool = False) -> _Detail:
        """``detail``, the JSON object of an event of this kind, as a value.

        Raises:
            Unreadable: a field that is missing, mistyped or, without ``skip_unknown``, unknown.
        """
        known, given = _meanings(cls), detail
        if (cls.open or skip_unknown) and not detail.keys() <= known.keys():
            given = {key: value for key, value in detail.items() if key in known}
            if cls.open:
                given = {**given, "more": {key: value for key, value in detail.items() if key not in known}}
        try:
            return convert(cls, given)
        except Unreadable as error:
            raise Unreadable(f"detail of {cls.kind}: {error}") from None

    @classmethod
    def required(cls) -> dict[str, str]:
        """Field that every event of this kind has -> meaning and unit."""
        return {name: meaning for name, meaning in _meanings(cls).items() if name not in cls.optional()}

    @classmethod
    def optional(cls) -> dict[str, str]:
        """Field that may be absent -> meaning and unit."""
        names = {each.name for each in fields(cls) if _is_optional(each)}
        return {name: meaning for name, meaning in _meanings(cls).items() if name in names}


@dataclass(frozen=True, kw_only=True)
class OpenDetail(Detail):
    """A detail that may have further keys."""

    open: ClassVar[bool] = True
    more: Annotated[JsonObject, "the further keys"] = field(default_factory=dict)


_MEANINGS: dict[type[Detail], Mapping[str, str]] = {}


def _meanings(cls: type[Detail]) -> Mapping[str, str]:
    """Field -> meaning and unit. Cached: every event that is read asks for the names."""
    if cls not in _MEANINGS:
        hints = get_type_hints(cls, include_extras=True)
        _MEANINGS[cls] = {each.name: hints[each.name].__metadata__[0] for each in fields(cls) if each.name != "more"}
    return _MEANINGS[cls]


def _is_optional(each: Field[object]) -> bool:
    return each.default is not MISSING or each.default_factory is not MISSING
