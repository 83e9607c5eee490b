"""What was captured of each rank, with what the kernel says of its process, as the supervisor gets it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from muster.agent.hardware.kernel_log import PORTS
from muster.agent.values.actions import ReportEvidence
from muster.agent.values.events import Counters
from muster.agent.values.rank import Gathering, Rank
from muster.core.processes import processor_ticks
from muster.core.typed_json import Unreadable, encode
from muster.health.hang import flight_recorder, stacks
from muster.health.hang.evidence import NO_SPY, RankEvidence
from muster.health.hang.process_state import GONE, CgroupState, ProcessState, parse_cgroup, parse_stat
from muster.health.verdicts import Finding
from muster.protocol.rank_agent import RankCaptured
from muster.protocol.to_supervisor import EvidenceReady

#: Of one rank's evidence on the wire; of what is larger the flight recorder is left out.
MOST_BYTES = 1 << 18
#: Threads and frames that are reported of a rank.
MOST_THREADS, MOST_FRAMES = 32, 40
_WORD_BYTES = 4  # port_rcv_data and port_xmit_data count these (Linux, sysfs-class-infiniband)


def assemble(report: ReportEvidence, host: str) -> EvidenceReady:
    """Reads ``/proc`` of each rank: no rank steps while this is done."""
    gathered = report.gathered
    if gathered.exited is not None:
        others = [_after_exit(gathered, rank, host) for rank in gathered.ranks if rank.pid in gathered.captured]
        ranks = tuple(encode(rank).decode() for rank in (gathered.exited, *others))
        return EvidenceReady(attempt=gathered.attempt, ranks=ranks, exited=gathered.exited.rank)
    ras, problem = gathered.ras or ("", "NCCL's RAS: does not answer" if gathered.asks_ras else "")
    ranks = tuple(_evidence(gathered, rank, host, report.findings[rank.rank]) for rank in gathered.ranks)
    return EvidenceReady(attempt=gathered.attempt, ranks=ranks, ras=ras, missing=(problem,) if problem else ())


def _after_exit(gathered: Gathering, rank: Rank, host: str) -> RankEvidence:
    """A rank that lived when another exited; what its process does by now is the order to end."""
    threads = _threads(gathered, rank.pid, missing=[])
    return RankEvidence(rank=rank.rank, host=host, pid=rank.pid, step=rank.steps.step, answers=True, threads=threads)


def _evidence(gathered: Gathering, rank: Rank, host: str, findings: tuple[Finding, ...]) -> str:
    missing: list[str] = []
    captured = gathered.captured.get(rank.pid)
    if captured is None:
        missing.append(f"its own thread did not answer within {gathered.limit_s:g} s")
    found = RankEvidence(
        rank=rank.rank,
        host=host,
        pid=rank.pid,
        step=rank.steps.step,
        process=process_state(rank.pid),
        cgroup=cgroup_state(rank.pid),
        answers=captured is not None,
        recorder=None if captured is None else _recorder(captured, missing),
        threads=_threads(gathered, rank.pid, missing=missing),
        findings=findings,
    )
    found = replace(found, missing=tuple(missing))
    text = encode(found).decode()
    if len(text) > MOST_BYTES:
        left_out = f"its flight recorder is too large: more than {MOST_BYTES} bytes"
        text = encode(replace(found, recorder=None, missing=(*missing, left_out))).decode()
    return text


def _recorder(captured: RankCaptured, missing: list[str]) -> flight_recorder.Recorder | None:
    missing += captured.problems
    found = []
    for text in captured.recorders:
        try:
            found.append(flight_recorder.parse(text))
        except Unreadable as error:
            missing.append(str(error))
    if not found:
        return None
    placed = flight_recorder.placed(flight_recorder.merged(found), captured.groups)
    return flight_recorder.shortened(placed)


def _threads(gathered: Gathering, pid: int, *, missing: list[str]) -> tuple[stacks.Thread, ...] | None:
    """As seen from outside, else in the rank's own words."""
    spied, captured = gathered.spies.get(pid), gathered.captured.get(pid)
    texts = [] if spied is None else [spied.decode(errors="replace")]
    texts += [] if captured is None else [captured.stacks]
    for text in texts:
        try:
            return _bounded(stacks.parse(text))
        except Unreadable as error:
            missing.append(str(error))
    if not gathered.has_spy:
        missing.append(NO_SPY)
    return None


def _bounded(threads: tuple[stacks.Thread, ...]) -> tuple[stacks.Thread, ...]:
    """The main thread first."""
    main = stacks.main_thread(threads)
    ordered = sorted(threads, key=lambda one: one is not main)[:MOST_THREADS]
    return tuple(replace(one, main=one is main, frames=one.frames[:MOST_FRAMES]) for one in ordered)


def counters(pids: Sequence[int], *, proc: Path = Path("/proc"), ports: Path = PORTS) -> Counters:
    """Now. Ports of RDMA count in addition to the network interfaces, loopback does not."""
    busy, everything = processor_ticks(proc)
    received, sent = _interfaces(proc)
    for port in ports.glob("*/ports/*/counters"):
        with contextlib.suppress(OSError, ValueError):
            into = int((port / "port_rcv_data").read_text()) * _WORD_BYTES
            out = int((port / "port_xmit_data").read_text()) * _WORD_BYTES
            received, sent = (received or 0) + into, (sent or 0) + out
    return Counters(
        at_ns=time.monotonic_ns(), ranks_cpu_s={pid: process_state(pid, proc).cpu_s for pid in pids},
        busy_ticks=busy, all_ticks=everything, received_bytes=received, sent_bytes=sent,
    )  # fmt: skip


def _interfaces(proc: Path) -> tuple[int | None, int | None]:
    """(received, sent)."""
    try:
        lines = (proc / "net" / "dev").read_text().splitlines()[2:]
        rows = [line.rpartition(":")[2].split() for line in lines if line.partition(":")[0].strip() != "lo"]
        return sum(int(row[0]) for row in rows), sum(int(row[8]) for row in rows)
    except (OSError, ValueError, IndexError):
        return None, None


def process_state(pid: int, proc: Path = Path("/proc")) -> ProcessState:
    """Now; a process that is gone is a result, no error."""
    folder = proc / str(pid)
    try:
        return parse_stat(_read(folder / "stat"), _read(folder / "wchan").strip(), os.sysconf("SC_CLK_TCK"))
    except Unreadable:
        return ProcessState(state=GONE)


def cgroup_state(pid: int, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> CgroupState:
    """Of the process's group, of version 1 where the controller is there, else of version 2; else unknown."""
    rows = [line.split(":", 2) for line in _read(proc / str(pid) / "cgroup").splitlines() if line.count(":") >= 2]
    paths = {name: path for _, names, path in rows for name in names.split(",")}

    def folder(controller: str) -> Path:
        if controller in paths:
            return root / controller / paths[controller].lstrip("/")
        return root / paths.get("", "").lstrip("/")

    memory = folder("memory")
    events = _read(memory / "memory.events") or _read(memory / "memory.oom_control")
    return parse_cgroup(events, _read(folder("cpu") / "cpu.stat"))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
