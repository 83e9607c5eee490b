"""torch.compile, one decoder layer at a time: layers share their code, so it is compiled once.

Shapes are static but for the number of documents (packed sequences have one length; ``batch.make_batch`` marks the
bounds): one graph in training and one in evaluation. FSDP's hooks stay outside the graphs.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from muster.config.spec import Training
from muster.core.errors import UsageError


def compiles(training: Training, device: torch.device) -> bool:
    """Whether this run's layers are compiled on ``device``; ``auto``: only where a compiler is installed."""
    if training.compile != "auto" or not training.compiles_on(device.type):
        return training.compiles_on(device.type)
    lacks = missing(device.type)
    if lacks is not None:
        print(f"note: training.compile: auto compiles nothing: {lacks[0]}", file=sys.stderr, flush=True)
    return lacks is None


def compile_layers(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Compile the ``forward`` of each layer at its first call.

    Raises:
        UsageError: something that the compiler needs is missing.
    """
    check_compiler(device)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)


def load_compiler(device: torch.device) -> None:
    """Load what a process's first compilation needs: 3 s of imports, and the driver that its code is loaded with.

    In this process alone: the pool of processes that inductor compiles with is not started: nothing would end it here.
    """
    from torch._inductor import config

    with config.patch(compile_threads=1):
        doubled = torch.compile(_doubled, dynamic=False)
        doubled(torch.ones(8, device=device, requires_grad=True)).backward()  # type: ignore[no-untyped-call]


def _doubled(values: torch.Tensor) -> torch.Tensor:
    return (values * 2).sum()


def check_compiler(device: torch.device) -> None:
    """Raise UsageError if torch.compile would fail, which otherwise shows minutes later at the first step."""
    lacks = missing(device.type)
    if lacks is not None:
        raise UsageError(f"training.compile: {lacks[0]}", hint=f"{lacks[1]}, or set training.compile: false")


@cache
def missing(device: str) -> tuple[str, str] | None:
    """What the compiler needs on this type of device and is not installed, and how to get it; None: nothing."""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed", "pip install triton"
    compilers = ("g++", "clang++", "c++") if device == "cpu" else ("gcc", "clang", "cc")
    if not any(shutil.which(name) for name in compilers):
        kind = "C++" if device == "cpu" else "C"
        return f"no {kind} compiler found ({', '.join(compilers)})", f"apt-get install {compilers[0]}"
    return None
