"""Optimizers: one table of what every part of Muster must know about each, without torch.

Another package adds one by an entry point of the group ``muster.optimizers`` that names an ``OptimizerTraits``; its
name is then accepted as ``training.optimizer.name``.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.core.registry import Registry


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits:
    """One optimizer. State is counted per trained parameter; master weights have ``master_bytes`` each."""

    title: str
    """As a plan's title names it: ``AdamW``."""
    factory: str
    """``"module:function"``, imported by the trainer alone: ``function(named, settings, *, elementwise)`` returns a
    ``muster.train.optim.optimizer.ShardOptimizer`` over this rank's shards. ``named``: parameter name ->
    ``nn.Parameter``; ``settings``: the section ``training.optimizer``; ``elementwise``: each element's update must
    depend on that element alone (``training.exact``)."""
    moments: int = 2
    """State tensors of the parameter's shape, each of the master weights' type."""
    state_bytes: float | None = None
    """On the device, where the state is smaller than ``moments`` says; None: ``moments`` x ``master_bytes``."""
    saved_state_bytes: float | None = None
    """In snapshots and saves, where the state is converted for them; None: as on the device."""
    elementwise: bool = True
    """Whether it can compute an update that does not depend on how state is sharded; false: refused in exact runs."""
    restores_exactly: bool = True
    """Whether state comes back from a snapshot to the bit. False: a rank that is kept would drift from one that is
    restored, and steps that are taken again need not give the same bits."""

    @property
    def compact(self) -> bool:
        """Whether its state is smaller than whole moments."""
        return self.state_bytes is not None

    def device_bytes(self, master_bytes: float) -> float:
        """Bytes of state on the device."""
        return self.moments * master_bytes if self.state_bytes is None else self.state_bytes

    def saved_bytes(self, master_bytes: float) -> float:
        """Bytes of state in snapshots and saves."""
        return self.device_bytes(master_bytes) if self.saved_state_bytes is None else self.saved_state_bytes


ADAMW = OptimizerTraits(title="AdamW", factory="muster.train.optim.adamw:AdamW")
#: Moments of a byte in blocks of 256 with a float32 scale (torchao); saved as float32.
ADAMW_8BIT = OptimizerTraits(
    title="8-bit AdamW", factory="muster.train.optim.adamw_8bit:AdamW8bit",
    state_bytes=2 * (1 + 4 / 256), saved_state_bytes=2 * 4, elementwise=False, restores_exactly=False,
)  # fmt: skip

OPTIMIZERS: Registry[OptimizerTraits] = Registry(
    family="optimizer",
    group="muster.optimizers",
    shipped={"adamw": "muster.core.optimizers:ADAMW", "adamw_8bit": "muster.core.optimizers:ADAMW_8BIT"},
)
