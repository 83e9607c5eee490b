"""A rank, from process start to exit code.

The fork server calls ``run_rank`` in each forked process. ``python -m muster.rank.worker --run-dir DIR`` does the same
under torchrun, where rank 0 writes its host's event file itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from muster.catalog import libraries
from muster.config.spec import Model, RunSpec
from muster.core import environment, resolved_file
from muster.core.errors import MusterError, UsageError
from muster.core.layout import layout_for
from muster.core.processes import forgive_outputs
from muster.core.resolved_file import DamagedRunFile
from muster.protocol.ranks import LOST_PEER, RESIZE_EXIT_CODE, AgentClient, Command, RankContext
from muster.rank import fault_injection, heap
from muster.rank.standalone_client import StandaloneClient
from muster.train.components import assemble, make_components
from muster.train.distributed import network
from muster.train.distributed.memory_nearby import stay_near
from muster.train.distributed.process_setup import (
    choose_device,
    join_replicas,
    join_world,
    leave_world,
    open_rendezvous,
    set_numerics,
)
from muster.train.loop import train
from muster.train.measurement.metrics import Phases
from muster.train.state.snapshot_restore import prepare_reading
from muster.train.training_run import Paused, TrainingRun


def run_rank(
    context: RankContext,
    agent: AgentClient,
    *,
    store: Store | None = None,
    store_hosted: bool = False,
    inject_faults: bool = False,
) -> int:
    """Train this rank's part of the run in ``context.run_dir`` and return the exit code.

    0: done; 130 or 75: stopped by a command with that code, saved if there was time. A failure is raised.
    ``store``: the rendezvous store, if already open; otherwise it is at the context's address, served by rank 0 unless
    another process does (``store_hosted``). ``inject_faults``: obey the requests of a drill.
    """
    spec = read_spec(Path(context.run_dir))
    phases = Phases(agent)
    phases.enter("start")
    if context.rank == 0 and context.attempt == 1 and (line := libraries.untested(libraries.installed())):
        agent.emit("run.message", text=line)
    device = choose_device(spec, context)
    set_numerics(spec, context, device)
    stay_near(device)
    if device.type == "cpu":
        heap.keep_freed()
    if store is None:
        serve = context.rank == 0 and not store_hosted
        store = open_rendezvous(context.master_addr, context.master_port, serve=serve, begun=store_hosted)
    world = join_world(context, device, store)
    if spec.check.network and context.attempt == 1 and not spec.unmeasured_network:  # later ones are recoveries
        network.measure(context, agent, device=device, store=store)
    if spec.resources.device == "tpu":
        from muster.train_jax import components as on_chips  # imports jax

        components = on_chips.make_components(spec, context, agent, world=world)
    else:
        components = make_components(spec, context, agent, device=device, world=world)
    while True:
        agent.on_pause(world.aborter)
        run = assemble(components, context, agent, phases, world)
        if inject_faults:
            fault_injection.install(run)
        try:
            command = run_phases(run)
            break
        except (RuntimeError, Paused) as error:
            assignment = try_reassign(run, error)
            if assignment is None:
                raise
        context = assignment
        phases.enter("start")
        store = open_rendezvous(context.master_addr, context.master_port, serve=False, begun=True)
        world = join_replicas(context, device, store)
        components.move(context, world)
    if spec.resources.device == "tpu":
        on_chips.leave_chips()
    if command is None or command.exit_code != RESIZE_EXIT_CODE:  # the next world waits until this process exits
        leave_world()
    return 0 if command is None else command.exit_code


def try_reassign(run: TrainingRun, error: RuntimeError | Paused) -> RankContext | None:
    """Another replica was lost, or may have been: pause, keep the state, and wait for a place in the next attempt.

    None: this rank failed itself, or it gets no place.
    """
    replicated = run.spec.replicas_survive and run.context.layout.dp_replicate > 1
    lost_peer = replicated and LOST_PEER.search(str(error)) is not None
    # The replica's ranks may have agreed on a pause before this one's request arrived.
    paused = isinstance(error, Paused) or run.agent.pause_requested()
    if isinstance(error, MusterError) or not (lost_peer or paused):
        return None
    run.pause()
    assignment = run.agent.wait_for_assignment(run.state.step)
    if assignment is not None:
        run.abandon()
    return assignment


def run_phases(run: TrainingRun) -> Command | None:
    """Evaluate, train, evaluate, save. Returns the command that ended the run early, if one did."""
    if run.state.step == 0 and run.spec.evaluation.at_start:
        run.evaluate(0)
    if run.state.step < run.last_step:
        run.phases.enter("warmup")
        run.log.restart()
    command = train(run)
    if command is not None and command.exit_code == RESIZE_EXIT_CODE:
        run.leave()
        return command
    if command is None:
        run.meet_replicas(after=run.state.step, last=True)
        run.evaluate(run.state.step, final=True)
    run.save(run.state.step, command)
    run.finish()
    return command


def read_spec(run_dir: Path) -> RunSpec:
    """The resolved run file. Raises DamagedRunFile, or UsageError if the folder has none."""
    path = run_dir / "resolved.json"
    try:
        return RunSpec.model_validate_json(resolved_file.read(run_dir, patient=True))
    except DamagedRunFile:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a resolved run file: {error}") from error


def preload(model: Model) -> None:
    """Do the one-time work of a process's first model, before a fork.

    Imports the model's class and builds a small one on the meta device, which runs no tensor operation, starts no
    thread and touches no device.
    """
    prepare_reading()
    family = model_type_of(model.source, model.config)
    with _scipy_hidden():
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            small = AutoConfig.for_model(family or "llama", num_hidden_layers=1)
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(small, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 (an optimization only: the rank's own build reports what is wrong)
            print(f"note: {family} could not be loaded in advance: {error}", file=sys.stderr)
    if model.lora:
        import peft  # noqa: F401


@contextlib.contextmanager
def _scipy_hidden() -> Iterator[None]:
    """transformers imports scipy, where it is there, for the losses of models that find objects in images: 0.4 s of a
    start (of 4.2 s of imports on two cores). No causal language model uses it.

    Not where scikit-learn is there, which needs it, and which transformers imports too.
    """
    if "scipy" in sys.modules or importlib.util.find_spec("sklearn") is not None:
        yield
        return
    sys.modules["scipy"] = None  # type: ignore[assignment]  # not there, for who looks (find_spec) and who imports
    try:
        yield
    finally:
        del sys.modules["scipy"]


def model_type_of(source: str | None, config: object) -> str | None:
    """The ``model_type`` that the run file gives, or that of a local model folder or config.json; None for a hub id."""
    if isinstance(config, dict) and config.get("model_type"):
        return str(config["model_type"])
    folder = source or config
    if not isinstance(folder, str):
        return None
    path = Path(folder)
    try:
        return str(json.loads((path if path.is_file() else path / "config.json").read_text())["model_type"])
    except (OSError, ValueError, KeyError):
        return None


def torchrun_context(run_dir: Path, variables: Mapping[str, str], spec: RunSpec) -> tuple[RankContext, Store]:
    """The place in the world that torchrun gave this process, and the rendezvous store.

    Raises:
        UsageError: not started by torchrun, or the layout does not fit the number of ranks.
    """
    try:
        rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        local_rank, local_world = int(variables["LOCAL_RANK"]), int(variables["LOCAL_WORLD_SIZE"])
        address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    except KeyError as error:
        raise UsageError(
            f"{error.args[0]} is not set", hint="start with `torchrun --nproc-per-node N -m muster.rank.worker ...`"
        ) from error
    layout = layout_for(spec.rank_axes, world)
    if layout is None:
        axes = " x ".join(f"{name} {size}" for name, size in spec.rank_axes.items() if size != 1)
        raise UsageError(
            f"{axes or 'one rank'} does not fit {world} ranks",
            hint="set parallelism.dp_shard: -1 to use all ranks that remain",
        )
    agent_serves = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = open_rendezvous(address, port, serve=rank == 0 and not agent_serves)
    key = f"muster/attempt/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"
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
    """One more than any attempt that left an event file: an attempt number is never reused."""
    attempts = [path.name.rsplit(".", 2)[1] for path in (run_dir / "events").glob("*.jsonl")]
    return 1 + max((int(number) for number in attempts if number.isdigit()), default=0)


def main() -> int:
    """Run as one of torchrun's workers."""
    forgive_outputs()
    parser = argparse.ArgumentParser(description="one rank of a run, under torchrun")
    parser.add_argument("--run-dir", required=True, type=Path, help="holds resolved.json")
    arguments = parser.parse_args()
    agent = None
    try:
        spec = read_spec(arguments.run_dir)
        if spec.model is not None:
            libraries.refuse(libraries.installed(), attention=spec.model.attention)
        context, store = torchrun_context(arguments.run_dir, os.environ, spec)
        agent = StandaloneClient(context)
        agent.obey_signals()
        return run_rank(context, agent, store=store, inject_faults=environment.current().drill)
    except MusterError as error:
        hint = f" (hint: {error.hint})" if error.hint else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return error.exit_code
    finally:
        if agent is not None:
            agent.close()


if __name__ == "__main__":
    sys.exit(main())
