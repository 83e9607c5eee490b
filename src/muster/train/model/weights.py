"""Values of a model's parameters: a rank's own slices from safetensors, or random ones by (seed, name).

No rank holds a whole model. Every parameter is first laid out (meta device, ``fully_shard``, ``to_empty``),
then each rank fills the index ranges that it holds.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muster.core.errors import BackendError
from muster.train.distributed.reduce import local

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Ranges = tuple[slice, ...]
#: Random numbers are drawn in blocks of whole rows of about this many elements, each with its own seed, so that a
#: rank draws little more than its own rows.
BLOCK_NUMEL = 1 << 20


def local_ranges(parameter: Tensor) -> Ranges:
    """Which part of the global tensor this rank holds, as one range per dimension.

    Tensor parallel splits first and ``fully_shard`` splits the result, also if both split the same dimension.
    """
    ranges = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        for axis in reversed(range(parameter.device_mesh.ndim)):
            dimension = getattr(parameter.placements[axis], "dim", None)
            if dimension is None:
                continue
            start, stop = ranges[dimension]
            part = -(-(stop - start) // parameter.device_mesh.size(axis))  # as torch.chunk: the last may be short
            first = min(stop, start + part * parameter.device_mesh.get_local_rank(axis))
            ranges[dimension] = (first, min(stop, first + part))
    return tuple(slice(start, stop) for start, stop in ranges)


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Copy this rank's ``values`` into its part, converting the dtype."""
    part = local(parameter)
    assert part.shape == values.shape, f"{tuple(part.shape)} held, {tuple(values.shape)} given"
    part.copy_(values)


# ---------------------------------------------------------------- random values


def initialise(model: PreTrainedModel, *, seed: int, device: torch.device) -> None:
    """Random values for all parameters of a transformers model: a function of (seed, name, device type) only.

    Matrices and embeddings are normal(0, initializer_range), biases of linear modules 0; other modules
    (mostly norms) get the model's own initialisation.
    """
    deviation = initializer_range(model.config)
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own = [
            (plain_name(f"{prefix}.{name}" if prefix else name), name, parameter)
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) not in seen and ".lora_" not in prefix
        ]
        seen.update(id(parameter) for _, _, parameter in own)
        if not own:
            continue
        special = None
        for full, name, parameter in own:
            ranges = local_ranges(parameter)
            if isinstance(module, (nn.Linear, nn.Embedding)):
                if name == "bias":
                    fill(parameter, torch.zeros_like(local(parameter)))
                else:
                    fill(parameter, normal(full, parameter.shape, ranges, deviation, seed=seed, device=device))
                continue
            special = special or own_initialisation(model, module, prefix, seed)
            fill(parameter, special[name][ranges].to(device))


def plain_name(name: str) -> str:
    """The parameter's name without adapters, which rename the module they wrap."""
    return name.replace(".base_layer.", ".")


def initializer_range(config: PreTrainedConfig) -> float:
    """Standard deviation of a model's random matrices; 0.02 is transformers' own default."""
    for section in (config, config.get_text_config()):
        for key in ("initializer_range", "init_std", "initializer_factor"):
            if getattr(section, key, None):
                return float(getattr(section, key))
    return 0.02


def normal(
    name: str, shape: Sequence[int], ranges: Ranges, deviation: float, *, seed: int, device: torch.device
) -> Tensor:
    """The part ``ranges`` of a tensor of normal(0, deviation) numbers, float32."""
    return torch.cat([block.mul_(deviation) for block in _blocks(name, shape, ranges, seed, device, "normal_")])


def uniform(
    name: str, shape: Sequence[int], ranges: Ranges, bound: float, *, seed: int, device: torch.device
) -> Tensor:
    """The part ``ranges`` of a tensor of uniform(-bound, bound) numbers, float32."""
    blocks = _blocks(name, shape, ranges, seed, device, "uniform_")
    return torch.cat([block.mul_(2 * bound).sub_(bound) for block in blocks])


def _blocks(
    name: str, shape: Sequence[int], ranges: Ranges, seed: int, device: torch.device, draw: str
) -> Iterator[Tensor]:
    rows, rest = shape[0], list(shape[1:])
    per_block = max(1, BLOCK_NUMEL // max(1, math.prod(rest)))
    first, last = ranges[0].start, ranges[0].stop
    generator = torch.Generator(device=device)
    yield torch.empty(0, *(part.stop - part.start for part in ranges[1:]), device=device)
    for block in range(first // per_block, -(-last // per_block) if last > first else 0):
        generator.manual_seed(derived_seed(seed, f"{name}#{block}"))
        start = block * per_block
        values = torch.empty(min(per_block, rows - start), *rest, device=device)
        getattr(values, draw)(generator=generator)
        yield values[max(0, first - start) : last - start][(slice(None), *ranges[1:])]


def derived_seed(seed: int, name: str) -> int:
    """A seed for each name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def own_initialisation(model: PreTrainedModel, module: nn.Module, prefix: str, seed: int) -> dict[str, Tensor]:
    """Unsharded parameters of one module from the model's own ``_init_weights``, on CPU."""
    copied = alone(module, "cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(derived_seed(seed, prefix))
        model._init_weights(copied)
    return {name: parameter.detach() for name, parameter in copied.named_parameters()}


def alone(module: nn.Module, device: str) -> nn.Module:
    """The module with the same buffers, without submodules, and with zero parameters of their own."""
    copied = copy.copy(module)
    copied._modules = {}
    copied._parameters = {
        name: nn.Parameter(torch.zeros(parameter.shape, dtype=torch.float32, device=device))
        for name, parameter in module.named_parameters(recurse=False)
    }
    return copied


# ---------------------------------------------------------------- buffers


def transient_buffers(model: nn.Module) -> set[str]:
    """Names of the buffers that no file holds."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def recompute_buffers(model: PreTrainedModel, *, persistent: bool) -> None:
    """Recompute buffers that no file holds (rotary frequencies) after ``to_empty``.

    ``persistent``: also those that a file would hold, if the model starts from random values.

    Raises:
        BackendError: neither the model's initialisation nor its constructor computes a buffer.
    """
    for prefix, module in model.named_modules():
        names = [
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and (persistent or name in module._non_persistent_buffers_set)
        ]
        if not names:
            continue
        for name in names:
            buffer = module._buffers[name]
            if buffer.is_floating_point():
                buffer.fill_(math.nan)
        with torch.no_grad():
            model._init_weights(alone(module, "meta"))  # its own buffers, but parameters that nothing is written to
        if any(not module._buffers[name].is_floating_point() or module._buffers[name].isnan().any() for name in names):
            _from_constructor(module, names, prefix)


def _from_constructor(module: nn.Module, names: list[str], prefix: str) -> None:
    config = getattr(module, "config", None)
    try:
        with torch.device("cpu"):
            fresh = type(module)(config)
    except Exception as error:
        raise BackendError(
            f"buffer {prefix}.{names[0]} of {type(module).__name__} cannot be recomputed: {error}",
            hint="this architecture needs transformers' own loading; please report it",
        ) from error
    for name in names:
        module._buffers[name].copy_(fresh._buffers[name])  # type: ignore[union-attr,arg-type]
