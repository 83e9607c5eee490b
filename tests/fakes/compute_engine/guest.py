"""A machine from the inside: what a start-up script and an agent meet, and what is done to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

SERIAL_BYTES = 1 << 20
"""What the API keeps of a machine's output: the end."""
DRIVER_S = 180.0
"""From a boot until nvidia-smi exists on an image that installs the driver at first boot."""


@dataclass
class Programs:
    """What runs in the machines; without it they do nothing."""

    boot: Callable[[Guest], None] = lambda guest: None
    acpi: Callable[[Guest, float], None] = lambda guest, kill_in_s: None
    """Told to shut down, and killed so many seconds later."""
    kill: Callable[[Guest], None] = lambda guest: None


@dataclass
class Guest:
    """One machine behind a name. The name and the address may outlive it."""

    name: str
    zone: str
    address: str
    metadata: dict[str, str] = field(default_factory=dict)
    """Below ``instance/``."""
    boots: int = 0
    boot_id: str = ""
    booted_s: float = 0.0
    up: bool = False
    frozen: bool = False
    """It does nothing, and may wake up later: the API knows nothing of it."""
    root: dict[str, bytes] = field(default_factory=dict)
    local_ssd: dict[str, bytes] | None = None
    """None: raw, no file system yet."""
    serial: str = ""
    looked: int = 0

    def boot(self, number: int, now_s: float) -> None:
        self.boots, self.up, self.booted_s, self.looked = self.boots + 1, True, now_s, 0
        self.boot_id = f"boot-{number:08x}"

    def fresh_host(self) -> None:
        """The same name on another machine: memory and local disks are gone, the boot disk is not."""
        self.local_ssd = None

    def prints(self, text: str) -> None:
        self.serial += text

    def nvidia_smi(self, now_s: float) -> int:
        """Exit code: 127 until the driver is there; then it fails once before it works."""
        if now_s - self.booted_s < DRIVER_S:
            return 127
        self.looked += 1
        return 9 if self.looked == 1 else 0


def serial_output(guest: Guest, start: int) -> dict[str, str]:
    """What getSerialPortOutput answers: bytes that are gone are skipped, and ``start`` in the answer says so."""
    data = guest.serial.encode()
    first = max(start, len(data) - SERIAL_BYTES, 0)
    text = data[first:].decode(errors="replace")
    return {"contents": text, "start": str(first), "next": str(len(data)), "kind": "compute#serialPortOutput"}
