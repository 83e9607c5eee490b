"""torch.compile, one decoder layer at a time: layers share their code, so it is compiled once.

Shapes are static but for the number of documents (packed sequences have one length; ``batch.make_batch`` marks the
bounds): one graph in training and one in evaluation. FSDP's hooks stay outside the graphs.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence

import torch
from torch import nn

from muster.core.errors import UsageError


def compile_layers(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Compile the ``forward`` of each layer at its first call.

    Raises:
        UsageError: something that the compiler needs is missing.
    """
    check_compiler(device)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)


def check_compiler(device: torch.device) -> None:
    """Raise UsageError if torch.compile would fail, which otherwise shows minutes later at the first step."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UsageError("training.compile: triton is not installed", hint="pip install triton, or compile: false")
    compilers = ("g++", "clang++", "c++") if device.type == "cpu" else ("gcc", "clang", "cc")
    if not any(shutil.which(name) for name in compilers):
        raise UsageError(
            f"training.compile: no C++ compiler found ({', '.join(compilers)})",
            hint="apt-get install g++, or set training.compile: false",
        )
