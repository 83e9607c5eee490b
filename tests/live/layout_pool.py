"""Ranks that train one small run after another in the same processes: a run of four takes a second, not five."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ports import free_port
from trainranks import context_of, prepared_run, server

from muster.core import event_log
from muster.core.types import Layout
from muster.protocol.ranks import RankContext

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Trained:
    """What a run computed; ``start``, ``end``: whole trained parameters."""

    losses: list[float]
    norms: list[float]
    start: dict[str, Any]
    end: dict[str, Any]


@dataclass
class Pool:
    """Processes that each take part in the runs of as many ranks as a layout has."""

    pipes: Sequence[Connection]

    def train(self, run_dir: Path, spec: Mapping[str, Any], layout: Layout) -> Trained:
        """Train ``spec`` in this layout. AssertionError: a rank failed."""
        from safetensors.torch import load_file

        prepared_run(run_dir, spec)
        port, pipes = free_port(), self.pipes[: layout.world_size]
        for rank, pipe in enumerate(pipes):
            pipe.send(context_of(run_dir, rank, len(pipes), layout, port))
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} does not answer"
            assert (error := pipe.recv()) is None, error
        steps = [event.detail for _, event in event_log.read(run_dir / "events") if event.kind == "step"]
        stages = {
            when: {name: tensor for path in run_dir.glob(f"{when}-*") for name, tensor in load_file(path).items()}
            for when in ("start", "end")
        }
        return Trained([each["loss"] for each in steps], [each["grad_norm"] for each in steps], **stages)


@contextmanager
def pool(size: int) -> Iterator[Pool]:
    """``size`` processes, ended at the end."""
    ends = [multiprocessing.Pipe() for _ in range(size)]
    processes = [server().Process(target=_serve, args=(theirs,)) for _, theirs in ends]
    for process in processes:
        process.start()
    try:
        yield Pool([ours for ours, _ in ends])
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from muster.rank import worker
    from muster.rank.standalone_client import StandaloneClient
    from muster.train import components

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # Traced as for inductor, whose C++ takes longer than a whole run.
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    components.build_model = partial(components.build_model, whole_below=0)
    run_phases = worker.run_phases
    while True:
        context: RankContext = pipe.recv()
        worker.run_phases = partial(_and_write, run_phases, context)
        try:
            code = worker.run_rank(context, StandaloneClient(context))
            pipe.send(None if code == 0 else f"exit code {code}")
        except BaseException:  # noqa: BLE001 (a process's edge: the test prints it)
            pipe.send(traceback.format_exc())
        finally:
            _clear_sharding_prop_cache()  # meshes of two worlds compare equal
            torch.use_deterministic_algorithms(False)
            torch._dynamo.reset()
            if dist.is_initialized():  # the run failed
                dist.destroy_process_group()


def _and_write(run_phases: Any, context: RankContext, run: Any) -> Any:
    """``run_phases``, with the trained parameters written before and after it, and process groups counted: torch's
    default one, which is that of a lone axis and of dp_shard with cp, and one for each other axis."""
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor

    def write(when: str) -> None:
        tensors = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().contiguous()
            for name, tensor in run.model.model.named_parameters()
            if tensor.requires_grad
        }
        save_file(tensors, Path(context.run_dir) / f"{when}-{context.rank}.safetensors")

    inside = {axis for axis, size in context.layout.sizes.items() if size > 1} - {"dp_replicate"}
    groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_backend(group) != "fake"]
    assert len(groups) == 1 + (0 if len(inside) == 1 else len(inside) - (inside == {"cp", "dp_shard"}))
    write("start")
    ended = run_phases(run)
    write("end")
    return ended
