"""A rank, from nothing to its exit code.

``run_rank`` is what the fork server calls in each forked process. ``python -m muster.rank.worker --run-dir DIR``
is the same under torchrun, where the rank writes its host's event file itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster.config.spec import RunSpec
from muster.core.errors import MusterError, UsageError
from muster.core.layout import layout_for
from muster.protocol.ranks import LOST_PEER, RESIZE_EXIT_CODE, AgentClient, Command, RankContext
from muster.rank import fault_injection
from muster.rank.standalone_client import StandaloneClient
from muster.train.components import assemble, make_components
from muster.train.distributed.process_setup import (
    choose_device,
    join_replicas,
    join_world,
    leave_world,
    open_rendezvous,
    set_numerics,
)
from muster.train.loop import train
from muster.train.metrics import Phases
from muster.train.training_run import Paused, TrainingRun


def run_rank(context: RankContext, agent: AgentClient, *, store: dist.Store | None = None) -> int:
    """Train this rank's part of the run in ``context.run_dir`` and return the exit code.

    0: done; 130 or 75: stopped by that order, saved where there was time. A failure is raised.
    ``store``: where ranks meet, if open already; else at the context's address, served by rank 0 unless
    ``MUSTER_STORE_HOSTED`` says that somebody does.
    """
    spec = read_spec(Path(context.run_dir))
    phases = Phases(agent)
    phases.enter("start")
    device = choose_device(spec, context)
    set_numerics(spec, context, device)
    if store is None:
        hosted = os.environ.get("MUSTER_STORE_HOSTED") == "1"
        store = open_rendezvous(context.master_addr, context.master_port, serve=context.rank == 0 and not hosted)
    world = join_world(context, device, store)
    components = make_components(spec, context, device=device, world=world)
    while True:
        agent.on_pause(world.aborter)
        run = assemble(components, context, agent, phases, world)
        fault_injection.install(run)
        try:
            order = run_phases(run)
            break
        except (RuntimeError, Paused) as error:
            place = try_reassign(run, error)
            if place is None:
                raise
        context = place
        phases.enter("start")
        world = join_replicas(context, device, open_rendezvous(context.master_addr, context.master_port, serve=False))
        components.move(context, world)
    if order is None or order.exit_code != RESIZE_EXIT_CODE:  # the next world waits for this process's end
        leave_world()
    return 0 if order is None else order.exit_code


def try_reassign(run: TrainingRun, error: RuntimeError | Paused) -> RankContext | None:
    """A replica beside this one was lost, or may have been: stand still, keep the state, wait for another place.

    None: this rank's own failure, or nobody says that another attempt keeps it.
    """
    lost_peer = run.context.layout.dp_replicate > 1 and LOST_PEER.search(str(error)) is not None
    told = isinstance(error, Paused) or run.agent.pause_requested()  # the replica's ranks may have agreed before we heard
    if isinstance(error, MusterError) or not (lost_peer or told):
        return None
    run.pause()
    place = run.agent.wait_for_assignment(run.state.step)
    if place is not None:
        run.abandon()
    return place


def run_phases(run: TrainingRun) -> Command | None:
    """Evaluate, train, evaluate, save. The order that ended it early, if one did."""
    if run.state.step == 0 and run.spec.evaluation.at_start:
        run.evaluate(0)
    if run.state.step < run.last_step:
        run.phases.enter("warmup")
        run.log.restart()
    order = train(run)
    if order is not None and order.exit_code == RESIZE_EXIT_CODE:
        run.leave()
        return order
    if order is None:
        run.evaluate(run.state.step, final=True)
    run.save(run.state.step, order)
    run.finish()
    return order


def read_spec(run_dir: Path) -> RunSpec:
    """The resolved run file. Raises UsageError where the folder holds none."""
    path = run_dir / "resolved.json"
    try:
        return RunSpec.model_validate_json(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no resolved run file: {error}") from error


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


def torchrun_context(run_dir: Path, environment: Mapping[str, str], spec: RunSpec) -> tuple[RankContext, dist.Store]:
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
            f"{error.args[0]} is not set", hint="start with `torchrun --nproc-per-node N -m muster.rank.worker ...`"
        ) from error
    layout = layout_for(spec.parallelism.axes, world)
    if layout is None:
        axes = " x ".join(f"{name} {size}" for name, size in spec.parallelism.axes.items() if size != 1)
        raise UsageError(
            f"{axes or 'one rank'} does not fit {world} ranks",
            hint="set parallelism.dp_shard: -1 to use all ranks that remain",
        )
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


def next_attempt(run_dir: Path) -> int:
    """One more than any attempt that left an event file: an attempt's number is never used twice."""
    found = [path.name.rsplit(".", 2)[1] for path in (run_dir / "events").glob("*.jsonl")]
    return 1 + max((int(number) for number in found if number.isdigit()), default=0)


def main() -> int:
    """Run as one of torchrun's workers."""
    parser = argparse.ArgumentParser(description="one rank of a run, under torchrun")
    parser.add_argument("--run-dir", required=True, type=Path, help="holds resolved.json")
    arguments = parser.parse_args()
    agent = None
    try:
        spec = read_spec(arguments.run_dir)
        context, store = torchrun_context(arguments.run_dir, os.environ, spec)
        agent = StandaloneClient(context)
        agent.obey_signals()
        return run_rank(context, agent, store=store)
    except MusterError as error:
        hint = f" (hint: {error.hint})" if error.hint else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return error.exit_code
    finally:
        if agent is not None:
            agent.close()


if __name__ == "__main__":
    sys.exit(main())
