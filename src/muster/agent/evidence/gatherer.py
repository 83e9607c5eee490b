"""Captures, before the ranks of an attempt are ended, what each of them does: within the order's limit, never waiting.

From outside: the kernel's words about the process, and its stacks by ``py-spy`` where that is installed, which works on
a process that is stopped or keeps Python's lock. From inside: a thread of the rank tells its stacks and PyTorch's
flight recorder. What has not come in time is named as missing.

Beside a rank's exit the same is done with less, and nothing waits for it: the others' stacks as they come, what the
kernel says of the host. They are about to be ended, and whoever has not answered by then is not missed.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from muster.agent.evidence.proc import cgroup_state, process_state
from muster.agent.evidence.ras_query import RasQuery
from muster.agent.ranks.rank_process import Worker, on_exit
from muster.core.processes import program
from muster.core.typed_json import Unreadable, encode
from muster.health.hang import flight_recorder, stacks
from muster.health.hang.evidence import NO_SPY, RankEvidence
from muster.health.hang.process_state import GONE, CgroupState, ProcessState
from muster.health.hardware.own_gpus import GPUS
from muster.health.verdicts import Finding
from muster.protocol.rank_agent import CaptureRank
from muster.protocol.ranks import REQUESTED_EXIT_CODES
from muster.protocol.to_agent import GatherEvidence, TraceRanks
from muster.protocol.to_supervisor import EvidenceReady, FromAgent, RankExit
from muster.transport.connections import ConnectionPool

#: Of one rank's evidence on the wire; of what is larger the flight recorder is left out.
MOST_BYTES = 1 << 18
#: How long ranks have to answer beside another's exit; nothing waits for it.
EXIT_LIMIT_S = 0.2
#: How far to look back for errors of a GPU where no rank is left that knows when the last step was.
UNKNOWN_STEP_S = 60.0
#: Threads and frames that are told of a rank.
MOST_THREADS, MOST_FRAMES = 32, 40


@dataclass
class _Spy:
    """A ``py-spy`` on one rank."""

    output: BinaryIO
    child: subprocess.Popen[bytes]
    done: bool = False


@dataclass
class _Gathering:
    attempt: int
    limit_s: float
    until_s: float
    workers: list[Worker]
    spies: dict[int, _Spy] = field(default_factory=dict)
    """By pid."""
    ras: RasQuery | None = None
    exited: RankEvidence | None = None
    """The rank beside whose exit this is done; None: the run stands still."""


class EvidenceGatherer:
    """One gathering at a time; another order for the same attempt meanwhile is the same one."""

    def __init__(
        self,
        *,
        hub: ConnectionPool,
        host: str,
        living: Callable[[], list[Worker]],
        send: Callable[[FromAgent], None],
        findings: Callable[[int, float], tuple[Finding, ...]] = lambda rank, since_s: (),
        environ: Mapping[str, str] | None = None,
        gpus: Path = GPUS,
    ) -> None:
        """``findings``: of a rank's GPU and host since a (monotonic) time. ``environ``: of the ranks.

        ``gpus``: where the driver lists them; without any no NCCL is asked."""
        self._hub, self._host, self._living, self._send = hub, host, living, send
        self._findings, self._environ, self._gpus = findings, environ or {}, gpus
        self._now: _Gathering | None = None
        self._oom_kills = cgroup_state(os.getpid()).oom_kills or 0

    def report(self, message: FromAgent) -> None:
        """Pass it to the supervisor; beside a rank's exit with an error look around."""
        self._send(message)
        if isinstance(message, RankExit) and message.code not in (0, *REQUESTED_EXIT_CODES):
            self._exited(message)

    def _exited(self, exit_: RankExit) -> None:
        kills = cgroup_state(os.getpid()).oom_kills or 0  # the ranks' group is the agent's own
        new, self._oom_kills = max(0, kills - self._oom_kills), kills
        if self._now is not None:  # a hang's evidence is on its way, or another rank's
            return
        now = time.monotonic()
        workers = [worker for worker in self._living() if worker.attempt == exit_.attempt]
        since_s = min((worker.progress_s for worker in workers), default=now - UNKNOWN_STEP_S)
        found = RankEvidence(
            rank=exit_.rank, host=self._host, step=exit_.step, process=ProcessState(state=GONE),
            cgroup=CgroupState(oom_kills=new), findings=self._findings(exit_.rank, since_s),
        )  # fmt: skip
        self._now = _Gathering(
            attempt=exit_.attempt, limit_s=EXIT_LIMIT_S, until_s=now + EXIT_LIMIT_S, workers=workers, exited=found
        )
        for worker in workers:
            worker.captured = None
            if worker.peer is not None:
                self._hub.send(worker.peer, CaptureRank(recorders=False))

    def begin(self, order: GatherEvidence | TraceRanks) -> None:
        """Ask everybody; ``watch`` answers. Traces are asked for only: the ranks report them themselves."""
        workers = [worker for worker in self._living() if worker.attempt == order.attempt]
        if isinstance(order, TraceRanks):
            for peer in [worker.peer for worker in workers if worker.rank in order.ranks and worker.peer is not None]:
                self._hub.send(peer, order.trace)
            return
        until_s = time.monotonic() + order.limit_s
        if self._now is not None and self._now.exited is not None:
            self._end(self._now)
        if self._now is not None:  # a hang's report waits for no one's curiosity
            self._now.until_s = min(self._now.until_s, until_s)
            return
        self._now = _Gathering(attempt=order.attempt, limit_s=order.limit_s, until_s=until_s, workers=workers)
        for worker in workers:
            worker.captured = None
            if worker.peer is not None:
                self._hub.send(worker.peer, CaptureRank())
        if self._gpus.is_dir() and any(worker.rank == 0 for worker in workers):  # it knows of all hosts
            self._now.ras = RasQuery(self._hub, self._environ, on_done=lambda: None)
        spy = program("py-spy")
        for worker in workers if spy is not None else ():
            self._start_spy(self._now, spy or "", worker.pid)

    def due_s(self) -> float:
        """When ``watch`` has something to do, whatever happens until then."""
        return math.inf if self._now is None else self._now.until_s

    def watch(self) -> None:
        """Call it in every turn of the loop."""
        now = self._now
        if now is None:
            return
        answered = all(worker.captured is not None or worker.exit_code is not None for worker in now.workers)
        looked_at = all(spy.done for spy in now.spies.values()) and (now.ras is None or now.ras.done)
        if (answered and looked_at) or time.monotonic() >= now.until_s:
            self._end(now)

    def _end(self, now: _Gathering) -> None:
        self._now = None
        if now.exited is not None:
            others = [self._seen_beside(worker) for worker in now.workers if worker.captured is not None]
            told = tuple(encode(one).decode() for one in (now.exited, *others))
            self._send(EvidenceReady(attempt=now.attempt, ranks=told, exited=now.exited.rank))
            return
        told = tuple(self._evidence(now, worker) for worker in now.workers)
        ras, missing = "", ""
        if now.ras is not None:
            now.ras.end()
            ras, missing = now.ras.report, now.ras.problem
        self._send(EvidenceReady(attempt=now.attempt, ranks=told, ras=ras, missing=(missing,) if missing else ()))
        for spy in now.spies.values():
            spy.output.close()
            if not spy.done:
                spy.child.kill()

    def _seen_beside(self, worker: Worker) -> RankEvidence:
        """A rank that lived when another exited; what its process does by now is the order to end."""
        return RankEvidence(
            rank=worker.rank, host=self._host, pid=worker.pid, step=worker.step, answers=True,
            threads=_threads(worker, None, []),
        )  # fmt: skip

    def _start_spy(self, now: _Gathering, spy: str, pid: int) -> None:
        try:
            output = tempfile.TemporaryFile()  # noqa: SIM115 (closed once it has been read)
        except OSError:  # a full disk, no descriptors: the rest of the evidence is worth having
            return
        command = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except OSError:
            output.close()
            return
        found = now.spies[pid] = _Spy(output=output, child=child)

        def ended() -> None:
            found.done = True
            child.wait()

        try:
            on_exit(self._hub, child.pid, ended)
        except OSError:  # no descriptors: nobody would notice its end
            child.kill()
            child.wait()
            now.spies.pop(pid).output.close()

    def _evidence(self, now: _Gathering, worker: Worker) -> str:
        missing: list[str] = []
        found = RankEvidence(
            rank=worker.rank,
            host=self._host,
            pid=worker.pid,
            step=worker.step,
            process=process_state(worker.pid),
            cgroup=cgroup_state(worker.pid),
            answers=worker.captured is not None,
            recorder=_recorder(worker, now.limit_s, missing),
            threads=_threads(worker, now.spies.get(worker.pid), missing),
            findings=self._findings(worker.rank, worker.progress_s),
        )
        found = replace(found, missing=tuple(missing))
        text = encode(found).decode()
        if len(text) > MOST_BYTES:
            left_out = f"its flight recorder is too large: more than {MOST_BYTES} bytes"
            text = encode(replace(found, recorder=None, missing=(*missing, left_out))).decode()
        return text


