"""From the report of a rank's exit to the kind of incident and its evidence. Pure."""

from __future__ import annotations

import re
import signal

from muster.core.incidents import HOST_UNHEALTHY, NOT_FINITE, RANK_EXCEPTION, RANK_EXIT, RANK_OOM, IncidentTraits
from muster.core.typed_json import Json, JsonObject
from muster.protocol.ranks import LOST_PEER
from muster.protocol.to_supervisor import RankExit

#: Error texts of allocators (CPU: ``DefaultCPUAllocator: can't allocate memory``; CUDA: ``CUDA out of memory``).
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|Cannot allocate memory", re.IGNORECASE)


#: Error texts of drivers and runtimes for a broken device or link: cudaGetErrorString (cudaErrorECCUncorrectable,
#: cudaErrorLaunchFailure, cudaErrorNvlinkUncorrectable, cudaErrorHardwareStackError, cudaErrorDevicesUnavailable,
#: cudaErrorContained), the kernel's "NVRM: Xid" lines, cuBLAS.
#: A launch failure can also be a bug of a kernel: then it follows the ranks to the next host.
_DEVICE = re.compile(
    r"uncorrectable (ECC|NVLink) error|uncorrectable error|CUDA error: uncorrectable|\bXid\b"
    r"|unspecified launch failure|hardware stack error|GPU has fallen off the bus|GPU is lost"
    r"|busy or unavailable|unable to determine the device handle"
    r"|Contained error|CUBLAS_STATUS_INTERNAL_ERROR",
    re.IGNORECASE,
)
#: NCCL's error texts for a failed system call or network card (ncclSystemError; in PyTorch "unhandled system error"). A
#: lost peer gives the same text, and names the broken connection.
_NCCL_SYSTEM = re.compile(r"unhandled system error|ncclSystemError|NCCL.*ibv_|NET/IB.*(error|fatal)", re.IGNORECASE)
#: No memory for a snapshot (``snapshot_ring.NoRoom``): nothing is wrong with the snapshot.
_NO_ROOM = re.compile(r"\bno room for snapshots\b")

#: How the message of a non-finite step begins (``train.optim.nonfinite``).
_STEP = re.compile(r"step (\d+):")


def classify_rank_exit(host: str, message: RankExit) -> tuple[IncidentTraits, str, JsonObject]:
    """(kind, evidence, detail) for a rank that left without being asked to."""
    code, last = message.code, message.last
    where = f"rank {message.rank} on {host}"
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        return RANK_EXIT, f"{where} was killed by {name}", {"signal": -code}
    if last is None:
        evidence = f"{where} left with exit code {code} and no last words"
        return RANK_EXIT, evidence, {"exception": "", "message": "", "signature": ":"}
    kind, text = last.exception, last.message.strip()
    first_line = text.splitlines()[0] if text else ""
    detail: dict[str, Json] = {
        "exception": kind,
        "message": text[:2000],
        "signature": f"{kind}:{re.sub(r'[0-9]+', '#', first_line)[:200]}",
    }
    if last.exit_code is not None:
        detail["exit_code"] = last.exit_code
    if last.hint:
        detail["hint"] = last.hint
    if last.not_finite:
        named = _STEP.match(first_line)  # the rank may be at the next step by the time it checks the numbers
        if named:
            detail["step"] = int(named[1])
        return NOT_FINITE, f"{where}: {first_line}", detail
    if last.rejected:
        return RANK_EXIT, f"{where} could not use its snapshot: {first_line}", {}
    if kind in ("OutOfMemoryError", "MemoryError") or _OUT_OF_MEMORY.search(text):
        return RANK_OOM, f"{where} ran out of memory: {first_line}", detail
    if _DEVICE.search(text):
        return HOST_UNHEALTHY, f"{where}, its device: {first_line}", detail
    if LOST_PEER.search(text):
        return RANK_EXIT, f"{where} lost a peer: {first_line}", {"secondary": True}
    if _NCCL_SYSTEM.search(text):
        return HOST_UNHEALTHY, f"{where}, its network: {first_line}", detail
    if _NO_ROOM.search(text):
        return RANK_EXCEPTION, f"{where}, its host's memory: {first_line}", detail
    name = f"{kind}: " if kind and kind not in ("MusterError",) else ""
    return RANK_EXCEPTION, f"{where}: {name}{first_line}", detail


def natural_key(name: str) -> tuple[int | str, ...]:
    """Sort ``host-2`` before ``host-10``."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
