"""RDMA ports: ``ibstat``, or the files under ``/sys/class/infiniband``, and two readings of their counters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from muster.health.verdicts import Finding, Verdict

#: Counters that grow only where something is wrong: of ports that run RoCE (``_OF_PACKETS``), and of every port.
#: ``np_cnp_sent`` and its like mean congestion, which is no fault. Names: Linux, Documentation/ABI/stable/
#: sysfs-class-infiniband; NVIDIA, understanding mlx5 counters.
_OF_PACKETS = ("packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans")
_FAULTY = ("symbol_error", "port_rcv_errors", "local_link_integrity_errors", *_OF_PACKETS)
_LINK_DOWNED = "link_downed"
#: What is read twice.
COUNTERS = (_LINK_DOWNED, *_FAULTY)
#: Ports of one kind from which the kind counts as the data network: fewer are storage or management.
_MANY = 4
_SYSFS = re.compile(r"(?:.*/)?infiniband/([^/\s]+)/(?:ports/(\d+)/)?([a-z_A-Z0-9/]+)")
_IBSTATUS = re.compile(r"^Infiniband device '([^']+)' port (\d{1,6}) status:")


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of one adapter."""

    adapter: str
    port: int
    kind: str = ""
    """Model of the adapter (``MT4129``)."""
    state: str = ""
    """Active, Down, Initializing..."""
    physical: str = ""
    """LinkUp, Polling, Disabled..."""
    rate: int | None = None
    """Gbit/s."""
    link_layer: str = ""
    """InfiniBand or Ethernet."""

    @property
    def up(self) -> bool:
        return self.state.lower() == "active" and self.physical.lower() in ("linkup", "")

    @property
    def name(self) -> str:
        return f"{self.adapter}/{self.port}"


@dataclass(frozen=True, kw_only=True)
class Ports:
    """All ports of a host."""

    ports: tuple[Port, ...]
    source: str
    missing: str = ""
    """Why the report is not whole; empty: it is, as far as one can tell (it names no total)."""


def is_ibstat(text: str) -> bool:
    return re.search(r"^CA '[^']+'\s*$|^ib(?:panic|warn|error): ", text, re.MULTILINE) is not None


def read_ibstat(text: str) -> Ports:
    """``ibstat``. Never raises. It names no total, so one that is cut between two adapters looks whole.

    It ends at an adapter that it cannot read (``ibpanic``), or passes it over (``ibwarn``: rdma-core from 55 on).
    """
    ports: list[Port] = []
    refused = re.search(r"^ib(?:panic|warn|error): .*", text, re.MULTILINE)
    missing = refused[0].strip() if refused else ""
    blocks = re.split(r"^CA '([^']*)'[ \t]*$", text, flags=re.MULTILINE)
    for adapter, block in zip(blocks[1::2], blocks[2::2], strict=True):
        head, *parts = re.split(r"^\s*Port (\d{1,6}):[ \t]*$", block, flags=re.MULTILINE)
        numbers, bodies = parts[::2], parts[1::2]
        announced = _field(head, "Number of ports")
        if announced != str(len(numbers)):
            shown = f"{adapter} has {announced or 'an unknown number of'} ports, and {len(numbers)} are shown"
            missing = missing or shown
            if len(set(numbers)) < len(numbers):
                continue  # two adapters in one: the line between them is lost
        for number, body in zip(numbers, bodies, strict=True):
            one = Port(
                adapter=adapter, port=int(number), kind=_field(head, "CA type"), state=_field(body, "State"),
                physical=_field(body, "Physical state"), rate=_rate(_field(body, "Rate")),
                link_layer=_field(body, "Link layer"),
            )  # fmt: skip
            if one.link_layer not in ("InfiniBand", "Ethernet") or not (one.state and one.physical):
                missing = missing or f"port {number} of {adapter} is not whole"
            else:
                ports.append(one)
    if not text.endswith(("\n", "InfiniBand", "Ethernet")):
        missing = missing or "the last line is cut"
    return Ports(ports=tuple(ports), source="ibstat", missing=missing or ("" if ports else "there is no port in it"))


def is_sysfs(text: str) -> bool:
    """Whether lines of it are what ``grep -r . /sys/class/infiniband`` or ``ibstatus`` prints."""
    return bool(files_of_listing(text + "\n"))


def read_sysfs(files: Mapping[str, str]) -> Ports:
    """From paths under ``/sys/class/infiniband`` (whole, or from ``infiniband/`` on) to their text."""
    values: dict[tuple[str, int], dict[str, str]] = {}
    kinds: dict[str, str] = {}
    for path, text in files.items():
        match = _SYSFS.fullmatch(path)
        if match and match[2] and len(match[2]) < 7:
            values.setdefault((match[1], int(match[2])), {})[match[3]] = text.strip()
        elif match and match[3] == "hca_type":
            kinds[match[1]] = text.strip()
    ports, missing = [], ""
    for (adapter, number), found in sorted(values.items()):
        if lacking := {"state", "phys_state", "rate"} - found.keys():
            missing = missing or f"port {number} of {adapter} has no {min(lacking)}"
        if "state" in lacking or "phys_state" in lacking:
            continue
        ports.append(
            Port(
                adapter=adapter, port=number, kind=kinds.get(adapter, ""), state=_named(found.get("state", "")),
                physical=_named(found.get("phys_state", "")), rate=_rate(found.get("rate", "")),
                link_layer=found.get("link_layer", ""),
            )
        )  # fmt: skip
    return Ports(ports=tuple(ports), source="/sys/class/infiniband", missing=missing)


