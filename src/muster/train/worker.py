"""A rank, from nothing to its exit code.

``run_rank`` is what the fork server calls in each forked process. ``python -m muster.train.worker --run-dir DIR``
is the same under torchrun, where the rank writes its host's event file itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster.core.errors import MusterError, UsageError
from muster.core.flops import ModelShape, lora_factor, step_flops
from muster.core.nouns import Layout
from muster.core.ranks import Link, Order, RankContext
from muster.core.spec import RunSpec
from muster.data.prepare import Prepared, open_prepared, prepare
from muster.data.schedule import num_steps
from muster.train.evaluate import Evaluator
from muster.train.exact import FixedPointSums
from muster.train.links import FileLink
from muster.train.loop import train
from muster.train.mesh import Meshes, make_meshes
from muster.train.metrics import Peak, Phases, StepLog
from muster.train.model import BuiltModel, build_model
from muster.train.optimizer import make_optimizer
from muster.train.orders import Orders
from muster.train.profiling import Collector, Profiler, memory_room_bytes, peak_flops
from muster.train.reader import ReadAhead, StepWork, plan_work
from muster.train.reduce import REPLICATE, SHARD, TENSOR, Axes, FloatSums, Sums
from muster.train.reference import ReferenceWindow
from muster.train.resume import open_snapshots, restore
from muster.train.run import Run
from muster.train.saving import open_saves
from muster.train.setup import World, choose_device, join_world, leave_world, open_rendezvous, set_numerics
from muster.train.state import TrainState, named_without_wrappers
from muster.train.trackers import open_trackers

#: Gradients of the whole model are kept on each rank between micro-batches when they take less than this share
#: of its memory.
LOCAL_GRADIENTS_SHARE = 0.1


def run_rank(context: RankContext, link: Link, *, store: dist.Store | None = None) -> int:
    """Train this rank's part of the run in ``context.run_dir`` and return the exit code.

    0: done; 130 or 75: stopped by that order, saved where there was time. A failure is raised.
    ``store``: where ranks meet, if open already; else at the context's address, served by rank 0 unless
    ``MUSTER_STORE_HOSTED`` says that somebody does.
    """
    spec = read_spec(Path(context.run_dir))
    phases = Phases(link)
    phases.enter("start")
    device = choose_device(spec, context)
    set_numerics(spec, context, device)
    if store is None:
        hosted = os.environ.get("MUSTER_STORE_HOSTED") == "1"
        store = open_rendezvous(context.master_addr, context.master_port, serve=context.rank == 0 and not hosted)
    world = join_world(context, device, store)
    run = assemble(spec, context, link, phases, device=device, world=world)
    order = fulfil(run)
    leave_world()
    return 0 if order is None else order.exit_code


def fulfil(run: Run) -> Order | None:
    """Evaluate, train, evaluate, save. The order that ended it early, if one did."""
    if run.state.step == 0 and run.spec.evaluation.at_start:
        run.evaluate(0)
    if run.state.step < run.last_step:
        run.phases.enter("warmup")
        run.log.restart()
    order = train(run)
    if order is None:
        run.evaluate(run.state.step, final=True)
    run.save(run.state.step, order)
    run.finish()
    return order


def assemble(
    spec: RunSpec, context: RankContext, link: Link, phases: Phases, *, device: torch.device, world: World
) -> Run:
    """Open the data, build the model, restore the state: everything the loop needs."""
    run_dir = Path(context.run_dir)
    prepared = open_data(spec, run_dir)
    last_step = num_steps(
        steps=spec.training.steps,
        epochs=spec.training.epochs,
        num_sequences=len(prepared.train),
        global_batch_size=spec.training.global_batch_size,
    )
    meshes = make_meshes(context.layout, device.type)
    axes = axes_of(meshes)
    built = build_model(
        spec,
        layout=context.layout,
        device=device,
        vocab_size=prepared.vocab_size,
        mesh=meshes,
        seed=spec.training.seed,
    )
    sums = choose_sums(spec, built, axes, device, context)
    named = named_without_wrappers(built.named_trainable())
    optimizer = make_optimizer(named, spec.training.optimizer, elementwise=spec.training.exact)
    state = TrainState(named, optimizer)
    saves = open_saves(spec, context, state, world, extra={"data_fingerprint": prepared.fingerprint}, link=link)
    phases.enter("restore")
    restore(spec, context, state, saves, world, link)
    flops, source = peak_flops(
        spec, device=device, run_dir=run_dir, probe=context.restore is None, keep=world.rank == 0
    )
    announce(link, world, prepared, built, flops, source)
    log = StepLog(
        link=link,
        rank=world.rank,
        device=device,
        peak=Peak(flops=flops, ranks=context.world_size),
        trackers=open_trackers(spec, run_id=context.run_id, run_dir=run_dir) if world.rank == 0 else [],
        track_every_steps=spec.output.log_every_steps,
    )
    data_ranks = context.layout.data_ranks
    count_flops = flop_counter(built)

    def make(step: int) -> StepWork:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins with GPU 0, where pinning would open a context
        return plan_work(
            prepared.train,
            spec.training,
            step=step,
            data_rank=meshes.data_rank,
            data_ranks=data_ranks,
            device=device,
            count_flops=count_flops if world.rank == 0 else None,
        )

    return Run(
        spec=spec,
        context=context,
        link=link,
        device=device,
        world=world,
        model=built.module,
        state=state,
        optimizer=optimizer,
        sums=sums,
        reader=ReadAhead(make, first=state.step + 1, last=last_step),
        orders=Orders(link, world.control),
        log=log,
        phases=phases,
        evaluator=Evaluator(
            spec=spec,
            prepared=prepared,
            model=built.module,
            axes=axes,
            data_rank=meshes.data_rank,
            data_ranks=data_ranks,
            world=world,
            device=device,
            link=link,
            log=log,
        ),
        saves=saves,
        snapshots=open_snapshots(spec, context, state),
        reference=ReferenceWindow.planned(
            spec.recovery.reference_steps, resumed_at=state.step, world_size=context.world_size
        ),
        profiler=Profiler(spec.training.profile, directory=run_dir / "traces", rank=world.rank, device=device),
        collector=Collector(spec.training.gc_every_steps),
        last_step=last_step,
    )


def read_spec(run_dir: Path) -> RunSpec:
    """The resolved run file. Raises UsageError where the folder holds none."""
    path = run_dir / "resolved.json"
    try:
        return RunSpec.model_validate_json(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no resolved run file: {error}") from error


def open_data(spec: RunSpec, run_dir: Path) -> Prepared:
    """The prepared data; made here where nobody did so before the ranks were started (torchrun)."""
    try:
        return open_prepared(spec, run_dir)
    except MusterError:
        return prepare(spec, run_dir=run_dir)


def axes_of(meshes: Meshes) -> Axes:
    """The process groups along which sums run; an axis of size 1 has none."""
    groups = {}
    if meshes.shard.size() > 1:
        groups[SHARD] = meshes.shard.get_group()
    if meshes.tp.size() > 1:
        groups[TENSOR] = meshes.tp.get_group()
    if meshes.replicate is not None:
        groups[REPLICATE] = meshes.replicate
    return Axes(groups)


def choose_sums(spec: RunSpec, built: BuiltModel, axes: Axes, device: torch.device, context: RankContext) -> Sums:
    """Fixed point where asked for; otherwise floats, reduced once a step where whole gradients are small.

    The choice depends on the machine and the model alone, so that a restart makes the same one.
    """
    if spec.training.exact:
        return FixedPointSums(built.module, axes)
    room = memory_room_bytes(device) / (context.local_world_size if device.type == "cpu" else 1)
    return FloatSums(built.module, axes, accumulate_locally=built.num_trainable * 4 < LOCAL_GRADIENTS_SHARE * room)


def flop_counter(built: BuiltModel) -> Callable[[list[int]], float] | None:
    """Document lengths -> operations by the CAUSAL convention; None for a model whose shape is not known."""
    try:
        shape = ModelShape.from_config(built.config.to_dict())
    except UsageError:
        return None
    factor = 1.0 if built.lora_config is None else lora_factor(shape, built.num_trainable)
    return lambda lengths: factor * step_flops(shape, lengths)


def announce(link: Link, world: World, prepared: Prepared, built: BuiltModel, flops: float | None, source: str) -> None:
    """Say what will be trained on what (rank 0)."""
    if world.rank != 0:
        return
    link.emit(
        "data.prepared",
        fingerprint=prepared.fingerprint,
        tokens=prepared.train.tokens,
        sequences=len(prepared.train),
        cached=bool(prepared.stats.get("cached", True)),
    )
    length = prepared.train.sequence_length
    detail: dict[str, Any] = {
        "parameters": built.num_parameters,
        "trainable_parameters": built.num_trainable,
        "attention": str(built.attention),
        "peak_source": source,
    }
    count_flops = flop_counter(built)
    if count_flops is not None:
        detail["flops_per_token"] = count_flops([length]) / length
    if flops is not None:
        detail["peak_flops"] = flops
    link.emit("model.ready", **detail)


def preload(spec: Mapping[str, Any]) -> None:
    """Pay in advance for what the first model of a process costs: called before a fork.

    Imports the model's class and builds a small one on the meta device, which runs no tensor operation and starts
    no thread, and touches no device.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = spec.get("model") or {}
    config = model.get("config")
    family = config.get("model_type") if isinstance(config, dict) else None
    if family is None:
        family = model_type_of(model.get("source") or config)
    try:
        small = AutoConfig.for_model(family or "llama", num_hidden_layers=1)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(small)
    except Exception as error:  # noqa: BLE001 (only a head start; the rank's own build says what is wrong)
        print(f"note: {family} could not be loaded in advance: {error}", file=sys.stderr)
    if model.get("lora"):
        import peft  # noqa: F401


