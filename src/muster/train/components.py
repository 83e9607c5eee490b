"""What one rank trains with, and how it becomes a run in the world of one attempt.

``TrainerComponents`` (data, model, optimizer, state) are made once per process. ``assemble`` connects them to a world;
if a rank outlives its world (another replica was lost), they are connected to the next one, with the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from muster.config.spec import RunSpec
from muster.core.batch_schedule import BatchSchedule
from muster.core.flops import lora_factor, step_flops
from muster.core.typed_json import Json
from muster.data.prepare import Prepared
from muster.data.schedule import num_steps
from muster.protocol.ranks import AgentClient, RankContext
from muster.train.baseline import BaselineWindow
from muster.train.data_feed.batch_reader import ReadAhead, StepWork, plan_work
from muster.train.distributed.arrivals import Arrivals, StepClock, time_collectives
from muster.train.distributed.device_mesh import Meshes, make_meshes
from muster.train.distributed.fixed_point import FixedPointReducer
from muster.train.distributed.pause_consensus import PauseConsensus
from muster.train.distributed.process_setup import World
from muster.train.distributed.reduce import (
    REPLICA,
    REPLICATE,
    SHARD,
    STAGE,
    TENSOR,
    FloatReducer,
    GradientReducer,
    ReduceGroups,
)
from muster.train.distributed.step_consensus import StepConsensus
from muster.train.evaluation.evaluate import Evaluator
from muster.train.evaluation.evaluated_model import EvaluatedModel, TorchModel
from muster.train.evaluation.reference import References
from muster.train.inputs import fetch_weights, open_data
from muster.train.loop import update
from muster.train.measurement.live_trace import Recorder, torch_profiler
from muster.train.measurement.metrics import Peak, Phases, StepLog
from muster.train.measurement.profiling import Collector, Profiler, memory_room_bytes, peak_flops
from muster.train.model.causal_lm import BuiltModel, build_model
from muster.train.model.pipeline_stage import tied_gradient
from muster.train.model.sharding import forget_gradients, reshard
from muster.train.optim.local_steps import LocalSteps
from muster.train.optim.optimizer import ShardOptimizer, make_optimizer
from muster.train.pipeline import Pipeline
from muster.train.separation import separate
from muster.train.state.resume import restore, schedule_extra
from muster.train.state.saving import open_saves
from muster.train.state.snapshot_tiers import open_together
from muster.train.state.state_hash import StateHashes
from muster.train.state.training_state import TrainingState, named_without_wrappers
from muster.train.training_run import TrainingRun

#: Gradients of the whole model are kept on each rank between micro-batches if they take less than this share
#: of its memory.
LOCAL_GRADIENTS_SHARE = 0.1


@dataclass
class TrainerComponents:
    """What a rank keeps when it moves from one world to another."""

    spec: RunSpec
    device: torch.device
    prepared: Prepared
    last_step: int
    batch_schedule: BatchSchedule
    meshes: Meshes
    groups: ReduceGroups
    built: BuiltModel
    reducer: GradientReducer
    optimizer: ShardOptimizer
    state: TrainingState
    evaluated: EvaluatedModel
    reports: Sequence[str] = ()
    """What is said once: how documents share rows, where the run file asks for something else; experts, adapters."""
    update: Callable[[TrainingRun, StepWork, float], None] = update
    peak: tuple[float | None, str] | None = None
    """Peak FLOP/s of a rank and the figure's source, where the kind of device says it."""
    sees_arrivals: bool = True
    """Sums over ranks are begun by the host, so that it sees who comes last."""
    recorder: Callable[[], Recorder] = torch_profiler
    """Of traces of steps."""

    def move(self, context: RankContext, world: World) -> None:
        """Move to another world: another number of replicas, the same shard of the model."""
        replica = context.rank // context.layout.ranks_per_replica
        self.batch_schedule, self.last_step = schedule_of(self.spec, context, self.prepared)
        self.meshes = replace(self.meshes, layout=context.layout, replica=replica)
        self.groups.by_axis.pop(REPLICATE, None)
        if world.replicate is not None:
            self.groups.by_axis[REPLICATE] = world.replicate
        self.groups.aborter = world.aborter
        self.state.replica = replica
        forget_gradients(self.built.module)
        reshard(self.built.module)