def files_of_listing(text: str) -> dict[str, str]:
    """The files that ``grep -r . /sys/class/infiniband`` printed, one ``path:text`` a line, or those of which
    ``ibstatus`` tells. A cut line is left out."""
    found, folder = {}, ""
    for line in text.split("\n")[:-1]:
        path, _, value = line.partition(":")
        if match := _IBSTATUS.match(line):
            folder = f"infiniband/{match[1]}/ports/{match[2]}/"
        elif _SYSFS.fullmatch(path):
            found[path] = value
        elif folder and path.strip() in ("state", "phys state", "rate", "link_layer"):
            found[folder + path.strip().replace(" ", "_")] = value.strip()
    return found


def judge_ports(
    found: Ports, *, expected: int | None = None, rate: int | None = None, source: str = ""
) -> list[Finding]:
    """Findings on every port that is not as it should be; one HEALTHY finding where all are.

    ``expected`` ports of ``rate`` Gbit/s, as the machine's row says; with 0 there need be none. Without it the ports
    are compared with their like: of the commonest model (four at least) the few that are down are faulty.
    """
    out: list[Finding] = []
    if found.missing:
        out.append(Finding("net.port", Verdict.INCOMPLETE, f"{found.source}: {found.missing}"))
    if expected is not None:
        working = [port for port in found.ports if port.up and (rate is None or (port.rate or 0) >= rate)]
        if len(working) < expected and not found.missing:
            speed = f" at {rate} Gbit/s" if rate else ""
            others = ", ".join(_told(port) for port in found.ports if port not in working) or "none besides"
            out.append(
                Finding(
                    check="net.port", verdict=Verdict.REPLACE, evidence=others, value=str(len(working)),
                    message=f"{len(working)} of {expected} ports work{speed}", expected=str(expected), source=source,
                )
            )  # fmt: skip
    else:
        out += [one for one in _among_like(found.ports)]
    if not out:
        rates = Counter(port.rate for port in found.ports if port.up)
        speeds = ", ".join(f"{count} at {speed} Gbit/s" for speed, count in rates.most_common())
        message = f"{sum(rates.values())} ports work ({speeds})" if rates else "no RDMA port, and none is needed"
        out.append(Finding(check="net.port", verdict=Verdict.HEALTHY, message=message))
    return out


def _among_like(ports: Sequence[Port]) -> Iterator[Finding]:
    kinds = Counter(port.kind for port in ports)
    commonest = max(kinds, key=lambda kind: kinds[kind], default="")
    like = [port for port in ports if port.kind == commonest]
    down = [port for port in like if not port.up]
    fastest = max((port.rate or 0 for port in like if port.up), default=0)
    source = "compared with the others of its model"
    for port in ports:
        data = port.kind == commonest and len(like) >= _MANY
        if not port.up:
            verdict = (Verdict.REPLACE if 2 * len(down) < len(like) else Verdict.INCOMPLETE) if data else Verdict.NOTE
            message = f"port {port.name} is down ({port.physical or port.state or 'no state'})"
            if verdict is Verdict.INCOMPLETE:
                message += ", as most are: whether they should be up is not known"
            yield Finding(
                check="net.port", verdict=verdict, message=message, evidence=_told(port),
                value=port.state, expected="Active", source=source,
            )  # fmt: skip
        elif data and port.rate is not None and port.rate < fastest:
            message = f"port {port.name} runs at {port.rate} Gbit/s, and others of its model at {fastest}"
            yield Finding(
                check="net.port", verdict=Verdict.DRAIN, message=message, evidence=_told(port),
                value=str(port.rate), expected=str(fastest), source=source,
            )  # fmt: skip


def judge_counters(
    before: Mapping[str, str], after: Mapping[str, str], *, seconds: float, idle: bool = True
) -> list[Finding]:
    """From two readings of the sysfs files (as for ``read_sysfs``), ``seconds`` apart.

    ``idle``: nothing of ours loads the network, where errors of packets are no congestion's; else they are noted.
    """
    out = []
    for path, text in after.items():
        match = _SYSFS.fullmatch(path)
        name = match[3].rpartition("/")[2] if match else ""
        old, new = before.get(path, "").strip(), text.strip()
        if not match or not re.fullmatch(r"\d{1,20}", old) or not re.fullmatch(r"\d{1,20}", new):
            continue
        grown = int(new) - int(old)
        if grown > 0 and (name == _LINK_DOWNED or name in _FAULTY):
            verdict = Verdict.DRAIN if idle or name not in _OF_PACKETS else Verdict.NOTE
            what = "lost its link" if name == _LINK_DOWNED else f"counted errors ({name})"
            message = (
                f"port {match[1]}/{match[2]} {what} {grown} {'time' if grown == 1 else 'times'} in {seconds:.1f} s"
            )
            out.append(
                Finding(
                    check="net.counters", verdict=verdict, message=message, value=str(grown),
                    evidence=f"{path}: {old}, then {new}", expected="0", source="mlx5 counters",
                )
            )  # fmt: skip
    return out


def _told(port: Port) -> str:
    return f"{port.name} {port.kind}: {port.state}, {port.physical}, {port.rate} Gbit/s"


def _field(text: str, name: str) -> str:
    match = re.search(rf"^\s*{name}:[ \t]*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _rate(text: str) -> int | None:
    match = re.match(r"(\d{1,6})(?:\.\d+)?\b", text)
    return int(match[1]) if match else None


def _named(text: str) -> str:
    """``4: ACTIVE`` -> Active, ``5: LinkUp`` -> LinkUp."""
    name = text.partition(":")[2].strip() or text
    return name.capitalize() if name.isupper() else name
