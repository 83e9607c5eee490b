"""The descriptors of the kernel log and of the driver's list of GPUs, at the agent's edge."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from muster.agent.values.events import Event, HardwareListed, KernelLine, KernelLogLost
from muster.health.hardware.kernel_log import pci_address
from muster.health.hardware.own_gpus import GPUS, own_gpus
from muster.transport.connections import ConnectionPool

#: Of RDMA.
PORTS = Path("/sys/class/infiniband")
KMSG = "/dev/kmsg"
#: The inode of the first PID namespace (PROC_PID_INIT_INO, include/linux/proc_ns.h): the numbers in the log are of it.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
_RECORD_BYTES = 16384  # a record is at most 8 KiB (CONSOLE_EXT_LOG_MAX), with its escapes


def list_hardware(environ: Mapping[str, str], gpus_folder: Path = GPUS) -> HardwareListed:
    """``environ``: of the ranks. Never raises."""
    gpus, own = {}, None
    with contextlib.suppress(OSError):
        # nvidia-smi counts in the order of addresses, and so does NVML.
        addresses = sorted(filter(None, (pci_address(path.name) for path in gpus_folder.iterdir())))
        gpus = {address: number for number, address in enumerate(addresses)}
        own = own_gpus(gpus_folder, environ)
    has_ports = sees_all_pids = False
    with contextlib.suppress(OSError):
        has_ports = any(PORTS.iterdir())
    with contextlib.suppress(OSError):
        sees_all_pids = os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    return HardwareListed(gpus, own, has_ports, sees_all_pids)


class KernelLog:
    """``/dev/kmsg``; the token of its descriptor is the object itself."""

    def __init__(self, pool: ConnectionPool, path: str = KMSG) -> None:
        self._pool, self._path, self._fd = pool, path, -1

    def open(self) -> Iterator[Event]:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            yield KernelLogLost(f"{self._path}: {error.strerror}")
            return
        with contextlib.suppress(OSError):
            os.lseek(self._fd, 0, os.SEEK_END)
        self._pool.watch(self._fd, self)

    def close(self) -> None:
        if self._fd >= 0:
            self._pool.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def read(self) -> Iterator[Event]:
        """One record, and those behind it: ``level,sequence,microseconds,flags;text``."""
        for _ in range(64):  # then the loop's other descriptors have their turn
            try:
                record = os.read(self._fd, _RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # older records were overwritten before they were read
                    continue
                self.close()
                yield KernelLogLost(f"{self._path}: {error.strerror}", once_open=True)
                return
            if not record:
                self.close()
                yield KernelLogLost(f"{self._path} ended", once_open=True)
                return
            yield KernelLine(record.decode(errors="replace").partition("\n")[0])
