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
    waits: Waits = field(default_factory=Waits)
    _sent: deque[tuple[Tensor, dist.Work]] = field(default_factory=deque, repr=False)

    @property
    def stage(self) -> int:
        return self.group.rank()

    @property
    def stages(self) -> int:
        return self.group.size()

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def exchange(
        self, *, send: tuple[Tensor, int] | None = None, receive: tuple[Sequence[int], int] | None = None
    ) -> Incoming | None:
        """Begin to send a tensor to a stage and to receive one of a shape from a stage; what comes.

        Both are posted together, so that neighbours who send to each other do not wait for each other in the order in
        which NCCL runs what it is given. The tensor that is sent is kept until it is gone.
        """
        operations = []
        if send is not None:
            tensor, to = send
            assert tensor.dtype == self.dtype, f"hidden states are {tensor.dtype}, {self.dtype} is expected"
            operations.append(dist.P2POp(dist.isend, tensor.contiguous(), group=self.group, group_peer=to))
        incoming = None
        if receive is not None:
            shape, source = receive
            incoming = torch.empty(*shape, dtype=self.dtype, device=self.device)
            operations.append(dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(operations) if operations else []
        if send is not None:
            self._sent.append((operations[0].tensor, works[0]))
            # A stage is ahead of the next one by fewer messages than this, so the oldest was received long ago.
            while len(self._sent) > 2 * self.stages + 2:
                self._sent.popleft()[1].wait()
        return None if incoming is None else Incoming(incoming, works[-1], self.waits)

    def receive(self, shape: Sequence[int]) -> Tensor | None:
        """The hidden states of the stage before; None on the first. Blocks."""
        incoming = None if self.is_first else self.exchange(receive=(shape, self.stage - 1))
        return None if incoming is None else incoming.take()

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage."""
        self.exchange(send=(hidden, self.stage + 1))

    def flush(self) -> None:
        """Wait until everything that was sent is gone."""
        while self._sent:
            self._sent.popleft()[1].wait()

    def from_last(self, tensor: Tensor) -> Tensor:
        """The last stage's ``tensor`` on every stage, in place."""
        self.flush()
        dist.broadcast(tensor, group=self.group, group_src=self.stages - 1)
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
