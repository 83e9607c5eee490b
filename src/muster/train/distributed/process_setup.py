"""A rank's process: device, threads, determinism, process groups. Set up once, before the model is built."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from muster.config.spec import RunSpec
from muster.core.errors import BackendError, UsageError
from muster.protocol.ranks import RankContext
from muster.train.distributed.process_groups import GroupAborter, gloo_group, named, nccl_group

#: Time-out of collectives; the agents detect a lost peer much earlier.
COLLECTIVE_TIMEOUT_S = 1800.0
#: After which it is seen whether a rendezvous store that does not answer is dead.
CONNECT_S = 3.0


@dataclass(frozen=True)
class World:
    """The process groups besides the axes of the layout."""

    rank: int
    control: dist.ProcessGroup | None
    """gloo over all ranks, for commands; None at world size 1."""
    checkpoint: dist.ProcessGroup | None
    """gloo over all ranks, for saves, which overlap with the training's collectives."""
    replicate: dist.ProcessGroup | None = None
    """Ranks that hold the same shard in other replicas; None where there is one replica."""
    aborter: GroupAborter = field(default_factory=GroupAborter)
    """Aborts the groups that cross replicas, and no others."""


def choose_device(spec: RunSpec, context: RankContext) -> torch.device:
    """The rank's device; of one that drives TPUs the host's memory, in which torch keeps the copy of its state.

    Raises:
        UsageError: the run file requires CUDA and there is none, or fewer GPUs than ranks.
    """
    requested = spec.resources.device
    if requested in ("cpu", "tpu") or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "resources.device is cuda, but torch finds no CUDA device", hint="resources.device=cpu runs on the CPU"
        )
    if context.local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"rank {context.rank} needs GPU {context.local_rank}, this host has {torch.cuda.device_count()}"
        )
    device = torch.device("cuda", context.local_rank)
    torch.cuda.set_device(device)
    return device


def set_numerics(spec: RunSpec, context: RankContext, device: torch.device) -> None:
    """Threads, seeds, precision of matmuls, deterministic kernels."""
    torch.set_num_threads(spec.resources.threads_per_rank or default_threads(spec, context, device))
    torch.manual_seed(spec.training.seed)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = not (spec.training.deterministic or spec.training.exact)
        torch.backends.cudnn.benchmark = False
    fix_libraries(spec)
    if spec.training.deterministic or spec.training.exact:
        torch.use_deterministic_algorithms(True)
        # Filling costs a pass over every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = True


def fix_libraries(spec: RunSpec) -> None:
    """Make cuBLAS and flash-attn deterministic, for deterministic runs.

    cuBLAS on every stream, if before its first use. flash-attn's backward pass sums in no fixed order unless it is
    asked to, and transformers reads this variable alone for it (``modeling_flash_attention_utils``); torch's own
    kernels (``varlen``) obey ``use_deterministic_algorithms``.
    """
    if spec.training.deterministic or spec.training.exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"


def default_threads(spec: RunSpec, context: RankContext, device: torch.device) -> int:
    """The host's cores divided among its ranks; 1 for exact training on the CPU.

    A CPU sum over many elements is split among threads, so that its last bits depend on their number.
    """
    if spec.training.exact and device.type == "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // context.local_world_size)


def open_rendezvous(address: str, port: int, *, serve: bool, begun: bool = False) -> Store:
    """The rendezvous store; ``serve``: this process hosts it. ``begun``: its host listened before this process had the
    address, so where the port is closed the store is dead.

    Raises:
        BackendError: the port is taken, the store is dead, or nothing answers there in time.
    """
    timeout, until_s = timedelta(seconds=COLLECTIVE_TIMEOUT_S), time.monotonic() + COLLECTIVE_TIMEOUT_S
    attempt_timeout = timedelta(seconds=CONNECT_S) if begun else timeout
    try:
        while True:
            try:
                store = TCPStore(address, port, None, serve, timeout=attempt_timeout, wait_for_workers=False)
                store.set_timeout(timeout)
                return store
            except (RuntimeError, OSError):
                if not begun or time.monotonic() > until_s:
                    raise
                with suppress(TimeoutError), socket.create_connection((address, port), CONNECT_S):
                    pass  # torch retries a connection that is refused, too
    except (RuntimeError, OSError) as error:
        problem = f"cannot serve the rendezvous on port {port}" if serve else f"nothing answers at {address}:{port}"
        hint = "check that the port is free and the hosts can reach each other"
        raise BackendError(f"{problem}: {error}", hint=hint) from error


def join_world(context: RankContext, device: torch.device, store: Store) -> World:
    """Create the process groups of this attempt: torch's default one over this rank's replica, the others over all.

    The store's keys contain the attempt, so that a store with keys of an earlier world does no harm. Raises as
    ``join_replicas`` does.
    """
    replica, inner = divmod(context.rank, context.layout.ranks_per_replica)
    with _join_errors(context):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"a{context.attempt}/replica{replica}", store),
            rank=inner,
            world_size=context.layout.ranks_per_replica,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=device if device.type == "cuda" else None,
        )
    return join_replicas(context, device, store)


def join_replicas(context: RankContext, device: torch.device, store: Store) -> World:
    """Create the groups that cross replicas; torch's default group stays as it is. Blocks until all ranks have joined.

    Raises:
        BackendError: the other ranks cannot be reached.
    """
    layout, timeout = context.layout, timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    aborter = GroupAborter()
    replica, inner = divmod(context.rank, layout.ranks_per_replica)

    def over_all(name: str) -> dist.ProcessGroup | None:
        keys = PrefixStore(f"a{context.attempt}/{name}", store)
        group = gloo_group(keys, rank=context.rank, size=context.world_size, timeout=timeout)
        return named(group, attempt=context.attempt, what=name, ranks=range(context.world_size))

    def over_replicas() -> dist.ProcessGroup | None:
        make = nccl_group if device.type == "cuda" else gloo_group
        keys = PrefixStore(f"a{context.attempt}/shard{inner}", store)
        group = make(keys, rank=replica, size=layout.dp_replicate, timeout=timeout)
        ranks = range(inner, context.world_size, layout.ranks_per_replica)
        return named(group, attempt=context.attempt, what=f"replicas of shard {inner}", ranks=ranks)

    with _join_errors(context):
        # Saves need a gloo group even on GPUs, and one of their own: they overlap with training.
        return World(
            rank=context.rank,
            control=aborter.watch(lambda: over_all("control")) if context.world_size > 1 else None,
            checkpoint=aborter.watch(lambda: over_all("checkpoint")),
            replicate=aborter.watch(over_replicas) if layout.dp_replicate > 1 else None,
            aborter=aborter,
        )


@contextmanager
def _join_errors(context: RankContext) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise BackendError(
            f"rank {context.rank} cannot join the {context.world_size} ranks of attempt {context.attempt} "
            f"at {context.master_addr}:{context.master_port}: {error}",
            hint="look for another rank that failed to start",
        ) from error


def leave_world() -> None:
    """Destroy the groups; a peer that has already left is not an error."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
