"""Which GPUs of a machine a program started in an environment may use: of a machine that is shared, only some."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.health.hardware.kernel_log import pci_address

#: The driver's list of GPUs: a folder for each, named by its PCI address.
GPUS = Path("/proc/driver/nvidia/gpus")


def own_gpus(folder: Path, environ: Mapping[str, str]) -> frozenset[str] | None:
    """PCI addresses, normalised; None: all, or not known. ``folder``: ``/proc/driver/nvidia/gpus``.

    Slurm's numbers are the machine's own (minor numbers of devices, or places: believed where both say the same);
    CUDA's may be of the job's part alone (device cgroups), so under Slurm they are believed only by UUID.
    """
    cards = {pci_address(path.name): _fields(path / "information") for path in sorted(folder.iterdir())}
    cards.pop("", None)
    step = environ.get("SLURM_STEP_GPUS")
    if step:
        minors = {card.get("Device Minor", ""): address for address, card in cards.items()}
        found = [minors.get(number) for number in _entries(step)]
        placed = [_find(number, cards, counts=True) for number in _entries(step)]
        return _all_known(found) if found == placed else None
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        asked = environ.get(name)
        if asked is None or asked in ("all", "void") or (name.startswith("NVIDIA") and not asked):
            continue
        counts = name.startswith("NVIDIA") or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or _alike(cards)
        return _all_known(
            [_find(entry, cards, counts=counts and "SLURM_JOB_ID" not in environ) for entry in _entries(asked)]
        )
    return None


def _find(entry: str, cards: Mapping[str, Mapping[str, str]], *, counts: bool) -> str | None:
    """``counts``: a number is the place in the order of addresses."""
    if entry.isdecimal():
        return list(cards)[int(entry)] if counts and int(entry) < len(cards) else None
    found = [address for address, card in cards.items() if card.get("GPU UUID", "").startswith(entry)]
    return found[0] if len(found) == 1 else None


def _all_known(found: Sequence[str | None]) -> frozenset[str] | None:
    known = frozenset(address for address in found if address is not None)
    return known if None not in found else None


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _alike(cards: Mapping[str, Mapping[str, str]]) -> bool:
    """CUDA puts the fastest first; of one model the order is that of the addresses."""
    return len({card.get("Model", "") for card in cards.values()}) == 1


def _fields(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in path.read_text(errors="replace").splitlines())
        return {name.strip(): value.strip() for name, _, value in lines}
    return {}
