"""Training objectives on preferences: what every part of Muster must know about each, without torch.

Another package adds one by an entry point of the group ``muster.objectives`` that names an ``ObjectiveTraits``; its
name is then accepted as ``training.objective``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from muster.core.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ObjectiveTraits:
    """One objective."""

    title: str
    factory: str
    """``"module:function"``, imported by the trainer alone: ``function(settings)`` returns a
    ``muster.train.objectives.base.Objective``; ``settings``: the section ``training.objective``."""
    rows: Literal["pairs", "labelled"] = "pairs"
    """What it learns from: two answers to a prompt of which one is better, or answers that are good or bad each."""
    needs_reference: bool = True
    """Whether log-probabilities of the model before its first step are needed."""
    learns_prompts: bool = False
    """Whether the loss counts tokens of the better answer's prompt too."""
    settings: tuple[str, ...] = ("beta",)
    """Keys of ``training.objective`` that it reads besides ``name``."""


DPO = ObjectiveTraits(
    title="DPO", factory="muster.train.objectives.dpo:Dpo", settings=("beta", "loss", "label_smoothing")
)
IPO = ObjectiveTraits(title="IPO", factory="muster.train.objectives.dpo:Ipo")
KTO = ObjectiveTraits(
    title="KTO", factory="muster.train.objectives.kto:Kto", rows="labelled",
    settings=("beta", "desirable_weight", "undesirable_weight"),
)  # fmt: skip
ORPO = ObjectiveTraits(
    title="ORPO", factory="muster.train.objectives.averaged:Orpo", needs_reference=False, learns_prompts=True
)
SIMPO = ObjectiveTraits(
    title="SimPO", factory="muster.train.objectives.averaged:SimPo", needs_reference=False, settings=("beta", "gamma")
)

OBJECTIVES: Registry[ObjectiveTraits] = Registry(
    family="objective",
    group="muster.objectives",
    shipped={name: f"muster.config.objectives:{name.upper()}" for name in ("dpo", "ipo", "kto", "orpo", "simpo")},
)
