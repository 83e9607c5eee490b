"""Ranks that exit: done, asked to, or failed; and what kind of incident a failure is."""

from __future__ import annotations

import re
import signal

from muster.core.incidents import (
    GPU_PROGRAM_ERROR,
    HOST_UNHEALTHY,
    NOT_FINITE,
    RANK_EXCEPTION,
    RANK_EXIT,
    RANK_OOM,
    IncidentTraits,
)
from muster.core.typed_json import JsonObject
from muster.health.hardware.driver_errors import judge_bursts
from muster.health.hardware.error_table import OwnNumbers
from muster.health.hardware.kernel_log import in_text
from muster.health.verdicts import Verdict
from muster.protocol.ranks import LOST_PEER, REQUESTED_EXIT_CODES, RESIZE_EXIT_CODE
from muster.protocol.to_supervisor import RankExit
from muster.supervise.recovery.attempts import check_ranks_exited, enter_stopping
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import finish_training
from muster.supervise.recovery.host_health import own_numbers
from muster.supervise.recovery.incidents import report_incident
from muster.supervise.recovery.phases import Draining, Running, Stopping

#: Ranks that end together and are logged, at most.
MOST_NAMED = 8
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
#: The device's, or a bug of a kernel, which follows the ranks to the next host; an Xid with it shows which.
_PERHAPS_DEVICE = re.compile(r"unspecified launch failure|CUBLAS_STATUS_INTERNAL_ERROR", re.IGNORECASE)
#: NCCL's error texts for a failed system call or network card (ncclSystemError; in PyTorch "unhandled system error"). A
#: lost peer gives the same text, and names the broken connection.
_NCCL_SYSTEM = re.compile(r"unhandled system error|ncclSystemError|NCCL.*ibv_|NET/IB.*(error|fatal)", re.IGNORECASE)
#: No memory for a snapshot (``snapshot_ring.NoRoom``): nothing is wrong with the snapshot.
_NO_ROOM = re.compile(r"\bno room for snapshots\b")
#: How the message of a non-finite step begins (``train.optim.nonfinite``).
_STEP = re.compile(r"step (\d+):")
_NO_NUMBERS = OwnNumbers()


def rank_exit(ctx: SupervisorContext, host: str, message: RankExit) -> None:
    """A rank of ``host`` has exited. One of another attempt changes nothing; each is counted once."""
    state, phase = ctx.state, ctx.state.phase
    if message.attempt != state.attempt:
        return
    if isinstance(phase, Draining):
        _while_answered(ctx, host, message)
    if not isinstance(phase, Running | Stopping):
        return
    rank, code, exited = message.rank, message.code, state.progress.exited
    if rank in exited:
        return
    exited[rank] = code
    if isinstance(phase, Stopping):
        check_ranks_exited(ctx)
        return
    if code == RESIZE_EXIT_CODE and phase.resize is not None:
        check_ranks_exited(ctx)
    elif code == 0:
        if ctx.settings.spec.command is None:  # a loop of the user's own may leave in mid-step
            state.advance(message.step)  # its event may be lost
        if len(exited) == len(state.ranks) and not any(exited.values()):
            finish_training(ctx)
    elif code in REQUESTED_EXIT_CODES:
        outcome, code = ("stopped", 130) if code == 130 else ("preempted", 75)
        enter_stopping(ctx, Stopping(outcome=outcome, exit_code=code))
        check_ranks_exited(ctx)
    else:
        _failed(ctx, host, message)


def _failed(ctx: SupervisorContext, host: str, message: RankExit, *, part_of: str | None = None) -> None:
    kind, evidence, detail = _classified(ctx, host, message)
    if part_of is not None:
        detail = {**detail, "part_of": part_of}
    if message.last is not None and message.last.rejected:
        ctx.reject(message.last.rejected, evidence)  # the host that holds them may have said so already
        detail = {**detail, "snapshot_rejected": True}
    named = detail.get("step")  # the rank may be at the next step by the time it checks the numbers
    step = named if isinstance(named, int) else message.step
    _await_evidence(ctx, message)
    report_incident(ctx, kind, host=host, rank=message.rank, step=step, evidence=evidence, detail=detail)


def _await_evidence(ctx: SupervisorContext, message: RankExit) -> None:
    """Evidence that its host gathers for this exit belongs to the incident that is logged next."""
    state = ctx.state
    state.exits = {of: incident for of, incident in state.exits.items() if of[0] >= message.attempt - 1}
    state.exits[message.attempt, message.rank] = f"i{state.next_incident}"


