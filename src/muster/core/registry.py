"""One table for each family (optimizers, data sources, back ends, tasks): what ships, and what other packages add.

A family is a mapping of names to ``"module:attribute"``. Another package adds a member by an entry point of its own::

    [project.entry-points."muster.optimizers"]
    lion = "my_package.lion:OPTIMIZER"

Members are imported when they are asked for, not before: a laptop that only submits imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import Generic, TypeVar

from muster.core.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Registry(Generic[T]):
    """The members of one family, by name."""

    family: str
    """What a member is called in messages (``optimizer``)."""
    group: str
    """Entry-point group of other packages (``muster.optimizers``)."""
    shipped: Mapping[str, str]
    """Name -> ``"module:attribute"``."""

    def get(self, name: str) -> T:
        """The member called ``name``, imported now.

        Raises:
            UsageError: there is none of that name, or it cannot be imported; the hint lists what there is.
        """
        target = self.shipped.get(name) or self._added.get(name)
        if target is None:
            raise UsageError(f"no {self.family} {name!r}", hint=f"available: {', '.join(self.names())}")
        module, _, attribute = target.partition(":")
        try:
            member: T = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"{self.family} {name!r} cannot be loaded from {target}: {error}") from error
        return member

    def __contains__(self, name: object) -> bool:
        """Whether there is a member of that name; entry points are looked up only for names that do not ship."""
        return name in self.shipped or name in self._added

    def names(self) -> list[str]:
        """Every name, shipped ones first."""
        return [*self.shipped, *sorted(set(self._added) - set(self.shipped))]

    @cached_property
    def _added(self) -> dict[str, str]:
        return {point.name: point.value for point in metadata.entry_points(group=self.group)}
