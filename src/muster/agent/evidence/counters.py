"""What the kernel has counted for this host: processors, memory, network."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from muster.agent.evidence.proc import process_state
from muster.agent.hardware.kernel_log import PORTS
from muster.agent.values.events import Counters
from muster.core.processes import processor_ticks

_WORD_BYTES = 4  # port_rcv_data and port_xmit_data count these (Linux, sysfs-class-infiniband)


def counters(pids: Sequence[int], *, proc: Path = Path("/proc"), ports: Path = PORTS) -> Counters:
    """Now. Ports of RDMA count in addition to the network interfaces, loopback does not."""
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


def _interfaces(proc: Path) -> tuple[int | None, int | None]:
    """(received, sent)."""
    try:
        lines = (proc / "net" / "dev").read_text().splitlines()[2:]
        rows = [line.rpartition(":")[2].split() for line in lines if line.partition(":")[0].strip() != "lo"]
        return sum(int(row[0]) for row in rows), sum(int(row[8]) for row in rows)
    except (OSError, ValueError, IndexError):
        return None, None
