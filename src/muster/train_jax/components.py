"""What a rank on TPUs trains with: the torch trainer's parts, with the model, the step and the evaluation in JAX.

A rank is a host: one process drives all its chips (``resources.ranks_per_host`` is 1).
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from muster.checkpoint.exchange import gather
from muster.config.spec import RunSpec
from muster.core.errors import BackendError
from muster.protocol.ranks import AgentClient, RankContext
from muster.train.components import TrainerComponents, reduce_groups_of, schedule_of
from muster.train.distributed.device_mesh import make_meshes
from muster.train.distributed.process_setup import World
from muster.train.distributed.reduce import FloatReducer
from muster.train.inputs import fetch_weights, open_data
from muster.train.model import causal_lm, lora
from muster.train.model.attention import Attention
from muster.train.model.causal_lm import BuiltModel, shape_of
from muster.train.model.loss import logit_rule
from muster.train.model.model_with_loss import ModelWithLoss
from muster.train.optim.optimizer import decays_weight, make_optimizer
from muster.train.state.training_state import TrainingState
from muster.train_jax.architecture import architecture_of, check_tp
from muster.train_jax.arrays import Leaf, leaves_of, to_device
from muster.train_jax.batches import check_rows
from muster.train_jax.chips import watch_chips
from muster.train_jax.engine import Engine, JaxModel
from muster.train_jax.host_model import HostModel, build_host_model, rotary_of
from muster.train_jax.layout import FSDP, ROWS, TP, mesh_of
from muster.train_jax.model import Model, Parameters
from muster.train_jax.trace import XlaTrace

#: Peak dense bf16 operations a second of a chip by JAX's name for it; Google's pages on v5e, v5p and v6e.
PEAKS = {
    "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}  # fmt: skip
#: How long the hosts wait for each other's chips.
JOIN_TIMEOUT_S = 300
CPU = torch.device("cpu")


def make_components(spec: RunSpec, context: RankContext, agent: AgentClient, *, world: World) -> TrainerComponents:
    """Open the data, join the chips of all hosts and build the model, as ``train.components.make_components``.

    Raises:
        UsageError: the model or the batch is nothing that this trainer computes.
        BackendError: the other hosts' chips cannot be joined.
    """
    assert spec.model is not None
    set_numerics(spec, context)
    prepared = open_data(spec, Path(context.run_dir), agent)
    fetched = fetch_weights(spec, Path(context.run_dir), agent)
    join_chips(context, world)
    layout = context.layout
    mesh = mesh_of(slices=layout.dp_replicate, tp=spec.parallelism.tp)
    check_rows(spec.training.micro_batch_size, mesh)
    batch_schedule, last_step = schedule_of(spec, context, prepared)
    meshes = make_meshes(layout, "cpu", replica=context.rank // layout.ranks_per_replica)
    host = build_host_model(
        fetched, vocab_size=prepared.vocab_size, hosts=meshes.shard, chips=mesh.shape[FSDP] * mesh.shape[TP],
        seed=spec.training.seed,
    )  # fmt: skip
    trained = host.trained()
    optimizer = make_optimizer(trained, spec.training.optimizer, elementwise=False)
    frozen = host.frozen()
    leaves = leaves_of(trained, mesh)
    engine = Engine(
        model=model_of(spec, host, mesh),
        mesh=mesh,
        training=spec.training,
        agent=agent,
        leaves=leaves,
        trained=trained,
        moments=optimizer,
        frozen=to_device(leaves_of(frozen, mesh), frozen),
        decays=decays_of(
            leaves, {name: decays_weight(value, spec.training.optimizer) for name, value in trained.items()}
        ),
        group=world.control,
        watch=watch_chips(agent),
    )
    groups = reduce_groups_of(meshes, world)
    return TrainerComponents(
        spec=spec,
        device=CPU,
        prepared=prepared,
        last_step=last_step,
        batch_schedule=batch_schedule,
        meshes=meshes,
        groups=groups,
        built=(built := described(spec, host, mesh)),
        reducer=FloatReducer(built.module, groups, accumulate_locally=False),
        optimizer=optimizer,
        state=TrainingState(trained, optimizer, mirrored=engine),
        evaluated=JaxModel(engine),
        update=engine.update,
        peak=peak_of(mesh),
        sees_arrivals=False,
        recorder=XlaTrace,
    )


def set_numerics(spec: RunSpec, context: RankContext) -> None:
    """Precision of products, and where compiled programs are kept, so that a restart need not compile them again.

    Each rank has a folder of its own: programs of CPU chips differ from process to process, and no two write one file.
    """
    assert spec.model is not None
    if spec.model.dtype == "float32":  # else a TPU multiplies in bfloat16
        jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_compilation_cache_dir", str(Path(context.run_dir, "xla_cache", f"rank-{context.rank}")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Overrides the environment: process 0 would compile for all, and here each is that one (``Engine.compiling``).
    jax.config.update("jax_share_binary_between_hosts", False)


def join_chips(context: RankContext, world: World) -> None:
    """Make the chips of all hosts one platform. Collective; the coordinator is in rank 0, on a port of its own.

    It listens on the run's address alone and, like torch's rendezvous store, has no authentication (SECURITY.md).
    """
    if context.world_size == 1:
        return
    port = gather(free_port(context.master_addr) if context.rank == 0 else 0, world.control)[0]
    address = f"[{context.master_addr}]:{port}" if ":" in context.master_addr else f"{context.master_addr}:{port}"
    try:
        jax.distributed.initialize(
            address,
            context.world_size,
            context.rank,
            coordinator_bind_address=address,
            initialization_timeout=JOIN_TIMEOUT_S,
        )
    except RuntimeError as error:
        raise BackendError(
            f"rank {context.rank} cannot join the chips of {context.world_size} hosts at {address}: {error}",
            hint="look for another rank that failed to start",
        ) from error


def leave_chips() -> None:
    """Leave together: a process whose coordinator is gone is ended by JAX."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def free_port(address: str) -> int:
    """A port that is free now. Another program could take it first: then joining fails, and the attempt is repeated."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def model_of(spec: RunSpec, host: HostModel, mesh: Mesh) -> Model:
    """The function that the chips compute."""
    assert spec.model is not None
    frequencies, factor = rotary_of(host)
    rule = logit_rule(host.config)
    architecture, tp = architecture_of(host.config), mesh.shape[TP]
    check_tp(architecture, tp)
    return Model(
        architecture=architecture,
        inverse_frequencies=frequencies,
        rotary_factor=factor,
        dtype=jnp.dtype(spec.model.dtype),
        lora_scale=1.0 if spec.model.lora is None else lora.scale_of(spec.model.lora),
        recompute=spec.training.activation_checkpointing,
        logit_factor=rule.factor,
        logit_cap=rule.cap,
        devices=mesh.size // tp,
        tp=tp,
        splash_over=mesh if on_tpu(mesh) else None,
        constrain=Laid(NamedSharding(mesh, PartitionSpec(ROWS, None, None))),
        gather=Vocabulary(mesh),
        split=Laid(NamedSharding(mesh, PartitionSpec(ROWS, None, TP))) if tp > 1 else whole,
    )


@dataclass(frozen=True)
class Laid:
    """Has an array laid out so. A value, and not a closure: programs are compiled once for equal models."""

    layout: NamedSharding

    def __call__(self, array: jax.Array) -> jax.Array:
        result: jax.Array = jax.lax.with_sharding_constraint(array, self.layout)
        return result


@dataclass(frozen=True)
class Vocabulary:
    """Has a weight [V, E] whole on every device; of ``tp`` that share a row each has a part of V, where they divide it.
    A value, as ``Laid``."""

    mesh: Mesh

    def __call__(self, weight_VE: jax.Array) -> jax.Array:
        axis = None if weight_VE.shape[0] % self.mesh.shape[TP] else TP
        return Laid(NamedSharding(self.mesh, PartitionSpec(axis, None)))(weight_VE)


def whole(array: jax.Array) -> jax.Array:
    """``Model.split`` without tensor parallel."""
    return array


def decays_of(leaves: Iterable[Leaf], decays: Mapping[str, bool]) -> Parameters:
    """By array, from what holds for its parameters."""
    result = Parameters({}, {})
    for leaf in leaves:
        (result.layers if leaf.stacked else result.top)[leaf.key] = decays[leaf.names[0]]  # type: ignore[assignment]
    return result


def described(spec: RunSpec, host: HostModel, mesh: Mesh) -> BuiltModel:
    """What events and arithmetic need to know of the model."""
    assert spec.model is not None
    chips = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    reason = f"JAX on {chips}" if on_tpu(mesh) else f"JAX on {chips}: there is no TPU here"
    attention = Attention("splash" if on_tpu(mesh) else "dense", reason)
    trained = host.trained()
    looked_up = causal_lm.looked_up(host.module)
    return BuiltModel(
        module=ModelWithLoss(host.module, attention, compute_dtype=causal_lm.DTYPES[spec.model.dtype]),
        config=host.config,
        attention=attention,
        proof=None,
        num_parameters=sum(v.numel() for name, v in host.module.named_parameters() if not lora.is_adapter_name(name)),
        num_trainable=sum(value.numel() for value in trained.values()),
        num_multiplied=sum(value.numel() for value in trained.values() if value is not looked_up),
        lora_config=host.lora_config,
        shape=shape_of(host.config),
    )


def on_tpu(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "tpu")


def peak_of(mesh: Mesh) -> tuple[float | None, str] | None:
    """Peak FLOP/s of a host's chips and the figure's source; None on CPUs."""
    if not on_tpu(mesh):
        return None
    kind, chips = mesh.devices.flat[0].device_kind, mesh.local_mesh.size
    if kind not in PEAKS:
        return None, f"no peak is known for {kind}: set output.peak_tflops"
    return PEAKS[kind] * chips, f"data sheet of {chips} x {kind}"
