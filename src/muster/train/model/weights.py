"""Values of a model's parameters: a rank's own slices from safetensors, or random ones by (seed, name).

No rank holds a whole model. Every parameter is first laid out (meta device, ``fully_shard``, ``to_empty``),
then each rank fills the index ranges that it holds.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from muster.core.errors import BackendError, first_line
from muster.train.distributed.reduce import local
from muster.train.model.conversion import Ranges

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

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

    Matrices and embeddings are normal(0, initializer_range), biases of linear modules 0. Everything else gets the
    model's own initialisation, as do linear modules that the module around them initialises (Mamba's ``dt_proj``).

    Raises:
        BackendError: transformers does not say how a parameter begins.
    """
    deviation = initializer_range(model.config)
    seen: set[int] = set()
    for unit in units(model):
        own: dict[str, nn.Parameter] = {}
        linear: dict[str, nn.Parameter] = {}
        for path, module in unit.modules:
            group = linear if isinstance(module, (nn.Linear, nn.Embedding)) else own
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in seen and ".lora_" not in f"{unit.prefix}.{path}":
                    seen.add(id(parameter))
                    group[_joined(path, name)] = parameter
        values = own_values(unit, own, linear, seed=seed) if own else {}
        for name, parameter in (own | linear).items():
            ranges = local_ranges(parameter)
            if name in values:
                fill(parameter, values[name][ranges].to(device))
            elif name.rpartition(".")[2] == "bias":
                fill(parameter, torch.zeros_like(local(parameter)))
            else:
                full = plain_name(_joined(unit.prefix, name))
                fill(parameter, normal(full, parameter.shape, ranges, deviation, seed=seed, device=device))


def plain_name(name: str) -> str:
    """The parameter's name without adapters, which rename the module they wrap."""
    return re.sub(r"\.base_layer(?=\.)", "", name)


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


# ---------------------------------------------------------------- the model's own values


@dataclass(frozen=True)
class Unit:
    """What is initialised together."""

    prefix: str
    modules: list[tuple[str, nn.Module]]
    """Path inside the unit -> module, parents before their children; the unit itself first."""
    model: PreTrainedModel
    """The innermost around it: a model inside another has its own ``_init_weights``."""


def units(model: PreTrainedModel) -> Iterator[Unit]:
    """The units of ``model``, in its order: a decoder layer (an element of an outermost list), or a module with
    tensors of its own, with all that is in it, because a module may initialise those inside it; others alone."""
    models: dict[str, Any] = {}
    inside = None
    for prefix, module in model.named_modules():
        if inside is not None and prefix.startswith(inside):
            continue
        if hasattr(module, "_init_weights"):
            models[f"{prefix}." if prefix else ""] = module
        innermost = models[max((place for place in models if f"{prefix}.".startswith(place)), key=len)]
        if isinstance(module, nn.ModuleList):
            inside = f"{prefix}."
            for name, layer in module.named_children():
                yield Unit(f"{prefix}.{name}", list(layer.named_modules(remove_duplicate=False)), innermost)
        else:
            within = list(module.named_modules(remove_duplicate=False))
            own = [*module._parameters.values(), *module._buffers.values()]
            if not any(value is not None for value in own) or any(isinstance(e, nn.ModuleList) for _, e in within):
                within = within[:1]
            yield Unit(prefix, within, innermost)


def own_values(
    unit: Unit, wanted: Collection[str], linear: Collection[str] = (), *, seed: int = 0
) -> dict[str, Tensor]:
    """The whole values on CPU of the ``wanted`` parameters and buffers (names in ``unit``), and of those of ``linear``
    that another module than their own initialises: by transformers' ``_init_weights``, run on a copy.

    Raises:
        BackendError: neither that nor the unit's constructor gives one a value.
    """
    copies: dict[str, nn.Module] = {}
    for path, module in unit.modules:
        copies[path] = _copied(module, path, wanted)
        if path:
            above, _, name = path.rpartition(".")
            copies[above]._modules[name] = copies[path]
    top = copies[""]

    def initialise(path: str) -> None:
        torch.manual_seed(derived_seed(seed, _joined(unit.prefix, path)))
        unit.model._init_weights(copies[path])

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for path in reversed(copies):  # children first, as transformers does
            versions = {name: top.get_parameter(name)._version for name in linear if name.startswith(f"{path}.")}
            versions = {name: version for name, version in versions.items() if name.rpartition(".")[0] != path}
            initialise(path)
            changed = [name for name, version in versions.items() if top.get_parameter(name)._version != version]
            for name in changed:  # on the meta device: once more, with memory
                owner, _, leaf = name.rpartition(".")
                copies[owner]._parameters[leaf] = nn.Parameter(_blank(top.get_parameter(name), "cpu"))
            if changed:
                initialise(path)
        tensors = dict(top.named_parameters()) | dict(top.named_buffers())
        values = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
        if _unset(values):
            _initialise_from_above(unit, top)
    unset = _unset(values)
    return values | (_constructed(unit, unset, seed) if unset else {})


