"""One look at a run on Compute Engine, said in a sentence: which request waits, how far each machine has come, and why.

Pure, but for ``look``, which reads.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from muster.backends.bucket_launcher import ended_with
from muster.backends.gce.compute import Compute
from muster.backends.gce.machine import FOLDER
from muster.backends.gce.placement import Placement
from muster.backends.gce.provision import AGAIN_S, Instance, instances_of
from muster.backends.google.request_log import ASKED, MADE, NOTHING, RequestLog, RequestLogFile
from muster.core.errors import MusterError
from muster.core.protocols import Store
from muster.core.typed_json import Unreadable, decode, text
from muster.core.types import JobState, JobStatus
from muster.protocol.lease import EndRecord, HomeStatus
from muster.storage import uris

STATUS = "status.json"
STALE_S = 180.0
"""A supervisor that works writes its status twice a minute."""
SETTLES_S = 600.0
"""Hosts find a new supervisor in seconds; those that gave up waiting for one start again after two minutes."""
SILENT_S = 900.0
"""Google notices a dead host after 90 s at least and starts it again elsewhere; its start-up takes minutes."""
FAILED_S = 180.0
"""systemd starts what failed again: some failures (a grant that does not hold yet) pass."""
CREATED, BOOTED, DRIVER, AGENT, CHECKED, JOINED = "created", "booted", "driver", "agent", "checked", "joined"
FAILED = "failed"
LIMITS_S = {CREATED: 600.0, BOOTED: 300.0, DRIVER: 960.0, AGENT: 1200.0, CHECKED: 300.0, JOINED: 180.0}
"""Of the driver and the software the script itself gives up after 900 s each, with a reason of its own."""
OBJECTS = {BOOTED: "booted", DRIVER: "driver", AGENT: "started", CHECKED: "checked"}
"""Stage -> its object's name below the machine's folder."""
LATE = {
    CREATED: "the request has not made it a machine yet",
    BOOTED: "its start-up script has reported nothing: no way to Cloud Storage (Private Google Access, or an external "
    "address), no objectUser role on the bucket for its account, or no start (its serial port shows why)",
    DRIVER: "nvidia-smi does not show its GPUs: the image installs its driver at the first boot, or cannot",
    AGENT: "the bundle is still being fetched or installed",
    CHECKED: "its program has not read the run's files and secrets: the journal of muster.service shows why",
    JOINED: "its agent does not reach the supervisor, or is not reached: is there a firewall rule that lets the "
    "subnetwork's own addresses in?",
}


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What is there."""

    log: RequestLog | None
    machines: Sequence[Instance]
    reported: Mapping[str, Mapping[str, tuple[float, str]]] = field(default_factory=dict)
    """Machine -> what it reported of its newest boot."""
    connected: frozenset[str] = frozenset()
    """Hosts whose agents the supervisor knows."""


@dataclass(kw_only=True)
class Useless:
    """Which machines run and will never be of use: they said that their start failed, are late, or fell silent.

    Nothing is said while there is no supervisor to join: its program has just started, or reports nothing.
    Not for several threads.
    """

    placement: Placement
    store: Store
    wall_s: Callable[[], float]
    up_s: Callable[[], float]
    """For how long the supervisor's program has been running; 0: it does not."""
    _joined: set[str] = field(default_factory=set)
    _silent_s: dict[str, float] = field(default_factory=dict)

    def __call__(self, machines: Sequence[Instance]) -> dict[str, str]:
        """Machine -> reason."""
        now_s, status = self.wall_s(), _status(self.placement, self.store)
        if status is None or now_s - status.wall_ns / 1e9 > STALE_S or self.up_s() < SETTLES_S:
            return {}
        connected = _connected(status)
        found = {}
        for one in (one for one in machines if one.status == "RUNNING"):
            if one.name in connected:
                self._joined.add(one.name)
                self._silent_s.pop(one.name, None)
            elif reason := self._reason(one, now_s):
                found[one.name] = reason
        return found

    def _reason(self, machine: Instance, now_s: float) -> str | None:
        reported = _reported(self.store, self.placement.home, machine.name)
        if machine.name in self._joined:
            since_s = self._silent_s.setdefault(machine.name, now_s)
            if all(at_s <= since_s for at_s, _ in reported.values()):
                silent = f"its agent fell silent {now_s - since_s:.0f} s ago, and the machine runs"
                return silent if now_s - since_s > SILENT_S else None
            self._joined.discard(machine.name)  # it has booted again: its start is looked at
            del self._silent_s[machine.name]
        looked = Looked(log=None, machines=(machine,), reported={machine.name: reported})
        rows = stages_of(looked, machine, now_s)
        wrong = next((row for row in rows if row.state in ("failed", "late")), None)
        if wrong is None or (wrong.state == "failed" and now_s - (wrong.since_s or now_s) < FAILED_S):
            return None
        return sentence(rows, now_s)


