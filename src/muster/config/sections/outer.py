"""The run file's ``training.outer``: what replicas do when they meet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from muster.config.sections.section import Fraction, Positive, Section


class Outer(Section):
    """The outer optimizer of ``training.local_steps``: SGD with Nesterov momentum, on how far the replicas moved."""

    learning_rate: Annotated[float, Field(gt=0)] = 0.7
    momentum: Fraction = 0.9
    fragments: Positive = 1
    """Parts of the parameters that meet at different steps, evenly spread: the same bytes in smaller messages."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """What replicas send each other. int8: with a float32 scale for each 256 values."""
