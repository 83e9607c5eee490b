"""Stored tensors as a model's parameters and back, by transformers' conversion table.

Nothing is converted as a whole: a parameter is a view over stored tensors, of which any box can be read. transformers
exports none of the names that are used here, and moves them between minor versions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightTransform

Ranges: TypeAlias = tuple[slice, ...]
Shape: TypeAlias = tuple[int, ...]


class View:
    """A tensor that other tensors hold. A box of it is never empty."""

    @property
    def shape(self) -> Shape:
        raise NotImplementedError

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        """Copy the box ``ranges`` to ``into``, which is of its shape, and of any type and device."""
        raise NotImplementedError

    def whole(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All of it, in new memory."""
        tensor = torch.empty(self.shape, dtype=dtype)
        self.copy(tuple(slice(0, size) for size in self.shape), tensor)
        return tensor


@dataclass(frozen=True)
class Made(View):
    """A tensor that is made when it is read."""

    make: Callable[[], Tensor]
    size: Shape

    @property
    def shape(self) -> Shape:
        return self.size

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        into.copy_(self.make()[ranges])


@dataclass(frozen=True)
class Stack(View):
    """``MergeModulelist``: one of its parts at each place of a new dimension."""

    parts: Sequence[View]
    dim: int

    @cached_property
    def shape(self) -> Shape:
        rest = self.parts[0].shape
        return (*rest[: self.dim], len(self.parts), *rest[self.dim :])

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        rest = (*ranges[: self.dim], *ranges[self.dim + 1 :])
        for place, number in enumerate(range(ranges[self.dim].start, ranges[self.dim].stop)):
            self.parts[number].copy(rest, into.select(self.dim, place))


@dataclass(frozen=True)
class Cat(View):
    """``Concatenate``."""

    parts: Sequence[View]
    dim: int

    @cached_property
    def shape(self) -> Shape:
        rest = self.parts[0].shape
        return (*rest[: self.dim], sum(part.shape[self.dim] for part in self.parts), *rest[self.dim + 1 :])

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        first, last = ranges[self.dim].start, ranges[self.dim].stop
        bounds = accumulate((part.shape[self.dim] for part in self.parts), initial=0)
        for part, (start, stop) in zip(self.parts, pairwise(bounds), strict=True):
            low, high = max(first, start), min(last, stop)
            if low < high:
                box = (*ranges[: self.dim], slice(low - start, high - start), *ranges[self.dim + 1 :])
                part.copy(box, into.narrow(self.dim, low - first, high - low))


@dataclass(frozen=True)
class Part(View):
    """``Chunk``: from one bound of a dimension to the next."""

    of: View
    dim: int
    bounds: Callable[[int], tuple[int, int]]
    """By the dimension's size."""

    @cached_property
    def shape(self) -> Shape:
        whole = self.of.shape
        start, stop = self.bounds(whole[self.dim])
        return (*whole[: self.dim], stop - start, *whole[self.dim + 1 :])

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        at, start = ranges[self.dim], self.bounds(self.of.shape[self.dim])[0]
        box = (*ranges[: self.dim], slice(at.start + start, at.stop + start), *ranges[self.dim + 1 :])
        self.of.copy(box, into)


@dataclass(frozen=True)
class Element(View):
    """``SplitModulelist``: what is at one place of a dimension."""

    of: View
    dim: int
    place: int

    @cached_property
    def shape(self) -> Shape:
        return (*self.of.shape[: self.dim], *self.of.shape[self.dim + 1 :])

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        box = (*ranges[: self.dim], slice(self.place, self.place + 1), *ranges[self.dim :])
        self.of.copy(box, into.unsqueeze(self.dim))


@dataclass(frozen=True)
class Converted(View):
    """The result ``key`` of any other operation, which no causal model's experts need: its sources are read whole."""

    convert: Callable[[dict[str, Any]], Mapping[str, Any]]
    sources: Mapping[str, Sequence[View]]
    key: str

    @cached_property
    def shape(self) -> Shape:
        return tuple(self._convert(lambda view: torch.empty(view.shape, device="meta")).shape)

    def _convert(self, read: Callable[[View], Tensor]) -> Tensor:
        result = self.convert({name: [read(view) for view in views] for name, views in self.sources.items()})[self.key]
        tensor: Tensor = result[0] if isinstance(result, list) else result
        return tensor

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        into.copy_(self._convert(View.whole)[ranges])


# ---------------------------------------------------------------- quantised folders

