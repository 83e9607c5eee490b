"""What Vertex AI rents for custom jobs, as typed values of ``machines.yaml``: machines, quota metrics, the fee.

::

    find("a3-highgpu-8g", None) -> Machine(name="a3-highgpu-8g", gpus=8, accelerator=Accelerator("NVIDIA_H100_80GB"...))
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from muster.catalog import rows
from muster.core.errors import UsageError

ON_DEMAND, SPOT, FLEX_START, RESERVATION = "on_demand", "spot", "flex_start", "reservation"
MODES = (ON_DEMAND, SPOT, FLEX_START, RESERVATION)
"""``resources.provisioning_model`` as Vertex knows it: a calendar's reservation is a reservation there, and nothing is
owned."""
CPUS = "aiplatform.googleapis.com/custom_model_training_cpus"


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One accelerator by its name in a request."""

    name: str
    chip: str
    """As the tables of machines and offers call it."""
    quota: str
    quota_seen: bool
    default_quota: int | None
    """GPUs that a new project may have in a region; None: not known."""
    flex_start: bool
    network: Literal["configured", "script", "sockets", "unknown"]
    regions: tuple[str, ...] | None
    """Where it was offered on demand when the table was made; None: not known."""

    def metric(self, mode: str) -> str:
        """The quota metric that a job counts against: flex-start's is the preemptible one, though it is not."""
        kind = "preemptible_" if mode in (SPOT, FLEX_START) else ""
        return f"aiplatform.googleapis.com/custom_model_training_{kind}{self.quota}_gpus"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine type."""

    name: str
    gpus: int
    accelerator: Accelerator | None
    """Of GPUs: TPUs have no name of their own in a request."""
    boot_disk: str = "pd-ssd"
    chips: int = 0
    """Of a TPU."""

    @property
    def chip(self) -> str | None:
        """Its accelerator as the tables of machines and offers call it; None: it has none."""
        if self.chips:
            return rows.machines()[self.name].accelerator
        return None if self.accelerator is None else self.accelerator.chip

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways of buying it that can be asked for here. Where it is not sold on demand elsewhere, a request says."""
        flexible = self.accelerator is not None and self.accelerator.flex_start
        return tuple(mode for mode in MODES if mode != FLEX_START or flexible)


@dataclass(frozen=True, kw_only=True)
class Fee:
    """Vertex's management fee."""

    usd_per_gpu_hour: float
    billed: bool
    """It stood on a bill; else the share is assumed that another machine's bill shows."""


@cache
def machines() -> Mapping[str, Machine]:
    """Every machine by name."""
    table = rows.table("machines.yaml", "vertex")
    accelerators = rows.typed(Accelerator, table["accelerators"])
    rented = {
        name: {**row, "accelerator": accelerators.get(row["accelerator"])} for name, row in table["machines"].items()
    }
    return {name: Machine(**{"name": name, **row}) for name, row in rented.items()}


def table_date() -> str:
    """When the table was made."""
    return str(rows.table("machines.yaml", "vertex")["date"])


def find(machine: str | None, accelerator: str | None) -> Machine:
    """The machine that a run file names, or the only whole host with its accelerator.

    Raises:
        UsageError: nothing named, a name that is not rented here, or a word that fits several machines.
    """
    known = machines()
    if machine is not None:
        if machine not in known:
            near = difflib.get_close_matches(machine, known, n=3, cutoff=0.6)
            hint = "did you mean " + " or ".join(near) + "?" if near else "it rents " + ", ".join(known)
            raise UsageError(f"Vertex AI has no machine {machine!r} for custom jobs", hint=hint)
        return known[machine]
    if accelerator is None:
        raise UsageError(
            "no machine named", hint="set resources.machine (a3-highgpu-8g) or resources.accelerator (B200)"
        )
    asked = accelerator.upper().replace("NVIDIA-", "").replace(" ", "-")
    fitting = [one for one in known.values() if one.chip is not None and one.chip.upper() == asked]
    if not fitting:
        chips = sorted({one.chip for one in known.values() if one.chip is not None})
        raise UsageError(f"Vertex AI has no accelerator {accelerator!r}", hint="it rents " + ", ".join(chips))
    if len(fitting) > 1:
        names = ", ".join(one.name for one in fitting)
        raise UsageError(f"accelerator {accelerator!r} comes in several machines", hint=f"resources.machine: {names}")
    return fitting[0]


def reducer_usd_per_hour() -> float:
    """Of one machine of Reduction Server, with the fee; from memory (see the table)."""
    table = rows.table("machines.yaml", "vertex")
    return float(table["reducer_usd_per_hour"]) * (1 + float(table["fee"]["share_of_on_demand"]))


def fee(machine: str, region: str) -> Fee | None:
    """The fee for a GPU of ``machine`` in ``region``; None: not known."""
    table = rows.table("machines.yaml", "vertex")["fee"]
    billed: Mapping[str, float] = table["usd_per_gpu_hour"]
    if machine in billed:
        return Fee(usd_per_gpu_hour=billed[machine], billed=True)
    prices = [one for one in rows.shipped_prices() if (one.machine, one.mode) == (machine, ON_DEMAND)]
    listed = next((one for one in prices if one.region == region), prices[0] if prices else None)
    share = float(table["share_of_on_demand"])
    return None if listed is None else Fee(usd_per_gpu_hour=listed.usd_per_gpu_hour * share, billed=False)
