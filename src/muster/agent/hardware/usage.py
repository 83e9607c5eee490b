"""What the steps of a host's ranks use: processors, memory, network, GPUs; the event ``host.usage``.

It costs the ranks nothing: the agent reads a few files of ``/proc`` where a step ends, every 10 s at most, and of many
hosts more rarely, so that the supervisor hears ten of them a second. GPUs are asked by one ``nvidia-smi`` that goes on
while ranks live: the driver's library in the agent itself would hang with a broken GPU.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.agent.evidence.proc import process_state
from muster.agent.hardware.host_check import PORTS
from muster.agent.ranks.rank_process import Worker, kill, on_exit
from muster.core import processes
from muster.core.event_details.hosts import HostUsage
from muster.core.processes import processor_ticks, program
from muster.core.typed_json import Json
from muster.health.hardware.kernel_log import pci_address
from muster.health.hardware.own_gpus import GPUS, own_gpus
from muster.protocol.values import RankEvent
from muster.transport.connections import ConnectionPool

EVERY_S = 10.0
#: What each host of a run adds to that.
EVERY_S_PER_HOST = 0.1
#: A pass over eight GPUs takes the tool tens of milliseconds of a processor.
ASK_GPUS = ("--query-gpu=pci.bus_id,utilization.gpu,memory.used", "--format=csv,noheader,nounits", "--loop=5")
_WORD_BYTES = 4  # port_rcv_data and port_xmit_data count these (Linux, sysfs-class-infiniband)


@dataclass(frozen=True, kw_only=True)
class Counters:
    """As they stand at one moment; None: not to be read here."""

    at_ns: int
    ranks_cpu_s: Mapping[int, float]
    """By pid."""
    busy_ticks: int | None
    all_ticks: int | None
    received_bytes: int | None
    sent_bytes: int | None


@dataclass
class _GpuTool:
    """The ``nvidia-smi`` that runs, and what it has said since the last event."""

    child: subprocess.Popen[bytes]
    fd: int
    buffer: bytes = b""
    busy: dict[str, list[float]] = field(default_factory=dict)
    """By PCI address: shares."""
    memory_bytes: dict[str, int] = field(default_factory=dict)


class UsageMeter:
    """Reports at the ends of steps; silent while there are none."""

    def __init__(
        self,
        *,
        hub: ConnectionPool,
        living: Callable[[], list[Worker]],
        tell: Callable[[RankEvent], None],
        hosts: Callable[[], int],
        environ: Mapping[str, str],
        every_s: float = EVERY_S,
        proc: Path = Path("/proc"),
        ports: Path = PORTS,
        gpus: Path = GPUS,
    ) -> None:
        """``hosts``: of the run. ``environ``: of the ranks. ``every_s``, ``proc``, ``ports``, ``gpus``: a test's."""
        self._hub, self._living, self._tell, self._hosts, self._environ = hub, living, tell, hosts, environ
        self._every_s, self._proc, self._ports, self._gpus = every_s, proc, ports, gpus
        self._next_s = 0.0
        self._seen = (0, -1)
        """Attempt and step that all ranks here are in."""
        self._from: tuple[int, Counters] | None = None
        """The last step of which the newest event tells, and what stood then."""
        self._tool: _GpuTool | None = None
        self._asked = 0
        """The attempt for which the tool was started: one that ends is not started again in it."""

    def watch(self) -> None:
        """Call it in every turn of the loop."""
        if time.monotonic() < self._next_s:
            return
        workers = self._living()
        attempt = max((worker.attempt for worker in workers), default=0)
        workers = [worker for worker in workers if worker.attempt == attempt]
        now = (attempt, min((worker.step for worker in workers), default=-1))
        before, self._seen = self._seen, now
        if not workers:
            self.release()
        if not workers or now[0] != before[0] or now[1] < before[1]:
            self._from = None
        elif now[1] > before[1] >= 0:  # a step has ended
            self._on_step(now[1] - 1, attempt, workers)

    def release(self) -> None:
        """Leave the GPUs: a reset needs that nobody asks them anything. Never waits."""
        tool, self._tool = self._tool, None
        if tool is not None:
            self._hub.unwatch(tool.fd)
            assert tool.child.stdout is not None
            tool.child.stdout.close()
            kill(tool.child.pid)

    def _on_step(self, step: int, attempt: int, workers: list[Worker]) -> None:
        found = counters([worker.pid for worker in workers], proc=self._proc, ports=self._ports)
        before, self._from = self._from, (step, found)
        self._next_s = time.monotonic() + self._every_s + EVERY_S_PER_HOST * self._hosts()
        if before is None:
            self._ask_gpus(attempt)
            return
        detail = {**used(*before, step, found), **self._memory(), **self._of_gpus()}
        self._tell(
            RankEvent(
                kind=HostUsage.kind, attempt=attempt, step=step, mono_ns=found.at_ns, wall_ns=time.time_ns(),
                detail=detail,
            )
        )  # fmt: skip

    def _memory(self) -> dict[str, Json]:
        found = processes.host_memory(self._proc / "meminfo")
        return {} if found is None else {"memory_bytes": found[0], "memory_total_bytes": sum(found)}

    # ------------------------------------------------------------ GPUs

    def _ask_gpus(self, attempt: int) -> None:
        tool = program("nvidia-smi") if self._tool is None and self._asked != attempt and self._gpus.is_dir() else None
        if tool is None:
            return
        self._asked = attempt
        try:
            child = subprocess.Popen(
                [tool, *ASK_GPUS], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            return
        assert child.stdout is not None
        self._tool = _GpuTool(child=child, fd=child.stdout.fileno())
        os.set_blocking(self._tool.fd, False)
        self._hub.watch(self._tool.fd, self._on_output)

        def ended() -> None:
            child.wait()

        try:
            on_exit(self._hub, child.pid, ended)
        except OSError:  # no descriptors: it would stay as a zombie
            self.release()
            child.wait()

    def _on_output(self) -> None:
        tool = self._tool
        assert tool is not None
        with contextlib.suppress(BlockingIOError):
            output = os.read(tool.fd, 65536)
            if not output:  # it has ended
                self.release()
                return
            *lines, tool.buffer = (tool.buffer + output).split(b"\n")
            for line in lines:
                _read_gpu(line.decode(errors="replace"), tool)

    def _of_gpus(self) -> dict[str, Json]:
        """In the order of their addresses, of those that the run may use; nothing where one of them does not answer."""
        tool = self._tool
        if tool is None or not tool.busy:
            return {}
        own = None
        with contextlib.suppress(OSError):
            own = own_gpus(self._gpus, self._environ)
        shares = {address: sum(all_) / len(all_) for address, all_ in sorted(tool.busy.items())}
        tool.busy = {}
        known = [address for address in shares if own is None or address in own]
        return {
            "gpu_busy": [round(shares[address], 3) for address in known],
            "gpu_memory_bytes": [tool.memory_bytes[address] for address in known],
        }


def counters(pids: list[int], *, proc: Path = Path("/proc"), ports: Path = PORTS) -> Counters:
    """Now. Ports of RDMA count beside the interfaces of the network, loopback does not."""
    busy, everything = processor_ticks(proc)
    received, sent = _interfaces(proc)
    for port in ports.glob("*/ports/*/counters"):
        with contextlib.suppress(OSError, ValueError):
            into = int((port / "port_rcv_data").read_text()) * _WORD_BYTES
            out = int((port / "port_xmit_data").read_text()) * _WORD_BYTES
            received, sent = (received or 0) + into, (sent or 0) + out
    return Counters(
        at_ns=time.monotonic_ns(), ranks_cpu_s={pid: process_state(pid, proc).cpu_s for pid in pids},
        busy_ticks=busy, all_ticks=everything, received_bytes=received, sent_bytes=sent,
    )  # fmt: skip


def used(first: int, before: Counters, step: int, now: Counters) -> dict[str, Json]:
    """Of the steps after ``first`` up to ``step``, as the event has it; what is not known is left out."""
    ranks_s = (
        seconds - before.ranks_cpu_s[pid] for pid, seconds in now.ranks_cpu_s.items() if pid in before.ranks_cpu_s
    )
    result: dict[str, Json] = {
        "steps": step - first,
        "interval_ns": now.at_ns - before.at_ns,
        "cpu_ns": int(sum(max(0.0, one) for one in ranks_s) * 1e9),
    }
    ticks = _grown(before.all_ticks, now.all_ticks)
    busy = _grown(before.busy_ticks, now.busy_ticks)
    if ticks and busy is not None:
        result["busy"] = round(min(1.0, busy / ticks), 4)
    for name in ("received_bytes", "sent_bytes"):
        grown = _grown(getattr(before, name), getattr(now, name))
        if grown is not None:  # an interface that went away took its count with it
            result[name] = grown
    return result


def _grown(before: int | None, now: int | None) -> int | None:
    return now - before if before is not None and now is not None and now >= before else None


def _interfaces(proc: Path) -> tuple[int | None, int | None]:
    """(received, sent)."""
    try:
        lines = (proc / "net" / "dev").read_text().splitlines()[2:]
        rows = [line.rpartition(":")[2].split() for line in lines if line.partition(":")[0].strip() != "lo"]
        return sum(int(row[0]) for row in rows), sum(int(row[8]) for row in rows)
    except (OSError, ValueError, IndexError):
        return None, None


def _read_gpu(line: str, tool: _GpuTool) -> None:
    """``00000000:19:00.0, 97, 40321``; a GPU that does not say a number is left out."""
    with contextlib.suppress(ValueError):
        address, busy, memory_mib = (part.strip() for part in line.split(","))
        share, held = int(busy) / 100, int(memory_mib) << 20
        tool.busy.setdefault(pci_address(address), []).append(share)
        tool.memory_bytes[pci_address(address)] = held
