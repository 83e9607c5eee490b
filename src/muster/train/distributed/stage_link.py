"""What a pipeline stage sends to its neighbours: hidden states onward, their gradients back.

Shapes travel in no message: every stage builds each micro-batch itself, so the receiver knows them. Never run on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from muster.train.distributed.process_groups import Waits


def sends_under_way(stages: int, chunks: int) -> int:
    """Messages of a stage that may be under way. A stage is ahead of its neighbours by fewer in every order: the oldest
    of more was received long ago, and no stage waits for one that awaits its end."""
    return 2 * stages * chunks + 2


@dataclass
class Incoming:
    """A tensor that is on its way here."""

    tensor: Tensor
    work: dist.Work
    waits: Waits

    def take(self) -> Tensor:
        """The tensor, once it is there. Raises RuntimeError if its sender is gone."""
        self.waits.wait(self.work)
        return self.tensor


@dataclass
class StageLink:
    """The stages of one pipeline, as one of them sees it."""

    group: dist.ProcessGroup
    """The ranks that hold this replica's stages at this rank's place, in order."""
    device: torch.device
    dtype: torch.dtype
    """Of hidden states: the compute type."""
    chunks: int = 1
    """Of each stage."""
    waits: Waits = field(default_factory=Waits)
    _sent: deque[tuple[Tensor, dist.Work]] = field(default_factory=deque, repr=False)

    @property
    def stage(self) -> int:
        return self.group.rank()

    @property
    def stages(self) -> int:
        return self.group.size()

    def exchange(
        self,
        *,
        sends: Sequence[tuple[Tensor, int]] = (),
        receives: Sequence[tuple[Sequence[int], int]] = (),
    ) -> list[Incoming]:
        """Begin to send tensors to stages and to receive tensors of these shapes from stages; those that come.

        All are posted together, so that neighbours who send to each other do not wait for each other in the order in
        which NCCL runs what it is given. A tensor that is sent is kept until it is gone.
        """
        operations = []
        for tensor, to in sends:
            assert tensor.dtype == self.dtype, f"hidden states are {tensor.dtype}, {self.dtype} is expected"
            operations.append(dist.P2POp(dist.isend, tensor.contiguous(), group=self.group, group_peer=to))
        for shape, source in receives:
            incoming = torch.empty(*shape, dtype=self.dtype, device=self.device)
            operations.append(dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(operations) if operations else []
        if len(works) < len(operations):  # NCCL has one for all
            works = [works[-1]] * len(operations)
        begun = [(operation.tensor, work) for operation, work in zip(operations, works, strict=True)]
        self._sent += begun[: len(sends)]
        while len(self._sent) > sends_under_way(self.stages, self.chunks):
            self._sent.popleft()[1].wait()
        return [Incoming(tensor, work, self.waits) for tensor, work in begun[len(sends) :]]

    def receive(self, shape: Sequence[int], source: int) -> Tensor:
        """The hidden states that a stage sends. Blocks."""
        (incoming,) = self.exchange(receives=[(shape, source)])
        return incoming.take()

    def send(self, hidden: Tensor, to: int) -> None:
        """Send hidden states to a stage."""
        self.exchange(sends=[(hidden, to)])

    def flush(self) -> None:
        """Wait until everything that was sent is gone."""
        while self._sent:
            self._sent.popleft()[1].wait()

    def from_stage(self, source: int, tensor: Tensor) -> Tensor:
        """A stage's ``tensor`` on every stage, in place."""
        self.flush()
        dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def both_ends(self, tensors: Sequence[Tensor]) -> None:
        """On the first and the last stage: add the other's tensors to these, with the same bits on both."""
        other = self.stages - 1 - self.stage
        for tensor in tensors:
            theirs = torch.empty_like(tensor)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor, group=self.group, group_peer=other),
                    dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=other),
                ]
            )
            for work in works:
                self.waits.wait(work)
            tensor += theirs  # a sum of two is the same in either order
