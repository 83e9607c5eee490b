"""The GPU driver's error lines in a kernel log: Xid (GPU), SXid (NVSwitch) and "fallen off the bus".

Reads what ``/dev/kmsg``, ``dmesg`` (plain, ``-T``, ``--time-format iso``, ``-x``), ``journalctl -k`` (short, iso,
monotonic) and syslog files hold. Old drivers print ``Xid (0000:03:00): 14`` without ``PCI:``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class Family(StrEnum):
    XID = "Xid"
    SXID = "SXid"


class Clock(StrEnum):
    """What a line's time can be compared with."""

    BOOT = "boot"  # seconds since this boot
    WALL = "wall"  # Unix seconds
    LOCAL = "local"  # of a zone, or even a year, that the line does not name: only differences mean something


@dataclass(frozen=True, kw_only=True)
class KernelFault:
    """One error line of the driver."""

    family: Family
    number: int
    device: str
    """PCI address, normalised (``0000:9b:00.0``); empty where the line names none."""
    text: str
    """What follows the number."""
    line: str
    time_s: float | None = None
    clock: Clock = Clock.BOOT
    boot: int = 0
    """Which of the log's boots the line belongs to, from 0."""
    pid: int | None = None
    process: str = ""
    fatal: bool | None = None
    """What the line says itself; None: nothing."""
    resets: int = 0
    """How often the GPU was reset before this line, as far as is known."""


@dataclass(frozen=True, kw_only=True)
class KernelMessage:
    """One line without its prefixes. ``time_s``: on ``clock``; None: the line has none."""

    text: str
    line: str
    time_s: float | None = None
    clock: Clock = Clock.BOOT
    boot: int = 0


@dataclass(frozen=True, kw_only=True)
class KernelLog:
    """A kernel log, read."""

    faults: tuple[KernelFault, ...]
    messages: tuple[KernelMessage, ...] = ()
    boots: int = 1
    unread: str = ""
    """A line that begins as an error's but holds no number."""
    cut: bool = False
    """The last line has no end, and may be cut."""
    lines: int = 0


#: More than any record of the kernel's (CONSOLE_EXT_LOG_MAX) with its prefixes.
_LONGEST = 16384
_KMSG = re.compile(r"(\d+),\d+,(\d+),[^;]*;")
_SINCE_BOOT = re.compile(r"(?:<\d+>)?\[ *(\d+\.\d+)(?: <[^>]*>)?\](?: ?\[ *[CT]\d+\])? *")
_LOCAL = re.compile(r"\[(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4})\] ?")
_ISO = re.compile(
    r"(?:\w{3} )?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d+))?(Z|[+-]\d\d:?\d\d| UTC)?(?: (?:GMT|[A-Z]{1,4}T))? +"
)
_SHORT = re.compile(r"(?:\w{3} )?(?:\d{4} )?(\w{3} +\d+ \d\d:\d\d:\d\d)(?:\.(\d+))?(?: \d{4})? +")
#: Levels, the facility, a host and the kernel's name, times since the line before, the file that grep names, a quoted
#: or numbered line, and a record in JSON (journalctl, Cloud Logging).
_UNTIMED = re.compile(
    r"<\d+>\d? ?|(?:kern|user|daemon|syslog) *:\w+ *: ?|(?:\S+ ){0,2}kernel(?:\[\d+\])?(?:: ?| - - - )"
    r"|\[(?:[A-Z][a-z]{2}\d\d \d\d:\d\d| *\+[\d.]+)\] ?"
    r"|message repeated \d+ times: \[ ?|[\w.-]+ (?=NVRM: |nvidia-nvswitch\d)"
    r"|[\w./-]+(?:\.(?:log|txt)|dmesg|syslog|messages)(?:\.\d+)?:(?:\d+:)?"
    r'|> ?|\d+[:\t] *(?=[\[<A-Z])|[\w.-]+ *\| *(?=[\[<])|(?:\{.*?)?"(?:MESSAGE|message|textPayload)" *: *"'
)

