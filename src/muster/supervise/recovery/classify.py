"""From the report of a rank's exit to the kind of incident and its evidence. Pure."""

from __future__ import annotations

import re
import signal

from muster.config.spec import Check
from muster.core.incidents import (
    GPU_PROGRAM_ERROR,
    HOST_UNHEALTHY,
    NOT_FINITE,
    RANK_EXCEPTION,
    RANK_EXIT,
    RANK_OOM,
    IncidentTraits,
)
from muster.core.typed_json import Json, JsonObject
from muster.health.hardware.driver_errors import judge_bursts
from muster.health.hardware.error_table import OwnNumbers
from muster.health.hardware.kernel_log import in_text
from muster.health.verdicts import Verdict
from muster.protocol.ranks import LOST_PEER
from muster.protocol.to_supervisor import RankExit

#: Error texts of allocators (CPU: ``DefaultCPUAllocator: can't allocate memory``; CUDA: ``CUDA out of memory``).
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|Cannot allocate memory", re.IGNORECASE)


#: Error texts of drivers and runtimes for a broken device or link: cudaGetErrorString (cudaErrorECCUncorrectable,
#: cudaErrorLaunchFailure, cudaErrorNvlinkUncorrectable, cudaErrorHardwareStackError, cudaErrorDevicesUnavailable,
#: cudaErrorContained, cudaErrorSystemNotReady: no fabric manager), cuBLAS.
_DEVICE = re.compile(
    r"uncorrectable (ECC|NVLink) error|uncorrectable error|CUDA error: uncorrectable|system not yet initialized"
    r"|hardware stack error|GPU has fallen off the bus|GPU is lost"
    r"|busy or unavailable|unable to determine the device handle"
    r"|Contained error",
    re.IGNORECASE,
)
#: The device's, or a bug of a kernel, which follows the ranks to the next host; an Xid beside it tells which.
_PERHAPS_DEVICE = re.compile(r"unspecified launch failure|CUBLAS_STATUS_INTERNAL_ERROR", re.IGNORECASE)
#: NCCL's error texts for a failed system call or network card (ncclSystemError; in PyTorch "unhandled system error"). A
#: lost peer gives the same text, and names the broken connection.
_NCCL_SYSTEM = re.compile(r"unhandled system error|ncclSystemError|NCCL.*ibv_|NET/IB.*(error|fatal)", re.IGNORECASE)
#: No memory for a snapshot (``snapshot_ring.NoRoom``): nothing is wrong with the snapshot.
_NO_ROOM = re.compile(r"\bno room for snapshots\b")

#: How the message of a non-finite step begins (``train.optim.nonfinite``).
_STEP = re.compile(r"step (\d+):")
_NO_NUMBERS = OwnNumbers()


def classify_rank_exit(
    host: str, message: RankExit, own: OwnNumbers = _NO_NUMBERS
) -> tuple[IncidentTraits, str, JsonObject]:
    """(kind, evidence, detail) for a rank that left without being asked to. ``own``: Xids that the run file judges."""
    code, last = message.code, message.last
    where = f"rank {message.rank} on {host}"
    # One that a library of the GPU or the network aborted has left its words in its log: they are judged as its own.
    if code < 0 and (last is None or code != -signal.SIGABRT):
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
    verdict = _xid(text, own, detail)
    if verdict.faulty or _DEVICE.search(text) or (verdict is not Verdict.APP and _PERHAPS_DEVICE.search(text)):
        return HOST_UNHEALTHY, f"{where}, its device: {first_line}", detail
    if verdict is Verdict.APP:
        return GPU_PROGRAM_ERROR, f"{where}, its own error on the GPU: {first_line}", detail
    if LOST_PEER.search(text):
        return RANK_EXIT, f"{where} lost a peer: {first_line}", {"secondary": True}
    if _NCCL_SYSTEM.search(text):
        return HOST_UNHEALTHY, f"{where}, its network: {first_line}", detail
    if _NO_ROOM.search(text):
        return RANK_EXCEPTION, f"{where}, its host's memory: {first_line}", detail
    name = f"{kind}: " if kind and kind not in ("MusterError", "SystemExit") else ""
    return RANK_EXCEPTION, f"{where}: {name}{first_line}", detail


def _xid(text: str, own: OwnNumbers, detail: dict[str, Json]) -> Verdict:
    """What the Xids in a rank's last words say, by their numbers: most are the program's own. HEALTHY: there are none.

    The number and its class go into ``detail``.
    """
    bursts = judge_bursts(in_text(text), own)
    if not bursts:
        return Verdict.HEALTHY
    decisive = bursts[0].decisive  # without times, all are one burst
    detail["xid"], detail["class"] = decisive.fault.number, decisive.verdict.value
    return decisive.verdict


def own_numbers(check: Check) -> OwnNumbers:
    """The Xid numbers that a run file judges itself."""
    return OwnNumbers(ignore=frozenset(check.xid_ignore), fatal=frozenset(check.xid_fatal))


def natural_key(name: str) -> tuple[int | str, ...]:
    """Sort ``host-2`` before ``host-10``."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
