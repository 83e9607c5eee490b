"""What a machine tells of itself: no torch, no CUDA, nothing loaded; safe beside running ranks."""

from __future__ import annotations

import os
import resource
import shutil
import time
from pathlib import Path
from uuid import uuid4

from muster.health.machine.report import Disk, ProbeLine, Settings
from muster.probe.nvml import read_gpus

_PORT_FILES = ("state", "phys_state", "rate", "link_layer")
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
_WRITE_BYTES = 64 << 20
_BLOCK = os.urandom(1 << 20)  # a file system that squeezes zeros must not look fast


def gpus(limit_s: float) -> ProbeLine:
    return ProbeLine(rung="gpus", gpus=read_gpus(limit_s=limit_s))


def settings() -> ProbeLine:
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    found = Settings(
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=_kib(memory["MemTotal"]),
        memory_available_bytes=_kib(memory.get("MemAvailable", memory["MemFree"])),
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        clock_source=_read(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
        nvidia_devices=_nvidia_devices(),
    )
    return ProbeLine(rung="settings", settings=found)


def ports() -> ProbeLine:
    """The state of every RDMA port; none where the machine has none."""
    found: dict[str, str] = {}
    for folder in sorted(Path("/sys/class/infiniband").glob("*")):
        paths = [folder / "hca_type", folder / "board_id", *folder.glob("ports/*/*")]
        found |= {str(path): _read(path) for path in paths if path.name not in _PORT_FILES and path.parent == folder}
        found |= {str(path): _read(path) for path in paths if path.name in _PORT_FILES}
    return ProbeLine(rung="ports", ports={path: text for path, text in found.items() if text})


def disk(folder: str) -> ProbeLine:
    """Free room, and the speed of writing and syncing 64 MiB in a file without a name."""
    free = shutil.disk_usage(folder).free
    speed = None
    if free > 4 * _WRITE_BYTES:
        path = Path(folder, f".muster-check-{uuid4().hex}")
        begun = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            path.unlink()  # at once: a rung that is given up, or a kill, leaves nothing behind
            for _ in range(_WRITE_BYTES // len(_BLOCK)):
                os.write(fd, _BLOCK)
            os.fsync(fd)
        finally:
            os.close(fd)
        speed = _WRITE_BYTES / (time.perf_counter() - begun)
    return ProbeLine(rung="disk", disk=Disk(folder=folder, free_bytes=free, write_bytes_per_s=speed))


def _nvidia_devices() -> int:
    """On the PCI bus, whether or not a driver has them. Virtual functions and audio parts have other classes."""
    devices = Path("/sys/bus/pci/devices").glob("*")
    return sum(_read(one / "vendor") == _NVIDIA and _read(one / "class")[:6] in _DISPLAYS for one in devices)


def _kib(text: str) -> int:
    return int(text.split()[0]) << 10


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
