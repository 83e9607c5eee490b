"""float8 matrices (torchao): ``training.precision`` fp8 and mxfp8. On GPUs fp8 ran on one H200, mxfp8 never.

The linear maps inside decoder layers compute their three products in float8; weights, their gathers and gradients stay
as they are, and so do embedding, head and attention.

* fp8: a scale covers one row (token). With one for a whole tensor, as torchao's other recipes have it, a document's
  neighbours would change its logits.
* mxfp8: a scale, a power of two, covers 32 elements of a row; of the weight's gradient, which sums over tokens anyway,
  32 tokens (Open Compute Project, microscaling formats 1.0). torchao calls what trains in it a prototype: it is
  compared with its own emulation before its first use on a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from muster.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One of ``training.precision``."""

    name: str
    multiple: int
    """Of each side of a matrix."""
    least_capability: tuple[int, int]
    since: str
    """The first GPU that has it."""


KINDS = {
    # torch._scaled_mm takes rows of a multiple of 16 elements; scales by row need Hopper's kernels.
    "fp8": Kind(name="fp8", multiple=16, least_capability=(9, 0), since="H100"),
    # A scale for 32 elements along either side; the tensor cores read such scales since Blackwell.
    "mxfp8": Kind(name="mxfp8", multiple=32, least_capability=(10, 0), since="B200"),
}
#: Largest difference of a kernel's result from its emulation's, as a share of its norm: both round alike, and what is
#: left is bfloat16's rounding of the result (0.002); float8's own is 0.03.
AGREES = 0.01


def convert_layers(
    layers: Sequence[nn.Module], device: torch.device, precision: str = "fp8", *, emulate: bool = False
) -> None:
    """Replace every linear map in ``layers`` by torchao's, in place; names of parameters stay.

    ``emulate``: products in the compute type on float8 values, on any device: for tests.

    Raises:
        UsageError: torchao or the device is missing, its kernels are wrong, or a matrix has an odd size.
    """
    kind = KINDS[precision]
    if not emulate:
        check(device, precision)
    for layer in layers:
        for name, part in layer.named_modules():
            if isinstance(part, nn.Linear) and (part.in_features % kind.multiple or part.out_features % kind.multiple):
                size = f"{part.in_features} x {part.out_features}"
                raise UsageError(
                    f"training.precision: {precision}: {name} is {size}, not multiples of {kind.multiple}",
                    hint="precision: bf16",
                )
    for layer in layers:
        if precision == "mxfp8":
            _convert_blocks(layer, emulate)
        else:
            _convert_rows(layer, emulate)


def check(device: torch.device, precision: str = "fp8") -> None:
    """Raise UsageError where ``precision`` cannot run."""
    kind = KINDS[precision]
    needs = f"training.precision: {precision} needs a GPU of {kind.since}'s generation or newer"
    if device.type != "cuda":
        raise UsageError(f"{needs}, the device is {device.type}", hint="precision: bf16")
    if torch.cuda.get_device_capability(device) < kind.least_capability:
        raise UsageError(f"{needs}, this is {torch.cuda.get_device_name(device)}", hint="precision: bf16")
    if importlib.util.find_spec("torchao") is None:
        raise UsageError(
            f"training.precision: {precision} needs torchao, which is not installed", hint="pip install torchao"
        )
    if precision == "mxfp8":
        check_kernels(device)


def check_kernels(device: torch.device) -> None:
    """Compute a small product and its gradients with torchao's mxfp8 kernels and by its emulation. Draws no random
    number.

    Raises:
        UsageError: a kernel is missing (torchao's build decides that where it is called) or gives something else.
    """
    try:
        exact, found = (_products(device, emulate) for emulate in (True, False))
    except torch.OutOfMemoryError:
        raise
    except (ImportError, RuntimeError, AssertionError, AttributeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"training.precision: mxfp8: torchao's kernels do not run here: {first[:200]}",
            hint="torchao 0.18 with torch's CUDA 12.8 or newer, or precision: bf16",
        ) from error
    for name, wanted in exact.items():
        off = float((found[name] - wanted).norm() / wanted.norm())
        if not off <= AGREES:
            raise UsageError(
                f"training.precision: mxfp8: torchao's kernels are wrong here: {name} is {off:.2g} off its emulation",
                hint="another version of torchao, or precision: bf16",
            )


def _products(device: torch.device, emulate: bool) -> dict[str, Tensor]:
    """The three products of one linear map, in float64."""
    tokens, inputs, outputs = 128, 256, 384
    plain = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16)
    plain.weight = nn.Parameter(_waves(outputs, inputs, 0.7, device))
    linear = _in_blocks(plain, emulate)
    given = _waves(tokens, inputs, 1.3, device).requires_grad_()
    with torch.enable_grad():
        result = linear(given)
    result.backward(_waves(tokens, outputs, 2.1, device))
    gradients = {"the input's gradient": given.grad, "the weight's gradient": linear.weight.grad}
    return {"the product": result.detach().double()} | {
        name: gradient.double() for name, gradient in gradients.items() if gradient is not None
    }


def _waves(rows: int, columns: int, pace: float, device: torch.device) -> Tensor:
    """A matrix without a pattern of its rows, whose blocks of 32 have scales of their own."""
    values = torch.sin(torch.arange(rows * columns, device=device, dtype=torch.float32).square() * pace)
    loudness = torch.exp2(torch.arange(columns, device=device) // 32 % 5 - 2.0)
    return (values.view(rows, columns) * loudness).bfloat16()


def _convert_rows(layer: nn.Module, emulate: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(layer, config=replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate))


def _convert_blocks(layer: nn.Module, emulate: bool) -> None:
    for parent, name, part in list(_linear_maps(layer)):
        setattr(parent, name, _in_blocks(part, emulate))


def _linear_maps(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in layer.modules():
        for name, part in parent.named_children():
            if isinstance(part, nn.Linear):
                yield parent, name, part


def _in_blocks(part: nn.Linear, emulate: bool) -> Any:
    """torchao's linear map with the parameters of ``part``; scales are rounded up, so that no value overflows."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    result = MXFP8Linear(
        part.in_features, part.out_features, bias=False, device="meta", dtype=part.weight.dtype,
        kernel_preference=KernelPreference.EMULATED if emulate else KernelPreference.AUTO,
        scale_calculation_mode=ScaleCalculationMode.RCEIL,
    )  # fmt: skip
    result.weight, result.bias = part.weight, part.bias
    return result.train(part.training)
