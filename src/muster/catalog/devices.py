"""From a driver's name of a GPU to the catalogue's row, and to the peak that MFU divides by."""

from __future__ import annotations

import re

from muster.catalog import rows
from muster.catalog.rows import Accelerator, accelerators


def accelerator_of(device_name: str) -> Accelerator | None:
    """``NVIDIA H100 80GB HBM3`` -> H100; None for a device the catalogue does not know (never a guess).

    Variants with other peaks than the row's (PCIe cards, NVL pairs) are not taken for it.
    """
    parts = _words(device_name)
    if not parts or {"PCIE", "NVL", "MIG"} & set(parts):
        return None
    result = [row for name, row in accelerators().items() if name.upper().split("-")[0] == parts[0]]
    if len(result) <= 1:
        return result[0] if result else None
    sizes = [
        int(size) for word in parts for size in re.findall(r"(\d+)GB", word)
    ]  # as sold: up to 7 % less than is seen
    sized = [row for row in result if any(0.9 < size * 1e9 / row.memory_bytes < 1.1 for size in sizes)]
    return sized[0] if len(sized) == 1 else None


def bf16_peak(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of the data sheet for what the driver calls its GPU; None: unknown, never a guess.

    A slice of a GPU (MIG) has no peak here.
    """
    parts = _words(device_name)
    if "MIG" in parts:
        return None
    row = accelerator_of(device_name)
    if row is not None:
        return row.peak_flops.get("bf16")
    cards = rows.table("devices.yaml")["peaks"]
    return next((float(card["bf16"]) * 1e12 for card in cards if set(card["words"]) <= set(parts)), None)


def _words(device_name: str) -> list[str]:
    return [word for word in re.split(r"[\s_-]+", device_name.upper()) if word != "NVIDIA"]
