"""Reset a host's GPUs between two attempts, where the health verdict says that it may help."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from muster.agent.ranks.rank_process import on_exit
from muster.transport.connections import ConnectionPool


def command(gpus: Sequence[int]) -> list[str]:
    """NVIDIA's own tool; it refuses while any process uses the GPU, so the ranks must be gone."""
    return ["nvidia-smi", "--gpu-reset", "-i", ",".join(str(gpu) for gpu in gpus)]


def start(hub: ConnectionPool, gpus: Sequence[int], done: Callable[[bool, str], None]) -> None:
    """Reset without waiting; ``done(ok, evidence)`` is called from the hub's loop."""
    try:
        child = subprocess.Popen(
            command(gpus), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        done(False, f"no reset: {error.strerror}: {error.filename}")
        return

    def ended() -> None:
        output, _ = child.communicate()
        last = output.strip().splitlines()[-1] if output.strip() else f"exit code {child.returncode}"
        done(child.returncode == 0, last[:200])

    on_exit(hub, child.pid, ended)
