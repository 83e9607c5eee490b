"""A look at the host's hardware by ``muster.probe``: before ranks use it, and whenever the supervisor asks.

The agent says only what was seen: the supervisor judges. The first look begins with the agent and runs beside the
imports. A passive one holds up the host's readiness for ``PASSIVE_S`` at most; a full one loads the GPUs, so standbys,
which open contexts there, wait for its end.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster.agent.ranks.rank_process import on_exit
from muster.config.spec import RunSpec
from muster.health.hardware.own_gpus import GPUS, own_gpus
from muster.protocol.to_agent import LookAtHost
from muster.protocol.to_supervisor import HostLooked
from muster.protocol.values import HostLook
from muster.transport.connections import ConnectionPool

#: So long a start waits for a passive look: importing torch takes longer.
PASSIVE_S = 2.0
#: A probe that has not ended by then is killed; what it said until then counts.
LIMIT_S = {"passive": 10.0, "full": 90.0}
#: Host-hours from which ``auto`` loads the GPUs (docs/check.md), and the length of a run that does not say it.
WORTH_HOST_HOURS, UNSAID_HOURS = 8.0, 1.0
PORTS = Path("/sys/class/infiniband")
#: Of a probe's output on the wire: what is cut is incomplete.
MOST_BYTES = 1 << 17
_Part = Literal["passive", "full"]


@dataclass
class _Probe:
    """One that runs."""

    part: _Part
    child: subprocess.Popen[bytes]
    fd: int
    begun_s: float
    numbers: list[int]
    """The questions that it answers; 0: nobody's."""
    output: bytes = b""