def look(placement: Placement, compute: Compute, store: Store, file: RequestLogFile) -> Looked:
    """Raises MusterError: Google or the home does not answer."""
    log, _ = file.read()
    machines = instances_of(compute, placement.stem)
    status = _status(placement, store)
    connected = _connected(status) if status is not None else frozenset()
    starting = [one.name for one in machines if one.lives and one.name not in connected]
    reported = {name: _reported(store, placement.home, name) for name in starting}
    return Looked(log=log, machines=machines, reported=reported, connected=connected)


def _status(placement: Placement, store: Store) -> HomeStatus | None:
    try:
        return decode(HomeStatus, store.get(uris.join(placement.home, STATUS)).data)
    except (FileNotFoundError, Unreadable):
        return None


def _connected(said: HomeStatus) -> frozenset[str]:
    return frozenset(name for name, host in said.status.hosts.items() if host.connected)


def _reported(store: Store, home: str, name: str) -> dict[str, tuple[float, str]]:
    """Of the newest boot: the one with the last report."""
    boots: dict[str, dict[str, tuple[float, str]]] = {}
    try:
        for uri in store.list(uris.join(home, FOLDER, name) + "/"):
            boot, _, stage = uri.rpartition("/")[2].rpartition(".")
            boots.setdefault(boot, {})[stage] = read_report(store.get(uri).data.decode(errors="replace"))
    except (MusterError, FileNotFoundError):
        return {}
    return max(boots.values(), key=lambda rows: max(at for at, _ in rows.values()), default={})


def stages_of(looked: Looked, machine: Instance, now_s: float) -> list[Stage]:
    """How far ``machine``'s start has come."""
    reported = looked.reported.get(machine.name, {})
    asked_s = _seconds(text(machine.row, "creationTimestamp")) or now_s
    runs = machine.status == "RUNNING"
    began_s = (_seconds(text(machine.row, "lastStartTimestamp")) or asked_s) if runs else None
    # A supervisor joins nothing: it is done when its program has what it needs.
    joined = machine.name in looked.connected or (not machine.request_number and CHECKED in reported)
    return tree(began_s, reported, asked_s=asked_s, joined=joined, now_s=now_s)


def explain(looked: Looked, placement: Placement, end: EndRecord | None, now_s: float) -> JobStatus:
    """The run's state, and the reason for it."""
    machines, log = looked.machines, looked.log
    tasks = {_task(placement, one): _machine_text(looked, one, now_s) for one in machines}
    if end is not None:
        return ended_with(end, tasks)
    if log is None:
        return JobStatus(state=JobState.ABSENT, reason="nothing was asked for", tasks=tasks)
    if log.closed:
        left = f"; {len(machines)} of its machines are being removed" if machines else ""
        return JobStatus(state=JobState.STOPPED, reason=f"it was taken down{left}", tasks=tasks)
    supervisor = next((one for one in machines if one.name == placement.supervisor), None)
    hosts = [one for one in machines if one.request_number and one.lives]
    joined = [one for one in hosts if one.name in looked.connected]
    if supervisor is None or not supervisor.lives:
        again = "muster submit makes it"
        if not hosts:
            return JobStatus(state=JobState.ABSENT, reason=f"no machine of it is there; {again}", tasks=tasks)
        reason = f"the supervisor's machine is gone, and {len(hosts)} hosts are there and billed; {again}"
        return JobStatus(state=JobState.WAITING, reason=reason, tasks=tasks)
    state = JobState.RUNNING if joined else JobState.WAITING
    if len(joined) >= placement.hosts:
        return JobStatus(state=state, reason=f"running: {_hosts(len(joined))} and the supervisor", tasks=tasks)
    parts = [f"{len(joined)} of {_hosts(placement.hosts)} joined"] if joined else []
    parts += _late(looked, supervisor, [one for one in hosts if one not in joined], now_s)
    if log.given_up:
        newest = log.given_up[-1]
        parts.append(f"{len(log.given_up)} machines were given up, the last one {newest.name}: {newest.reason}")
    parts += _asked(log, placement, len(hosts), now_s)
    return JobStatus(state=state, reason="; ".join(parts) or "waiting for the supervisor to ask for hosts", tasks=tasks)


def _late(looked: Looked, supervisor: Instance, hosts: Sequence[Instance], now_s: float) -> list[str]:
    """The supervisor while it starts, else the host that is furthest behind."""
    rows = stages_of(looked, supervisor, now_s)
    if rows[-1].state != "done" and not hosts:
        return [f"{supervisor.name}: {sentence(rows, now_s)}"]
    starting = [(stages_of(looked, one, now_s), one) for one in hosts]
    starting.sort(key=lambda pair: _badness(pair[0]))
    for rows, one in starting[:1]:
        more = f" (and {len(starting) - 1} more)" if len(starting) > 1 else ""
        return [f"{one.name}: {sentence(rows, now_s)}{more}"]
    return []


def _badness(rows: Sequence[Stage]) -> tuple[bool, bool, int]:
    """What failed first, then what is late, then who has come the least far."""
    states = [row.state for row in rows]
    return "failed" not in states, "late" not in states, states.count("done")