#: Values of the four bits of ``fp4_e2m1`` (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Values that share a scale; of the last float8 block there may be fewer.
_MX_BLOCK = 32
_FP8_BLOCK = 128


@dataclass(frozen=True)
class Mxfp4(View):
    """gpt-oss's experts, [E, in, out]: ``blocks`` uint8[E, out, in / 32, 16], ``scales`` uint8[E, out, in / 32]."""

    blocks: View
    scales: View

    @cached_property
    def shape(self) -> Shape:
        experts, rows, blocks, _ = self.blocks.shape
        return (experts, blocks * _MX_BLOCK, rows)

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        experts, columns, rows = ranges
        first = columns.start // _MX_BLOCK
        within = (experts, rows, slice(first, -(-columns.stop // _MX_BLOCK)))
        sizes = [part.stop - part.start for part in within]
        packed, exponents = torch.empty(*sizes, 16, dtype=torch.uint8), torch.empty(sizes, dtype=torch.uint8)
        self.blocks.copy((*within, slice(0, 16)), packed)
        self.scales.copy(within, exponents)
        table = torch.tensor(_FP4)
        values = torch.stack([table[(packed & 15).int()], table[(packed >> 4).int()]], -1).flatten(-2)  # low bits first
        values = torch.ldexp(values, exponents.int()[..., None] - 127).flatten(-2)
        start = columns.start - first * _MX_BLOCK
        into.copy_(values[..., start : start + columns.stop - columns.start].transpose(1, 2))


@dataclass(frozen=True)
class Fp8(View):
    """A matrix in float8 with a scale for each block of it (DeepSeek V3: 128 x 128)."""

    weight: View
    scales: View

    @property
    def shape(self) -> Shape:
        return self.weight.shape

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        scales = self.scales.whole() if self.scales.shape else self.scales.whole().expand(1, 1)
        values = torch.empty([part.stop - part.start for part in ranges])
        self.weight.copy(ranges, values)
        for dim, (part, size, count) in enumerate(zip(ranges, self.shape, scales.shape, strict=True)):
            block = _FP8_BLOCK if -(-size // _FP8_BLOCK) == count else -(-size // count)
            scales = scales.index_select(dim, torch.arange(part.start, part.stop) // block)
        into.copy_(values * scales)


def dequantised(stored: Mapping[str, View]) -> dict[str, View]:
    """``stored`` with each quantised tensor and its scales as one tensor, under the name of the plain one."""
    views = dict(stored)
    for name in stored:
        if name.endswith("_blocks") and (scales := f"{name.removesuffix('_blocks')}_scales") in stored:
            views[name.removesuffix("_blocks")] = Mxfp4(views.pop(name), views.pop(scales))
        elif name.endswith("_scale_inv") and (weight := name.removesuffix("_scale_inv")) in stored:
            views[weight] = Fp8(views[weight], views.pop(name))
    return views


# ---------------------------------------------------------------- loading


@dataclass(frozen=True)
class Plan:
    """Where a model's values are stored."""

    views: dict[str, View]
    """Parameter or buffer -> its view."""
    unknown: list[str]
    """Stored tensors that the model does not have."""


def plan_loading(model: PreTrainedModel, stored: Mapping[str, View], known: Collection[str]) -> Plan:
    """The views of ``known``, plain names of the whole model's tensors, of which ``model`` may be a part. Only names
    are compared: nothing is read."""
    from transformers.core_model_loading import rename_source_key

    renamings, converters = _sorted_out(_table(model))
    state: dict[str, Any] = dict.fromkeys(known, True)
    groups: dict[str, Group] = {}
    unknown = []
    for name in _in_order(stored):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in known:  # as transformers does, a name that is the model's own is not renamed
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        if target not in known:
            unknown.append(name)
        else:
            groups.setdefault(target, Group(_converter_of(pattern, converters))).add(pattern, stored[name])
    views: dict[str, View] = {}
    for target, group in groups.items():
        views |= group.converted(target, model)
    return Plan(views, unknown)


def plan_publishing(model: PreTrainedModel, held: Mapping[str, View], loaded: Collection[str]) -> dict[str, View]:
    """The tensors of ``held`` (all of the model's) as published: under the names that transformers saves. ``loaded``:
    names in the folder whose layout is kept; empty: there is none.

    Follows ``transformers.core_model_loading.revert_weight_conversion``.
    """
    from transformers.core_model_loading import PrefixChange

    if loaded:
        transforms = _table(model)
        renamings, converters = _sorted_out(transforms)
        for name in _in_order(loaded):
            _matched(_renamed(name, renamings), converters)
        transforms = [each for each in transforms if each.was_used()]
    else:
        transforms = [each for each in _table(model, legacy=False) if not isinstance(each, PrefixChange)]
    renamings, converters = _sorted_out([each.reverse_transform() for each in reversed(transforms)])
    groups: dict[str, Group] = {}
    for name in _in_order(held):
        target, pattern = _matched(name, converters)
        groups.setdefault(target, Group(_converter_of(pattern, converters))).add(pattern, held[name])
    return {
        _renamed(name, renamings): view
        for target, group in groups.items()
        for name, view in group.converted(target, model).items()
    }


def _table(model: PreTrainedModel, *, legacy: bool = True) -> list[WeightTransform]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model, add_legacy=legacy)


def _sorted_out(transforms: Sequence[WeightTransform]) -> tuple[list[Any], list[WeightConverter]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    return [each for each in transforms if isinstance(each, WeightRenaming)], converters


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    """By every one that matches, in turn."""
    for renaming in renamings:
        name = renaming.rename_source_key(name)[0]
    return name


def _matched(name: str, converters: Sequence[WeightConverter]) -> tuple[str, str | None]:
    """Name of the first target and the pattern, by the first converter that matches; the name itself and None."""
    for converter in converters:
        target, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return target, pattern
    return name, None


def _in_order(names: Iterable[str]) -> list[str]:
    """``experts.2`` before ``experts.10``: a wrong order would give wrong values of the right shape."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def _converter_of(pattern: str | None, converters: Sequence[WeightConverter]) -> WeightConverter | None:
    """The last one, as in transformers' own dictionary of patterns."""
    return next((each for each in reversed(converters) if pattern in each.source_patterns), None)


@dataclass(frozen=True)
class Group:
    """Tensors that one converter takes together; without one there is a single tensor."""

    converter: WeightConverter | None
    views: dict[str, list[View]] = field(default_factory=dict)
    """By the pattern that matched."""

    def add(self, pattern: str | None, view: View) -> None:
        self.views.setdefault(pattern or "", []).append(view)

    def converted(self, target: str, model: PreTrainedModel) -> dict[str, View]:
        """The results by their full names; ``target`` is the first of them."""
        if self.converter is None:
            return {target: self.views[""][-1]}
        held = self.views
        for operation in self.converter.operations:
            held = _applied(operation, held, self.converter, target, model)
        whole = target.replace("*.", "0.")
        key = next((key for key in held if key in whole), None)
        before, _, behind = whole.partition(key) if key is not None else ("", "", "")
        return {f"{before}{key}{behind}": views[0] for key, views in held.items()}


def _applied(
    operation: Any,
    held: dict[str, list[View]],
    converter: WeightConverter,
    target: str,
    model: PreTrainedModel,
) -> dict[str, list[View]]:
    """One operation of transformers on views. The results have the names that its ``convert`` gives them."""
    targets, config = converter.target_patterns, model.config
    match type(operation).__name__:
        case "MergeModulelist":
            names = {key: operation.get_target_pattern(len(held), key, targets) for key in held}
            return {names[key]: [Stack(views, operation.dim)] for key, views in held.items()}
        case "Concatenate":
            parts = [view for key in converter.source_patterns for view in held.get(key, ())]
            return {operation.get_target_pattern(targets): [Cat(parts, operation.dim)]}
        case "SplitModulelist":
            results: dict[str, list[View]] = {}
            for key, (view, *_) in held.items():
                names = operation.get_target_patterns(held, key, targets, view.shape[operation.dim])
                results |= {name: [Element(view, operation.dim, place)] for place, name in enumerate(names)}
            return results
        case "Chunk":
            [[view, *_]] = held.values()
            names = operation.get_target_patterns(targets, config=config)
            count = len(names)
            return {name: [_chunk(view, operation.dim, place, count)] for place, name in enumerate(names)}
    given = {"source_patterns": converter.source_patterns, "target_patterns": targets, "full_layer_name": target}
    last = operation is converter.operations[-1] or len(held) == 1
    convert = partial(operation.convert, **given, model=model, config=config)
    return {name: [Converted(convert, held, name)] for name in (targets if last else held)}


def _chunk(view: View, dim: int, place: int, count: int) -> Part:
    """As ``torch.chunk``: the last one may be short."""

    def bounds(size: int) -> tuple[int, int]:
        step = -(-size // count)
        return min(size, place * step), min(size, (place + 1) * step)

    return Part(view, dim, bounds)