def model_type_of(folder: object) -> str | None:
    """What a local model folder or config.json says it is; None for a hub id."""
    if not isinstance(folder, str):
        return None
    path = Path(folder)
    try:
        found = json.loads((path if path.is_file() else path / "config.json").read_text())
        return str(found["model_type"])
    except (OSError, ValueError, KeyError):
        return None


def torchrun_place(run_dir: Path, environment: Mapping[str, str], spec: RunSpec) -> tuple[RankContext, dist.Store]:
    """The place in the world that torchrun gave this process, and the store where its ranks meet.

    Raises:
        UsageError: not started by torchrun, or the layout does not fit the number of ranks.
    """
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank, local_world = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except KeyError as error:
        raise UsageError(
            f"{error.args[0]} is not set", hint="start with `torchrun --nproc-per-node N -m muster.train.worker ...`"
        ) from error
    layout = layout_for(spec, world)
    agent_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = open_rendezvous(address, port, serve=rank == 0 and not agent_serves)
    key = f"muster/attempt/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        store.set(key, str(next_attempt(run_dir)))
    context = RankContext(
        run_id=run_dir.resolve().name,
        run_dir=str(run_dir),
        attempt=int(store.get(key)),
        host=re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "host",
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        local_world_size=local_world,
        layout=layout,
        master_addr=address,
        master_port=port,
    )
    return context, store


