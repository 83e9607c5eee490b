"""What a machine reports of itself: no torch, no CUDA, nothing loaded; safe while ranks run."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from muster.health.hardware.infiniband import COUNTERS
from muster.health.hardware.kernel_log import pci_address
from muster.health.hardware.nvidia_smi import is_xml, read_xml
from muster.health.hardware.nvlink import is_nvlink
from muster.health.hardware.readings import ClockReason, GpuReading, GpuReport
from muster.health.machine.report import Disk, KernelLines, ProbeLine, Settings
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
            path.unlink()  # at once: a measurement that is given up, or a kill, leaves nothing behind
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


# ----------------
# GPUs by NVML (``nvidia-ml-py``, where it is installed), else by ``nvidia-smi -q -x``: one reading, no CUDA


_Value = TypeVar("_Value")
#: nvmlDeviceGpuRecoveryAction_t (nvml.h of driver 580), in the words of ``nvidia-smi``.
_ACTIONS = {
    0: "None", 1: "Reset", 2: "Reboot", 3: "Drain P2P", 4: "Drain and Reset", 5: "Recover IMEX Domain", 6: "Bus Reset",
    7: "System Reboot",
}  # fmt: skip
_COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_FABRIC = {0: "", 1: "Not started", 2: "In Progress", 3: "Completed"}
_BITS = sum(ClockReason)


def read_gpus(*, limit_s: float) -> GpuReport | None:
    """All GPUs of this machine; None where there is neither a driver's library nor ``nvidia-smi``."""
    try:
        import pynvml
    except ImportError:
        return _by_tool(limit_s)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        found = _by_tool(limit_s)
        missing_library = isinstance(error, pynvml.NVMLError_LibraryNotFound)
        return found if missing_library or found else GpuReport(gpus=(), source="NVML", missing=f"NVML: {error}")
    try:
        return _by_nvml()
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _by_tool(limit_s: float) -> GpuReport | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    output, code = output_of([tool, "-q", "-x"], limit_s=limit_s)
    text = output.decode(errors="replace")
    found = read_xml(text)
    missing = found.missing if is_xml(text) else " ".join(text.split())[:200] or found.missing
    ended = f"did not end within {limit_s:g} s" if code is None else f"ended with code {code}"
    return replace(found, missing=missing or (f"nvidia-smi {ended}" if code != 0 else ""))


def _by_nvml() -> GpuReport:
    import pynvml

    count = int(pynvml.nvmlDeviceGetCount())
    gpus, unreachable = [], []
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            unreachable.append(f"GPU {index} ({error})")
            continue
        gpus.append(_Gpu(handle).reading(index))
    driver = _text(_Gpu(None).ask("driver", pynvml.nvmlSystemGetDriverVersion) or "")
    return GpuReport(gpus=tuple(gpus), source="NVML", driver=driver, count=count, unreachable=tuple(unreachable))