class HostCheck:
    """At most one probe at a time; whoever asks meanwhile gets the answer of the one that runs."""

    def __init__(
        self,
        *,
        start_program: Callable[..., subprocess.Popen[bytes]],
        environ: Mapping[str, str],
        alone: bool,
        hub: ConnectionPool,
        spec: Callable[[], RunSpec],
        send: Callable[[HostLooked], None],
        is_supervised: Callable[[], bool],
        on_over: Callable[[], None],
        gpus: Path = GPUS,
    ) -> None:
        """``start_program``: as ``HostIdentity``'s. ``alone``: no other agent of the run is on this machine.

        ``on_over``: a start has nothing more to wait for here. ``gpus``: where a test has its own."""
        self._start_program, self._environ, self._alone = start_program, environ, alone
        self._hub, self._spec = hub, spec
        self._send, self._is_supervised, self._on_over, self._gpus = send, is_supervised, on_over, gpus
        self._probe: _Probe | None = None
        self._unsent: list[HostLooked] = []
        self._ready_by = -math.inf
        """Until then a start waits for what runs; inf: until it has ended."""

    @property
    def over(self) -> bool:
        """Whether a start has nothing to wait for."""
        return time.monotonic() >= self._ready_by

    @property
    def loads(self) -> bool:
        """Whether GPUs are being loaded: nothing else may use them."""
        return self._ready_by == math.inf

    def begin(self) -> None:
        """The host is new: look at it, as far as the run file wants that."""
        part = part_of(self._spec(), gpus=_any(self._gpus), ports=_any(PORTS), whole=self._is_whole())
        if part is not None and self._start(part, 0):
            self._ready_by = math.inf if part == "full" else time.monotonic() + PASSIVE_S

    def ask(self, order: LookAtHost) -> None:
        """Look now, beside what runs here: nothing is loaded."""
        if self._probe is not None:
            self._probe.numbers.append(order.number)
        elif not self._start("passive", order.number):
            self._tell(HostLooked(number=order.number, look=self._look("passive", b"", 0.0)))

    def due_s(self) -> float:
        """When ``watch`` has something to do, whatever happens until then."""
        limit_s = math.inf if self._probe is None else self._probe.begun_s + LIMIT_S[self._probe.part]
        return min(limit_s, math.inf if self._ready_by < 0 else self._ready_by)

    def watch(self) -> None:
        """Call it in every turn of the loop."""
        if self._probe is not None and time.monotonic() >= self._probe.begun_s + LIMIT_S[self._probe.part]:
            self._end(self._probe)
        elif self._ready_by > 0 and self.over:
            self._free()
        while self._unsent and self._is_supervised():
            self._send(self._unsent.pop(0))

    def shutdown(self) -> None:
        """End what runs; never waits."""
        if self._probe is not None:
            self._probe.child.kill()

    # ------------------------------------------------------------ the probe

    def _start(self, part: _Part, number: int) -> bool:
        try:
            child = self._start_program("check", "muster.probe.main", "--part", part, stdout=subprocess.PIPE)
        except OSError:
            return False
        assert child.stdout is not None
        fd = child.stdout.fileno()
        os.set_blocking(fd, False)
        probe = _Probe(part=part, child=child, fd=fd, begun_s=time.monotonic(), numbers=[number])
        try:
            on_exit(self._hub, child.pid, lambda: self._on_exit(probe))
        except OSError:  # no descriptors: nobody would notice its end
            child.kill()
            child.wait()
            child.stdout.close()
            return False
        self._hub.watch(fd, lambda: self._read(probe))
        self._probe = probe
        return True

    def _read(self, probe: _Probe) -> None:
        """What it has said; at its end nothing more is watched."""
        while self._probe is probe:
            try:
                data = os.read(probe.fd, 65536)
            except BlockingIOError:
                return
            probe.output = (probe.output + data)[:MOST_BYTES]
            if not data:
                self._end(probe)

    def _on_exit(self, probe: _Probe) -> None:
        self._read(probe)  # something that it started may hold the other end: then there is none
        self._end(probe)
        probe.child.wait()

    def _end(self, probe: _Probe) -> None:
        """Tell what was seen. Once; a driver's call that never returns keeps the process, not us."""
        if self._probe is not probe:
            return
        self._probe = None
        self._hub.unwatch(probe.fd)
        assert probe.child.stdout is not None
        probe.child.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            probe.child.kill()
        look = self._look(probe.part, probe.output, time.monotonic() - probe.begun_s)
        for number in probe.numbers:
            self._tell(HostLooked(number=number, look=look, at_ns=time.monotonic_ns()))
        self._free()

    def _free(self) -> None:
        if self._ready_by > 0:
            self._ready_by = -math.inf
            self._on_over()

    def _tell(self, looked: HostLooked) -> None:
        self._unsent.append(looked)
        self.watch()

    def _look(self, part: _Part, output: bytes, seconds: float) -> HostLook:
        environ = self._environ
        node = environ.get("MUSTER_NODE") or environ.get("SLURMD_NODENAME") or socket.gethostname()
        own = self._own()
        return HostLook(
            part=part,
            output=output.decode(errors="replace"),
            node=node,
            own=tuple(sorted(own)) if own is not None else None,
            seconds=seconds,
        )

    def _own(self) -> frozenset[str] | None:
        with contextlib.suppress(OSError):
            return own_gpus(self._gpus, self._environ)
        return None

    def _is_whole(self) -> bool:
        """Whether the machine's GPUs are this agent's alone."""
        own = self._own()
        return self._alone and (own is None or len(own) >= len(list(self._gpus.iterdir())))


def part_of(spec: RunSpec, *, gpus: bool, ports: bool, whole: bool) -> _Part | None:
    """What is looked at before ranks use a host; None: nothing.

    ``gpus``, ``ports``: there are some (of RDMA). ``whole``: the GPUs are this host's alone; else they are not loaded.

    The rule of ``auto`` weighs 30 s of all hosts against what a bad one costs: docs/check.md has the sum.
    """
    mode, resources = spec.check.mode, spec.resources
    if mode == "off":
        return None
    if mode == "auto":
        wanted = resources.device == "cuda" or resources.accelerator or resources.machine
        if resources.device == "cpu" or not (gpus or ports or wanted):
            return None
        hours = resources.hosts * (spec.limits.max_hours or UNSAID_HOURS)
        mode = "full" if gpus and hours >= WORTH_HOST_HOURS else "passive"
    return "full" if mode == "full" and whole else "passive"


def _any(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(folder.iterdir())
    return False