_PCI = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?"
_XID = re.compile(rf"(?:NVRM: )?Xid \((?:PCI:)?({_PCI})\): (\d+)(?![\w.])[, ]*(.*)")
#: Some drivers and tools leave the address out.
_BARE_XID = re.compile(r"NVRM: Xid:? (\d+)(?![\w.])[, ]*(.*)")
_SXID = re.compile(rf"(?:nvidia-nvswitch\d+: )SXid \(PCI:({_PCI})\): (\d+)(?![\w.])[, ]*(.*)")
_LOOSE = re.compile(rf"(?:NVRM: |\b)(S?Xid) \((?:PCI:)?({_PCI})\): (\d+)(?![\w.])[, ]*([^\n]*)")
_BEGINS = re.compile(r"NVRM: Xid\b|nvidia-nvswitch\d+: SXid\b")
_OFF_THE_BUS = re.compile(r"NVRM: (.*fallen off the bus.*)")
_GPU_NAMED = re.compile(rf"NVRM: .*\bGPU (?:at PCI:)?({_PCI})")
_BOOT = re.compile(r"Linux version \d|-- Boot [0-9a-f]{32}")
_PID = re.compile(r"\bpid='?(\d+)")
_PROCESS = re.compile(r"\bname=([^,]+)")
_FATAL = re.compile(r"\b(Non-?)?fatal\b", re.IGNORECASE)
#: A GPU's reset: the kernel's own words, NVSentinel's, and the driver's when it is loaded.
_RESET = re.compile(rf"(?:\S+ )?({_PCI}): (?:reset done|resetting)\b|GPU reset executed|NVRM: loading NVIDIA")
#: Xid 154: what the driver says that the GPU needs.
RECOVERY_ACTION = 154
#: The number of "fallen off the bus", which some lines leave out.
OFF_THE_BUS = 79


def pci_address(text: str) -> str:
    """``00000000:9B:00.0`` (nvidia-smi) and ``0000:9b:00`` (kernel) are both ``0000:9b:00.0``; "" for no address."""
    if not re.fullmatch(_PCI, text.strip()):
        return ""
    domain, bus, rest = text.strip().split(":")
    device, _, function = rest.partition(".")
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{int(function or '0', 16):x}"


def looks_stamped(text: str) -> bool:
    """Whether most of its lines begin as those of a kernel log do."""
    lines = [line for line in text.splitlines() if line.strip()]
    stamped = sum(bool(_KMSG.match(line) or _SINCE_BOOT.match(line) or _LOCAL.match(line)) for line in lines)
    named = sum(" kernel: " in line for line in lines)
    return 2 * max(stamped, named) > len(lines) > 0


def read_kernel_log(text: str) -> KernelLog:
    """Every error line of the GPU driver in ``text``, and all messages. Never raises.

    A line without an end is read, too, unless its number may be cut.
    """
    reader, unread = KernelLogReader(), ""
    lines = text.split("\n")
    cut = bool(lines[-1].strip())
    faults, messages = [], []
    for number, line in enumerate(lines, 1):
        fault = reader.read(line)
        if reader.message is not None:
            messages.append(reader.message)
        if fault is not None and cut and number == len(lines) and not fault.text:
            unread = line.strip()
        elif fault is not None:
            faults.append(fault)
    return KernelLog(
        faults=tuple(faults), messages=tuple(messages), boots=reader.boot + 1,
        unread=unread or reader.unread, cut=cut, lines=sum(bool(line.strip()) for line in lines),
    )  # fmt: skip


