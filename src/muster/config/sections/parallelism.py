"""The run file's ``parallelism``: how ranks share the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from muster.config.sections.section import Positive, Section
from muster.core.layout import AXES


class Parallelism(Section):
    """How ranks share the model. dp_shard -1: all ranks that remain. ``parallelism: auto`` instead of a section: the
    layout that the plan finds to be the fastest that fits."""

    auto: bool = False
    """The meaning of ``parallelism: auto``: the layout is chosen when the run starts, and logged."""
    dp_replicate: Positive = 1
    dp_shard: Annotated[int, Field(ge=-1)] = -1
    tp: Positive = 1
    """Tensor parallel: ranks that share each matrix; on TPUs chips of a host."""
    pp: Positive = 1
    """Pipeline stages: each holds a run of layers, and micro-batches pass through them."""
    pp_schedule: Literal["1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    """In which order stages work. interleaved: each holds several runs of layers (``pp_chunks``), and waits that much
    less for the others; more messages, and more activations are kept. zero_bubble: gradients of weights are computed
    apart, where a stage would wait; for parameters that no rank shares (``dp_shard: 1``), and not compiled. zbv: the
    same with two runs of layers on each stage, placed in a V (the first stage has the first and the last layers)."""
    pp_chunks: Annotated[int, Field(ge=2)] = 2
    """Runs of layers on each stage, with ``pp_schedule: interleaved``."""
    cp: Positive = 1
    """Context parallel: ranks that share each sequence; attention gathers the keys and values of all of it. Twice this
    must divide ``training.sequence_length``."""
    ep: Literal[1] = 1
    reshard_after_forward: bool = True

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, value: object) -> object:
        return {"auto": True} if value == "auto" else value

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart."""
        return self.pp_schedule in ("zero_bubble", "zbv") and self.pp > 1

    @property
    def placed_in_v(self) -> bool:
        """Whether stages' two runs of layers are placed in a V."""
        return self.pp_schedule == "zbv" and self.pp > 1

    @property
    def chunks(self) -> int:
        """Runs of layers on each stage."""
        if self.placed_in_v:
            return 2
        return self.pp_chunks if self.pp_schedule == "interleaved" and self.pp > 1 else 1

    @property
    def axes(self) -> dict[str, int]:
        """Axis -> size as given, every axis included."""
        return {axis.name: getattr(self, axis.name) for axis in AXES}
