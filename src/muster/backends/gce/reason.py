"""One look at a run on Compute Engine, said in a sentence: which request waits, how far each machine has come, and why.

Pure, but for ``look``, which reads.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muster.backends.gce import startup_stages
from muster.backends.gce.compute import Compute
from muster.backends.gce.journal import ASKED, MADE, NOTHING, Journal, JournalFile
from muster.backends.gce.machine import FOLDER
from muster.backends.gce.placement import Placement
from muster.backends.gce.provision import AGAIN_S, Instance, instances_of
from muster.backends.gce.startup_stages import Stage, read_told, sentence, tree
from muster.core.errors import MusterError
from muster.core.protocols import Store
from muster.core.typed_json import Unreadable, decode, text
from muster.core.types import JobState, JobStatus
from muster.protocol.lease import EndRecord, HomeStatus
from muster.storage import uris

STATUS = "status.json"
STOPPED_BY_USER = 130


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What is there."""

    journal: Journal | None
    machines: Sequence[Instance]
    told: Mapping[str, Mapping[str, tuple[float, str]]] = field(default_factory=dict)
    """Machine -> what it told of its newest boot."""
    connected: frozenset[str] = frozenset()
    """Hosts whose agents the supervisor knows."""


def look(placement: Placement, compute: Compute, store: Store, file: JournalFile) -> Looked:
    """Raises MusterError: Google or the home does not answer."""
    journal, _ = file.read()
    machines = instances_of(compute, placement.stem)
    connected: frozenset[str] = frozenset()
    try:
        status = decode(HomeStatus, store.get(uris.join(placement.home, STATUS)).data).status
        connected = frozenset(name for name, host in status.hosts.items() if host.connected)
    except (FileNotFoundError, Unreadable):
        pass
    told = {
        one.name: _told(store, placement.home, one.name) for one in machines if one.lives and one.name not in connected
    }
    return Looked(journal=journal, machines=machines, told=told, connected=connected)


def _told(store: Store, home: str, name: str) -> dict[str, tuple[float, str]]:
    """Of the newest boot: the one that told something last."""
    boots: dict[str, dict[str, tuple[float, str]]] = {}
    try:
        for uri in store.list(uris.join(home, FOLDER, name) + "/"):
            boot, _, stage = uri.rpartition("/")[2].rpartition(".")
            boots.setdefault(boot, {})[stage] = read_told(store.get(uri).data.decode(errors="replace"))
    except (MusterError, FileNotFoundError):
        return {}
    return max(boots.values(), key=lambda rows: max(at for at, _ in rows.values()), default={})


def stages_of(looked: Looked, machine: Instance, now_s: float) -> list[Stage]:
    """How far ``machine``'s start has come."""
    told = looked.told.get(machine.name, {})
    asked_s = _seconds(text(machine.row, "creationTimestamp")) or now_s
    runs = machine.status == "RUNNING"
    began_s = (_seconds(text(machine.row, "lastStartTimestamp")) or asked_s) if runs else None
    # A supervisor joins nothing: it is done when its program has what it needs.
    joined = machine.name in looked.connected or (not machine.turn and startup_stages.CHECKED in told)
    return tree(began_s, told, asked_s=asked_s, joined=joined, now_s=now_s)


def explain(looked: Looked, placement: Placement, end: EndRecord | None, now_s: float) -> JobStatus:
    """The run's state, and the reason for it."""
    machines, journal = looked.machines, looked.journal
    tasks = {_task(placement, one): _machine_text(looked, one, now_s) for one in machines}
    if end is not None:
        return ended_with(end, tasks)
    if journal is None:
        return JobStatus(state=JobState.ABSENT, reason="nothing was asked for", tasks=tasks)
    if journal.closed:
        left = f"; {len(machines)} of its machines are being removed" if machines else ""
        return JobStatus(state=JobState.STOPPED, reason=f"it was taken down{left}", tasks=tasks)
    supervisor = next((one for one in machines if one.name == placement.supervisor), None)
    hosts = [one for one in machines if one.turn and one.lives]
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
    parts += _asked(journal, placement, len(hosts), now_s)
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


def _asked(journal: Journal, placement: Placement, living: int, now_s: float) -> list[str]:
    """What the newest request does, or why none is under way."""
    last = journal.last
    if last is None or living >= placement.hosts:
        return []
    what = f"{last.count} x {placement.machine.name}"
    for_s = max(0.0, now_s - last.at_wall_s)
    if last.state == ASKED:
        reason = f", {last.reason}" if last.reason else ""
        return [f"{last.zone} was asked for {what} {for_s:.0f} s ago{reason}"]
    if last.state == NOTHING:
        return [f"{last.zone} has not given {what}: {last.reason}; zones are asked again within {AGAIN_S:.0f} s"]
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


def ended_with(end: EndRecord, tasks: Mapping[str, str]) -> JobStatus:
    state = {0: JobState.SUCCEEDED, STOPPED_BY_USER: JobState.STOPPED}.get(end.exit_code, JobState.FAILED)
    words = {JobState.SUCCEEDED: "finished", JobState.STOPPED: "stopped", JobState.FAILED: "failed"}
    return JobStatus(state=state, reason=f"{words[state]}: {end.reason}", exit_code=end.exit_code, tasks=tasks)


def _seconds(stamp: str) -> float | None:
    """Of Google's time stamp; None: there is none."""
    try:
        return datetime.datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None
