"""What was read of a host's GPUs, from any source: NVML, ``nvidia-smi -q``, ``nvidia-smi --query-gpu``.

One judge (``gpu_judge``) reads these, so the same GPU gets the same verdict from each source. None: the source does not
tell (an older driver, a field that this GPU has not); it is neither healthy nor faulty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag


class ClockReason(IntFlag):
    """Why clocks are lower than they could be: NVML's bits (``nvmlClocksEventReasons``)."""

    IDLE = 0x1
    APPLICATION_CLOCKS = 0x2
    SW_POWER_CAP = 0x4
    HW_SLOWDOWN = 0x8
    SYNC_BOOST = 0x10
    SW_THERMAL = 0x20
    HW_THERMAL = 0x40
    HW_POWER_BRAKE = 0x80
    DISPLAY_CLOCKS = 0x100


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One GPU. Counts are since the driver was loaded (volatile) or over its life (aggregate)."""

    index: int | None = None
    address: str = ""
    """PCI address, normalised (``0000:9b:00.0``)."""
    name: str = ""
    uuid: str = ""
    vbios: str = ""
    lost_fields: tuple[str, ...] = ()
    """Fields for which the driver said ``ERR!``, ``Unknown Error`` or ``GPU is lost``, as it named them."""

    ecc_uncorrected: int | None = None
    """Volatile; memory and caches together."""
    ecc_corrected: int | None = None
    sram_uncorrected_aggregate: int | None = None
    sram_threshold_exceeded: bool | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    remap_banks: Mapping[str, int] = field(default_factory=dict)
    """Banks by how many spare rows they have left: max, high, partial, low, none."""
    retired_pages: int | None = None
    """Of GPUs before A100."""
    retired_pages_pending: bool | None = None
    repair_pending: bool | None = None
    """A channel or processor cluster waits for a reset to be repaired."""
    unrepairable: bool | None = None

    clock_reasons: ClockReason | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """Where the GPU slows down."""
    margin_c: int | None = None
    """Degrees left to the limit, where the driver gives that (``T.Limit``) in place of ``slowdown_c``."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None

    recovery_action: str = ""
    """The driver's own word (570 or newer): None, Reset, Reboot, Drain P2P, Drain and Reset."""
    reset_required: bool | None = None
    drain_recommended: bool | None = None
    persistence: bool | None = None
    mig: bool | None = None
    compute_mode: str = ""
    fabric_state: str = ""
    fabric_status: str = ""
    memory_used_bytes: int | None = None
    processes: tuple[tuple[int, str], ...] = ()
    """(pid, name) of those that use the GPU."""


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """All GPUs of a host."""

    gpus: tuple[GpuReading, ...]
    source: str
    """``NVML``, ``nvidia-smi -q``..."""
    driver: str = ""
    count: int | None = None
    """GPUs that the source says there are; None: it does not say."""
    unreachable: tuple[str, ...] = ()
    """GPUs of which the driver has no handle any more, as it named them."""
    missing: str = ""
    """Why the report is not whole; empty: it is."""
