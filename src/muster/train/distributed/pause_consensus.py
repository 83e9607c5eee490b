"""Agree on one micro-batch boundary at which every rank of a replica pauses.

A pause request reaches them at different moments; a rank that left at once would block the others in a collective of
their replica. So they agree once a micro-batch, by a small message that overlaps with the backward pass, and leave
together after it: at the micro-batch in which the last of them received the request, or the next. A request that comes
too late for a step's last micro-batch takes effect in the sums over replicas, which are aborted for all of them
(``reduce.ReduceGroups``). A rank that has its replica to itself needs no agreement and leaves where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from muster.protocol.ranks import AgentClient
from muster.train.distributed.process_groups import Waits, all_reduce


@dataclass
class PauseConsensus:
    """``result`` answers the last ``start``."""

    agent: AgentClient | None = None
    group: dist.ProcessGroup | None = None
    """The ranks of this replica, with a gloo backend; None: nothing to agree on."""
    waits: Waits = field(default_factory=Waits)
    _pending: tuple[dist.Work, Tensor] | None = field(default=None, init=False, repr=False)

    def start(self) -> None:
        """Send whether a pause was requested of this rank. Collective: at the same micro-batches on every rank."""
        if self.group is not None and self.agent is not None:
            requested = torch.tensor([int(self.agent.pause_requested())])
            self._pending = all_reduce(requested, self.group, op=dist.ReduceOp.MAX), requested

    def result(self) -> bool:
        """Whether all of them pause here, because one had a request. False without a ``start``."""
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        work, requested = pending
        self.waits.wait(work)
        return bool(requested.item())
