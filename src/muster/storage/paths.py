"""Paths of a run's files on a host. Nothing is created."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from muster.core import environment
from muster.core.errors import UsageError

#: Of a Unix socket's name, its closing zero left out (unix(7)).
SOCKET_PATH_BYTES = 107
_LONGEST_SOCKET = "replicator.sock"


def memory_dir(run_dir: str | Path, run_id: str, host: str) -> Path:
    """The host's folder on tmpfs for snapshots and the agent's socket.

    The name is short (see ``check_memory_dir``) and can be computed again for cleaning up.
    """
    return environment.current().memory_root / f"{memory_prefix(run_dir, run_id)}-{host}"


def check_memory_dir(folder: Path) -> None:
    """Raise UsageError where the sockets in ``folder`` would have longer names than the kernel takes."""
    too_long = len(os.fsencode(folder)) + len(f"/{_LONGEST_SOCKET}") - SOCKET_PATH_BYTES
    if too_long > 0:
        raise UsageError(
            f"the memory folder {folder} has {too_long} bytes too many for the sockets in it",
            hint="set MUSTER_MEMORY_DIR to a folder on tmpfs with a shorter path",
        )


def memory_prefix(run_dir: str | Path, run_id: str) -> str:
    """What every ``memory_dir`` of this run begins with."""
    digest = hashlib.sha256(f"{Path(run_dir).resolve()}\0{run_id}".encode()).hexdigest()[:12]
    return f"muster-{os.getuid()}-{digest}"
