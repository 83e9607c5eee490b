"""Ranks that share a model stand still at one place.

A pause reaches them at different moments; one that left at once would leave the others in a collective of their
replica for ever. So they agree once a micro-batch, by a small message that travels while gradients are computed, and
leave together behind it: after the micro-batch in which the last of them heard of it, or the next. One that comes too
late for a step's last micro-batch finds them in the sums over replicas, which are broken for all of them alike
(``reduce.Axes``). A rank that has its replica to itself needs no agreement and leaves where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from muster.protocol.ranks import AgentClient
from muster.train.distributed.process_groups import all_reduce


@dataclass
class PauseConsensus:
    """Each ``ask`` is answered by the next ``agreed``."""

    agent: AgentClient | None = None
    group: dist.ProcessGroup | None = None
    """The ranks of this replica, with a gloo backend; None: there is nobody to agree with."""
    _asked: tuple[dist.Work, Tensor] | None = field(default=None, init=False, repr=False)

    def ask(self) -> None:
        """Say whether this rank has heard of a pause. Every rank of the replica calls it at the same micro-batches."""
        if self.group is not None and self.agent is not None:
            heard = torch.tensor([int(self.agent.pause_requested())])
            self._asked = all_reduce(heard, self.group, op=dist.ReduceOp.MAX), heard

    def agreed(self) -> bool:
        """Whether all of them are to stand still here, since one had heard of it. False where nobody was asked."""
        asked, self._asked = self._asked, None
        if asked is None:
            return False
        work, heard = asked
        work.wait()
        return bool(heard.item())
