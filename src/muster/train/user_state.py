"""The state of a loop of one's own as named tensors, and back again.

A name that begins with ``rank<N>.`` is rank N's own. What any other name holds must be the same on every rank: a
checkpoint has one value of it. (A DTensor's parts may differ, of course: they are parts of one value.)
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from muster.checkpoint_format.shards import owner_of
from muster.core.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

PLAIN = "__plain__"
PLAIN_BYTES = 64 * 1024
"""Room for the values that are no tensors, as JSON in a tensor of bytes; for each rank's own ones as much again."""
WHOLE_BYTES = 64 * 1024
"""Tensors up to this size are compared whole; of larger ones as many values, evenly spread."""
_SPREAD = 2048


@runtime_checkable
class Stateful(Protocol):
    """What torch calls so: models, optimizers, schedulers, data loaders."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


State = Mapping[str, "Stateful | Tensor | None"]


# ---------------------------------------------------------------- to tensors and back


def flatten(state: State) -> dict[str, Tensor]:
    """Dotted name -> tensor that shares storage with the state, plus tensors of bytes for all the rest.

    Raises:
        UsageError: something in it could not be given back.
    """
    import torch

    found: dict[str, Tensor] = {}
    plain: dict[int | None, dict[str, Any]] = {None: {}}
    for name, part in state.items():
        values = plain.setdefault(owner_of(name), {})
        if isinstance(part, torch.Tensor):
            found[name] = part.detach()
        elif isinstance(part, Stateful):
            _walk(name, part.state_dict(), found, values)
        elif part is not None:
            raise UsageError(
                f"state: {name!r} is a {type(part).__name__}, which could not be given back",
                hint="a tensor, or an object with state_dict and load_state_dict",
            )
    for owner, values in plain.items():
        found[_plain_name(owner)] = _as_bytes(values)
    return found


def unflatten(state: State, tensors: Mapping[str, Tensor]) -> list[str]:
    """Hand each part of ``state`` what is its own; names of values that were saved and have no place in it."""
    plain: dict[str, Any] = {}
    for owner in {None, *(owner_of(name) for name in state)}:
        plain |= json.loads(bytes(tensors[_plain_name(owner)].numpy()).decode())
    taken: set[str] = set()
    for name, part in state.items():
        if isinstance(part, Stateful):
            part.load_state_dict(_fill(name, part.state_dict(), tensors, plain, taken))
    return sorted(plain.keys() - taken)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill_optimizers(state: State) -> None:
    """Give a fresh optimizer the moments that its first step would make, so that there is a place to restore into.

    A step of learning rate 0 with gradients of 0 makes them and moves nothing; what it counts is restored over.
    """
    import torch

    for part in state.values():
        if not isinstance(part, torch.optim.Optimizer) or part.state:
            continue
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


def _plain_name(owner: int | None) -> str:
    return PLAIN if owner is None else f"rank{owner}.{PLAIN}"


def _walk(name: str, content: Any, found: dict[str, Tensor], plain: dict[str, Any]) -> None:
    import torch

    if isinstance(content, torch.Tensor):
        found[name] = content.detach()
    elif isinstance(content, Mapping):
        for key, value in content.items():
            _walk(f"{name}.{key}", value, found, plain)
    else:
        plain[name] = content


def _as_bytes(values: Mapping[str, Any]) -> Tensor:
    import torch

    try:
        text = json.dumps(values).encode()
    except (TypeError, ValueError):
        for name, value in values.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"state: {name} is neither a tensor nor JSON: {error}",
                    hint="let its state_dict give numbers, texts, lists and tensors",
                ) from error
        raise
    if len(text) > PLAIN_BYTES:
        raise UsageError(f"{len(text)} bytes of the state are no tensors; {PLAIN_BYTES} fit")
    return torch.frombuffer(bytearray(text.ljust(PLAIN_BYTES)), dtype=torch.uint8)


def _fill(name: str, content: Any, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], taken: set[str]) -> Any:
    if name in tensors:
        return tensors[name]
    if isinstance(content, Mapping):
        return {key: _fill(f"{name}.{key}", value, tensors, plain, taken) for key, value in content.items()}
    taken.add(name)
    return plain.get(name, content)


# ---------------------------------------------------------------- the same on every rank


def first_difference(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> str | None:
    """What ranks hold differently under one name, in words; None where nothing is. Collective over a gloo group.

    Every rank gets the same answer. Large tensors are compared by a sample of their values, DTensors by their shape.
    """
    from muster.checkpoint.exchange import gather

    digests = _digests(tensors)
    shared = {name: digest for name, digest in sorted(digests.items()) if owner_of(name) is None}
    own = {name: digest for name, digest in digests.items() if owner_of(name) is not None}
    told = gather({"shared": _crc(json.dumps(shared).encode()), "own": own}, group)
    if len({each["shared"] for each in told}) > 1:
        found = _first_of(gather(shared, group))
        if found is not None and found[0] == PLAIN:
            values = json.loads(bytes(tensors[PLAIN].numpy()).decode())
            found = _first_of(gather({key: _crc(json.dumps(value).encode()) for key, value in values.items()}, group))
        return None if found is None else found[1]
    holders: dict[str, tuple[int, str]] = {}
    for rank, each in enumerate(told):
        for name, digest in each["own"].items():
            first, known = holders.setdefault(name, (rank, digest))
            if known != digest:
                return f"{name} differs between ranks {first} and {rank}"
    return None


def refuse_difference(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Raise UsageError, the same on every rank, where ``first_difference`` finds one. Collective."""
    found = first_difference(tensors, group)
    if found is not None:
        raise UsageError(
            f"state: {found}, and a checkpoint holds one value under a name",
            hint="give a rank's own things names of their own, as in "
            'state[f"rank{dist.get_rank()}.loader"] = loader; make everything else equal before save',
        )