def make_components(
    spec: RunSpec, context: RankContext, agent: AgentClient, *, device: torch.device, world: World
) -> TrainerComponents:
    """Open the data and build the model, with weights from the seed or the pretrained files.

    If in-memory snapshots are restored next (``context.restore``), trained weights stay undefined until then.
    """
    prepared = open_data(spec, Path(context.run_dir), agent)
    fetched = fetch_weights(spec, Path(context.run_dir), agent)
    layout = context.layout
    meshes = make_meshes(layout, device.type, replica=context.rank // layout.ranks_per_replica)
    groups = reduce_groups_of(meshes, world)
    built = build_model(
        fetched,
        device=device,
        vocab_size=prepared.vocab_size,
        mesh=meshes,
        seed=spec.training.seed,
        proof=Path(context.run_dir) / "attention_proof.json",
        restored=context.restore is not None,
    )
    mixture = built.module.mixture
    objective = built.module.objective
    if mixture is not None:
        groups.along = lambda: mixture.loads
    elif objective is not None:
        groups.along = lambda: objective.totals
    separated = separate(spec, prepared, built)
    spec, prepared = separated.spec, separated.prepared
    batch_schedule, last_step = schedule_of(spec, context, prepared)
    reducer = choose_reducer(spec, built, groups, device, context)
    time_collectives(built.module, reducer, groups.waits, device)
    named = named_without_wrappers(built.named_trainable())
    stage = built.module.stage
    optimizer = make_optimizer(named, spec.training.optimizer, elementwise=spec.training.exact)
    every = spec.training.local_steps
    local_steps = LocalSteps(named, every, spec.training.outer, groups) if every else None
    return TrainerComponents(
        spec=spec,
        device=device,
        prepared=prepared,
        last_step=last_step,
        batch_schedule=batch_schedule,
        meshes=meshes,
        groups=groups,
        built=built,
        reducer=reducer,
        optimizer=optimizer,
        state=TrainingState(
            named,
            optimizer,
            local_steps=local_steps,
            replica=meshes.replica,
            elsewhere=stage.trained_elsewhere if stage is not None else (),
            buffers=mixture.biases(built.module.model) if mixture is not None else None,
        ),
        evaluated=TorchModel(built.module),
        reports=[*built.reports, *([separated.report] if separated.report else [])],
    )


def assemble(
    components: TrainerComponents, context: RankContext, agent: AgentClient, phases: Phases, world: World
) -> TrainingRun:
    """Restore the state and open everything else that the loop needs in this world."""
    spec, device, prepared, state = components.spec, components.device, components.prepared, components.state
    run_dir, every, waits = Path(context.run_dir), spec.checkpoint.snapshot_every_steps, components.groups.waits
    reference = References.of(spec, prepared, spec.checkpoint_uri(context.run_dir))
    extra = {"data_fingerprint": prepared.fingerprint, **schedule_extra(spec.training.optimizer, components.last_step)}
    saves = open_saves(spec, context, state, world, extra=extra | reference.read(), agent=agent)
    phases.enter("restore")
    restore(spec, context, state, saves, world, agent)
    saves.extra = extra | complete(reference, components, agent, world, phases)
    flops, source = components.peak or peak_flops(spec, device)
    announce(agent, world, prepared, components.built, flops, source, components.reports)
    peak = Peak(flops=flops, ranks=context.world_size)
    evaluator = Evaluator(
        spec=spec,
        prepared=prepared,
        model=components.evaluated,
        groups=components.groups,
        data_rank=components.meshes.data_rank,
        data_ranks=context.layout.data_ranks,
        world=world,
        device=device,
        agent=agent,
        counts=components.meshes.is_first_of_data,
        objective=components.built.module.objective,
    )
    return TrainingRun(
        spec=spec,
        context=context,
        agent=agent,
        device=device,
        world=world,
        model=components.built.module,
        state=state,
        optimizer=components.optimizer,
        reducer=components.reducer,
        reader=ReadAhead(work_of(components, world), first=state.step + 1, last=components.last_step),
        consensus=StepConsensus(agent, world.control, waits),
        log=StepLog(agent=agent, rank=world.rank, device=device, peak=peak),
        phases=phases,
        evaluator=evaluator,
        saves=saves,
        snapshots=open_together(
            context, state.sharded, every_steps=every, extra=saves.extra, group=world.control, agent=agent
        ),
        hashes=hashes_of(components, world),
        baseline=BaselineWindow.planned(
            spec.recovery.baseline_steps, resumed_at=state.step, world_size=context.world_size
        ),
        profiler=profiler_of(components, agent, run_dir / "traces", rank=world.rank),
        collector=Collector(spec.training.gc_every_steps),
        last_step=components.last_step,
        batch_schedule=components.batch_schedule,
        update=components.update,
        pause_consensus=PauseConsensus(agent, replica_group(spec, context), waits),
        arrivals=arrivals_of(components, context),
        pipeline=pipeline_of(components),
    )


def complete(
    reference: References, components: TrainerComponents, agent: AgentClient, world: World, phases: Phases
) -> dict[str, str]:
    """Compute what is missing of the reference; what a save says of it."""
    if not reference.stores:
        return {}
    phases.enter("eval")
    meshes, step, writes = components.meshes, components.state.step, world.rank == 0
    return reference.make(
        components.evaluated, components.groups, meshes, agent, components.device, step=step, writes=writes
    )


def pipeline_of(components: TrainerComponents) -> Pipeline | None:
    """This rank's stage at work; None: the model is not cut into stages."""
    stage = components.built.module.stage
    if stage is None:
        return None
    stage.link.waits = components.groups.waits
    return Pipeline(components.built.module, stage, components.spec.training.loss_chunk_tokens)


def arrivals_of(components: TrainerComponents, context: RankContext) -> Arrivals:
    """Who comes last to the sums, where that can be seen: on the CPU, with a micro-batch of its own on each rank."""
    return Arrivals(
        StepClock(components.groups.waits),
        rank=context.rank,
        world_size=context.world_size,
        enabled=components.device.type == "cpu"
        and components.sees_arrivals
        and context.layout.data_ranks == context.world_size,
    )


def profiler_of(components: TrainerComponents, agent: AgentClient, directory: Path, *, rank: int) -> Profiler:
    """Of one rank."""
    profile, device, recorder = components.spec.training.profile, components.device, components.recorder
    return Profiler(profile, agent, directory=directory, rank=rank, device=device, recorder=recorder)


def replica_group(spec: RunSpec, context: RankContext) -> dist.ProcessGroup | None:
    """The ranks that continue together when another replica is lost; None: only this one, or none."""
    replicated = max(spec.parallelism.dp_replicate, context.layout.dp_replicate) > 1 and spec.replicas_survive
    shared = replicated and context.layout.ranks_per_replica > 1 and context.snapshot_dir is not None
    return dist.group.WORLD if shared else None  # torch's default group spans one replica (``join_world``)


def hashes_of(components: TrainerComponents, world: World) -> StateHashes:
    """The hashes of the training state, if the run file requests them."""
    meshes, local_steps, stage = components.meshes, components.state.local_steps, components.built.module.stage
    return StateHashes(
        components.state,
        every_steps=components.spec.training.state_hash_every_steps,
        replica=meshes.replica if local_steps is None else 0,
        groups=components.groups,
        group=world.control,
        replicas=meshes.layout.dp_replicate if local_steps is None else 1,
        counted_elsewhere=frozenset() if stage is None else stage.counted_elsewhere,
    )


def work_of(components: TrainerComponents, world: World) -> Callable[[int], StepWork]:
    """Step -> this rank's work in it; called by the reader's thread."""
    device, meshes, batch_schedule = components.device, components.meshes, components.batch_schedule
    count_flops = flop_counter(components.built) if world.rank == 0 else None
    static_shapes = components.built.module.compiled

    def make(step: int) -> StepWork:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread uses GPU 0, where pinning would open a context
        return plan_work(
            components.prepared.train,
            components.spec.training,
            step=step,
            data_rank=meshes.data_rank,
            data_ranks=meshes.layout.data_ranks,
            replica_ranks=meshes.layout.dp_shard,
            device=device,
            static_shapes=static_shapes,
            count_flops=count_flops,
            batch_schedule=batch_schedule,
        )

    return make


def schedule_of(spec: RunSpec, context: RankContext, prepared: Prepared) -> tuple[BatchSchedule, int]:
    """Batch sizes, and the run's last step: ``steps`` where given, else the one that completes the epochs."""
    training = spec.training
    batch_schedule = BatchSchedule.of(training.global_batch_size, context.batch_schedule)
    last_step = num_steps(
        steps=training.steps,
        epochs=training.epochs,
        num_sequences=len(prepared.train),
        global_batch_size=training.global_batch_size,
        batch_schedule=batch_schedule,
    )
    return batch_schedule, last_step


def reduce_groups_of(meshes: Meshes, world: World) -> ReduceGroups:
    """The process groups of the sums; an axis of size 1 has none."""
    by_axis = {}
    for axis, mesh in ((SHARD, meshes.shard), (TENSOR, meshes.tp), (STAGE, meshes.stages)):
        if mesh is not None and mesh.size() > 1:
            by_axis[axis] = mesh.get_group()
    if meshes.layout.ranks_per_replica > 1:
        assert dist.group.WORLD is not None
        by_axis[REPLICA] = dist.group.WORLD  # torch's default group spans one replica (``join_world``)
    if world.replicate is not None:
        by_axis[REPLICATE] = world.replicate
    return ReduceGroups(by_axis, world.aborter)


def choose_reducer(
    spec: RunSpec, built: BuiltModel, groups: ReduceGroups, device: torch.device, context: RankContext
) -> GradientReducer:
    """Fixed point for exact training; otherwise floats, reduced once a step if whole gradients are small.

    The choice depends only on the machine and the model, so that a restart makes the same one.
    """
    if spec.training.exact:
        return FixedPointReducer(built.module, groups)
    room = memory_room_bytes(device) / (context.local_world_size if device.type == "cpu" else 1)
    held = sum(parameter.numel() for parameter in built.module.parameters() if parameter.requires_grad)
    return FloatReducer(
        built.module,
        groups,
        accumulate_locally=held * 4 < LOCAL_GRADIENTS_SHARE * room,
        tied=tied_gradient(built.module.model, built.module.stage),
        over_replicas=not spec.training.local_steps,
    )


def flop_counter(built: BuiltModel) -> Callable[[list[int]], float] | None:
    """Document lengths -> operations by the CAUSAL convention; None for a model of unknown shape."""
    shape = built.shape
    if shape is None:
        return None
    multiplied = built.num_multiplied
    if built.lora_config is not None and shape.experts is not None:  # a token passes adapters of its experts alone
        targets = built.lora_config.target_modules
        multiplied = shape.lora_parameters(built.lora_config.r, targets or "all-linear", active=True)
    factor = 1.0 if built.lora_config is None else lora_factor(shape, multiplied)
    return lambda lengths: factor * step_flops(shape, lengths)


def announce(
    agent: AgentClient,
    world: World,
    prepared: Prepared,
    built: BuiltModel,
    flops: float | None,
    source: str,
    reports: Sequence[str],
) -> None:
    """Emit what will be trained, and on what data (rank 0)."""
    if world.rank != 0:
        return
    for report in reports:
        agent.emit("run.message", text=report)
    agent.emit(
        "data.prepared",
        fingerprint=prepared.fingerprint,
        tokens=prepared.train.tokens,
        sequences=len(prepared.train),
        cached=bool(prepared.stats.get("cached", True)),
    )
    length = prepared.train.sequence_length
    detail: dict[str, Json] = {
        "parameters": built.num_parameters,
        "trainable_parameters": built.num_trainable,
        "attention": str(built.attention),
        "compiled": built.module.compiled,
        "peak_source": source,
    }
    count_flops = flop_counter(built)
    if count_flops is not None:
        detail["flops_per_token"] = count_flops([length]) / length
    if flops is not None:
        detail["peak_flops"] = flops
    agent.emit("model.ready", step=None, phase=None, **detail)
