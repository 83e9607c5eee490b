"""A rank's line to the outside where no agent holds the other end: torchrun, a notebook, a test."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from muster.core.event_log import EventLog
from muster.protocol.ranks import Command, RankContext


class StandaloneClient:
    """Rank 0 writes its host's event file itself; the other ranks are silent.

    ``order`` answers what signals said: SIGTERM saves and leaves with 75, SIGINT with 130.
    """

    def __init__(self, context: RankContext) -> None:
        self.rank = context.rank
        self._order: Command | None = None
        self._log: EventLog | None = None
        if context.rank == 0:
            self._log = EventLog(
                run_id=context.run_id,
                directory=Path(context.run_dir) / "events",
                writer=context.host,
                attempt=context.attempt,
            )

    def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Any) -> None:
        if self._log is not None:
            self._log.append(kind, rank=self.rank, step=step, phase=phase, detail=detail)

    def beat(self, step: int) -> None:
        """Nobody watches."""

    def progress(self, *, for_s: float = 0.0) -> None:
        """Nobody watches."""

    def order(self) -> Command | None:
        taken, self._order = self._order, None
        return taken

    def pause_requested(self) -> bool:
        return False

    def on_pause(self, act: Callable[[], None]) -> None:
        """Nobody asks."""

    def wait_for_assignment(self, step: int) -> None:
        return None

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def obey_signals(self) -> None:
        """From here on a first SIGINT or SIGTERM asks for a save; a second one ends the process."""
        signal.signal(signal.SIGINT, self._noted)
        signal.signal(signal.SIGTERM, self._noted)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        self._order = Command(kind="stop", exit_code=130 if number == signal.SIGINT else 75)
        signal.signal(number, signal.SIG_DFL)