def layout_for(spec: RunSpec, world_size: int) -> Layout:
    """The run file's layout at this number of ranks. Raises UsageError where it does not fit."""
    wanted = spec.parallelism
    shard = wanted.dp_shard
    if shard == -1:
        shard = max(1, world_size // (wanted.dp_replicate * wanted.tp))
    layout = Layout(dp_replicate=wanted.dp_replicate, dp_shard=shard, tp=wanted.tp)
    if layout.world_size != world_size:
        raise UsageError(
            f"dp_replicate {wanted.dp_replicate} x dp_shard {shard} x tp {wanted.tp} is not {world_size} ranks",
            hint="set parallelism.dp_shard: -1 to use all ranks that remain",
        )
    return layout


def next_attempt(run_dir: Path) -> int:
    """One more than any attempt that left an event file: an attempt's number is never used twice."""
    found = [path.name.rsplit(".", 2)[1] for path in (run_dir / "events").glob("*.jsonl")]
    return 1 + max((int(number) for number in found if number.isdigit()), default=0)


def main() -> int:
    """Run as one of torchrun's workers."""
    parser = argparse.ArgumentParser(description="one rank of a run, under torchrun")
    parser.add_argument("--run-dir", required=True, type=Path, help="holds resolved.json")
    arguments = parser.parse_args()
    link = None
    try:
        spec = read_spec(arguments.run_dir)
        context, store = torchrun_place(arguments.run_dir, os.environ, spec)
        link = FileLink(context)
        link.obey_signals()
        return run_rank(context, link, store=store)
    except MusterError as error:
        hint = f" (hint: {error.hint})" if error.hint else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return error.exit_code
    finally:
        if link is not None:
            link.close()


if __name__ == "__main__":
    sys.exit(main())
