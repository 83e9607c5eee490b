"""The training state: trained parameters, the optimizer's moments and the step, and nothing else.

Data order, learning rate and dropout are functions of the step and the seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muster.checkpoint import compact
from muster.checkpoint_format.shards import of_replica
from muster.core.errors import CheckpointError
from muster.train.distributed.reduce import local
from muster.train.optim.local_steps import LocalSteps
from muster.train.optim.optimizer import ShardOptimizer

#: What wrappers put into parameter names, and checkpoints must not depend on.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def named_without_wrappers(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The same parameters in the same order under names without those of recomputation and compile."""
    plain = {}
    for name, parameter in named.items():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        plain[name] = parameter
    return plain


class Mirrored(Protocol):
    """State that lives elsewhere (on TPUs, as JAX arrays), of which the tensors here are a copy."""

    def fetch(self, step: int) -> None:
        """Bring the tensors up to date with the state after ``step``."""
        ...

    def push(self) -> None:
        """Adopt the tensors' values."""
        ...


class TrainingState:
    """The training state of one rank.

    ``step`` is the last applied step; 0 before the first. ``mirrored``: what the tensors are a copy of, if they are.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        optimizer: ShardOptimizer,
        *,
        step: int = 0,
        mirrored: Mirrored | None = None,
        local_steps: LocalSteps | None = None,
        replica: int = 0,
        elsewhere: Iterable[str] = (),
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``local_steps``: where replicas train by themselves. What they have in common then has the names of a model
        (``model.``: the outer parameters) and ``outer.``; what is ``replica``'s own begins with ``replica<N>.``.
        ``elsewhere``: trained parameters that other stages of a pipeline hold. ``buffers``: what changes in training
        and is no parameter, the same on all ranks."""
        self.named = dict(named)
        self._elsewhere, self._buffers = tuple(elsewhere), dict(buffers or {})
        self.optimizer = optimizer
        self.step = step
        self.mirrored = mirrored
        self.local_steps = local_steps
        self.replica = replica
        self.joined_from: int | None = None
        """The replica whose moments this one has begun with, since its own local steps were nowhere."""
        self._number = torch.tensor([replica])
        """A replica that was restored from another's own state finds that one's number here."""

    def local_tensors(self) -> dict[str, Tensor]:
        """This rank's parts, in a fixed order, not as DTensors. They share the storage; 8-bit moments are compact
        (``checkpoint.compact``): read them in slices."""
        return {name: part for name, (part, _) in self._parts().items()}

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of the tensors of the whole state that only other stages of a pipeline hold."""
        prefixes = ("model", *(f"optimizer.{moment}" for moment in self.optimizer.moments))
        return frozenset(f"{prefix}.{name}" for prefix in prefixes for name in self._elsewhere)

    def sharded(self) -> dict[str, Tensor]:
        """The same tensors as DTensors, for checkpoints; plain if nothing is sharded."""
        return {
            name: part if parameter is None else placed_like(parameter, part)
            for name, (part, parameter) in self._parts().items()
        }

    @property
    def _own(self) -> str:
        return "" if self.local_steps is None else f"replica{self.replica}."

    def _parts(self) -> dict[str, tuple[Tensor, nn.Parameter | None]]:
        """Name -> (this rank's part, the parameter that it is placed like)."""
        if self.mirrored is not None:
            self.mirrored.fetch(self.step)
        own, steps = self._own, self.local_steps
        groups = {f"{own}model.": {name: local(parameter.detach()) for name, parameter in self.named.items()}}
        for moment, parts in self.optimizer.moments.items():
            groups[f"{own}optimizer.{moment}."] = dict(parts)
        result: dict[str, tuple[Tensor, nn.Parameter | None]] = {}
        if steps is not None:
            groups = {"model.": steps.outer, "outer.momentum.": steps.momentum, **groups}
            self._number.fill_(self.replica)
            result = {"outer.met": (steps.met, None), f"{own}number": (self._number, None)}
        result |= {f"{own}model.{name}": (buffer, None) for name, buffer in self._buffers.items()}
        for prefix, named in groups.items():
            result |= {prefix + name: (part, self.named[name]) for name, part in named.items()}
        return result

    def writable(self) -> dict[str, Tensor]:
        """``sharded`` for a restore that writes into its tensors in place: whole ones of any values, in the host's
        memory, stand for compact ones. ``loaded`` adopts them."""
        tensors = self.sharded()
        if self.local_steps is not None:  # ``local_tensors`` sets the one that is here
            tensors[f"{self._own}number"] = self._number.clone()
        for name, part in self.local_tensors().items():
            if compact.is_compact(part):
                whole = torch.empty(part.shape, dtype=part.dtype)
                like = tensors[name]
                if isinstance(like, DTensor):  # as FSDP makes offloaded ones: ``from_local`` would move it to the GPU
                    whole = DTensor(whole, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]
                tensors[name] = whole
        return tensors

    @torch.no_grad()
    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts, as ``local_tensors`` returned them, bit for bit.

        Raises:
            CheckpointError: a tensor is missing or of another shape; then nothing is changed.
        """
        local_parts = self.local_tensors()
        if self.local_steps is not None:  # it may be another replica's
            tensors = {of_replica(name, self.replica): tensor for name, tensor in tensors.items()}
        for name, tensor in local_parts.items():
            given = tensors.get(name)
            if given is None:
                raise CheckpointError(f"the restored state lacks {name}")
            if given.shape != tensor.shape or given.dtype != tensor.dtype:
                raise CheckpointError(
                    f"the restored {name} is {given.dtype} {tuple(given.shape)}, "
                    f"here it is {tensor.dtype} {tuple(tensor.shape)}"
                )
        for name, tensor in local_parts.items():
            compact.write(tensor, tensors[name])
        self.loaded(step, local_parts)

    def loaded(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Adopt values that were written into ``local_tensors`` or ``writable`` as the state after ``step``.

        Where they are another replica's, this one begins with the outer parameters and the other's moments.
        """
        own = self._own
        self.optimizer.load_moments(
            {
                moment: {name: local(tensors[f"{own}optimizer.{moment}.{name}"]) for name in parts}
                for moment, parts in self.optimizer.moments.items()
            }
        )
        self.step = step
        self.joined_from = None
        if self.local_steps is not None and (number := int(tensors[f"{own}number"])) != self.replica:
            self.joined_from = number
            self.local_steps.start_from_outer()
        if self.mirrored is not None:
            self.mirrored.push()


def parameter_of(name: str) -> str:
    """The parameter that a tensor of the state belongs to, by its name."""
    kind, _, rest = name.partition(".")
    return rest if kind == "model" else rest.partition(".")[2]


def placed_like(parameter: Tensor, part: Tensor) -> Tensor:
    """``part`` (this rank's, shaped as the parameter's own part) with the parameter's mesh and placements."""
    if not isinstance(parameter, DTensor):
        return part
    if part.dtype == parameter.dtype:  # the same spec: made without autograd and without checks, it takes a tenth
        return DTensor(part, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