def _asked(log: RequestLog, placement: Placement, living: int, now_s: float) -> list[str]:
    """What the newest request does, or why none is under way."""
    last = log.last
    if last is None or living >= placement.hosts:
        return []
    what = f"{last.count} x {placement.machine.name}"
    for_s = max(0.0, now_s - last.asked_s)
    if last.state == ASKED:
        reason = f", {last.reason}" if last.reason else ""
        return [f"{last.where} was asked for {what} {for_s:.0f} s ago{reason}"]
    if last.state == NOTHING:
        return [f"{last.where} has not given {what}: {last.reason}; zones are asked again within {AGAIN_S:.0f} s"]
    return [] if last.state != MADE else [f"{placement.hosts - living} of {placement.hosts} hosts are to be replaced"]


def _machine_text(looked: Looked, machine: Instance, now_s: float) -> str:
    where = f"{machine.name} in {machine.zone}, {machine.status}"
    if not machine.lives:
        return where
    return f"{where}; {sentence(stages_of(looked, machine, now_s), now_s)}"


def _task(placement: Placement, machine: Instance) -> str:
    return "supervisor" if machine.name == placement.supervisor else machine.name.removeprefix(f"{placement.stem}-")


def _hosts(count: int) -> str:
    return "1 host" if count == 1 else f"{count} hosts"


def _seconds(stamp: str) -> float | None:
    """Of Google's time stamp; None: there is none."""
    try:
        return datetime.datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One row of the tree: a machine's start as a person follows it.

    Compute Engine reports the first; the start-up script and the program after it put the others into the run's home.
    Exit codes of scripts are shown nowhere, so a stage that does not come is all there is to see.
    """

    name: str
    state: str
    """``done``, ``waiting``, ``late``, ``failed``, or ``-``: one before it is not done."""
    since_s: float | None = None
    """Seconds since 1970: when it was done, or when it could begin."""
    limit_s: float = 0.0
    text: str = ""
    """What the machine reported of it, or why it is late or failed."""


def tree(
    created_s: float | None, reported: Mapping[str, tuple[float, str]], *, asked_s: float, joined: bool, now_s: float
) -> list[Stage]:
    """The stages of one machine, in order.

    ``created_s``: when it began to run, None before; ``reported``: its objects in the home since its newest boot, by
    stage, with their times; ``asked_s``: when it was asked for. Times are seconds since 1970, and machines' own.
    """
    done = {CREATED: (created_s, "") if created_s is not None else None}
    done |= {stage: reported.get(name) for stage, name in OBJECTS.items()}
    # A later stage that was reported proves those before it: the bucket may have lost an object that was overwritten.
    found, before_s, open_ = [], asked_s, True
    reached = JOINED if joined else next((one for one in reversed(LIMITS_S) if done.get(one)), None)
    for name, limit_s in LIMITS_S.items():
        said = done.get(name)
        proven = reached is not None and list(LIMITS_S).index(name) <= list(LIMITS_S).index(reached)
        if proven:
            before_s = max(before_s, said[0]) if said is not None and said[0] is not None else before_s
            text = said[1] if said is not None else ""
            found.append(Stage(name=name, state="done", since_s=before_s, limit_s=limit_s, text=text))
        elif not open_:
            found.append(Stage(name=name, state="-", limit_s=limit_s))
        else:
            found.append(_open(name, limit_s, before_s, reported.get(FAILED), now_s))
            open_ = False
    return found


def _open(name: str, limit_s: float, began_s: float, failed: tuple[float, str] | None, now_s: float) -> Stage:
    """The first stage that is not done."""
    if failed is not None and name != CREATED:
        return Stage(name=name, state="failed", since_s=failed[0], limit_s=limit_s, text=failed[1])
    if now_s - began_s > limit_s:
        return Stage(name=name, state="late", since_s=began_s, limit_s=limit_s, text=LATE[name])
    return Stage(name=name, state="waiting", since_s=began_s, limit_s=limit_s)


def sentence(stages: list[Stage], now_s: float) -> str:
    """How far it is, in a line: ``driver for 70 s (limit 960 s)``, or the reason why it is late."""
    for stage in stages:
        if stage.state == "done":
            continue
        for_s = max(0.0, now_s - (stage.since_s if stage.since_s is not None else now_s))
        if stage.state == "failed":
            return f"{stage.name} failed: {stage.text}"
        if stage.state == "late":
            return f"{stage.name} is late ({for_s:.0f} s, limit {stage.limit_s:.0f} s): {stage.text}"
        return f"{stage.name} for {for_s:.0f} s (limit {stage.limit_s:.0f} s)"
    return "joined"


def read_report(text: str) -> tuple[float, str]:
    """An object's line: seconds since 1970, and words; 0 where another program wrote it."""
    seconds, _, words = text.strip().partition(" ")
    return (float(seconds) if re.fullmatch(r"[0-9]{1,12}", seconds) else 0.0, words)
