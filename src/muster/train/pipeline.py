"""A step's micro-batches on one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from muster.train.data_feed.batch_reader import Round
from muster.train.distributed.stage_link import Incoming, StageLink
from muster.train.model.loss import loss_sum
from muster.train.model.model_with_loss import ModelWithLoss


@dataclass(frozen=True)
class Action:
    """One thing that a stage does."""

    forward: bool
    """Else backward."""
    micro_batch: int
    """Its number among those of this rank's step, from 0."""


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """The order of one stage: as many forward passes as there are stages behind it, then one of each in turn, then the
    backward passes that are left (Narayanan et al. 2019, PipeDream-Flush). At most ``stages`` micro-batches are kept.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    for number in range(ahead):
        yield Action(True, number)
    for number in range(ahead, micro_batches):
        yield Action(True, number)
        yield Action(False, number - ahead)
    for number in range(micro_batches - ahead, micro_batches):
        yield Action(False, number)


@dataclass
class Pipeline:
    """Runs forward and backward passes of micro-batches in an order in which all stages go on."""

    module: ModelWithLoss
    link: StageLink
    chunk_tokens: int
    _order: list[Action] = field(default_factory=list)
    _kept: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict, repr=False)
    """Micro-batch -> what went in and what came out, until its backward pass."""
    _incoming: Incoming | None = None

    def actions(self, rounds: tuple[Round, ...]) -> Iterator[Action]:
        """This stage's actions of one step, each to be followed by ``forward`` or ``backward``. A message is awaited
        in the action that needs it."""
        link = self.link
        self._kept.clear()
        self._order = list(one_forward_one_backward(link.stage, link.stages, len(rounds)))
        self._made: tuple[Tensor, int] | None = None
        for action in self._order:
            self._incoming = link.exchange(send=self._made, receive=self._needs(action, rounds))
            self._made = None
            yield action
        link.exchange(send=self._made)
        link.flush()

    def forward(self, number: int, part: Round) -> Tensor | None:
        """The forward pass of micro-batch ``number``; its loss on the last stage."""
        hidden = None
        if self._incoming is not None:
            hidden = self._incoming.take().requires_grad_()
        output = loss_sum(self.module, part.batch, chunk_tokens=self.chunk_tokens, scale=part.scale, hidden=hidden)
        self._kept[number] = hidden, output
        if self.link.is_last:
            return output.detach()
        self._made = output.detach(), self.link.stage + 1
        return None

    def backward(self, number: int, *, last: bool) -> None:
        """The backward pass of micro-batch ``number``; ``last``: of the step's."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                # What FSDP remembers of forward passes is dropped with the last backward pass: others are under way.
                part.set_is_last_backward(last)
        hidden, output = self._kept.pop(number)
        output.backward(None if self._incoming is None else self._incoming.take())  # type: ignore[no-untyped-call]
        if hidden is not None:
            assert hidden.grad is not None, "the loss does not depend on what the stage before sent"
            self._made = hidden.grad, self.link.stage - 1

    def _needs(self, action: Action, rounds: tuple[Round, ...]) -> tuple[list[int], int] | None:
        """The shape that an action waits for, and the stage that sends it."""
        source = self.link.stage - 1 if action.forward else self.link.stage + 1
        if not 0 <= source < self.link.stages:
            return None
        return self.module.hidden_shape(rounds[action.micro_batch].batch.input_ids), source
