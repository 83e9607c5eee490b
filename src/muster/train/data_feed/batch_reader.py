"""Batches, read ahead: a thread builds the next steps' batches while the current step computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from muster.config.spec import Training
from muster.core.batch_schedule import BatchSchedule
from muster.core.errors import RunFailed
from muster.data.schedule import MicroBatchRef, StepPlan, plan_step
from muster.data.sequences import SequenceStore
from muster.train.data_feed.batch import Batch, batch_from, chosen_targets, padding_batch

READ_AHEAD_STEPS = 2


@dataclass(frozen=True)
class Round:
    """One micro-batch as this rank runs it."""

    index: int
    """Position in the step; -1: zero-weight padding, because every rank must make the same collectives."""
    sequences: tuple[int, ...]
    batch: Batch
    scale: float
    """1 / the step's supervised tokens (of preferences: units) over all ranks; 0.0 for padding."""
    mismatched: Batch | None = None
    """Of labelled answers, each prompt with another one's."""


@dataclass(frozen=True)
class StepWork:
    """One step of one rank, and the totals of the step over all ranks."""

    step: int
    rounds: tuple[Round, ...]
    micro_batches: int
    rows: int
    tokens: int
    supervised_tokens: int
    padding_tokens: int
    padding_rounds: int
    model_flops: float
    """By the CAUSAL convention; 0.0 on ranks other than 0."""
    units: int = 0
    """Of preferences, the step's."""
    own_tokens: int = 0
    """Of this rank's rounds, padding excluded."""
    replica_share: float = 1.0
    """Of the step's supervised tokens (or units), those of this rank's replica."""


def plan_work(
    store: SequenceStore,
    training: Training,
    *,
    step: int,
    data_rank: int,
    data_ranks: int,
    replica_ranks: int | None = None,
    device: torch.device,
    static_shapes: bool,
    count_flops: Callable[[list[int]], float] | None,
    batch_schedule: BatchSchedule,
) -> StepWork:
    """Read and build everything that ``step`` needs on this rank.

    ``replica_ranks``: how many of the ``data_ranks`` one replica has; None: all. ``static_shapes``: for
    compiled models. ``count_flops``: document lengths of the whole step, without padding -> operations.

    Raises:
        RunFailed: no token of the step is supervised.
    """
    plan = plan_step(
        seed=training.seed,
        step=step,
        num_sequences=len(store),
        global_batch_size=batch_schedule.at(step).global_batch_size,
        start=batch_schedule.sequences_before(step),
        micro_batch_size=training.micro_batch_size,
        data_ranks=data_ranks,
    )
    chosen, padding_rows = [*chain(*plan.micro_batches)], plan.padding_rounds * training.micro_batch_size
    tokens_of, weight_of, supervised, learned, lengths = _counted(store, chosen, with_lengths=count_flops is not None)
    objective = training.preference
    tokens, weight = (sum(map(of.__getitem__, chosen)) for of in (tokens_of, weight_of))
    if supervised == 0:
        raise RunFailed(
            f"step {step}: none of its {tokens} tokens is supervised", hint="see `muster data` for the mask"
        )
    prompts = weight / learned if objective is not None and objective.traits.learns_prompts else None
    make = partial(make_round, static_shapes=static_shapes, learns_prompts=prompts)
    rounds = tuple(make(one, store, training, device, weight) for one in plan.for_rank(data_rank))
    return StepWork(
        step=step,
        rounds=rounds,
        micro_batches=len(plan.micro_batches),
        rows=len(chosen),
        tokens=tokens,
        supervised_tokens=supervised,
        padding_tokens=(len(chosen) + padding_rows) * training.sequence_length - tokens,
        padding_rounds=plan.padding_rounds,
        model_flops=count_flops(lengths) if count_flops is not None else 0.0,
        units=weight if objective is not None else 0,
        own_tokens=sum(tokens_of[index] for one in rounds for index in one.sequences),
        replica_share=supervised_of_replica(plan, weight_of, data_rank, replica_ranks or data_ranks) / weight,
    )


def _counted(
    store: SequenceStore, chosen: Iterable[int], *, with_lengths: bool
) -> tuple[dict[int, int], dict[int, int], int, int, list[int]]:
    """Tokens and weight of each of these sequences; of all of them the targets, the tokens that are predicted in better
    conversations, and the documents' lengths."""
    tokens_of, weight_of = {}, {}
    supervised = learned = 0
    lengths: list[int] = []
    for index in chosen:
        sequence = store[index]
        tokens_of[index], weight_of[index] = sequence.tokens, sequence.weight
        supervised += sequence.supervised_tokens
        learned += chosen_targets(sequence)
        if with_lengths:
            lengths += sequence.documents.tolist()
    return tokens_of, weight_of, supervised, learned, lengths


def supervised_of_replica(plan: StepPlan, supervised_of: Mapping[int, int], data_rank: int, ranks: int) -> int:
    """Supervised tokens of the replica of ``ranks`` data ranks that ``data_rank`` is in."""
    first = data_rank // ranks * ranks
    own = (each for rank in range(first, first + ranks) for each in plan.for_rank(rank) if each is not None)
    return sum(supervised_of[index] for each in own for index in each.sequences)


def make_round(
    micro_batch: MicroBatchRef | None,
    store: SequenceStore,
    training: Training,
    device: torch.device,
    supervised: int,
    static_shapes: bool,
    learns_prompts: float | None = None,
) -> Round:
    """This rank's batch of one round; zero-weight padding where it has no micro-batch."""
    if micro_batch is None:
        size, width = training.micro_batch_size, training.sequence_length
        empty = padding_batch(size, width, device, static_shapes=static_shapes)
        return Round(-1, (), empty, 0.0, None if store.mismatched is None else empty)
    chosen = micro_batch.sequences
    batch = batch_from(store, chosen, device, static_shapes=static_shapes, learns_prompts=learns_prompts)
    other = None
    if store.mismatched is not None:
        other = batch_from(store.mismatched, chosen, device, static_shapes=static_shapes)
    return Round(micro_batch.index, chosen, batch, 1.0 / supervised, other)


class ReadAhead:
    """Builds the work of the steps in a thread, at most ``READ_AHEAD_STEPS`` ahead.

    The thread starts with the first ``take``, never before a fork. An exception in it is raised by ``take``.
    """

    def __init__(self, make: Callable[[int], StepWork], *, first: int, last: int) -> None:
        self._make = make
        self._steps = range(first, last + 1)
        self._ready: queue.Queue[StepWork | BaseException] = queue.Queue(maxsize=READ_AHEAD_STEPS)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, step: int) -> StepWork:
        """The work of ``step``; steps are taken in order."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="muster-reader", daemon=True)
            self._thread.start()
        work = self._ready.get()
        if isinstance(work, BaseException):
            raise work
        assert work.step == step, f"step {work.step} was read, step {step} is requested"
        return work

    def close(self) -> None:
        """End the thread and discard what it read."""
        self._stop.set()
        if self._thread is not None:
            while self._thread.is_alive():
                with suppress(queue.Empty):
                    self._ready.get(timeout=0.05)
            self._thread.join()

    def _run(self) -> None:
        for step in self._steps:
            if self._stop.is_set():
                return
            try:
                work: StepWork | BaseException = self._make(step)
            except BaseException as error:  # noqa: BLE001 (thread boundary: passed to the loop, which raises it)
                work = error
            self._ready.put(work)
            if isinstance(work, BaseException):
                return