def _recorder(worker: Worker, limit_s: float, missing: list[str]) -> flight_recorder.Recorder | None:
    if worker.captured is None:
        missing.append(f"its own thread did not answer within {limit_s:g} s")
        return None
    missing += worker.captured.problems
    found = []
    for text in worker.captured.recorders:
        try:
            found.append(flight_recorder.parse(text))
        except Unreadable as error:
            missing.append(str(error))
    if not found:
        return None
    placed = flight_recorder.placed(flight_recorder.merged(found), worker.captured.groups)
    return flight_recorder.shortened(placed)


def _threads(worker: Worker, spy: _Spy | None, missing: list[str]) -> tuple[stacks.Thread, ...] | None:
    """As seen from outside, else in the rank's own words."""
    if spy is not None and spy.done and spy.child.returncode == 0:
        spy.output.seek(0)
        try:
            return _bounded(stacks.parse(spy.output.read().decode(errors="replace")))
        except Unreadable as error:
            missing.append(str(error))
    if worker.captured is not None:
        try:
            return _bounded(stacks.parse(worker.captured.stacks))
        except Unreadable as error:
            missing.append(str(error))
    if spy is None and program("py-spy") is None:
        missing.append(NO_SPY)
    return None


def _bounded(threads: tuple[stacks.Thread, ...]) -> tuple[stacks.Thread, ...]:
    """The main thread first."""
    main = stacks.main_thread(threads)
    ordered = sorted(threads, key=lambda one: one is not main)[:MOST_THREADS]
    return tuple(replace(one, main=one is main, frames=one.frames[:MOST_FRAMES]) for one in ordered)