def _while_answered(ctx: SupervisorContext, host: str, message: RankExit) -> None:
    """A rank's own error or death, reported while its attempt is being ended.

    If the open incident is only a symptom (a lost peer), this is its cause, and the policy is asked again. Otherwise
    it is only logged: one recovery handles both; an unrelated cause will recur. Agents do not report ranks that they
    killed themselves.
    """
    state, last = ctx.state, message.last
    if last is not None:
        ctx.reject(last.rejected, f"rank {message.rank} on {host}: {last.message}")
    if state.open is None or message.code in (0, *REQUESTED_EXIT_CODES):
        return
    kind, evidence, detail = _classified(ctx, host, message)
    killed, named = "signal" in detail, state.progress.blamed
    if kind is RANK_EXIT and not killed:
        return  # a consequence as well
    part_of = state.open.incident_id
    if state.find_cause():
        _failed(ctx, host, message, part_of=part_of)
    elif (killed or kind.kind != state.open.kind) and message.rank not in named and len(named) < MOST_NAMED:
        _await_evidence(ctx, message)
        identity: JsonObject = {"incident_id": f"i{state.next_incident}", "incident": kind.kind, "evidence": evidence}
        state.next_incident += 1
        named.add(message.rank)
        details = {**identity, **detail, "part_of": part_of}
        ctx.log("incident.detected", details, host=host, rank=message.rank, step=message.step)


def _classified(ctx: SupervisorContext, host: str, message: RankExit) -> tuple[IncidentTraits, str, JsonObject]:
    return classify_rank_exit(host, message, own_numbers(ctx.settings.spec))


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
    name, text = last.exception, last.message.strip()
    first_line = text.splitlines()[0] if text else ""
    optional = {"exit_code": last.exit_code, "hint": last.hint or None}
    detail: JsonObject = {
        "exception": name,
        "message": text[:2000],
        "signature": f"{name}:{re.sub(r'[0-9]+', '#', first_line)[:200]}",
        **{key: value for key, value in optional.items() if value is not None},
    }
    step = _STEP.match(first_line)  # the rank may be at the next step by the time it checks the numbers
    verdict, xid = _xid(text, own)
    device = verdict.faulty or _DEVICE.search(text) or (verdict is not Verdict.APP and _PERHAPS_DEVICE.search(text))
    no_memory = name in ("OutOfMemoryError", "MemoryError") or _OUT_OF_MEMORY.search(text)
    prefix = f"{name}: " if name and name not in ("MusterError", "SystemExit") else ""
    # The first row that applies: condition, kind, words before the error's first line, detail.
    rows: tuple[tuple[object, IncidentTraits, str, JsonObject], ...] = (
        (last.not_finite, NOT_FINITE, ": ", {**detail, "step": int(step[1])} if step else detail),
        (last.rejected, RANK_EXIT, " could not use its snapshot: ", {}),
        (no_memory, RANK_OOM, " ran out of memory: ", detail),
        (device, HOST_UNHEALTHY, ", its device: ", {**detail, **xid}),
        (verdict is Verdict.APP, GPU_PROGRAM_ERROR, ", its own error on the GPU: ", {**detail, **xid}),
        (LOST_PEER.search(text), RANK_EXIT, " lost a peer: ", {"secondary": True}),
        (_NCCL_SYSTEM.search(text), HOST_UNHEALTHY, ", its network: ", {**detail, **xid}),
        (_NO_ROOM.search(text), RANK_EXCEPTION, ", its host's memory: ", {**detail, **xid}),
        (True, RANK_EXCEPTION, f": {prefix}", {**detail, **xid}),
    )
    kind, words, details = next(row[1:] for row in rows if row[0])
    return kind, f"{where}{words}{first_line}", details


def _xid(text: str, own: OwnNumbers) -> tuple[Verdict, JsonObject]:
    """What the Xids in a rank's last words say, by their numbers (most are the program's own), and the decisive one as
    a detail. HEALTHY: there are none."""
    bursts = judge_bursts(in_text(text), own)
    if not bursts:
        return Verdict.HEALTHY, {}
    decisive = bursts[0].decisive  # without times, all are one burst
    return decisive.verdict, {"xid": decisive.fault.number, "class": decisive.verdict.value}
