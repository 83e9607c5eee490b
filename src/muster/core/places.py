"""Where a run keeps its things on a host. Paths alone; nothing is created."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def memory_dir(run_dir: str | Path, run_id: str, host: str) -> Path:
    """The host's folder on tmpfs for snapshots and the agent's socket.

    The name is short (a socket path holds 107 bytes) and found again by whoever cleans up.
    """
    root = Path(os.environ.get("MUSTER_MEMORY_DIR") or ("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"))
    return root / f"{memory_prefix(run_dir, run_id)}-{host}"


def memory_prefix(run_dir: str | Path, run_id: str) -> str:
    """What every ``memory_dir`` of this run begins with."""
    digest = hashlib.sha256(f"{Path(run_dir).resolve()}\0{run_id}".encode()).hexdigest()[:12]
    return f"muster-{os.getuid()}-{digest}"
