"""From a driver's name of a GPU to the catalogue's row."""

from __future__ import annotations

import re

from muster.catalog.rows import Accelerator, accelerators


def accelerator_of(device_name: str) -> Accelerator | None:
    """``NVIDIA H100 80GB HBM3`` -> H100; None for a device the catalogue does not know (never a guess).

    Variants with other peaks than the row's (PCIe cards, NVL pairs) are not taken for it.
    """
    parts = [word for word in re.split(r"[\s_-]+", device_name.upper()) if word != "NVIDIA"]
    if not parts or {"PCIE", "NVL", "MIG"} & set(parts):
        return None
    result = [row for name, row in accelerators().items() if name.upper().split("-")[0] == parts[0]]
    if len(result) <= 1:
        return result[0] if result else None
    sized = [row for row in result if any(f"{int(row.memory_bytes / 1e9)}GB" in word for word in parts)]
    return sized[0] if len(sized) == 1 else None
