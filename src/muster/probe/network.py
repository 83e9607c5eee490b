"""A host's part of ``muster check --network``: orders come in as lines of JSON, figures go out as lines of JSON.

Started by argument list: ``python -P -m muster.probe.network --address ADDRESS``. The program that starts it holds its
input and output, so that nothing of ours listens but torch's store, on that address, as a run's ranks have it. Ranks
are forked for each order from this process, which has torch loaded and no thread. Ranks that hang are looked at and
then left as they are, so that the other hosts find them so, until the next order or the end: both begin with killing
them. It ends with its input.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from muster.core.typed_json import Unreadable, decode, encode
from muster.health.hang.evidence import RankEvidence
from muster.health.network.figures import Hello, HostLine, Measured, Order
from muster.probe.stuck import evidence

#: For killed ranks to be gone; for CUDA to tell its GPUs (a fabric manager that is starting takes its time).
_KILLED_S, _CUDA_S = 2.0, 60.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure collectives with other hosts; JSON lines.")
    parser.add_argument("--address", default="", help="where others reach this host; default: what its name leads to")
    parser.add_argument("--peer", default="", help="another's address: this host's is that of the route there")
    given = parser.parse_args(argv)
    try:
        address = _toward(given.peer) if given.peer else socket.gethostbyname(given.address or socket.gethostname())
        if not given.address and address.startswith("127."):
            _say(HostLine(failed=f"its name leads to {address}, where no other host reaches it: --host NAME=ADDRESS"))
            raise SystemExit(1)
        listener = socket.create_server((address, 0), backlog=1024)
    except OSError as error:
        _say(HostLine(failed=f"cannot listen on {given.address or socket.gethostname()}: {error.strerror}"))
        raise SystemExit(1) from None
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no thread yet: ranks are forked from here
    import torch

    try:
        gpus = _gpus(sorted(Path("/dev").glob("nvidia[0-9]*")))
    except RuntimeError as error:
        _say(HostLine(failed=str(error)))
        raise SystemExit(1) from None
    _fork(lambda: _serve_store(listener, address))
    port = int(listener.getsockname()[1])
    listener.close()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""  # type: ignore[no-untyped-call]
    ranks, device = max(1, len(gpus)), gpus[0] if gpus else ""
    _say(
        HostLine(
            hello=Hello(address=address, port=port, ranks=ranks, device=device, torch=torch.__version__, nccl=nccl)
        )
    )
    orders, carried = _Lines(sys.stdin.fileno()), None
    while (line := orders.next(None)) is not None:
        if carried is not None:
            carried.end()
        try:
            order = decode(Order, line)
        except Unreadable as error:
            _say(HostLine(failed=f"not an order: {error}"))
            continue
        carried = _Carried(order, ranks, bool(gpus), address)
        _say(carried.out(orders))


def _toward(peer: str) -> str:
    """This host's address on the route to ``peer``. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # a datagram socket: selects a route, sends nothing
        return str(probe.getsockname()[0])


def _gpus(devices: Sequence[Path]) -> list[str]:
    """Names of the GPUs that CUDA sees, where the kernel has ``devices`` of them. CUDA wakes in a child: ranks cannot
    be forked from a process in which it did.

    Raises:
        RuntimeError: it sees none: gloo would measure another network than the one in question.
    """
    if not devices:
        return []
    read, write = os.pipe()

    def tell() -> None:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        _write(write, "".join(f"{torch.cuda.get_device_name(gpu)}\n" for gpu in range(count)).encode())

    pid = _fork(tell)
    os.close(write)
    names, lines = list[str](), _Lines(read)
    until = time.monotonic() + _CUDA_S
    while (name := lines.next(max(0.0, until - time.monotonic()))) is not None:
        names.append(name.decode())
    os.close(read)
    os.kill(pid, signal.SIGKILL)
    if not lines.ended:
        raise RuntimeError(f"{devices[0]} is there, and CUDA does not answer within {_CUDA_S:g} s")
    os.waitpid(pid, 0)
    if not names:
        raise RuntimeError(f"{devices[0]} is there, and CUDA sees no GPU: muster check says why")
    return names


class _Lines:
    """Whole lines of a descriptor. ``ended``: the other end is gone."""

    def __init__(self, fd: int) -> None:
        self.fd, self.ended, self._rest = fd, False, b""

    def next(self, within_s: float | None) -> bytes | None:
        """The next line; None: none in this time (None: no limit), or the end."""
        until = None if within_s is None else time.monotonic() + within_s
        while b"\n" not in self._rest and not self.ended:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self.fd], [], [], left)[0]:
                return None
            part = os.read(self.fd, 1 << 16)
            self.ended = not part
            self._rest += part
        line, found, rest = self._rest.partition(b"\n")
        if not found:
            return None
        self._rest = rest
        return line


