"""Orders take effect at the same step on every rank, whenever each of them heard of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from muster.protocol.ranks import RESIZE_EXIT_CODE, AgentClient, Command
from muster.train.distributed.process_groups import all_reduce

NO_DEADLINE_MS = 1 << 40
#: ``RESIZE_EXIT_CODE`` as the ranks' maximum knows it: an order that ends the run counts for more.
_YIELD = 1


@dataclass
class StepConsensus:
    """One small all-reduce a step on a gloo group of its own, begun when its micro-batches are done and awaited at
    its end.

    So an order heard during step k is agreed on at the end of step k or k + 1, and costs next to no time: the message
    travels while gradients are summed and the update is made.
    """

    agent: AgentClient
    group: dist.ProcessGroup | None
    """All ranks; None at world size 1."""
    _waiting: Command | None = field(default=None, init=False)
    """To leave for a larger world, heard by this rank and not yet done: it waits for a save."""

    def begin(self, *, save_now: bool = False, copy_is_behind: bool = False, saving: bool = False) -> None:
        """Say what this rank has heard, or wants by itself (``save_now``).

        ``copy_is_behind``: what was ordered is not yet on the peer. ``saving``: a save is under way, and a
        larger world or another save waits for it.
        """
        order = self.agent.order() or self._waiting
        stop = order is not None and order.kind == "stop"
        self._waiting = order if order is not None and order.exit_code == RESIZE_EXIT_CODE else None if stop else self._waiting
        self._begun_s = time.monotonic()
        deadline, code = NO_DEADLINE_MS, 0
        if order is not None:
            code = _YIELD if order.exit_code == RESIZE_EXIT_CODE else order.exit_code
            if order.deadline_s is not None:
                deadline = max(0, int((order.deadline_s - (self._begun_s - order.heard_s)) * 1000))
        self._flags = torch.tensor(
            [
                1 if stop else 0,
                1 if save_now or (order is not None and (order.kind == "save" or order.save)) else 0,
                code,
                -deadline,  # the maximum of the negative is the nearest deadline
                1 if copy_is_behind else 0,
                1 if saving else 0,
            ]
        )
        self._work: dist.Work | None = None
        if self.group is not None:
            self._work = all_reduce(self._flags, self.group, op=dist.ReduceOp.MAX)

    def copies_arrived(self) -> bool:
        """Whether every rank's peer holds what was ordered, so that the next snapshot is copied too."""
        if self._work is not None:
            self._work.wait()
        return not int(self._flags[4])

    def any_rank_saving(self) -> bool:
        """Whether a save was under way on some rank when this step's orders were asked for."""
        if self._work is not None:
            self._work.wait()
        return bool(self._flags[5])

    def agreed(self) -> Command | None:
        """The step ends: what all ranks do now, the same on each. None: go on."""
        if self._work is not None:
            self._work.wait()
        stop, save, exit_code, deadline = (int(flag) for flag in self._flags[:4])
        yields = exit_code == _YIELD
        if stop and yields and int(self._flags[5]):
            return None  # nobody hurries: the growth waits, training does not; asked again at the next step
        if not stop and not save:
            return None
        left_s = -deadline / 1000 - (time.monotonic() - self._begun_s)
        return Command(
            kind="stop" if stop else "save",
            save=bool(save),
            exit_code=RESIZE_EXIT_CODE if yields else exit_code,
            deadline_s=None if -deadline == NO_DEADLINE_MS else max(0.0, left_s),
        )
