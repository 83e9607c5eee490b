"""float8 matrices (torchao, a scale for each row): ``training.precision: fp8``. Never run on a GPU.

The linear maps inside decoder layers compute their three products in float8; weights, their gathers and gradients stay
as they are, and so do embedding, head and attention. A scale covers one row (token): with one for a whole tensor, as
torchao's other recipes have it, a document's neighbours would change its logits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from muster.core.errors import UsageError

#: torch._scaled_mm takes float8 matrices with rows of a multiple of so many elements.
MULTIPLE = 16
#: Scales by row need Hopper's kernels.
LEAST_CAPABILITY = (9, 0)


def convert_layers(layers: Sequence[nn.Module], device: torch.device, *, emulate: bool = False) -> None:
    """Replace every linear map in ``layers`` by torchao's, in place; names of parameters stay.

    ``emulate``: products in the compute type on float8 values, on any device: for tests.

    Raises:
        UsageError: torchao or the device is missing, or a matrix has an odd size.
    """
    if not emulate:
        check(device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for layer in layers:
        for name, part in layer.named_modules():
            if isinstance(part, nn.Linear) and (part.in_features % MULTIPLE or part.out_features % MULTIPLE):
                size = f"{part.in_features} x {part.out_features}"
                raise UsageError(
                    f"training.precision: fp8: {name} is {size}, not multiples of {MULTIPLE}", hint="precision: bf16"
                )
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    for layer in layers:
        convert_to_float8_training(layer, config=config)


def check(device: torch.device) -> None:
    """Raise UsageError where float8 cannot run."""
    if device.type != "cuda":
        raise UsageError(
            f"training.precision: fp8 needs a GPU of H100's generation or newer, the device is {device.type}",
            hint="precision: bf16",
        )
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UsageError(
            f"training.precision: fp8 needs a GPU of H100's generation or newer, this is {name}",
            hint="precision: bf16",
        )
    if importlib.util.find_spec("torchao") is None:
        raise UsageError("training.precision: fp8 needs torchao, which is not installed", hint="pip install torchao")
