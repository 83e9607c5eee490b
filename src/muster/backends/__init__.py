"""Back ends: places that run jobs. Each ships a ``Backend`` value; other packages add theirs by an entry point."""

from __future__ import annotations

from collections.abc import Callable

from muster.backends.backend import Backend
from muster.backends.protocols import Launcher
from muster.config.backends import BACKENDS as NAMED
from muster.core.errors import UsageError, install_command
from muster.core.registry import Registry

#: The run file's table, whose names and checks it uses too.
BACKENDS: Registry[Backend] = NAMED


def get(name: str) -> Backend:
    """The back end called ``name``.

    Raises:
        UsageError: there is none of that name, or it cannot be imported.
    """
    return BACKENDS.get(name)


def load(name: str) -> Launcher:
    """A launcher of the back end called ``name``; the back end's libraries are imported now, not before.

    Raises:
        UsageError: there is none of that name, or its extra is not installed.
    """
    try:
        return get(name).launcher()
    except ImportError as error:
        raise UsageError(f"the back end {name!r} needs {error.name}", hint=install_command("gke")) from error


def names_where(able: Callable[[Backend], bool]) -> str:
    """The back ends for which ``able`` holds, for a hint: ``slurm or gke``."""
    return " or ".join(name for name in BACKENDS.names() if able(get(name)))
