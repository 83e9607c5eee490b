"""Machines whose hardware is faulty are kept from other work, where the run's account may do that in its cluster.

In addition to what the policy does with the run's own hosts: a machine that this run gives up would be the next run's
trouble. Work that runs there goes on. Where it is not allowed, the log has the command for an administrator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from muster import backends
from muster.app.run.event_writer import Sink
from muster.core.errors import AccessError, MusterError
from muster.core.event_details.hosts import HostCheck, HostHealth
from muster.core.event_log import EventReader
from muster.core.events import Event
from muster.health.machine.fleet import taking_out
from muster.supervise.process.run_file import read_run_id, read_spec
from muster.supervise.process.supervisor import Supervisor

#: What costs a machine its place; a GPU that a reset heals does not.
VERDICTS = ("drain", "replace")
#: Of the evidence, in a cluster's own records.
MOST_TOLD = 160


@dataclass
class TakeOut(Sink):
    """``act``: the back end's, of a machine and a reason. ``command``: the same for a person to type.

    A machine's name is known by its host's own look (``host.check``): of this supervisor's time, or in the run's log.
    """

    run_id: str
    events: Path
    act: Callable[[str, str], str]
    command: Callable[[str, str], str | None]
    say: Callable[[str], None]
    name = "what takes faulty machines out"
    _machines: dict[str, str] = field(default_factory=dict)
    """By host, the newest."""
    _told: set[str] = field(default_factory=set)
    """Machines that were taken out, or spoken of."""

    def event(self, event: Event) -> None:
        self._learn(event)
        if event.kind != HostHealth.kind:
            return
        found = event.read(HostHealth)
        if found.verdict not in VERDICTS:
            return
        if event.host not in self._machines:
            for _, earlier in EventReader(self.events, writer="supervisor").read():
                self._learn(earlier)
        machine = self._machines.get(event.host)
        if machine is not None and machine not in self._told:
            self._told.add(machine)
            self._take_out(event.host, machine, f"muster run {self.run_id}: {' '.join(found.evidence.split())}")

    def _learn(self, event: Event) -> None:
        if event.kind == HostCheck.kind and (machine := event.read(HostCheck).node):
            self._machines[event.host] = machine

    def _take_out(self, host: str, machine: str, reason: str) -> None:
        reason = reason[:MOST_TOLD]
        try:
            self.say(f"{host}: {self.act(machine, reason)}")
        except MusterError as error:
            why = "this run's account may not" if isinstance(error, AccessError) else "it could not be done"
            typed = self.command(machine, reason)
            self.say(
                f"{host}: its machine {machine} is to be taken out of the cluster by an administrator"
                f"{f': {typed}' if typed else ''} ({why}: {error})"
            )


def machines_taken_out(supervisor: Supervisor) -> Sequence[Sink]:
    """What does that for this run, where its cluster supports it and the run file does not forbid it."""
    run_dir = supervisor.run_dir.resolve()
    try:
        run_id, spec = read_run_id(run_dir), read_spec(run_dir)
        act = backends.get(spec.backend).provisioning.drain if spec.check.take_out else None
    except (MusterError, OSError, ValueError, KeyError):
        return ()  # ``serve`` says so
    if act is None:
        return ()
    command = partial(taking_out, spec.backend)
    return [TakeOut(run_id, run_dir / "events", act, command, supervisor.note)]
