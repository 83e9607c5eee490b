"""What a machine tells of itself: no torch, no CUDA, nothing loaded; safe beside running ranks."""

from __future__ import annotations

import os
import re
import resource
import shutil
import time
from pathlib import Path
from uuid import uuid4

from muster.health.hardware.infiniband import COUNTERS
from muster.health.hardware.nvlink import is_nvlink
from muster.health.machine.report import Disk, KernelLines, ProbeLine, Settings
from muster.probe.nvml import read_gpus
from muster.probe.programs import output_of

PORTS = Path("/sys/class/infiniband")
#: Between two readings of the ports' counters: the passive part has two seconds in all.
APART_S = 1.0
_PORT_FILES = ("state", "phys_state", "rate", "link_layer")
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
_WRITE_BYTES = 64 << 20
KMSG = "/dev/kmsg"
#: In every line of NVIDIA's driver and of its switches.
_DRIVER_WORDS = ("NVRM", "nvidia", "SXid")
_MOST_LINES = 200
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


def ports(folder: Path = PORTS, apart_s: float = APART_S) -> ProbeLine:
    """The state of every RDMA port and what its counters of errors do meanwhile; none where the machine has none."""
    before, begun = _counters(folder), time.monotonic()
    found = _port_files(folder)
    if not before:
        return ProbeLine(rung="ports", ports=found)
    time.sleep(apart_s)
    after, took_s = _counters(folder), time.monotonic() - begun
    return ProbeLine(rung="ports", ports=found, counters=(before, after), apart_s=took_s)


def _counters(adapters: Path) -> dict[str, str]:
    paths = (path for path in adapters.glob("*/ports/*/*counters/*") if path.name in COUNTERS)
    return {str(path): text for path in sorted(paths) if (text := _read(path))}


def _port_files(adapters: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in sorted(adapters.glob("*")):
        paths = [folder / "hca_type", folder / "board_id", *folder.glob("ports/*/*")]
        found |= {str(path): _read(path) for path in paths if path.name not in _PORT_FILES and path.parent == folder}
        found |= {str(path): _read(path) for path in paths if path.name in _PORT_FILES}
    return {path: text for path, text in found.items() if text}


def links(limit_s: float) -> ProbeLine:
    """NVLink, as ``nvidia-smi`` prints it; nothing where there is no such tool or these GPUs have no links."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ProbeLine(rung="links")
    output, code = output_of([tool, "nvlink", "--status"], limit_s=limit_s)
    text = output.decode(errors="replace")
    if code is None:
        return ProbeLine(rung="links", failed=f"nvidia-smi nvlink did not end within {limit_s:g} s")
    if code != 0 and not re.search(r"^GPU \d+:", text, re.MULTILINE):
        why = " ".join(text.split())[:200]
        return ProbeLine(rung="links", failed=f"nvidia-smi nvlink ended with code {code}: {why}")
    return ProbeLine(rung="links", nvlink=text if is_nvlink(text) else "")


def kernel_log(limit_s: float, kmsg: str = KMSG) -> ProbeLine:
    """The driver's lines in the kernel log, with their age on this machine's clock since it was started."""
    source = "/dev/kmsg"
    try:
        text = _records(kmsg)
    except OSError as error:
        source = "dmesg"
        try:
            output, code = output_of(["dmesg", "--kernel", "--nopager", "--color=never"], limit_s=limit_s)
        except OSError as missing:
            return ProbeLine(rung="kernel_log", note=f"{kmsg}: {error.strerror}; dmesg: {missing.strerror}")
        if code != 0:
            return ProbeLine(rung="kernel_log", note=f"{kmsg}: {error.strerror}; dmesg ended with code {code}")
        text = output.decode(errors="replace")
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if any(word in line for word in _DRIVER_WORDS)][-_MOST_LINES:]
    found = KernelLines(source=source, lines=len(lines), text="".join(kept), now_s=time.monotonic())
    return ProbeLine(rung="kernel_log", kernel_log=found)


def _records(kmsg: str) -> str:
    """All that the kernel still has, one record a read; lines that only explain a record are left out."""
    found: list[str] = []
    fd = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(fd, 16384)
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten before it was read: go on behind
                continue
            if not record:
                break
            found.append(record.decode(errors="replace").partition("\n")[0] + "\n")
    finally:
        os.close(fd)
    return "".join(found)


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
