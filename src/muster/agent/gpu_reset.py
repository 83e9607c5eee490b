"""Reset a host's GPUs between two attempts, where the health verdict says that it may help."""

from __future__ import annotations

import functools
import os
import subprocess
import threading
from collections.abc import Callable, Sequence

from muster.agent.ranks.rank_process import on_exit
from muster.transport.connections import ConnectionPool


class GpuReset:
    """At most one, once the ranks are gone. ``on_done(gpus, ok, evidence)`` is called from the hub's loop."""

    def __init__(self, *, hub: ConnectionPool, on_done: Callable[[Sequence[int], bool, str], None]) -> None:
        self._hub, self._on_done = hub, on_done
        self._ordered: Sequence[int] = ()
        self._running = False
        self.ended = 0
        """How many have been done; what the GPUs report from then on is a new incident."""

    def order(self, gpus: Sequence[int]) -> None:
        self._ordered = gpus

    def is_done(self) -> bool:
        """Whether nothing is left to reset; begins what was ordered."""
        if self._ordered:
            gpus, self._ordered = self._ordered, ()
            self._running = True
            start(self._hub, gpus, functools.partial(self._done, gpus))
        return not self._running

    def _done(self, gpus: Sequence[int], ok: bool, evidence: str) -> None:
        self._running = False
        self.ended += ok
        self._on_done(gpus, ok, evidence)


#: NVIDIA gives no bound; a reset takes seconds. What holds a GPU besides the ranks (a monitor, a fabric's peers) makes
#: the tool refuse at once.
LIMIT_S = 120.0


def command(gpus: Sequence[int]) -> list[str]:
    """NVIDIA's own tool, with its own numbers; it refuses while any process uses the GPU, so the ranks must be gone."""
    return ["nvidia-smi", "--gpu-reset", "-i", ",".join(str(gpu) for gpu in gpus)]


def start(
    hub: ConnectionPool, gpus: Sequence[int], done: Callable[[bool, str], None], *, limit_s: float = LIMIT_S
) -> None:
    """Reset without waiting; ``done(ok, evidence)`` is called once from the hub's loop, at latest after ``limit_s``.

    A tool that waits for a broken driver cannot always be killed."""
    try:
        child = subprocess.Popen(
            command(gpus), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        done(False, f"no reset: {error.strerror}: {error.filename}")
        return
    overdue, alarm = os.pipe()
    timer = threading.Timer(limit_s, os.write, (alarm, b"."))
    timer.daemon = True
    timer.start()
    answered = []

    def answer(ok: bool, evidence: str) -> None:
        answered.append(ok)
        timer.cancel()
        timer.join()
        hub.unwatch(overdue)
        os.close(overdue)
        os.close(alarm)
        done(ok, evidence)

    def ended() -> None:
        output, _ = child.communicate()
        if not answered:
            last = output.strip().splitlines()[-1] if output.strip() else f"exit code {child.returncode}"
            answer(child.returncode == 0, last[:200])

    def gave_up() -> None:
        child.kill()
        answer(False, f"nvidia-smi --gpu-reset has not ended within {limit_s:.0f} s")

    hub.watch(overdue, gave_up)
    on_exit(hub, child.pid, ended)