class _Gpu:
    """Asks one GPU; what it has not is None, and what the driver cannot read any more is kept in ``lost``."""

    def __init__(self, handle: object) -> None:
        self.handle = handle
        self.lost: list[str] = []

    def ask(self, name: str, call: Callable[..., _Value], *arguments: object) -> _Value | None:
        import pynvml

        try:
            return call(*arguments)
        except pynvml.NVMLError as error:
            lost = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_RESET_REQUIRED)
            if error.value in lost:
                self.lost.append(name)
            return None  # not supported by this GPU, or not known to an older driver

    def reading(self, index: int) -> GpuReading:
        import pynvml as n

        def ask(name: str, call: Callable[..., _Value], *more: object) -> _Value | None:
            return self.ask(name, call, self.handle, *more)

        remapped = ask("remapped rows", n.nvmlDeviceGetRemappedRows)
        banks = ask("remap banks", n.nvmlDeviceGetRowRemapperHistogram)
        reasons = ask("clock reasons", n.nvmlDeviceGetCurrentClocksEventReasons)
        if reasons is None:  # before driver 535
            reasons = ask("clock reasons", n.nvmlDeviceGetCurrentClocksThrottleReasons)
        mig = ask("MIG", n.nvmlDeviceGetMigMode)
        pages = ask("pages", n.nvmlDeviceGetRetiredPagesPendingStatus)
        persistence = ask("persistence", n.nvmlDeviceGetPersistenceMode)
        pci, memory = ask("PCI", n.nvmlDeviceGetPciInfo), ask("memory", n.nvmlDeviceGetMemoryInfo)
        sram, exceeded = self._sram()
        state, status = self._fabric()
        # by version: the name without one raises another error where the library lacks the newest
        processes = ask("processes", n.nvmlDeviceGetComputeRunningProcesses_v3) or ()
        return GpuReading(
            index=index,
            address=pci_address("" if pci is None else _text(pci.busId)),
            name=_text(ask("name", n.nvmlDeviceGetName) or ""),
            uuid=_text(ask("uuid", n.nvmlDeviceGetUUID) or ""),
            vbios=_text(ask("vbios", n.nvmlDeviceGetVbiosVersion) or ""),
            ecc_uncorrected=ask(
                "ECC", n.nvmlDeviceGetTotalEccErrors, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
            ),
            ecc_corrected=ask(
                "ECC", n.nvmlDeviceGetTotalEccErrors, n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_VOLATILE_ECC
            ),
            sram_uncorrected_aggregate=sram,
            sram_threshold_exceeded=exceeded,
            remap_pending=None if remapped is None else bool(remapped[2]),
            remap_failed=None if remapped is None else bool(remapped[3]),
            remap_banks={}
            if banks is None
            else {name: int(getattr(banks, name)) for name in ("max", "high", "partial", "low", "none")},
            retired_pages_pending=None if pages is None else bool(pages),
            clock_reasons=None if reasons is None else ClockReason(int(reasons) & _BITS),
            temperature_c=ask("temperature", n.nvmlDeviceGetTemperature, n.NVML_TEMPERATURE_GPU),
            slowdown_c=ask("slowdown", n.nvmlDeviceGetTemperatureThreshold, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            pcie_width=ask("PCIe width", n.nvmlDeviceGetCurrPcieLinkWidth),
            pcie_width_max=ask("PCIe width", n.nvmlDeviceGetMaxPcieLinkWidth),
            recovery_action=self._recovery(),
            fabric_state=state,
            fabric_status=status,
            persistence=None if persistence is None else bool(persistence),
            mig=None if mig is None else bool(mig[0]),
            compute_mode=_COMPUTE_MODES.get(ask("compute mode", n.nvmlDeviceGetComputeMode) or 0, ""),
            memory_used_bytes=None if memory is None else int(memory.used),
            processes=tuple((int(one.pid), "") for one in processes),
            lost_fields=tuple(self.lost),
        )

    def _recovery(self) -> str:
        """Of drivers from 570 on."""
        import pynvml as n

        field = n.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        values = self.ask("recovery action", n.nvmlDeviceGetFieldValues, self.handle, [field])
        if not values or values[0].nvmlReturn != n.NVML_SUCCESS:
            return ""
        number = int(values[0].value.uiVal)
        return _ACTIONS.get(number, f"action {number}")

    def _sram(self) -> tuple[int | None, bool | None]:
        """(uncorrectable errors over its life, threshold exceeded), of drivers from 550 on."""
        import pynvml as n

        status = n.c_nvmlEccSramErrorStatus_v1_t()
        if self.ask("SRAM", lambda: n.nvmlDeviceGetSramEccErrorStatus(self.handle, n.byref(status)) or True) is None:
            return None, None
        return int(status.aggregateUncParity + status.aggregateUncSecDed), bool(status.bThresholdExceeded)

    def _fabric(self) -> tuple[str, str]:
        """(state, status) of GPUs behind NVSwitch; empty for others."""
        import pynvml as n

        found = n.c_nvmlGpuFabricInfo_v2_t()
        if self.ask("fabric", lambda: n.nvmlDeviceGetGpuFabricInfoV(self.handle, n.byref(found)) or True) is None:
            return "", ""
        state = _FABRIC.get(int(found.state), f"state {int(found.state)}")
        status = "Success" if found.status == n.NVML_SUCCESS else f"error {int(found.status)}"
        return (state, status) if state else ("", "")


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
