"""GPUs by NVML (``nvidia-ml-py``, where it is installed), else by ``nvidia-smi -q -x``: one reading, no CUDA."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from muster.health.hardware.kernel_log import pci_address
from muster.health.hardware.nvidia_smi import is_xml, read_xml
from muster.health.hardware.readings import ClockReason, GpuReading, GpuReport
from muster.probe.programs import output_of

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
    driver = _Gpu(None).ask("driver", lambda: str(pynvml.nvmlSystemGetDriverVersion())) or ""
    return GpuReport(gpus=tuple(gpus), source="NVML", driver=driver, count=count, unreachable=tuple(unreachable))


class _Gpu:
    """Asks one GPU; what it has not is None, and what the driver cannot read any more is kept in ``lost``."""

    def __init__(self, handle: object) -> None:
        self.handle = handle
        self.lost: list[str] = []

    def ask(self, name: str, call: Callable[[], _Value]) -> _Value | None:
        import pynvml

        try:
            return call()
        except pynvml.NVMLError as error:
            lost = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_RESET_REQUIRED)
            if error.value in lost:
                self.lost.append(name)
            return None  # not supported by this GPU, or not known to an older driver

    def reading(self, index: int) -> GpuReading:
        import pynvml as n

        ask, handle = self.ask, self.handle
        number: Callable[[str, str], int | None] = lambda name, function: ask(  # noqa: E731
            name, lambda: int(getattr(n, function)(handle))
        )
        remapped = ask("remapped rows", partial(n.nvmlDeviceGetRemappedRows, handle))
        banks = ask("remap banks", partial(n.nvmlDeviceGetRowRemapperHistogram, handle))
        reasons = number("clock reasons", "nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # before driver 535
            reasons = number("clock reasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        mig = ask("MIG", lambda: int(n.nvmlDeviceGetMigMode(handle)[0]))
        pages = ask("pages", lambda: bool(n.nvmlDeviceGetRetiredPagesPendingStatus(handle)))
        sram, exceeded = self._sram()
        state, status = self._fabric()
        # by version: the name without one raises another error where the library lacks the newest
        processes = ask("processes", partial(n.nvmlDeviceGetComputeRunningProcesses_v3, handle)) or ()
        ecc: Callable[[int], int | None] = lambda kind: ask(  # noqa: E731
            "ECC", lambda: int(n.nvmlDeviceGetTotalEccErrors(handle, kind, n.NVML_VOLATILE_ECC))
        )
        return GpuReading(
            index=index,
            address=pci_address(ask("PCI", lambda: _text(n.nvmlDeviceGetPciInfo(handle).busId)) or ""),
            name=ask("name", lambda: _text(n.nvmlDeviceGetName(handle))) or "",
            uuid=ask("uuid", lambda: _text(n.nvmlDeviceGetUUID(handle))) or "",
            vbios=ask("vbios", lambda: _text(n.nvmlDeviceGetVbiosVersion(handle))) or "",
            ecc_uncorrected=ecc(n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            ecc_corrected=ecc(n.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            sram_uncorrected_aggregate=sram, sram_threshold_exceeded=exceeded,
            remap_pending=None if remapped is None else bool(remapped[2]),
            remap_failed=None if remapped is None else bool(remapped[3]),
            remap_banks={} if banks is None else {
                name: int(getattr(banks, name)) for name in ("max", "high", "partial", "low", "none")
            },
            retired_pages_pending=pages,
            clock_reasons=None if reasons is None else ClockReason(reasons & _BITS),
            temperature_c=ask("temperature", lambda: int(n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU))),
            slowdown_c=ask("slowdown", lambda: int(n.nvmlDeviceGetTemperatureThreshold(
                handle, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            ))),
            pcie_width=number("PCIe width", "nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_width_max=number("PCIe width", "nvmlDeviceGetMaxPcieLinkWidth"),
            recovery_action=self._recovery(), fabric_state=state, fabric_status=status,
            persistence=ask("persistence", lambda: bool(n.nvmlDeviceGetPersistenceMode(handle))),
            mig=None if mig is None else bool(mig),
            compute_mode=_COMPUTE_MODES.get(number("compute mode", "nvmlDeviceGetComputeMode") or 0, ""),
            memory_used_bytes=ask("memory", lambda: int(n.nvmlDeviceGetMemoryInfo(handle).used)),
            processes=tuple((int(one.pid), "") for one in processes),
            lost_fields=tuple(self.lost),
        )  # fmt: skip

    def _recovery(self) -> str:
        """Of drivers from 570 on."""
        import pynvml as n

        values = self.ask(
            "recovery action", lambda: n.nvmlDeviceGetFieldValues(self.handle, [n.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        )
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
