"""Compute Engine's side of each machine family; machines, networks and modes of sale are those of ``catalog.gke``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from muster.catalog import rows
from muster.catalog.gke import Family, Machine

ON_DEMAND, SPOT, FLEX_START = "on_demand", "spot", "flex_start"
RESERVATION, CALENDAR = "reservation", "calendar"
MODES = (ON_DEMAND, SPOT, FLEX_START, RESERVATION, CALENDAR)
"""``resources.provisioning_model`` as Compute Engine knows it: queued flex-start is Kueue's, and nothing is owned."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """A boot image of Google's."""

    name: str
    driver: int | None
    """Branch of the GPU driver that it holds."""


def image(family: Family) -> Image:
    """What machines of ``family`` boot from where the run file names nothing."""
    tpu = any(machine.chips for machine in family.machines.values())
    return _images()["tpu" if tpu else "gpu" if family.accelerator else "cpu"]


def supervisor_image() -> Image:
    """What the supervisor's machine boots from."""
    return _images()["cpu"]


def refusal(family: Family) -> str | None:
    """Why machines of ``family`` are not for plain machines; None: they are."""
    return _words("refused").get(family.name)


def missing(machine: Machine) -> str | None:
    """What the data network of ``machine`` lacks on Google's image; None: nothing."""
    return _words("missing").get(machine.fabric.name)


def modes(machine: Machine) -> tuple[str, ...]:
    """Ways of buying it."""
    return tuple(mode for mode in MODES if mode in machine.modes)


@cache
def _images() -> Mapping[str, Image]:
    return rows.typed(Image, rows.table("images.yaml", "gce")["images"])


@cache
def _words(key: str) -> Mapping[str, str]:
    table: Mapping[str, str] = rows.table("images.yaml", "gce")[key]
    return table
