"""Follows the kernel log for errors of the GPU driver, and tells the supervisor what they ask for.

Nothing polls: the log is a descriptor in the agent's loop. ``/dev/kmsg`` gives one record a read, from the moment it is
opened at its end, so what was before the run is never judged. Where it may not be opened ``dmesg --follow-new`` is
tried (it may have a permission of its own). Where neither works that is said once, and in a pod of GKE the node's
condition is read instead (``node_condition_follower``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from muster.agent.hardware.node_condition_follower import NodeConditionFollower
from muster.agent.host_event_log import HostLog
from muster.agent.host_identity import HostIdentity
from muster.agent.ranks.rank_process import Worker, end_child
from muster.config.spec import RunSpec
from muster.health.hardware.driver_errors import Burst, finding_of, judge_burst, same_burst
from muster.health.hardware.error_table import OwnNumbers
from muster.health.hardware.kernel_log import RECOVERY_ACTION, KernelFault, KernelLogReader, pci_address
from muster.health.hardware.own_gpus import GPUS, own_gpus
from muster.health.verdicts import Finding, Verdict
from muster.protocol.to_supervisor import HostFault
from muster.transport.connections import ConnectionPool

KMSG = "/dev/kmsg"
#: What comes from now on, from the kernel alone (programs can write to the log, too).
FOLLOW = ("dmesg", "--follow-new", "--kernel", "--nopager", "--color=never")
#: The inode of the first PID namespace (PROC_PID_INIT_INO, include/linux/proc_ns.h): the numbers in the log are of it.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
_ASKED: dict[Verdict, Literal["reset", "drain", "replace"]] = {
    Verdict.RESET: "reset",
    Verdict.DRAIN: "drain",
    Verdict.REPLACE: "replace",
}
#: Errors kept for judging bursts and repetition.
_KEPT = 512
_RECORD_BYTES = 16384  # a record is at most 8 KiB (CONSOLE_EXT_LOG_MAX), with its escapes


class KernelLogFollower:
    """Owns the descriptor (and ``dmesg``, where that is needed). Does nothing on a host without the driver."""

    def __init__(
        self,
        *,
        identity: HostIdentity,
        hub: ConnectionPool,
        log: HostLog,
        spec: Callable[[], RunSpec],
        living: Callable[[], Iterable[Worker]],
        send: Callable[[HostFault], None],
        resets: Callable[[], int] = lambda: 0,
        start_program: Callable[..., subprocess.Popen[bytes]] | None = None,
        gpus: Path = GPUS,
        kmsg: str = KMSG,
        follow: tuple[str, ...] = FOLLOW,
    ) -> None:
        """``living``: the ranks' processes. ``resets``: how often GPUs were reset here. ``start_program``: as
        ``HostIdentity``'s; None: the node's condition is not read.

        ``gpus``, ``kmsg``, ``follow``: where a test has its own."""
        self._host, self._environ = identity.host, identity.environ
        self._hub, self._spec, self._living = hub, spec, living
        self._send, self._log, self._resets = send, log, resets
        self._gpus_folder, self._kmsg, self._follow = gpus, kmsg, follow
        self._gpus: dict[str, int] = {}
        self._own: frozenset[str] | None = None
        """Addresses of the GPUs that this host's ranks may use; None: all."""
        self._foreign: set[tuple[str, int]] = set()
        self._reader = KernelLogReader()
        self._earlier: list[KernelFault] = []
        """Errors of closed bursts, each once."""
        self._open: dict[tuple[str, ...], KernelFault] = {}
        """The open burst: each error of a device once, since more of the same change no verdict."""
        self._recent: deque[tuple[float, KernelFault]] = deque(maxlen=_KEPT)
        """With the (monotonic) time at which each was read."""
        self._last: KernelFault | None = None
        self._told: Verdict | None = None
        """Of the open burst; None: nothing was told."""
        self._told_memory = False
        """Of the open burst, that memory failed."""
        self._standing: HostFault | None = None
        self._resets_seen = 0
        self._fd = -1
        self._dmesg: subprocess.Popen[bytes] | None = None
        self._node: NodeConditionFollower | None = None
        self._start_program = start_program
        self._buffer = b""

    def start(self) -> None:
        """Begin, where there are GPUs of NVIDIA; never raises."""
        with contextlib.suppress(OSError):
            # nvidia-smi counts in the order of addresses, and so does NVML.
            addresses = sorted(filter(None, (pci_address(path.name) for path in self._gpus_folder.iterdir())))
            self._gpus = {address: number for number, address in enumerate(addresses)}
            self._own = own_gpus(self._gpus_folder, self._environ)
        if not self._gpus:
            return
        try:
            self._fd = os.open(self._kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with contextlib.suppress(OSError):
                os.lseek(self._fd, 0, os.SEEK_END)
            self._hub.watch(self._fd, self._on_record)
        except OSError as error:
            self._start_dmesg(f"{self._kmsg}: {error.strerror}")

    def shutdown(self) -> None:
        """Close the descriptor, end ``dmesg``."""
        self._leave()
        if self._node is not None:
            self._node.shutdown()
        end_child(self._dmesg)

    def _leave(self) -> None:
        if self._fd >= 0:
            self._hub.unwatch(self._fd)
            if self._dmesg is None:
                os.close(self._fd)
            self._fd = -1

    # ------------------------------------------------------------ where lines come from

    def _on_record(self) -> None:
        """One record of /dev/kmsg, and those behind it: ``level,sequence,microseconds,flags;text``."""
        for _ in range(64):  # then the loop's other descriptors have their turn
            try:
                record = os.read(self._fd, _RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # older records were overwritten before they were read: go on behind
                    continue
                self._leave()
                self._lost(f"{self._kmsg}: {error.strerror}")
                return
            if not record:
                self._leave()
                self._lost(f"{self._kmsg} ended")
                return
            self._on_line(record.decode(errors="replace").partition("\n")[0])

    def _start_dmesg(self, why_not: str) -> None:
        try:
            self._dmesg = subprocess.Popen(
                self._follow, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._lost(f"{why_not}; {self._follow[0]}: {error.strerror}")
            return
        assert self._dmesg.stdout is not None
        self._fd = self._dmesg.stdout.fileno()
        os.set_blocking(self._fd, False)
        self._hub.watch(self._fd, lambda: self._on_output(why_not))

    def _on_output(self, why_not: str) -> None:
        with contextlib.suppress(BlockingIOError):
            output = os.read(self._fd, 65536)
            if not output:
                self._leave()
                self._lost(f"{why_not}; {self._follow[0]} ended")
                return
            *lines, self._buffer = (self._buffer + output).split(b"\n")
            for line in lines:
                self._on_line(line.decode(errors="replace"))

    def _lost(self, why: str) -> None:
        node, lost = self._environ.get("MUSTER_NODE"), f"{self._host}: kernel log not readable ({why})"
        if node and self._start_program is not None:
            self._log.note(f"{lost}: of its GPUs' Xids only what GKE says of node {node} is known")
            self._node = NodeConditionFollower(
                node=node, hub=self._hub, start_program=self._start_program, on_fault=self._on_fault,
                note=lambda text: self._log.note(f"{self._host}: {text}"),
            )  # fmt: skip
            self._node.start()
        else:
            self._log.note(f"{lost}, so an Xid of a GPU is not seen")

    # ------------------------------------------------------------ what they mean

    def _on_line(self, line: str) -> None:
        self._note_resets()
        fault = self._reader.read(line)
        if fault is not None:
            self._on_fault(fault)

    def _on_fault(self, fault: KernelFault) -> None:
        if self._own is not None and not self._may_be_ours(fault.device, self._own):
            self._note_foreign(fault)
            return
        self._recent.append((time.monotonic(), fault))
        self._note_resets()
        if self._last is not None and not same_burst(self._last, fault):
            self._close()
        self._last = fault
        action = fault.text if fault.number == RECOVERY_ACTION else str(fault.fatal)
        key = (fault.family, str(fault.number), fault.device, action)
        if fault.number == RECOVERY_ACTION:
            self._open.pop(key, None)  # the driver's newest word counts
        if key in self._open or len(self._open) >= _KEPT:
            return
        self._open[key] = fault
        burst = judge_burst(list(self._open.values()), self._earlier, self._own_numbers())
        if self._told is None or _graver(burst.verdict, self._told) or (burst.memory and not self._told_memory):
            self._told, self._told_memory = burst.verdict, burst.memory
            self._tell(burst)

    def _may_be_ours(self, device: str, own: frozenset[str]) -> bool:
        """Where no GPU is named, only if all are ours: no host is given up for a neighbour's error."""
        return device in own if device in self._gpus else bool(device) or own >= self._gpus.keys()

    def _note_foreign(self, fault: KernelFault) -> None:
        """Of a GPU that others use, on a machine that is shared: no fault of this run's part. Said once."""
        if (fault.device, fault.number) not in self._foreign and len(self._foreign) < _KEPT:
            self._foreign.add((fault.device, fault.number))
            if fault.device:
                where = f"on GPU {self._gpus[fault.device]} ({fault.device}), which this run does not use"
            else:
                where = "on a GPU that is not named, of which this run uses some"
            self._log.note(f"{self._host}: {fault.family} {fault.number} {where}")

    def _close(self) -> None:
        """The burst is over: what follows is another one, even where it says the same."""
        self._earlier = [*self._earlier, *self._open.values()][-_KEPT:]
        self._open, self._told, self._told_memory, self._last = {}, None, False, None

    def _note_resets(self) -> None:
        """A reset ends the burst, and what was told of it stands no longer."""
        if self._resets() != self._resets_seen:
            self._resets_seen, self._standing = self._resets(), None
            self._reader.note_reset()
            self._close()

    def standing(self) -> HostFault | None:
        """The gravest fault that was told and that no reset has followed."""
        self._note_resets()
        return self._standing

    def since(self, rank: int, since_s: float) -> tuple[Finding, ...]:
        """What was read since a (monotonic) time of the GPU of ``rank``; where that is not known, of any here."""
        faults = [fault for read_s, fault in self._recent if read_s >= since_s]
        here = self._spec().resources.ranks_per_host or 1
        if here == len(self._gpus) and self._own in (None, frozenset(self._gpus)):  # ranks and GPUs in one order
            faults = [fault for fault in faults if self._gpus.get(fault.device, rank % here) == rank % here]
        if not faults:
            return ()
        return (finding_of(judge_burst(faults, self._earlier, self._own_numbers()), host=self._host, gpus=self._gpus),)

    def _own_numbers(self) -> OwnNumbers:
        check = self._spec().check
        return OwnNumbers(ignore=frozenset(check.xid_ignore), fatal=frozenset(check.xid_fatal))

    def _tell(self, burst: Burst) -> None:
        evidence = finding_of(burst, gpus=self._gpus).message
        rank = self._rank(burst.decisive.fault)
        if rank is not None:
            evidence = f"rank {rank}: {evidence}"
        if burst.verdict.faulty:
            all_ours = self._own is None or self._own >= self._gpus.keys()
            resettable = burst.resettable(self._gpus, all_ours=all_ours)
            fault = HostFault(
                verdict=_ASKED[burst.verdict], evidence=evidence[:500], resettable=resettable, at_ns=time.monotonic_ns()
            )
            if burst.memory:
                fault = self._with_sound_step(fault)
            grave = list(_ASKED.values()).index
            if self._standing is None or grave(fault.verdict) >= grave(self._standing.verdict):
                self._standing = fault
            self._send(fault)
        else:
            whose = "the program's own" if burst.verdict is Verdict.APP else "no action"
            self._log.note(f"{self._host}: {evidence} ({whose})")

    def _with_sound_step(self, fault: HostFault) -> HostFault:
        """A rank is told to be at a step once it has taken the one before, snapshot included."""
        ranks = [one for one in self._living() if one.step >= 0]
        attempt = max((one.attempt for one in ranks), default=0)
        steps = [one.step - 1 for one in ranks if one.attempt == attempt]
        return replace(fault, sound_step=max(0, min(steps)), attempt=attempt) if steps else fault

    def _rank(self, fault: KernelFault) -> int | None:
        """The rank that the line names. In a container the numbers of its processes are not those of the log."""
        if fault.pid is None:
            return None
        try:
            outside = os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
        except OSError:
            return None
        return next((one.rank for one in self._living() if outside and one.pid == fault.pid), None)


def _graver(verdict: Verdict, than: Verdict) -> bool:
    order = list(Verdict)
    return order.index(verdict) > order.index(than)
