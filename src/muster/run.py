"""The small API for a training loop of your own, started by ``command:`` in the run file.

::

    import muster.run as muster

    state = {"model": model, "optimizer": optimizer}
    step = muster.restore(state)                     # 0: nothing to restore
    while step < steps and not muster.should_stop():
        train_one_step()
        step += 1
        muster.heartbeat(step, tokens=..., loss=...)
        muster.save(step, state)
    muster.finish(step, state)                       # saves and leaves, where a stop was asked for

Outside Muster (plain torchrun, a notebook) every call does nothing useful and harms nothing:
``restore`` answers 0, ``should_stop`` False. Calls are collective: every rank makes the same ones.

What it gives: in-memory snapshots after every step (a killed rank costs no applied step), checkpoints on
disk or in a bucket, the step watchdog, the ledger, a stop that saves. Objects with ``state_dict`` and
``load_state_dict`` and plain tensors are taken; what is no tensor in them (step counts, flags) goes along
as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from muster.core.errors import UsageError
from muster.core.ranks import YIELDED, Link, Order, RankContext
from muster.core.spec import RunSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from muster.train.orders import Orders
    from muster.train.snapshot import Snapshots

PLAIN = "__plain__"
PLAIN_BYTES = 64 * 1024
"""Room for the values that are no tensors, as JSON in a tensor of bytes."""


@runtime_checkable
class Stateful(Protocol):
    """What torch calls so: models, optimizers, schedulers, data loaders."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


State = Mapping[str, "Stateful | Tensor"]


class _Here:
    """This process's place, set by the fork server before the script runs."""

    context: RankContext | None = None
    link: Link | None = None
    spec: RunSpec | None = None
    step_ns: int | None = None
    snapshots: Snapshots | None = None
    orders: Orders | None = None
    order: Order | None = None
    saver: Any = None
    begun: bool = False
    saved_step: int = -1


def enter(context: RankContext, link: Link) -> None:
    """Called by the fork server: from here on this process is a rank of a run."""
    _Here.context, _Here.link = context, link
    _Here.spec = RunSpec.model_validate_json((Path(context.run_dir) / "resolved.json").read_text())


def context() -> RankContext | None:
    """This rank's place in the world; None outside Muster."""
    return _Here.context


def heartbeat(step: int, *, tokens: int | None = None, loss: float | None = None, **metrics: float) -> None:
    """Say that ``step`` was applied. ``tokens``: of the global batch, for tokens/s and the ledger."""
    if _Here.link is None or _Here.context is None:
        return
    now = time.monotonic_ns()
    if _Here.step_ns is None:
        _Here.link.emit("phase", phase="train", step=step)
    if _Here.context.rank == 0:
        took = now - _Here.step_ns if _Here.step_ns is not None else 0
        detail: dict[str, Any] = {"tokens_per_s": tokens / took * 1e9} if tokens and took else {}
        if _Here.snapshots is not None:
            detail |= _Here.snapshots.held()
        _Here.link.emit(
            "step",
            step=step,
            loss=loss,
            grad_norm=metrics.get("grad_norm"),
            learning_rate=metrics.get("learning_rate"),
            step_ns=took,
            tokens=tokens,
            supervised_tokens=tokens,
            padding_tokens=0,
            **detail,
        )
    _Here.step_ns = now
    _Here.link.beat(step + 1)


def progress() -> None:
    """Say that something long that is no step (an evaluation) goes on: the step watchdog waits for the next call."""
    if _Here.link is not None:
        _Here.link.progress()


def should_stop() -> bool:
    """Whether the run is to end now, the same on every rank: leave the loop, then ``finish`` saves and exits."""
    if _Here.link is None:
        return False
    orders = _orders()
    if not _Here.begun:
        orders.begin(copy_is_behind=_behind(), saving=_saving())
    _Here.order = orders.agreed() or _Here.order
    orders.begin(copy_is_behind=_behind(), saving=_saving())
    _Here.begun = True
    return _Here.order is not None and _Here.order.kind == "stop"


def finish(step: int, state: State) -> None:
    """The loop is over. Complete the saves; after a stop save ``state`` and leave (exit code 130 or 75)."""
    stopping = _Here.order is not None and _Here.order.kind == "stop"
    wanted = stopping and _Here.order is not None and _Here.order.save and _Here.link is not None
    if wanted and _Here.saved_step != step:
        _saver().save(step, _flatten(state), {})
    if stopping and _Here.order is not None and _Here.order.exit_code == YIELDED:
        if _Here.snapshots is not None:  # a larger world goes on from this very step
            _Here.snapshots.keep(step, {name: _local(tensor) for name, tensor in _flatten(state).items()})
    elif _Here.saver is not None:
        _Here.saver.finish()
    if stopping and _Here.order is not None:
        sys.exit(_Here.order.exit_code)


def save(step: int, state: State) -> None:
    """Snapshot into the host's memory; every ``checkpoint.every_steps`` to disk as well."""
    if _Here.context is None or _Here.spec is None or _Here.link is None:
        return
    tensors = _flatten(state)
    every = _Here.spec.checkpoint.memory_every_steps
    if _Here.context.snapshot_dir is not None and every and step % every == 0:
        if _Here.snapshots is None:
            from muster.train.snapshot import Snapshots

            _Here.snapshots = Snapshots(_Here.context, tensors)
        if not _Here.begun or _orders().snapshot_agreed():
            local = {name: _local(tensor) for name, tensor in tensors.items()}
            _Here.snapshots.save(step, local, agreed=_Here.begun)
    every_disk = _Here.spec.checkpoint.every_steps
    if isinstance(every_disk, int) and every_disk and step % every_disk == 0:
        _saver().save(step, tensors, {})
        _Here.saved_step = step
    elif _Here.saver is not None:
        _Here.saver.poll()


