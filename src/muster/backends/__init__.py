"""Ways of running jobs, loaded by name: ``muster.backends.<name>.launcher()`` returns a ``Launcher``."""

from __future__ import annotations

import importlib
import importlib.util

from muster.backends.protocols import Launcher
from muster.core.errors import UsageError

NAMES = ("local", "slurm", "gke", "vertex", "gce")


def load(name: str) -> Launcher:
    """The back end called ``name``; its libraries are imported now, not before.

    Raises:
        UsageError: there is none of that name, or its extra is not installed.
    """
    if name not in NAMES or importlib.util.find_spec(f"muster.backends.{name}") is None:
        raise UsageError(f"no back end {name!r} in this version", hint=f"available: {', '.join(available())}")
    try:
        module = importlib.import_module(f"muster.backends.{name}")
    except ImportError as error:
        raise UsageError(f"the back end {name!r} needs {error.name}", hint=f"pip install 'muster[{name}]'") from error
    if not hasattr(module, "launcher"):
        raise UsageError(f"no back end {name!r} in this version", hint=f"available: {', '.join(available())}")
    found: Launcher = module.launcher()
    return found


def available() -> list[str]:
    """Names of the back ends that this installation has."""
    return [name for name in NAMES if importlib.util.find_spec(f"muster.backends.{name}") is not None]
