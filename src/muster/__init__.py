"""Muster: assemble GPUs, train on them, keep the run alive, account for every second and dollar.

``muster.api`` has the verbs of the command line as functions; ``muster.run`` is for training loops of your own.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"
__all__ = ["__version__", "api"]


def __getattr__(name: str) -> Any:
    if name == "api":  # imported when it is asked for: ``import muster`` stays cheap
        return importlib.import_module("muster.app.api")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
