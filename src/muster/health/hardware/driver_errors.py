"""What Xid and SXid errors mean for a host: judged by burst, never line by line.

One fault prints several numbers (a double-bit error kills processes, whose channels are then removed: 48, 45, 45...),
so all errors of a host until three minutes of silence are one burst, judged by its gravest member. Three minutes:
NVIDIA Fleet Intelligence, "Xid bursts" (read 2026-11-22). What a reset answers is one incident until something was
reset, however often it comes: only then does the same number on the same GPU mean more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from muster.health.hardware.error_table import ErrorRow, OwnNumbers, error_rows
from muster.health.hardware.kernel_events import judge_events
from muster.health.hardware.kernel_log import RECOVERY_ACTION, Family, KernelFault, KernelLog, newest_boot
from muster.health.verdicts import Finding, Verdict

SILENCE_S = 180.0
#: How long an error counts as "the same again".
DAY_S = 86400.0
_NOTHING = OwnNumbers()


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One error and its verdict."""

    fault: KernelFault
    verdict: Verdict
    what: str
    source: str
    whole_host: bool = False
    decides: bool = True


@dataclass(frozen=True, kw_only=True)
class Burst:
    """Errors without three minutes of silence between them: one incident."""

    members: tuple[Judged, ...]
    decisive: Judged

    @property
    def verdict(self) -> Verdict:
        return self.decisive.verdict

    @property
    def memory(self) -> bool:
        """Whether the GPU's memory failed: what is computed from then on may be wrong."""
        rows = (error_rows(one.fault.family).get(one.fault.number or 0) for one in self.members)
        return any(row is not None and row.memory for row in rows)

    def resettable(self, gpus: Mapping[str, int], *, all_ours: bool = True) -> tuple[int, ...]:
        """GPUs (by number; ``gpus``: PCI address -> number) that a reset may heal; none where that is not enough, or
        where all would have to be reset and not ``all_ours``."""
        if self.verdict is not Verdict.RESET:
            return ()
        faulty = [member for member in self.members if member.verdict is Verdict.RESET]
        if any(member.whole_host for member in faulty):
            return tuple(sorted(gpus.values())) if all_ours else ()
        return tuple(sorted({gpus[member.fault.device] for member in faulty if member.fault.device in gpus}))


def judge_bursts(faults: Sequence[KernelFault], own: OwnNumbers = _NOTHING) -> tuple[Burst, ...]:
    """The bursts of one host's errors, in their order, each with its verdict."""
    found: list[Burst] = []
    several = _devices_by_number(faults)
    groups = _grouped(faults)
    for position, group in enumerate(groups):
        earlier = [fault for before in groups[:position] for fault in before]
        found.append(_judge_burst(group, earlier, own, several))
    return tuple(found)


def judge_burst(group: Sequence[KernelFault], earlier: Sequence[KernelFault], own: OwnNumbers = _NOTHING) -> Burst:
    """One burst's verdict. ``earlier``: the errors of the bursts before it."""
    return _judge_burst(group, earlier, own, _devices_by_number([*earlier, *group]))


def _judge_burst(
    group: Sequence[KernelFault],
    earlier: Sequence[KernelFault],
    own: OwnNumbers,
    several: Mapping[tuple[Family, int], int],
) -> Burst:
    earlier = [fault for fault in earlier if _within_a_day(fault, group[0])]
    members = _follow_the_driver([_judge(fault, group, earlier, own, several) for fault in group], own)
    # Equally grave: the first that decides (the cause comes before what follows from it).
    return Burst(members=tuple(members), decisive=max(members, key=_weight))


def same_burst(before: KernelFault, after: KernelFault) -> bool:
    """Whether no silence lies between two lines."""
    return _gap_s(before, after) <= SILENCE_S


def judge_kernel_log(
    log: KernelLog,
    *,
    gpus: Mapping[str, int] | None = None,
    own: OwnNumbers = _NOTHING,
    not_before_s: float | None = None,
) -> list[Finding]:
    """One finding for each incident of the log's last boot, one for what else happened to the host, and one for the
    log itself where it may be cut and holds nothing.

    ``gpus``: PCI address -> number, where known. ``not_before_s``: what is older (on the log's own clock) is not
    judged: the start of the run, or the last reset.
    """
    numbers = gpus or {}
    faults = newest_boot(log.faults, log.boots)
    if not_before_s is not None:
        faults = tuple(fault for fault in faults if fault.time_s is None or fault.time_s >= not_before_s)
    findings = [finding_of(one, gpus=numbers) for one in _incidents(judge_bursts(faults, own))]
    findings += judge_events(log, not_before_s)
    if log.unread:
        what = "a line of the driver's errors holds no number"
        findings.append(Finding("gpu.xid", Verdict.INCOMPLETE, what, evidence=log.unread))
    if findings:
        return findings
    if log.cut or not log.lines:
        what = "the last line of the kernel log has no end" if log.lines else "the kernel log is empty"
        return [Finding("gpu.xid", Verdict.INCOMPLETE, what)]
    what = f"no Xid in {log.lines} lines of the kernel log, and nothing else that is known"
    return [Finding("gpu.xid", Verdict.HEALTHY, what)]


