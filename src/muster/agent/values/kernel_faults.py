"""What the GPU driver's errors mean for this host: bursts, what is still true, what asks for a reset. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from muster.health.hardware.driver_errors import Burst, finding_of, judge_burst, same_burst
from muster.health.hardware.error_table import OwnNumbers
from muster.health.hardware.kernel_log import RECOVERY_ACTION, KernelFault, KernelLogReader
from muster.health.verdicts import Finding, Verdict
from muster.protocol.to_supervisor import HostFault

_ASKED: dict[Verdict, Literal["reset", "drain", "replace"]] = {
    Verdict.RESET: "reset",
    Verdict.DRAIN: "drain",
    Verdict.REPLACE: "replace",
}
#: Errors kept for judging bursts and repetition.
_KEPT = 512


@dataclass
class KernelFaults:
    """``gpus``: PCI address -> the driver's number. ``own``: those that this host's ranks may use; None: all."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    own: frozenset[str] | None = None
    numbers: OwnNumbers = field(default_factory=OwnNumbers)
    """Of the run file."""
    reader: KernelLogReader = field(default_factory=KernelLogReader)
    standing: HostFault | None = None
    """The gravest fault that was reported and that no reset has followed."""
    _foreign: set[tuple[str, int]] = field(default_factory=set)
    _earlier: list[KernelFault] = field(default_factory=list)
    """Errors of closed bursts, each once."""
    _open: dict[tuple[str, ...], KernelFault] = field(default_factory=dict)
    """The open burst: each error of a device once, since more of the same change no verdict."""
    _recent: deque[tuple[float, KernelFault]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """With the (monotonic) time at which each was read."""
    _last: KernelFault | None = None
    _reported: Verdict | None = None
    """Of the open burst; None: nothing was reported."""
    _reported_memory: bool = False
    """Of the open burst, that memory failed."""

    def add(self, fault: KernelFault, now_s: float) -> Burst | str | None:
        """A burst that is to be reported, or a line to note about a GPU that is not this run's; else None."""
        if self.own is not None and not self._may_be_ours(fault.device, self.own):
            return self._foreign_line(fault)
        self._recent.append((now_s, fault))
        if self._last is not None and not same_burst(self._last, fault):
            self._close()
        self._last = fault
        action = fault.text if fault.number == RECOVERY_ACTION else str(fault.fatal)
        key = (fault.family, str(fault.number), fault.device, action)
        if fault.number == RECOVERY_ACTION:
            self._open.pop(key, None)  # the driver's newest word counts
        if key in self._open or len(self._open) >= _KEPT:
            return None
        self._open[key] = fault
        burst = judge_burst(list(self._open.values()), self._earlier, self.numbers)
        is_news = self._reported is None or _graver(burst.verdict, self._reported)
        if not is_news and not (burst.memory and not self._reported_memory):
            return None
        self._reported, self._reported_memory = burst.verdict, burst.memory
        return burst

    def fault_of(self, burst: Burst, evidence: str, at_ns: int, sound: tuple[int, int] | None) -> HostFault:
        """``sound``: of an error of memory, the last step that this host's ranks had taken, and its attempt."""
        all_ours = self.own is None or self.own >= self.gpus.keys()
        resettable = burst.resettable(self.gpus, all_ours=all_ours)
        fault = HostFault(verdict=_ASKED[burst.verdict], evidence=evidence[:500], resettable=resettable, at_ns=at_ns)
        if burst.memory and sound is not None:
            fault = replace(fault, sound_step=sound[0], attempt=sound[1])
        grave = list(_ASKED.values()).index
        if self.standing is None or grave(fault.verdict) >= grave(self.standing.verdict):
            self.standing = fault
        return fault

    def note_reset(self) -> None:
        """A reset ends the burst, and clears what was reported of it."""
        self.standing = None
        self.reader.note_reset()
        self._close()

    def since(self, rank: int, since_s: float, *, ranks_here: int, host: str) -> tuple[Finding, ...]:
        """What was read since a (monotonic) time of the GPU of ``rank``; where that is not known, of any here."""
        faults = [fault for read_s, fault in self._recent if read_s >= since_s]
        if ranks_here == len(self.gpus) and self.own in (None, frozenset(self.gpus)):  # ranks and GPUs in one order
            here = rank % ranks_here
            faults = [fault for fault in faults if self.gpus.get(fault.device, here) == here]
        if not faults:
            return ()
        return (finding_of(judge_burst(faults, self._earlier, self.numbers), host=host, gpus=self.gpus),)

    def _may_be_ours(self, device: str, own: Iterable[str]) -> bool:
        """Where no GPU is named, only if all are ours: no host is given up for a neighbour's error."""
        return device in own if device in self.gpus else bool(device) or set(own) >= self.gpus.keys()

    def _foreign_line(self, fault: KernelFault) -> str | None:
        """Of a GPU that others use, on a machine that is shared: no fault of this run's part. Once."""
        if (fault.device, fault.number) in self._foreign or len(self._foreign) >= _KEPT:
            return None
        self._foreign.add((fault.device, fault.number))
        where = "on a GPU that is not named, of which this run uses some"
        if fault.device:
            where = f"on GPU {self.gpus[fault.device]} ({fault.device}), which this run does not use"
        return f"{fault.family} {fault.number} {where}"

    def _close(self) -> None:
        """The burst is over: what follows is another one, even where it says the same."""
        self._earlier = [*self._earlier, *self._open.values()][-_KEPT:]
        self._open, self._reported, self._reported_memory, self._last = {}, None, False, None


def _graver(verdict: Verdict, than: Verdict) -> bool:
    order = list(Verdict)
    return order.index(verdict) > order.index(than)
