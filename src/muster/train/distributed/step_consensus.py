"""Commands take effect at the same step on every rank, although they arrive at different moments."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from muster.protocol.ranks import RESIZE_EXIT_CODE, AgentClient, Command
from muster.train.distributed.process_groups import Waits, all_reduce

NO_DEADLINE_MS = 1 << 40
#: Stands for ``RESIZE_EXIT_CODE`` in the maximum over ranks, so that a command that ends the run wins.
_RESIZE = 1


@dataclass
class StepConsensus:
    """One small all-reduce a step on a gloo group of its own, started after its micro-batches and awaited at its end.

    A command received during step k is agreed on at the end of step k or k + 1, at almost no cost: the message overlaps
    with the gradient reduction and the update.
    """

    agent: AgentClient
    group: dist.ProcessGroup | None
    """All ranks; None at world size 1."""
    waits: Waits = field(default_factory=Waits)
    _resize: Command | None = field(default=None, init=False)
    """A resize that this rank received, and that waits for the end of a save."""

    def start(
        self,
        *,
        save_now: bool = False,
        copy_is_pending: bool = False,
        saving: bool = False,
        snapshot_every: int = 0,
        figures: Sequence[int] = (),
    ) -> None:
        """Send the command that this rank received, or its own request (``save_now``).

        ``copy_is_pending``: the requested copy is not yet on the other host. ``saving``: a save is in progress, and a
        resize or another save waits for it. ``snapshot_every``: this rank's number of steps between snapshots.
        ``figures``: as many on every rank.
        """
        command = self.agent.next_command() or self._resize
        stop = command is not None and command.kind == "stop"
        resize = command is not None and command.exit_code == RESIZE_EXIT_CODE
        if resize:
            self._resize = command
        elif stop:
            self._resize = None
        self._started_s = time.monotonic()
        deadline_ms, code, save = NO_DEADLINE_MS, 0, save_now
        if command is not None:
            save = save or command.kind == "save" or command.save
            code = _RESIZE if resize else command.exit_code
            if command.deadline_s is not None:
                deadline_ms = max(0, int((command.deadline_s - (self._started_s - command.received_s)) * 1000))
        # The maximum of the negative deadlines is the nearest one.
        self._flags = torch.tensor(
            [int(stop), int(save), code, -deadline_ms, int(copy_is_pending), int(saving), snapshot_every, *figures]
        )
        self._values: list[int] | None = None
        self._work: dist.Work | None = None
        if self.group is not None:
            self._work = all_reduce(self._flags, self.group, op=dist.ReduceOp.MAX)

    def copies_arrived(self) -> bool:
        """Whether every requested copy is on its other host, so that the next snapshot is copied too."""
        return not self._result()[4]

    def any_rank_saving(self) -> bool:
        """Whether a save was in progress on some rank at this step's ``start``."""
        return bool(self._result()[5])

    def snapshot_every(self) -> int:
        """The largest number of steps between snapshots that any rank sent at this step's ``start``."""
        return self._result()[6]

    def figures(self) -> Sequence[int]:
        """For each of the ``figures`` of the last ``start`` the largest that any rank sent."""
        return self._result()[7:]

    def command(self) -> Command | None:
        """What all ranks do at the end of this step, the same on each. None: continue."""
        stop, save, exit_code, negative_deadline_ms, _, saving, _ = self._result()[:7]
        resize = exit_code == _RESIZE
        if stop and resize and saving:
            return None  # a resize is not urgent: it is asked for again at the next step, and training goes on
        if not stop and not save:
            return None
        left_s = -negative_deadline_ms / 1000 - (time.monotonic() - self._started_s)
        return Command(
            kind="stop" if stop else "save",
            save=bool(save),
            exit_code=RESIZE_EXIT_CODE if resize else exit_code,
            deadline_s=None if -negative_deadline_ms == NO_DEADLINE_MS else max(0.0, left_s),
        )

    def _result(self) -> list[int]:
        if self._values is None:
            if self._work is not None:
                self.waits.wait(self._work)
            self._values = [int(flag) for flag in self._flags.tolist()]
        return self._values
