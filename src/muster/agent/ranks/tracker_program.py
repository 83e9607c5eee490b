"""The process that copies the run's figures to its trackers, on the host of rank 0."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import cast, get_args

from muster.agent.ranks.program_output import ProgramOutput
from muster.agent.ranks.rank_process import Worker, end_child, on_exit
from muster.config.spec import RunSpec
from muster.core.errors import AccessError
from muster.core.event_details.run import Outcome
from muster.core.typed_json import Unreadable
from muster.protocol.codec import encode, reader_of
from muster.protocol.pipes import TRACKER_NOTES, RunOver
from muster.protocol.values import RankEvent
from muster.trackers import wanted
from muster.transport.connections import ConnectionPool

#: Wait before it is started again. The first death is reported, and those after that time without one.
RETRY_S, QUIET_S = 5.0, 600.0
#: At the end of the run it takes ``trackers.main.END_S`` at most, and this is more.
END_S = 10.0


class TrackerProgram:
    """Runs from rank 0's first start on this host to the end of the run, over all attempts. Only ``shutdown`` waits.

    Where rank 0 has moved to another host, there is one there too; this one has nothing more to deliver then.
    """

    def __init__(
        self,
        *,
        host: str,
        hub: ConnectionPool,
        spec: Callable[[], RunSpec],
        living: Callable[[], list[Worker]],
        tell: Callable[[RankEvent], None],
        start: Callable[[], subprocess.Popen[bytes]],
    ) -> None:
        """``living``: the ranks here. ``tell``: logs an event, and has it shown where the run is watched. ``start``:
        raises AccessError or OSError."""
        self._host, self._hub, self._spec, self._living = host, hub, spec, living
        self._tell, self._start_program = tell, start
        self._child: subprocess.Popen[bytes] | None = None
        self._spec_then: RunSpec | None = None
        """The run file that was followed last: another one may name other trackers."""
        self._attempt = 0
        self._died_s = -math.inf
        self.retry_s = math.inf
        """When ``watch`` is to be called at the latest."""

    def watch(self) -> None:
        """Call it in every turn of the loop."""
        rank_0 = next((worker for worker in self._living() if worker.rank == 0), None)
        if rank_0 is not None:
            self._attempt = rank_0.attempt
        if rank_0 is not None and self._spec_then is not self._spec():
            self._stop()
            self._spec_then = self._spec()
            if wanted(self._spec_then):
                self._start()
        elif time.monotonic() >= self.retry_s:
            self._start()

    def _stop(self) -> None:
        child, self._child, self.retry_s = self._child, None, math.inf
        if child is not None:
            _kill_session(child)

    def _start(self) -> None:
        self.retry_s = math.inf
        try:
            child = self._child = self._start_program()
        except (AccessError, OSError) as error:
            self._note(f"no figures for {' and '.join(wanted(self._spec()))}: {error}")
            self.retry_s = time.monotonic() + QUIET_S
            return
        output = ProgramOutput(self._hub, child, self._on_line)
        on_exit(self._hub, child.pid, lambda: self._on_exit(child, output))

    def _on_line(self, line: bytes) -> None:
        with contextlib.suppress(Unreadable):
            self._note(reader_of(TRACKER_NOTES)(line).text)

    def _note(self, text: str) -> None:
        mono_ns, wall_ns, detail = time.monotonic_ns(), time.time_ns(), {"text": text}
        self._tell(
            RankEvent(kind="run.message", attempt=self._attempt, mono_ns=mono_ns, wall_ns=wall_ns, detail=detail)
        )

    def _on_exit(self, child: subprocess.Popen[bytes], output: ProgramOutput) -> None:
        output.close()
        if child.returncode is None:
            _kill_session(child)  # before its number is free for another process
        code = child.wait()
        assert child.stdin is not None
        child.stdin.close()
        if child is not self._child:
            return
        self._child = None
        if code == 0:  # nothing more can be delivered, which it has reported
            return
        before, self._died_s = self._died_s, time.monotonic()
        self.retry_s = self._died_s + RETRY_S
        if self._died_s - before > QUIET_S:
            self._note(f"the process on {self._host} that serves trackers ended with code {code} and is restarted")

    def shutdown(self, reason: str) -> None:
        """Where ``reason`` is a final outcome of the run, wait until trackers have everything, ``END_S`` at most. Else
        end it at once: the run goes on elsewhere or later, and the host may have seconds left."""
        child, self._child = self._child, None
        is_final = reason in get_args(Outcome) and reason != "preempted"
        if child is None:
            if is_final and self.retry_s < math.inf:
                self._note("trackers lack figures and how the run ended: muster track RUN sends the rest")
            return
        if is_final:
            assert child.stdout is not None
            self._hub.unwatch(child.stdout.fileno())
            over = encode(RunOver(outcome=cast(Outcome, reason))) + b"\n"
            output = b""
            try:
                output = child.communicate(over, END_S)[0]
            except subprocess.TimeoutExpired as error:
                output = error.output or b""
            except OSError:
                pass
            for line in output.splitlines():
                self._on_line(line)
        _kill_session(child)


def _kill_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill it and the helper processes that trackers' clients start in its session."""
    with contextlib.suppress(OSError):
        os.killpg(leader.pid, signal.SIGKILL)
    end_child(leader)
