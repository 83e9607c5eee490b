"""The state of a user's own loop as named tensors, and back.

A name that begins with ``rank<N>.`` belongs to rank N. Any other value must be the same on every rank, because a
checkpoint has one value per name. (The parts of a DTensor are parts of one value.)
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from muster.checkpoint_format.shards import owner_of
from muster.core.errors import CheckpointError, UsageError
from muster.core.typed_json import Json, JsonObject

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor
PLAIN = "__plain__"
PLAIN_BYTES = 64 * 1024
"""Size of the tensor with all other values, as JSON; each rank's own values have one more."""
WHOLE_BYTES = 64 * 1024
"""Larger tensors are compared by ``_SPREAD`` values only, evenly spaced."""
_SPREAD = 2048


@runtime_checkable
class Stateful(Protocol):
    """As in torch: models, optimizers, schedulers, data loaders."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


State = Mapping[str, "Stateful | Tensor | None"]


# ---------------------------------------------------------------- to tensors and back


def flatten(state: State) -> dict[str, Tensor]:
    """Dotted name -> tensor that shares storage with the state, plus tensors of bytes for all other values.

    Raises:
        UsageError: a value could not be restored.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    plain: dict[int | None, dict[str, Json]] = {None: {}}
    for name, part in state.items():
        values = plain.setdefault(owner_of(name), {})
        if isinstance(part, torch.Tensor):
            tensors[name] = part.detach()
        elif isinstance(part, Stateful):
            _walk(name, part.state_dict(), tensors, values)
        elif part is not None:
            raise UsageError(
                f"state: {name!r} is a {type(part).__name__}, which could not be restored",
                hint="a tensor, or an object with state_dict and load_state_dict",
            )
    for owner, values in plain.items():
        tensors[_plain_name(owner)] = _as_bytes(values)
    return tensors


def unflatten(state: State, tensors: Mapping[str, Tensor]) -> list[str]:
    """Load each part of ``state``; returns the names of saved values that are not in it."""
    plain: dict[str, Json] = {}
    for owner in {None, *(owner_of(name) for name in state)}:
        plain |= json.loads(bytes(tensors[_plain_name(owner)].numpy()).decode())
    used: set[str] = set()
    for name, part in state.items():
        if isinstance(part, Stateful):
            part.load_state_dict(_fill(name, part.state_dict(), tensors, plain, used))
    return sorted(plain.keys() - used)


def fill_optimizers(state: State) -> None:
    """Create the moments of new optimizers, which the first step would create, so that they can be restored.

    A step with learning rate 0 and gradients of 0 creates them and changes no parameter; its count is overwritten.
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


def _walk(name: str, content: Any, tensors: dict[str, Tensor], plain: dict[str, Json]) -> None:
    import torch

    if isinstance(content, torch.Tensor):
        tensors[name] = content.detach()
    elif isinstance(content, Mapping):
        for key, value in content.items():
            _walk(f"{name}.{key}", value, tensors, plain)
    else:
        plain[name] = content


def _as_bytes(values: JsonObject) -> Tensor:
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
                    hint="its state_dict may hold numbers, strings, lists and tensors",
                ) from error
        raise
    if len(text) > PLAIN_BYTES:
        raise UsageError(f"{len(text)} bytes of the state are not tensors; the limit is {PLAIN_BYTES}")
    return torch.frombuffer(bytearray(text.ljust(PLAIN_BYTES)), dtype=torch.uint8)


def _fill(name: str, content: Any, tensors: Mapping[str, Tensor], plain: JsonObject, used: set[str]) -> Any:
    if name in tensors:
        return tensors[name]
    if isinstance(content, Mapping):
        return {key: _fill(f"{name}.{key}", value, tensors, plain, used) for key, value in content.items()}
    used.add(name)
    return plain.get(name, content)


# ---------------------------------------------------------------- the same on every rank


def first_difference(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> str | None:
    """A message about the first value that differs between ranks; None: none does. Collective over a gloo group.

    Every rank gets the same answer. Large tensors are compared by samples, DTensors by their shape.
    """
    from muster.checkpoint.exchange import gather

    digests = _digests(tensors)
    shared = {name: digest for name, digest in sorted(digests.items()) if owner_of(name) is None}
    own = {name: digest for name, digest in digests.items() if owner_of(name) is not None}
    reports = gather((_crc(json.dumps(shared).encode()), own), group)
    if len({crc for crc, _ in reports}) > 1:
        difference = _first_of(gather(shared, group))
        if difference is not None and difference[0] == PLAIN:
            values = json.loads(bytes(tensors[PLAIN].numpy()).decode())
            checksums = {key: _crc(json.dumps(value).encode()) for key, value in values.items()}
            difference = _first_of(gather(checksums, group))
        return None if difference is None else difference[1]
    holders: dict[str, tuple[int, str]] = {}
    for rank, (_, its_own) in enumerate(reports):
        for name, digest in its_own.items():
            first, known = holders.setdefault(name, (rank, digest))
            if known != digest:
                return f"{name} differs between ranks {first} and {rank}"
    return None


def refuse_difference(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Raise UsageError, the same on every rank, if ``first_difference`` finds one. Collective."""
    difference = first_difference(tensors, group)
    if difference is not None:
        raise UsageError(
            f"state: {difference}, and a checkpoint holds one value under a name",
            hint="give a rank's own values names of their own, as in "
            'state[f"rank{dist.get_rank()}.loader"] = loader; make everything else equal before save',
        )


def _first_of(reports: list[dict[str, str]]) -> tuple[str, str] | None:
    """(name, message) of the first value that is not the same on all ranks."""
    first = reports[0]
    for rank, report in enumerate(reports[1:], start=1):
        for name in sorted({*first, *report}):
            if name not in report or name not in first:
                holder, lacking = (rank, 0) if name in report else (0, rank)
                return name, f"rank {holder} holds {name} and rank {lacking} does not"
            if first[name] != report[name]:
                return name, f"{name} differs between ranks 0 and {rank}"
    return None


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> type, shape and checksum; with one copy from each device."""
    import torch
    from torch.distributed.tensor import DTensor

    digests: dict[str, str] = {}
    samples: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        digests[name] = f"{tensor.dtype}{list(tensor.shape)}"
        if not isinstance(tensor, DTensor):
            samples[tensor.device][name] = _sample(tensor)
    for parts in samples.values():
        data, at = torch.cat(list(parts.values())).cpu().numpy(), 0
        for name, part in parts.items():
            digests[name] += f":{_crc(data[at : at + part.numel()].data)}"
            at += part.numel()
    return digests


def _crc(data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


def _sample(tensor: Tensor) -> Tensor:
    """Its bytes, or those of evenly spaced values."""
    import torch

    flat = tensor.detach().reshape(-1)
    if flat.numel() * flat.element_size() > WHOLE_BYTES:
        flat = flat[:: -(-flat.numel() // _SPREAD)]
    return flat.contiguous().view(torch.uint8)


def copy_tensors(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor], *, step: int) -> None:
    """Copy ``sources`` into ``targets``. Raises CheckpointError if one is missing or has another shape."""
    from muster.train.distributed.reduce import local

    for name, tensor in targets.items():
        part = local(tensor)
        if name not in sources or sources[name].shape != part.shape:
            problem = f"they lack {name} of shape {list(part.shape)}"
            raise CheckpointError(f"the snapshots of step {step} do not fit this state: {problem}")
        part.copy_(sources[name])
