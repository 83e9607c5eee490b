"""What a machine should have, by its type's row in the catalogue."""

from __future__ import annotations

from dataclasses import dataclass

from muster.catalog.rows import machines


@dataclass(frozen=True, kw_only=True)
class Expected:
    """None: not known."""

    gpus: int | None = None
    ports: int | None = None
    port_gbps: int | None = None
    source: str = ""


def expected_of(machine: str | None) -> Expected:
    """Of a machine type, as a run file names it; a type without a row is not known."""
    row = machines().get(machine or "")
    return Expected(gpus=row.count, source=f"machine type {row.name}") if row is not None else Expected()
