"""The least that a sound GPU does, from ``catalog/health/floors.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from muster.catalog.devices import accelerator_of
from muster.catalog.rows import table, typed


@dataclass(frozen=True, kw_only=True)
class Floor:
    """One accelerator's. None: no figure is known. ``source`` names where they are from, with the table's date."""

    name: str
    source: str
    matmul_tflops: float | None = None
    memory_gb_s: float | None = None
    to_device_gb_s: float | None = None

    def of(self, what: str) -> float | None:
        """The floor of a figure that the probe measured, in its unit."""
        return {
            "matmul": self.matmul_tflops,
            "memory_copy": self.memory_gb_s,
            "to_device": self.to_device_gb_s,
            "from_device": self.to_device_gb_s,
        }.get(what)


def floor_of(device_name: str) -> Floor | None:
    """Of a driver's name of a GPU; None for one that the catalogue has no floor for."""
    row = accelerator_of(device_name)
    return _floors().get(row.name) if row else None


@cache
def _floors() -> dict[str, Floor]:
    found = table("floors.yaml", "health")
    rows = {name: {**row, "source": f"{row['source']}, {found['date']}"} for name, row in found["floors"].items()}
    return typed(Floor, rows)