def _incidents(bursts: Iterable[Burst]) -> list[Burst]:
    """Bursts that are one thing: the same number on one GPU without a reset between; errors of programs with
    what follows from them; notes."""
    found: dict[tuple[object, ...], Burst] = {}
    for burst in bursts:
        fault = burst.decisive.fault
        key: tuple[object, ...] = ("program" if burst.verdict is Verdict.APP or not burst.decisive.decides else "note",)
        if burst.verdict.faulty:
            key = (burst.verdict, fault.family, fault.number, fault.device, fault.resets, fault.boot)
        first = found.get(key)
        if first is not None:
            decisive = max(first.decisive, burst.decisive, key=_weight)
            burst = Burst(members=(*first.members, *burst.members), decisive=decisive)
        found[key] = burst
    return list(found.values())


def finding_of(burst: Burst, *, host: str = "", gpus: Mapping[str, int] | None = None) -> Finding:
    """The burst in one sentence, with the line that decided."""
    numbers, decisive = gpus or {}, burst.decisive
    fault = decisive.fault
    gpu = numbers.get(fault.device)
    where = fault.device and (f" on {fault.device}" if gpu is None else f" on GPU {gpu} ({fault.device})")
    counts = Counter((one.fault.family, one.fault.number) for one in burst.members)
    times = counts.pop((fault.family, fault.number))
    alike = [one.fault for one in burst.members if one.fault.number == fault.number]
    if len(devices := {one.device for one in alike}) > 1:
        gpu, where = None, f" on {len(devices)} GPUs"
    text = f"{fault.family} {fault.number}{where}" + (f", {times} times" if times > 1 else "") + f": {decisive.what}"
    if len(processes := {one.pid for one in alike if one.pid is not None}) > 1:
        text += f" ({len(processes)} processes)"
    elif fault.pid is not None:
        text += f" (process {fault.pid}{' ' + fault.process if fault.process else ''})"
    if counts:
        others = (
            f"{family} {number}" + (f" x{count}" if count > 1 else "") for (family, number), count in counts.items()
        )
        text += f"; with {', '.join(others)}"
    reset = ",".join(map(str, burst.resettable(numbers)))
    return Finding(
        check="gpu.xid" if fault.family is Family.XID else "nvswitch.sxid", verdict=burst.verdict, host=host, gpu=gpu,
        message=text, evidence=fault.line, value=str(fault.number), expected="none", source=decisive.source,
        command=f"nvidia-smi --gpu-reset -i {reset}" if reset else "",
    )  # fmt: skip


def _judge(
    fault: KernelFault,
    burst: Sequence[KernelFault],
    earlier: Sequence[KernelFault],
    own: OwnNumbers,
    several: Mapping[tuple[Family, int], int],
) -> Judged:
    if fault.family is Family.XID:
        if fault.number in own.fatal:
            return Judged(fault=fault, verdict=Verdict.REPLACE, what="named by the run file", source="check.xid_fatal")
        if fault.number in own.ignore:
            what = "ignored by the run file"
            return Judged(fault=fault, verdict=Verdict.NOTE, what=what, source="check.xid_ignore", decides=False)
        if fault.number == RECOVERY_ACTION:
            return _recovery_action(fault, earlier)
    row = error_rows(fault.family).get(fault.number)
    if fault.fatal is False and (fault.family is Family.SXID or (row is not None and row.by_line)):
        what = row.what if row else "not fatal"
        return Judged(fault=fault, verdict=Verdict.NOTE, what=f"{what}, not fatal", source="the line itself")
    if row is None:
        if fault.family is Family.SXID and fault.fatal:
            what = "fatal to a link of the switch"
            return Judged(fault=fault, verdict=Verdict.RESET, what=what, source="the line itself", whole_host=True)
        what = f"unknown {fault.family}: not in the table, so the host is not trusted"
        return Judged(fault=fault, verdict=Verdict.DRAIN, what=what, source="catalog/health: no row")
    verdict, note = _by_row(row, fault, burst, earlier, several)
    if fault.family is Family.SXID and fault.fatal and _gravity(verdict) < _gravity(Verdict.RESET):
        verdict = Verdict.RESET
    return Judged(
        fault=fault, verdict=verdict, what=row.what + note, source=row.source, decides=row.decides,
        whole_host=row.scope == "host" or fault.family is Family.SXID,
    )  # fmt: skip


