"""In which order the stages of a pipeline work, and what they send each other when. Pure.

A stage holds one or more chunks of layers, each of which is a part of the model (``layout.part_of``): a micro-batch
passes through the first chunk of every stage, then through the second ones, in a V from the last stage back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise

from muster.core.layout import forwards_ahead, part_of


class Kind(Enum):
    """What a stage does with a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """All gradients; where the order has ``WEIGHTS``, all but those of the layers' matrices."""
    WEIGHTS = "weights"
    """The gradients that the backward pass left out."""


@dataclass(frozen=True)
class Action:
    """One thing that a stage does."""

    kind: Kind
    micro_batch: int
    """Its number among those of this rank's step, from 0."""
    chunk: int = 0

    @property
    def forward(self) -> bool:
        return self.kind is Kind.FORWARD


@dataclass(frozen=True)
class Schedule:
    """How the stages of a pipeline take turns."""

    stages: int
    chunks: int = 1
    """Of each stage."""
    split_backward: bool = False
    """Gradients of weights are computed apart, where a stage would wait otherwise."""
    v: bool = False
    """Stages' two chunks are placed in a V, and gradients of weights come apart."""

    def __post_init__(self) -> None:
        assert not self.v or (self.chunks == 2 and self.split_backward), f"a V has two chunks a stage: {self}"

    @property
    def parts(self) -> int:
        """Parts that the model is cut into."""
        return self.stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        return part_of(stage, chunk, self.stages, v=self.v)

    def place(self, part: int) -> tuple[int, int]:
        """Where a part of the model is: its stage, and its chunk there."""
        chunk, place = divmod(part, self.stages)
        return part_of(place, chunk, self.stages, v=self.v) - chunk * self.stages, chunk

    def source(self, stage: int, chunk: int) -> int | None:
        """The stage that has the part before this one; None: the model begins here."""
        part = self.part(stage, chunk)
        return self.place(part - 1)[0] if part else None

    def target(self, stage: int, chunk: int) -> int | None:
        """The stage that has the part behind this one; None: the model ends here."""
        part = self.part(stage, chunk) + 1
        return self.place(part)[0] if part < self.parts else None

    def begins_on(self, stage: int) -> bool:
        """Whether the model does."""
        return self.source(stage, 0) is None

    def ends_on(self, stage: int) -> bool:
        """Whether the model does."""
        return self.target(stage, self.chunks - 1) is None

    def order(self, stage: int, micro_batches: int) -> list[Action]:
        """All that a stage does in a step. Passes of a kind through a chunk come in the order of micro-batches."""
        if self.v:
            return list(zero_bubble_v(stage, self.stages, micro_batches))
        ahead = forwards_ahead(stage, self.stages, self.chunks, micro_batches)
        order = one_forward_one_backward(self, ahead, micro_batches)
        return list(weights_apart(order, stage, micro_batches) if self.split_backward else order)


