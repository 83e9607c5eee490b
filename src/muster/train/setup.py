"""A rank's surroundings: device, threads, determinism, process groups. Done once, before the model is built."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from muster.core.errors import BackendError, UsageError
from muster.core.ranks import RankContext
from muster.core.spec import RunSpec

#: Collectives wait for a peer so long before they raise by themselves; long before that the agents act.
COLLECTIVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class World:
    """The process groups that are not an axis of the layout."""

    rank: int
    size: int
    control: dist.ProcessGroup | None
    """gloo over all ranks, for orders; None at world size 1."""
    checkpoint: dist.ProcessGroup | None
    """gloo over all ranks, for saves, which run beside the training's collectives."""


def choose_device(spec: RunSpec, context: RankContext) -> torch.device:
    """The rank's device.

    Raises:
        UsageError: the run file wants CUDA and there is none, or fewer GPUs than ranks.
    """
    wanted = spec.resources.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
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
    if spec.training.deterministic or spec.training.exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS: same bits on every stream
        torch.use_deterministic_algorithms(True)
        # Filling costs a pass over every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = True


def default_threads(spec: RunSpec, context: RankContext, device: torch.device) -> int:
    """The host's cores, shared out; one where sums must not depend on how many ranks share the host.

    A CPU sum over many elements is cut by threads, so that its last bits depend on their number.
    """
    if spec.training.exact and device.type == "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // context.local_world_size)


def open_rendezvous(address: str, port: int, *, serve: bool) -> dist.Store:
    """The store where ranks meet; ``serve``: this process hosts it.

    Raises:
        BackendError: the port is taken, or nobody answers.
    """
    try:
        return dist.TCPStore(
            address, port, None, serve, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        what = f"cannot serve the rendezvous on port {port}" if serve else f"nobody answers at {address}:{port}"
        raise BackendError(f"{what}: {error}", hint="is the port free, and can the hosts reach each other?") from error


def join_world(context: RankContext, device: torch.device, store: dist.Store) -> World:
    """Form the default process group of this attempt and the two beside it.

    The store's keys carry the attempt, so that a store which saw an earlier world does no harm.

    Raises:
        BackendError: the other ranks cannot be reached.
    """
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"a{context.attempt}", store),
            rank=context.rank,
            world_size=context.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        # Saves need a gloo group also where the default one is NCCL, and of their own: they run beside training.
        return World(
            rank=context.rank,
            size=context.world_size,
            control=dist.new_group(backend="gloo", timeout=timeout) if context.world_size > 1 else None,
            checkpoint=dist.new_group(backend="gloo", timeout=timeout),
        )
    except (RuntimeError, OSError) as error:
        raise BackendError(
            f"rank {context.rank} cannot join the {context.world_size} ranks of attempt {context.attempt} "
            f"at {context.master_addr}:{context.master_port}: {error}",
            hint="did another rank fail to start?",
        ) from error


def leave_world() -> None:
    """Destroy the groups; a peer that is gone already is no error."""
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except RuntimeError:
            pass