def _unset(values: dict[str, Tensor]) -> list[str]:
    """Names of tensors that nothing was written to."""
    return [
        name
        for name, value in values.items()
        if (value.isnan().any() if value.is_floating_point() else value._version == 0)
    ]


def _initialise_from_above(unit: Unit, layer: nn.Module) -> None:
    """Have the model around a list of layers initialise ``layer``, as if it were its only one (Falcon H1)."""
    name = unit.prefix.split(".")[-2:][0]
    if isinstance(unit.model._modules.get(name), nn.ModuleList):
        holder = _copied(unit.model, "", ())
        holder._modules[name] = nn.ModuleList([layer])
        unit.model._init_weights(holder)


def _unwrapped(module: nn.Module) -> type[nn.Module]:
    """Its class before FSDP wrapped it, which copies and constructs no wrapped one."""
    return type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)


def _copied(module: nn.Module, path: str, wanted: Collection[str]) -> nn.Module:
    """A module without its children, with new tensors: memory for the ``wanted``, the others on the meta device."""
    kind = _unwrapped(module)
    copied = kind.__new__(kind)
    copied.__dict__.update(module.__dict__)
    copied._modules = {name: None for name, child in module._modules.items() if child is None}

    def blank(name: str, tensor: Tensor) -> Tensor:
        return _blank(tensor, "cpu" if _joined(path, name) in wanted else "meta")

    copied._parameters = {n: None if p is None else nn.Parameter(blank(n, p)) for n, p in module._parameters.items()}
    copied._buffers = {n: None if b is None else blank(n, b) for n, b in module._buffers.items()}
    return copied


def _blank(tensor: Tensor, device: str) -> Tensor:
    """Of the same shape; NaN where that exists, so that what is not initialised shows."""
    is_parameter = isinstance(tensor, nn.Parameter)
    dtype = torch.float32 if is_parameter else tensor.dtype
    return torch.full(tensor.shape, math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


def _constructed(unit: Unit, names: list[str], seed: int) -> dict[str, Tensor]:
    """The values that the constructor of ``unit`` gives."""
    module, number = unit.modules[0][1], unit.prefix.rpartition(".")[2]
    kind = _unwrapped(module)
    config = getattr(module, "config", None) or unit.model.config.get_text_config()
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, unit.prefix))
            made = kind(**_arguments(kind, config, number))
        tensors = dict(made.named_parameters()) | dict(made.named_buffers())
        return {name: tensors[plain_name(name)].detach() for name in names}
    except Exception as error:
        raise BackendError(
            f"{unit.prefix}.{names[0]} cannot be initialised: {type(error).__name__}: {first_line(error)}",
            hint="this architecture needs transformers' own loading; please report it",
        ) from error


def _arguments(kind: type[nn.Module], config: PreTrainedConfig, number: str) -> dict[str, Any]:
    """What a module's constructor wants: the config, a layer's number, or numbers of the config."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name == "config":
            arguments[name] = config
        elif name.startswith("layer_") and number.isdigit():
            arguments[name] = int(number)
        elif parameter.default is parameter.empty and hasattr(config, name):
            arguments[name] = getattr(config, name)
    return arguments


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


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
        BackendError: neither the model's initialisation nor a constructor computes a buffer.
    """
    for unit in units(model):
        buffers = {
            _joined(path, name): buffer
            for path, module in unit.modules
            for name, buffer in module._buffers.items()
            if buffer is not None and (persistent or name in module._non_persistent_buffers_set)
        }
        for name, value in (own_values(unit, buffers) if buffers else {}).items():
            buffers[name].copy_(value)