def one_forward_one_backward(schedule: Schedule, ahead: int, micro_batches: int) -> Iterator[Action]:
    """1F1B: ``ahead`` forward passes, then one of each kind in turn, then the backward passes that are left (Narayanan
    et al. 2019, PipeDream-Flush).

    Several chunks are interleaved (Narayanan et al. 2021, section 2.2): groups of as many micro-batches as there are
    stages pass through a chunk before the next chunk's turn. Where the micro-batches are no multiple of the stages
    groups are larger: with a smaller one a stage could wait for a chunk that waits for it.
    """
    groups = max(1, micro_batches // schedule.stages)
    forwards, backwards = [], []
    for first, last in pairwise(micro_batches * number // groups for number in range(groups + 1)):
        for chunk in range(schedule.chunks):
            forwards += [Action(Kind.FORWARD, number, chunk) for number in range(first, last)]
        for chunk in reversed(range(schedule.chunks)):
            backwards += [Action(Kind.BACKWARD, number, chunk) for number in range(first, last)]
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def weights_apart(order: Iterable[Action], stage: int, micro_batches: int) -> Iterator[Action]:
    """Backward passes hand their gradient on before the gradients of weights are computed, which are put off to where a
    stage would wait (Qi et al. 2023, ZB-H1): on each later stage by one micro-batch more, so that no stage keeps more
    than the first does.
    """
    for action in order:
        yield action
        if not action.forward and action.micro_batch >= stage:
            yield Action(Kind.WEIGHTS, action.micro_batch - stage)
    for number in range(max(0, micro_batches - stage), micro_batches):
        yield Action(Kind.WEIGHTS, number)


def zero_bubble_v(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """ZB-V (Qi et al. 2023, section 6): no stage waits between its first and its last pass where forward passes,
    backward passes and gradients of weights take the same time; with chunks of one size none keeps more than the first
    stage of 1F1B does.

    The order is that of ``2 stages - 1`` micro-batches at least, and those that there are not are left out.
    """
    (f0, f1), (b0, b1), (w0, w1) = ([(kind, chunk) for chunk in range(2)] for kind in Kind)
    behind, rounds = stages - stage, max(2 * stages - 1, micro_batches) - stages
    begun = behind - 1  # forward passes through the first chunk that are ahead of the second's, where all is under way
    pattern = [f0] * (2 * behind - 1) + [f1, f0] * stage + [f1, b1, w1] * behind
    pattern += [f0, b0, w0, f1, b1, w1] * (rounds - begun) + [b0, w0, f1, b1, w1] * begun
    pattern += [b0, b1] * stage + [b0, w0] * behind + [w1] * stage + [w0] * stage
    numbers: Counter[tuple[Kind, int]] = Counter()
    for kind, chunk in pattern:
        if numbers[kind, chunk] < micro_batches:
            yield Action(kind, numbers[kind, chunk], chunk)
        numbers[kind, chunk] += 1


@dataclass(frozen=True)
class Message:
    """Hidden states that a forward pass made, or their gradient from a backward pass, for the part that goes on."""

    made_by: Action
    sender: int
    needed_by: Action
    receiver: int


@dataclass(frozen=True)
class Turn:
    """An action, and the messages that this stage begins to send and to receive before it. The last has no action."""

    messages: tuple[Message, ...]
    action: Action | None


@cache
def turns(schedule: Schedule, micro_batches: int) -> list[list[Turn]]:
    """What each stage does in a step.

    Messages have one order for all stages: that in which they are made where every chunk takes the same time. Each
    stage begins its own in this order, and before an action all up to the one that it needs. So neighbours' messages
    pair up, and no message waits for a later one, even where a rank transfers one after the other (NCCL).
    """
    orders = [schedule.order(stage, micro_batches) for stage in range(schedule.stages)]
    ends = finished(schedule, orders)
    messages = [
        message
        for stage, action in sorted(ends, key=lambda key: (ends[key], key[0]))
        if (message := message_of(schedule, stage, action)) is not None and message.receiver != stage
    ]
    return [_turns(stage, order, messages) for stage, order in enumerate(orders)]


def _turns(stage: int, order: Sequence[Action], messages: Sequence[Message]) -> list[Turn]:
    mine = [message for message in messages if stage in (message.sender, message.receiver)]
    following = dict(pairwise(order))
    due: dict[Action | None, int] = {}  # action -> number of messages that are begun before it
    for place, message in enumerate(mine, start=1):
        due[message.needed_by if message.receiver == stage else following.get(message.made_by)] = place
    found, begun = [], 0
    for action in order:
        upto = max(begun, due.get(action, 0))
        found.append(Turn(tuple(mine[begun:upto]), action))
        begun = upto
    return [*found, Turn(tuple(mine[begun:]), None)]


def message_of(schedule: Schedule, stage: int, action: Action) -> Message | None:
    """What an action of a stage makes for another one, which may be this stage's own; None: nothing."""
    if action.kind is Kind.WEIGHTS:
        return None
    part = schedule.part(stage, action.chunk) + (1 if action.forward else -1)
    if not 0 <= part < schedule.parts:
        return None
    receiver, chunk = schedule.place(part)
    return Message(action, stage, Action(action.kind, action.micro_batch, chunk), receiver)


def finished(
    schedule: Schedule,
    orders: Sequence[Sequence[Action]],
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weights: float | None = None,
) -> dict[tuple[int, Action], float]:
    """(stage, action) -> when it is done, where a chunk takes ``forward`` and ``backward`` and messages no time.

    ``weights``: how long gradients of weights take apart, and then ``backward`` is without them; None: half of it each.

    Raises:
        ValueError: stages wait for each other forever.
    """
    if schedule.split_backward and weights is None:
        backward = weights = backward / 2
    takes = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.WEIGHTS: weights or 0.0}
    ends: dict[tuple[int, Action], float] = {}
    arrives: dict[tuple[int, Action], float] = {}
    places, clocks = [0] * schedule.stages, [0.0] * schedule.stages
    going = True
    while going:
        going = False
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                action = order[places[stage]]
                part = schedule.part(stage, action.chunk)
                first = part == (0 if action.forward else schedule.parts - 1) or action.kind is Kind.WEIGHTS
                if not first and (stage, action) not in arrives:
                    break
                clocks[stage] = max(clocks[stage], arrives.get((stage, action), 0.0)) + takes[action.kind]
                ends[stage, action] = clocks[stage]
                message = message_of(schedule, stage, action)
                if message is not None:
                    arrives[message.receiver, message.needed_by] = clocks[stage]
                places[stage] += 1
                going = True
    if places != [len(order) for order in orders]:
        raise ValueError(f"stages wait for each other forever: {schedule}")
    return ends
