"""A step's micro-batches on one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from muster.train.data_feed.batch_reader import Round
from muster.train.distributed.pipeline_order import Action, Kind, Message, message_of, turns
from muster.train.model.loss import loss_sum
from muster.train.model.model_with_loss import ModelWithLoss
from muster.train.model.pipeline_stage import Stage
from muster.train.model.split_backward import finish


@dataclass
class Pipeline:
    """Runs forward and backward passes of micro-batches in an order in which all stages go on."""

    module: ModelWithLoss
    stage: Stage
    chunk_tokens: int
    _kept: dict[Action, tuple[Tensor | None, Tensor]] = field(default_factory=dict, repr=False)
    """Forward pass -> what went in and what came out, until its backward pass."""
    _made: dict[Action, Tensor] = field(default_factory=dict, repr=False)
    """What is to be sent."""
    _left: dict[Action, list[tuple[nn.Parameter, Tensor, Tensor]]] = field(default_factory=dict, repr=False)
    """What computes gradients -> those that the backward pass left for it."""
    _coming: dict[Action, Callable[[], Tensor]] = field(default_factory=dict, repr=False)
    """What needs a tensor of another action -> has it, once it is there."""

    def actions(self, rounds: tuple[Round, ...]) -> Iterator[tuple[Action, bool]]:
        """This stage's actions of one step, each to be done before the next; and whether it is the last. A message is
        awaited in the action that needs it."""
        self._kept.clear()
        self._made.clear()
        self._coming.clear()
        self._left.clear()
        *own, end = turns(self.stage.schedule, len(rounds))[self.stage.link.stage]
        for number, turn in enumerate(own, start=1):
            self._exchange(turn.messages, rounds)
            assert turn.action is not None
            yield turn.action, number == len(own)
        self._exchange(end.messages, rounds)
        self.stage.link.flush()

    def forward(self, action: Action, part: Round) -> Tensor | None:
        """The forward pass of a micro-batch through a chunk; its loss behind the last one."""
        coming = self._coming.pop(action, None)
        hidden = None if coming is None else coming().requires_grad_()
        output = loss_sum(
            self.module,
            part.batch,
            chunk_tokens=self.chunk_tokens,
            scale=part.scale,
            hidden=hidden,
            chunk=action.chunk,
        )
        self._kept[Action(Kind.BACKWARD, action.micro_batch, action.chunk)] = hidden, output
        if self.stage.ends(action.chunk):
            return output.detach()
        self._hand_on(action, output.detach())
        return None

    def backward(self, action: Action, *, last: bool) -> None:
        """The backward pass of a micro-batch through a chunk; ``last``: of the step's."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                # What FSDP remembers of forward passes is dropped with the last backward pass: others are under way.
                part.set_is_last_backward(last)
        hidden, output = self._kept.pop(action)
        coming = self._coming.pop(action, None)
        output.backward(None if coming is None else coming())  # type: ignore[no-untyped-call]
        if hidden is not None:
            assert hidden.grad is not None, "the loss does not depend on what the part before sent"
            self._hand_on(action, hidden.grad)
        if self.module.later is not None:
            self._left[replace(action, kind=Kind.WEIGHTS)] = self.module.later.take()

    def weights(self, action: Action) -> None:
        """The gradients that a micro-batch's backward pass left for later."""
        finish(self._left.pop(action))

    def _hand_on(self, action: Action, tensor: Tensor) -> None:
        """What an action made, for the part that needs it: where that is here too, nothing is sent."""
        message = message_of(self.stage.schedule, self.stage.link.stage, action)
        if message is not None and message.receiver == self.stage.link.stage:
            self._coming[message.needed_by] = lambda: tensor
        else:
            self._made[action] = tensor

    def _exchange(self, messages: Sequence[Message], rounds: tuple[Round, ...]) -> None:
        """Begin to send and to receive these."""
        out, into = [], []
        for message in messages:
            if message.sender == self.stage.link.stage:
                out.append((self._made.pop(message.made_by), message.receiver))
            else:
                batch = rounds[message.needed_by.micro_batch].batch
                into.append((message.needed_by, self.module.hidden_shape(batch), message.sender))
        incoming = self.stage.link.exchange(sends=out, receives=[(shape, source) for _, shape, source in into])
        self._coming |= {action: tensor.take for (action, *_), tensor in zip(into, incoming, strict=True)}