class _Carried:
    """One order: its ranks as processes, each with a pipe."""

    def __init__(self, order: Order, ranks: int, on_gpus: bool, address: str) -> None:
        self.order = order
        self.left = {rank: len(order.collectives) * len(order.sizes) for rank in range(ranks)}
        self.pids: dict[int, int] = {}
        self.pipes: dict[int, _Lines] = {}
        for local in range(ranks):
            read, write = os.pipe()
            self.pids[local] = _fork(
                lambda local=local, write=write: _rank(  # type: ignore[misc]
                    order, order.first + local, local if on_gpus else None, address, write
                )
            )
            os.close(write)
            self.pipes[local] = _Lines(read)

    def out(self, orders: _Lines) -> HostLine:
        """Pass figures on until all ranks have ended; the last line: why not all figures are there, or nothing. Ranks
        that hang live on."""
        failed, limit_s, what = "", self.order.start_s, "the ranks have not met"
        stuck: tuple[RankEvidence, ...] = ()
        deadline = time.monotonic() + limit_s
        open_pipes = {lines.fd: local for local, lines in self.pipes.items()}
        while open_pipes and not failed:
            ready = select.select([*open_pipes, orders.fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                failed = f"{what} within {limit_s:g} s"
                stuck = evidence({self.order.first + local: pid for local, pid in self.pids.items()})
            if orders.fd in ready:  # nothing is to come meanwhile but the end
                failed = "it was ended"
            for fd in (fd for fd in ready if fd != orders.fd):
                local = open_pipes[fd]
                while (line := self.pipes[local].next(0.0)) is not None:
                    text = decode(HostLine, line)
                    failed = failed or text.failed
                    if text.measured is not None:
                        self.left[local] -= 1
                        _say(text)
                    limit_s, what = self.order.limit_s, "a collective did not end"
                    deadline = time.monotonic() + limit_s
                if self.pipes[local].ended:
                    del open_pipes[fd]
                    if self.left[local] and not failed:
                        failed = f"rank {self.order.first + local} {_end_of(self.pids.pop(local))}"
        if not stuck:
            self.end()
        return HostLine(order=self.order.name, failed=failed, ranks=stuck, done=True)

    def end(self) -> None:
        """No rank is left, nor a pipe."""
        for lines in self.pipes.values():
            os.close(lines.fd)
        self.pipes.clear()
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
        until = time.monotonic() + _KILLED_S
        while self.pids and time.monotonic() < until:  # one in a driver's call may never end: it is left behind
            for local, pid in list(self.pids.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del self.pids[local]
            time.sleep(0.002)
        self.pids.clear()


def _end_of(pid: int) -> str:
    """Of a child that has closed its pipe, which is what it does last."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}" + " (out of memory?)" * (code == -signal.SIGKILL)
    return f"ended with exit code {code}"


def _rank(order: Order, rank: int, gpu: int | None, address: str, pipe: int) -> None:
    from muster.probe.collectives import measure

    def say(one: Measured | None) -> None:
        _write(pipe, encode(HostLine(order=order.name, met=one is None, measured=one)) + b"\n")

    try:
        measure(order, rank, address=address, gpu=gpu, say=say)
    except Exception as error:  # noqa: BLE001 (any error of torch: it is this order's failure)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        _write(pipe, encode(HostLine(order=order.name, failed=f"rank {rank}: {reason}")) + b"\n")


def _serve_store(listener: socket.socket, address: str) -> None:
    from torch._C._distributed_c10d import TCPStore

    _store = TCPStore(
        address, listener.getsockname()[1], None, True, wait_for_workers=False, master_listen_fd=listener.fileno()
    )
    while True:
        time.sleep(3600)


def _fork(work: Callable[[], object]) -> int:
    """A child that does ``work`` and ends; it ends with this process, too."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == parent:
            work()
    except BaseException:  # noqa: BLE001 (nothing of the parent may run in the child)
        traceback.print_exc()
    finally:
        os._exit(0)


def _say(line: HostLine) -> None:
    _write(sys.stdout.fileno(), encode(line) + b"\n")


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
    os._exit(0)  # torch takes seconds to be torn down; what is left of ranks ends with this process