def restore(state: State) -> int:
    """Bring ``state`` to the newest version, in memory or on disk, and return its step (0: none).

    Raises:
        CheckpointError: what is there does not fit this state.
    """
    if _Here.context is None or _Here.spec is None or _Here.link is None:
        return 0
    for part in state.values():
        _fill_optimizer(part)
    tensors = _flatten(state)
    wanted = _Here.context.restore
    if wanted is not None:
        from muster.train.snapshot import restored

        found = restored(_Here.context, wanted, tensors)
        for name, tensor in tensors.items():
            _local(tensor).copy_(found[name])
        step, tier, uri = wanted.step, wanted.tier, _Here.context.snapshot_dir or ""
    else:
        from muster.checkpoint.load import load_into, newest_valid
        from muster.core.store import open_store

        newest = newest_valid(open_store(), _directory()) if _Here.spec.checkpoint.resume else None
        if newest is None:
            return 0
        load_into(newest, tensors)
        step, tier, uri = newest.step, "disk", newest.uri
    _unflatten(state, tensors)
    _Here.link.emit("checkpoint.restored", step=step, tier=tier, uri=uri)
    return step


# ---------------------------------------------------------------- below


def _directory() -> str:
    assert _Here.spec is not None and _Here.context is not None
    return _Here.spec.checkpoint.dir or str(Path(_Here.context.run_dir) / "checkpoints")


def _saver() -> Any:
    if _Here.saver is None:
        import torch.distributed as dist

        from muster.checkpoint.handover import Handover
        from muster.checkpoint.saver import Saver
        from muster.core.store import open_store

        assert _Here.context is not None and _Here.spec is not None and _Here.link is not None
        here, link, directory = _Here.context, _Here.link, _directory()
        _Here.saver = Saver(
            directory,
            run_id=_Here.context.run_id,
            attempt=_Here.context.attempt,
            layout=_Here.context.layout,
            keep_last=_Here.spec.checkpoint.keep_last,
            asynchronous=_Here.spec.checkpoint.asynchronous,
            group=dist.new_group(backend="gloo") if dist.is_initialized() else None,
            store=open_store(),
            on_event=lambda kind, step, **detail: link.emit(kind, step=step, **detail),
            handover=Handover.on_this_host(
                run_dir=here.run_dir, run_id=here.run_id, host=here.host, directory_uri=directory
            ),
        )
    return _Here.saver


def _orders() -> Orders:
    if _Here.orders is None:
        import torch.distributed as dist

        from muster.train.orders import Orders

        assert _Here.link is not None
        several = dist.is_initialized() and dist.get_world_size() > 1
        _Here.orders = Orders(_Here.link, dist.new_group(backend="gloo") if several else None)
    return _Here.orders


def _saving() -> bool:
    return _Here.saver is not None and bool(_Here.saver.busy)


def _behind() -> bool:
    return _Here.snapshots is not None and _Here.snapshots.behind()


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flatten(state: State) -> dict[str, Tensor]:
    """Dotted name -> tensor that shares storage with the state, plus one tensor of bytes for all the rest."""
    import torch

    found: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, part in state.items():
        content = part.state_dict() if isinstance(part, Stateful) else part
        _walk(name, content, found, plain)
    text = json.dumps(plain).encode()
    if len(text) > PLAIN_BYTES:
        raise UsageError(f"{len(text)} bytes of the state are no tensors; {PLAIN_BYTES} fit")
    found[PLAIN] = torch.frombuffer(bytearray(text.ljust(PLAIN_BYTES)), dtype=torch.uint8)
    return found


def _walk(name: str, content: Any, found: dict[str, Tensor], plain: dict[str, Any]) -> None:
    import torch

    if isinstance(content, torch.Tensor):
        found[name] = content.detach()
    elif isinstance(content, Mapping):
        for key, value in content.items():
            _walk(f"{name}.{key}", value, found, plain)
    else:
        plain[name] = content


def _fill_optimizer(part: Any) -> None:
    """Give a fresh optimizer the moments that its first step would make, so that there is a place to restore into.

    A step of learning rate 0 with gradients of 0 makes them and moves nothing; what it counts is restored over.
    """
    import torch

    if not isinstance(part, torch.optim.Optimizer) or part.state:
        return
    rates = [group["lr"] for group in part.param_groups]
    for group in part.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    part.step()
    part.zero_grad(set_to_none=True)
    for group, rate in zip(part.param_groups, rates, strict=True):
        group["lr"] = rate


def _unflatten(state: State, tensors: Mapping[str, Tensor]) -> None:
    plain = json.loads(bytes(tensors[PLAIN].numpy()).decode())
    for name, part in state.items():
        if isinstance(part, Stateful):
            part.load_state_dict(_fill(name, part.state_dict(), tensors, plain))


def _fill(name: str, content: Any, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> Any:
    if name in tensors:
        return tensors[name]
    if isinstance(content, Mapping):
        return {key: _fill(f"{name}.{key}", value, tensors, plain) for key, value in content.items()}
    return plain.get(name, content)
