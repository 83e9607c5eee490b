"""The state on the chips, and what the loop and the evaluation do with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np
import torch
import torch.distributed as dist
from jax import Array
from jax._src import distributed  # no public name for it
from jax.sharding import Mesh
from torch import Tensor

from muster.config.spec import Training
from muster.protocol.ranks import AgentClient
from muster.train.data_feed.batch import Batch
from muster.train.data_feed.batch_reader import StepWork
from muster.train.distributed.process_groups import all_reduce
from muster.train.evaluation.generate import BATCH
from muster.train.optim.optimizer import ShardOptimizer
from muster.train.state.training_state import placed_like
from muster.train.training_run import TrainingRun
from muster.train_jax.arrays import Leaf, to_device, to_host, zeros_like
from muster.train_jax.batches import batch_arrays, groups_of_host, own_rows, rows_over_all, step_arrays
from muster.train_jax.chips import ChipsWatch
from muster.train_jax.generate import complete
from muster.train_jax.model import Model, Parameters, merged, row_losses
from muster.train_jax.step import Scalars, State, StepFunction, make_step

#: How long the first call of a program counts as progress: a step of 70B takes the TPU's compiler minutes.
COMPILE_LIMIT_S = 1800.0
#: Prompts are padded to a multiple of this width, so that few programs are compiled.
PROMPT_STEP = 64
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Engine:
    """The training state on this world's chips. ``train.state.TrainingState`` holds the host's copy of it."""

    model: Model
    mesh: Mesh
    training: Training
    agent: AgentClient
    leaves: Sequence[Leaf]
    """Of the trained parameters, and of each of the moments."""
    trained: Mapping[str, Tensor]
    """The host's tensors."""
    moments: ShardOptimizer
    """The host's moments; its step is never taken."""
    frozen: Parameters
    decays: Parameters
    """Whether weight decay acts on each trained parameter."""
    group: dist.ProcessGroup | None
    """gloo over all hosts; None: one."""
    watch: ChipsWatch
    _state: State | None = None
    _fetched: int = -1
    """The step of the host's copy."""
    _step: StepFunction | None = None
    _compiled: set[object] = field(default_factory=set)

    # ------------------------------------------------------------ the host's copy

    def fetch(self, step: int) -> None:
        """Copy the state after ``step`` to the host, if it is not there."""
        if self._state is None or step == self._fetched:
            return
        for arrays, tensors in zip(self._state, self._host(), strict=True):
            to_host(self.leaves, arrays, tensors)
        self._fetched = step

    def push(self) -> None:
        """Take the state from the host's copy. Collective."""
        self._state = State(*(to_device(self.leaves, tensors) for tensors in self._host()))
        self._fetched = -1

    def begin(self) -> None:
        """Take the initial values: parameters from the host, moments of zero."""
        trained = to_device(self.leaves, self.trained)
        self._state = State(trained, zeros_like(trained), zeros_like(trained))

    def _host(self) -> list[Mapping[str, Tensor]]:
        placed = [
            {key: placed_like(self.trained[key], part) for key, part in self.moments.moments[name].items()}
            for name in MOMENTS
        ]
        return [self.trained, *placed]

    @property
    def state(self) -> State:
        if self._state is None:
            self.begin()
        assert self._state is not None
        return self._state

    @property
    def parameters(self) -> tuple[Parameters, Parameters]:
        """Trained ones and frozen ones."""
        return self.state.trained, self.frozen

    # ------------------------------------------------------------ a step

    def update(self, run: TrainingRun, work: StepWork, rate: float) -> None:
        """One step, for the loop: as ``train.loop.update``."""
        if self._step is None:
            self._step = make_step(
                self.model,
                self.training.optimizer,
                self.decays,
                chunk_tokens=self.training.loss_chunk_tokens,
                state=self.state,
            )
        batches = step_arrays([part.batch for part in work.rounds], self.mesh)
        scale = 1.0 / work.supervised_tokens  # as of every round but padding, which has no target
        scalars = Scalars.of(scale=scale, learning_rate=rate, step=work.step, settings=self.training.optimizer)
        run.agent.beat(work.step)
        run.flush_pending_metrics()
        with self.compiling(("step", len(work.rounds))):
            self._state, (own, norm) = self._step(self.state, self.frozen, batches, scalars)
            losses = [torch.tensor(float(rows.sum())) for rows in own_rows(own)]  # waits for the step
        run.start_consensus(work)
        total = torch.stack(losses).sum().double()
        self.over_hosts(total, dist.ReduceOp.SUM)
        run.sums_ended()
        self._fetched = -1
        run.record_step(work, losses, total, torch.tensor(float(norm.addressable_data(0))), torch.zeros(()), rate)
        self.watch.at_step(work.step)

    def over_hosts(self, number: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce a number in place over all hosts."""
        if self.group is not None:
            all_reduce(number, self.group, op=operation).wait()
        return number

    def compiling(self, program: object) -> AbstractContextManager[None]:
        """Around a call: the first of each ``program`` compiles it, which takes long and is progress.

        JAX lets process 0 alone write compiled programs, since others may have the same files. Here each has its own
        (``components.set_numerics``), so meanwhile every process is that one to JAX: nothing else in it asks then.
        """
        if program in self._compiled:
            return nullcontext()
        self._compiled.add(program)
        return _Progress(self.agent, distributed.global_state.process_id)


@dataclass(frozen=True)
class _Progress(AbstractContextManager[None]):
    agent: AgentClient

    process: int
    """Of JAX's processes; 0 without others."""

    def __enter__(self) -> None:
        self.agent.progress(for_s=COMPILE_LIMIT_S)
        distributed.global_state.process_id = 0

    def __exit__(self, *_: object) -> None:
        distributed.global_state.process_id = self.process
        self.agent.progress()


@dataclass(frozen=True)
class JaxModel:
    """``train.evaluation.EvaluatedModel`` of an engine."""

    engine: Engine

    @property
    def compiled(self) -> bool:
        return False  # by torch: no batch needs marks for it

    def objection(self) -> str | None:
        return None

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()  # nothing of the model has a mode: dropout is refused

    def documents(self, batch: Batch) -> Tensor:
        raise NotImplementedError("tpu_rules refuse objectives")

    def loss(self, batch: Batch, *, chunk_tokens: int) -> Tensor:
        engine = self.engine
        rows = engine.training.micro_batch_size
        arrays = batch_arrays(batch, rows, engine.mesh)
        with engine.compiling("loss"):
            losses = _losses(engine.model, *engine.parameters, arrays, chunk_tokens=chunk_tokens)
            return torch.tensor(float(own_rows(losses).sum()))

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        pad_id: int,
        progress: Callable[[], None],
    ) -> list[list[int]]:
        engine = self.engine
        completions: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        groups = groups_of_host(engine.mesh)
        rows = min(-(-BATCH // groups), -(-len(prompts) // groups)) * groups
        for start in range(0, len(order), rows):
            chosen = order[start : start + rows]
            batch = [list(prompts[index]) or [*stop_ids[:1], pad_id][:1] for index in chosen]
            longest = engine.model.architecture.longest
            width = int(engine.over_hosts(torch.tensor(max(map(len, batch))), dist.ReduceOp.MAX))
            room = min(max_new_tokens, longest - width)
            if room <= 0:
                continue
            width = min(-(-width // PROMPT_STEP) * PROMPT_STEP, longest - room)
            tokens, real = padded(batch, rows, width, pad_id)
            with engine.compiling(("complete", width, room)):
                new = complete(
                    engine.model, merged(*engine.parameters), rows_over_all(tokens, engine.mesh),
                    rows_over_all(real, engine.mesh), new=room, stops=tuple(stop_ids), pad=pad_id,
                )  # fmt: skip
                found = own_rows(new, axis=0)
            progress()
            for index, row in zip(chosen, found.tolist(), strict=False):
                completions[index] = [token for token in row if token >= 0]
        return completions


def padded(prompts: Sequence[list[int]], rows: int, width: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[rows, width] and bool[rows, width]: prompts at the right, and where they are; rows without one hold one
    token."""
    tokens = np.full((rows, width), pad, np.int32)
    real = np.zeros((rows, width), bool)
    real[:, -1] = True
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = prompt
        real[row, width - len(prompt) :] = True
    return tokens, real


@partial(jax.jit, static_argnames=("model", "chunk_tokens"))
def _losses(
    model: Model, trained: Parameters, frozen: Parameters, batch: Mapping[str, Array], *, chunk_tokens: int
) -> Array:
    return row_losses(replace(model, recompute="none"), merged(trained, frozen), batch, chunk_tokens=chunk_tokens)
