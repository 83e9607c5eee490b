"""What every part of the run file is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from muster.core.registry import Registry
from muster.core.typed_json import Json

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue


class Section(BaseModel):
    """A part of the run file: frozen, unknown keys refused, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class MemberOf:
    """Marks a text that names a member of a registry: ``Annotated[str, MemberOf(OPTIMIZERS)]``."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Editors offer the shipped names and accept others, which packages add."""
        return {"anyOf": [{"enum": list(self.registry.shipped)}, handler(schema)]}

    def _check(self, name: str) -> str:
        if name not in self.registry:
            raise ValueError(f"no {self.registry.family} {name!r}")
        return name


@dataclass(frozen=True)
class SectionOf:
    """Marks a section whose ``type`` names a member of a registry; the member's ``section`` is its class."""

    registry: Registry[Any]

    def sections(self, raw: Json = None) -> list[type[Section]]:
        """The classes allowed here; where ``raw`` names its ``type``, that one alone."""
        name = raw.get("type") if isinstance(raw, dict) else None
        names = [name] if isinstance(name, str) and name in self.registry else self.registry.names()
        return [self.registry.get(name).section for name in names]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The shipped types alone: an editor cannot know what packages add."""
        sections = [self.registry.get(name).section for name in self.registry.shipped]
        members = [handler(section.__pydantic_core_schema__) for section in sections]
        return {"discriminator": {"propertyName": "type"}, "oneOf": members}

    def _read(self, value: object) -> Section:
        """Errors of the member's section keep their places."""
        if isinstance(value, Section):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("model_type", {"class_name": self.registry.family})
        if "type" not in value:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'type'"})
        if not isinstance(value["type"], str) or value["type"] not in self.registry:
            expected = ", ".join(self.registry.names())
            tags = {"discriminator": "'type'", "tag": str(value["type"]), "expected_tags": expected}
            raise PydanticKnownError("union_tag_invalid", tags)
        section: type[Section] = self.registry.get(value["type"]).section
        return section.model_validate(value)
