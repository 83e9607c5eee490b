"""What every part of the run file is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from muster.core.registry import Registry


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

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Editors offer the shipped names and accept others, which packages add."""
        return {"anyOf": [{"enum": list(self.registry.shipped)}, handler(schema)]}

    def _check(self, name: str) -> str:
        if name not in self.registry.names():
            raise ValueError(f"no {self.registry.family} {name!r}")
        return name
