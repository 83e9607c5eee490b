"""What does not go with float8 matrices."""

from __future__ import annotations

from collections.abc import Iterator

from muster.config.spec import RunSpec
from muster.core.errors import Problem

#: The first GPU that has it; and what the number of a rank's tokens must be a multiple of: the weights' gradients are
#: products along the tokens.
FLOAT8 = {"fp8": ("an H100", 16), "mxfp8": ("a B200", 32)}


def float8_rules(spec: RunSpec) -> Iterator[Problem]:
    """Problems of a run file with ``training.precision`` fp8 or mxfp8, one line at most."""
    key, model, length = "training.precision", spec.model, spec.training.sequence_length
    name, axes = spec.training.precision, spec.parallelism
    if name not in FLOAT8 or model is None:
        return
    since, tokens = FLOAT8[name]
    if spec.resources.device == "cpu":
        yield Problem(key, f"{name} needs {since} or newer, and device is cpu", hint="bf16")
    elif model.dtype != "bfloat16":
        yield Problem(key, f"{name} needs model.dtype: bfloat16, not {model.dtype}", hint="bf16, or dtype: bfloat16")
    elif model.lora is not None:
        yield Problem(key, f"{name} does not go with model.lora: adapters' matrices are too narrow", hint="bf16")
    elif axes.tp > 1:
        yield Problem(key, f"{name} does not go with tp = {axes.tp}: it was never tried", hint="bf16, or tp: 1")
    elif axes.pp > 1:
        yield Problem(key, f"{name} does not go with pp = {axes.pp}: it was never tried", hint="bf16, or pp: 1")
    elif length % (tokens * axes.cp):
        message = f"{name} needs a sequence_length that is a multiple of {tokens * axes.cp}, not {length}"
        yield Problem(key, message, hint="bf16")