def _by_row(
    row: ErrorRow,
    fault: KernelFault,
    burst: Sequence[KernelFault],
    earlier: Sequence[KernelFault],
    several: Mapping[tuple[Family, int], int],
) -> tuple[Verdict, str]:
    """(verdict, what to add to the sentence) from the row, the other errors of the burst and the earlier ones."""
    if row.beside_app is not None and any(_of_program(other) for other in burst):
        return row.beside_app, ", with an error of the program"
    # What was answered with nothing yet asks for nothing more; of a program's errors nothing is to be reset.
    before = any(_same(fault, other) and (not row.verdict.faulty or _reset_since(other, fault)) for other in earlier)
    if not before or row.if_again is row.verdict:
        return row.verdict, ""
    if row.verdict is Verdict.APP and several[fault.family, fault.number] > 1:
        return row.verdict, ""  # the program does it on every GPU
    return row.if_again, ", again within a day"


def _recovery_action(fault: KernelFault, earlier: Sequence[KernelFault]) -> Judged:
    verdict = recovery_action(fault.text.rpartition(" to ")[2])
    if verdict is None:
        verdict, what = Verdict.DRAIN, f"the driver asks for an unknown action: {fault.text[:80]}"
    elif verdict is Verdict.RESET and any(
        _same(fault, one) and "Reset" in one.text and _reset_since(one, fault) for one in earlier
    ):
        verdict, what = Verdict.REPLACE, "the driver asks for a reset again within a day"
    else:
        what = f"the driver says what is needed: {fault.text.rpartition(' to ')[2][:80]}"
    return Judged(fault=fault, verdict=verdict, what=what, source="Xid 154: the driver's own word")


def recovery_action(text: str) -> Verdict | None:
    """The driver's recovery action (Xid 154, ``GPU Recovery Action``, NVML's field) as a verdict; None: not known.

    ``0x1 (GPU Reset Required)``, ``Reset``, ``GPU_RESET``, ``PF FLR`` (a reset of the PCI function); a reboot,
    under any name, cannot be had from inside a run, so the host is replaced.
    """
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    if "reboot" in words:
        return Verdict.REPLACE
    if "drain" in words:
        return Verdict.DRAIN
    if "reset" in words or "flr" in words:
        return Verdict.RESET
    return Verdict.HEALTHY if re.search(r"\bnone\b", words) else None


def _follow_the_driver(members: list[Judged], own: OwnNumbers) -> list[Judged]:
    """Where the driver has said what a GPU needs (154), that GPU's other errors decide nothing."""
    last = {one.fault.device: one for one in members if one.fault.number == RECOVERY_ACTION and _is_xid(one)}
    out = []
    for one in members:
        word = last.get(one.fault.device)
        if word is None or one.fault.number in own.fatal or not _is_xid(one):
            out.append(one)
        elif one is word:
            hosts = any(other.whole_host and other.fault.device == one.fault.device for other in members)
            verdict = Verdict.NOTE if one.verdict is Verdict.HEALTHY else one.verdict
            out.append(Judged(fault=one.fault, verdict=verdict, what=one.what, source=one.source, whole_host=hosts))
        else:
            verdict = Verdict.APP if one.verdict is Verdict.APP else Verdict.NOTE
            out.append(Judged(fault=one.fault, verdict=verdict, what=one.what, source=one.source, decides=False))
    return out


def _is_xid(one: Judged) -> bool:
    return one.fault.family is Family.XID


def _of_program(fault: KernelFault) -> bool:
    row = error_rows(fault.family).get(fault.number)
    return row is not None and row.verdict is Verdict.APP and row.decides


def _same(fault: KernelFault, other: KernelFault) -> bool:
    return (fault.family, fault.number, fault.device) == (other.family, other.number, other.device) and bool(
        fault.device
    )


def _reset_since(before: KernelFault, after: KernelFault) -> bool:
    return before.resets < after.resets or before.boot < after.boot


def _devices_by_number(faults: Iterable[KernelFault]) -> Counter[tuple[Family, int]]:
    seen = {(fault.family, fault.number, fault.device) for fault in faults}
    return Counter((family, number) for family, number, _ in seen)


def _grouped(faults: Sequence[KernelFault]) -> list[list[KernelFault]]:
    groups: list[list[KernelFault]] = []
    for fault in faults:
        if groups and same_burst(groups[-1][-1], fault):
            groups[-1].append(fault)
        else:
            groups.append([fault])
    return groups


def _gap_s(before: KernelFault, after: KernelFault) -> float:
    """Seconds between two lines; 0 where they cannot be compared: then they are taken for one incident."""
    if before.boot != after.boot:
        return DAY_S
    if before.time_s is None or after.time_s is None or before.clock is not after.clock:
        return 0.0
    return after.time_s - before.time_s


def _within_a_day(before: KernelFault, after: KernelFault) -> bool:
    return _gap_s(before, after) < DAY_S


def _weight(one: Judged) -> tuple[bool, int]:
    return one.decides, _gravity(one.verdict)


_gravity = tuple(Verdict).index
