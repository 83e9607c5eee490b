"""A rank computes and allocates close to its GPU: on the processors of the GPU's own memory node.

On a machine with several sockets the host memory of a snapshot would otherwise lie wherever the rank happened to run
when it first wrote there, and copies to the other socket's memory go at about half the rate (an estimate).

Never run on a GPU: the decision is a function of what ``/sys`` says, and the rest two system calls.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

SYSFS = Path("/sys/bus/pci/devices")


def stay_near(device: torch.device, *, sysfs: Path = SYSFS) -> frozenset[int] | None:
    """Bind this thread, and those that it will start, to the device's processors; which, if that changes anything.

    Nothing happens where the system does not say, or where this process may use none of them.
    """
    if device.type != "cuda":
        return None
    with contextlib.suppress(OSError, AttributeError, ValueError):
        card: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the address
        address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        allowed = frozenset(os.sched_getaffinity(0))
        chosen = nearby(sysfs / address, allowed)
        if chosen and chosen != allowed:
            os.sched_setaffinity(0, chosen)
            return chosen
    return None


def nearby(card: Path, allowed: frozenset[int]) -> frozenset[int]:
    """Of the ``allowed`` processors those of the PCI device's memory node. Raises OSError or ValueError."""
    return allowed & processors((card / "local_cpulist").read_text())


def processors(text: str) -> frozenset[int]:
    """The numbers in a list of the kernel's: ``0-3,8`` (cpuset(7)). Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