def _first_of(told: list[dict[str, str]]) -> tuple[str, str] | None:
    """(name, in words what differs) of the first name that not all ranks hold alike."""
    for rank, each in enumerate(told[1:], start=1):
        for name in sorted({*told[0], *each}):
            if name not in each or name not in told[0]:
                holder, lacking = (rank, 0) if name in each else (0, rank)
                return name, f"rank {holder} holds {name} and rank {lacking} does not"
            if told[0][name] != each[name]:
                return name, f"{name} differs between ranks 0 and {rank}"
    return None


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> type, shape and checksum; made with one copy from each device."""
    import torch
    from torch.distributed.tensor import DTensor

    found: dict[str, str] = {}
    samples: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        found[name] = f"{tensor.dtype}{list(tensor.shape)}"
        if not isinstance(tensor, DTensor):
            samples[tensor.device][name] = _sample(tensor)
    for parts in samples.values():
        data, at = torch.cat(list(parts.values())).cpu().numpy(), 0
        for name, part in parts.items():
            found[name] += f":{_crc(data[at : at + part.numel()])}"
            at += part.numel()
    return found


def _crc(data: Any) -> str:
    return f"{zlib.crc32(data):08x}"


def _sample(tensor: Tensor) -> Tensor:
    """Its bytes, or those of values spread evenly over it."""
    import torch

    flat = tensor.detach().reshape(-1)
    if flat.numel() * flat.element_size() > WHOLE_BYTES:
        flat = flat[:: -(-flat.numel() // _SPREAD)]
    return flat.contiguous().view(torch.uint8)


def take(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, step: int) -> None:
    """Copy each of ``found`` into ``wanted``. Raises CheckpointError where one is not there or of another shape."""
    for name, tensor in wanted.items():
        here = local(tensor)
        if name not in found or found[name].shape != here.shape:
            what = f"{name} of shape {list(here.shape)}"
            raise CheckpointError(f"the snapshots of step {step} do not fit this state: they hold no {what}")
        here.copy_(found[name])