class KernelLogReader:
    """Reads one whole line after the other, as they come from a log that is followed."""

    def __init__(self) -> None:
        self.boot = 0
        self.unread = ""
        self.message: KernelMessage | None = None
        """Of the line that was read last."""
        self._seen_any = False
        self._named = ""
        self._resets: Counter[str] = Counter()

    def note_reset(self, device: str = "") -> None:
        """The GPU was reset; without an address all were."""
        self._resets[device] += 1

    def read(self, line: str) -> KernelFault | None:
        """The fault that this line reports, if it does."""
        message, time_s, clock = _message(line[:_LONGEST].rstrip("\r\n"))
        self.message = None
        if not message:
            return None
        if _BOOT.match(message):
            self.boot += self._seen_any
        self._seen_any = True
        self.message = KernelMessage(text=message, line=line.strip(), time_s=time_s, clock=clock, boot=self.boot)
        if reset := _RESET.match(message):
            self.note_reset(pci_address(reset[1] or ""))
        named = _GPU_NAMED.match(message)
        if named:
            self._named = pci_address(named[1])
        found = self._found(message)
        if found is None:
            if _BEGINS.match(message):
                self.unread = line.strip()
            return None
        family, device, number, text = found
        pid, process, fatal = (pattern.search(text) for pattern in (_PID, _PROCESS, _FATAL))
        resets = self._resets[device] + (self._resets[""] if device else 0)
        if number == RECOVERY_ACTION and re.search(r" to 0x0\b.*None", text):  # it has been reset
            self.note_reset(device)
        return KernelFault(
            family=family, number=number, device=device, text=text, line=line.strip(), time_s=time_s, clock=clock,
            boot=self.boot, pid=int(pid[1]) if pid else None, process=process[1].strip() if process else "",
            fatal=None if fatal is None else fatal[1] is None, resets=resets,
        )  # fmt: skip

    def _found(self, message: str) -> tuple[Family, str, int, str] | None:
        if match := _XID.match(message):
            return Family.XID, pci_address(match[1]), int(match[2][:9]), match[3]
        if match := _SXID.match(message):
            return Family.SXID, pci_address(match[1]), int(match[2][:9]), match[3]
        if match := _BARE_XID.match(message):
            return Family.XID, "", int(match[1][:9]), match[2]
        if match := _OFF_THE_BUS.match(message):
            address = re.search(_PCI, match[1])  # the text may go over several lines: then an earlier one names it
            return Family.XID, pci_address(address[0]) if address else self._named, OFF_THE_BUS, match[1]
        return None


def in_text(text: str) -> tuple[KernelFault, ...]:
    """Faults anywhere in free text, such as an exception's message, where a line need not begin with them.

    The GPU's address must be next to the number: databases have a thing called xid, too.
    """
    return tuple(
        KernelFault(
            family=Family(match[1]), number=int(match[3][:9]), device=pci_address(match[2]), text=match[4],
            line=match[0], fatal=None if (fatal := _FATAL.search(match[4])) is None else fatal[1] is None,
        )
        for match in _LOOSE.finditer(text)
    )  # fmt: skip


def _message(line: str) -> tuple[str, float | None, Clock]:
    """(the kernel's message, its time, what the time counts from). Prefixes stack: syslog keeps the kernel's own."""
    time_s, clock, rest = None, Clock.BOOT, line.lstrip()
    for _ in range(6):
        stamp = _stamp(rest)
        if stamp is not None:
            at_s, of, rest = stamp
            if time_s is None or clock is Clock.LOCAL:
                time_s, clock = at_s, of
        elif match := _UNTIMED.match(rest):
            rest = rest[match.end() :]
        else:
            break
    return rest, time_s, clock


def _stamp(rest: str) -> tuple[float, Clock, str] | None:
    if match := _KMSG.match(rest):
        # Eight times the facility and the level: a program can write to /dev/kmsg, but never as the kernel (facility 0;
        # Documentation/ABI/testing/dev-kmsg). What it writes is no evidence.
        kernels = len(match[1]) == 1 and int(match[1]) < 8
        return int(match[2][:15]) / 1e6, Clock.BOOT, rest[match.end() :] if kernels else ""
    if match := _SINCE_BOOT.match(rest):
        return float(match[1]), Clock.BOOT, rest[match.end() :]
    try:
        if match := _LOCAL.match(rest):
            at = datetime.strptime(f"{match[1]} +0000", "%a %b %d %H:%M:%S %Y %z")
            return at.timestamp(), Clock.LOCAL, rest[match.end() :]
        if match := _ISO.match(rest):
            at = datetime.fromisoformat(match[1].replace(" ", "T") + ((match[3] or "+00:00").replace(" UTC", "+00:00")))
            return at.timestamp() + _part(match[2]), Clock.WALL if match[3] else Clock.LOCAL, rest[match.end() :]
        if match := _SHORT.match(rest):  # no year: any leap year will do
            at = datetime.strptime(f"1972 {match[1]} +0000", "%Y %b %d %H:%M:%S %z")
            return at.timestamp() + _part(match[2]), Clock.LOCAL, rest[match.end() :]
    except ValueError:  # digits that are no date
        return None
    return None


def _part(digits: str | None) -> float:
    return float(f"0.{digits}") if digits else 0.0


def newest_boot(faults: Iterable[KernelFault], boots: int) -> tuple[KernelFault, ...]:
    """Those of the log's last boot: a reboot has cleared earlier faults, or they will show again."""
    return tuple(fault for fault in faults if fault.boot == boots - 1)
