"""The agent client of a rank that has no agent: torchrun, a notebook, a test."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from muster.core.event_log import EventLog
from muster.core.typed_json import Json
from muster.protocol.ranks import Command, RankContext


class StandaloneClient:
    """Rank 0 writes its host's event file itself; the other ranks write nothing.

    Commands come from signals: SIGTERM saves and exits with 75, SIGINT with 130.
    """

    def __init__(self, context: RankContext) -> None:
        self.rank = context.rank
        self._command: Command | None = None
        self._log: EventLog | None = None
        if context.rank == 0:
            self._log = EventLog(
                run_id=context.run_id,
                directory=Path(context.run_dir) / "events",
                writer=context.host,
                attempt=context.attempt,
            )

    def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Json) -> None:
        if self._log is not None:
            self._log.append(kind, rank=self.rank, step=step, phase=phase, detail=detail)

    def beat(self, step: int) -> None:
        """No watchdog."""

    def progress(self, *, for_s: float = 0.0) -> None:
        """No watchdog."""

    def next_command(self) -> Command | None:
        command, self._command = self._command, None
        return command

    def next_trace(self) -> None:
        """None: without an agent there are no requests for a trace."""

    def pause_requested(self) -> bool:
        return False

    def on_pause(self, act: Callable[[], None]) -> None:
        """No pause is ever requested."""

    def wait_for_assignment(self, step: int) -> None:
        return None

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def obey_signals(self) -> None:
        """From now on the first SIGINT or SIGTERM requests a save; the second one ends the process."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._command = Command(kind="stop", exit_code=130 if number == signal.SIGINT else 75)
        signal.signal(number, signal.SIG_DFL)
