"""The beginning of a supervisor's term: take the lease, rebuild the run's state, and build every part, in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muster.config.spec import RunSpec
from muster.core.clock import SystemClock
from muster.core.events import Event
from muster.core.protocols import Clock
from muster.core.typed_json import JsonObject
from muster.policy.load import load_policy
from muster.protocol.client import FROM_CLIENT
from muster.protocol.codec import reader_of
from muster.protocol.hello import AgentHello, BeatHello, ClientHello, greeting_reader
from muster.protocol.to_supervisor import FROM_AGENT, GREETING
from muster.supervise.process.decisions import Decisions
from muster.supervise.process.heartbeats import Heartbeats, read_heartbeat
from muster.supervise.process.home_sync import SupervisorHome
from muster.supervise.process.lease import keeping
from muster.supervise.process.limits import LimitsGuard, LimitsTimer
from muster.supervise.process.liveness import HostLiveness
from muster.supervise.process.run_file import read_run_id, read_spec, settings_of
from muster.supervise.process.world import Journal, World
from muster.supervise.recovery.state_machine import RecoveryStateMachine
from muster.supervise.replay.event_replay import EventsInOrder
from muster.supervise.replay.rebuild_state import rebuild_in_order
from muster.transport.connections import ConnectionPool
from muster.transport.secure_session import run_token

#: What reads the frames that follow a greeting.
CHANNELS = {AgentHello: reader_of(FROM_AGENT), BeatHello: read_heartbeat, ClientHello: reader_of(FROM_CLIENT)}


@dataclass(frozen=True, kw_only=True)
class Term:
    """The finished parts that a loop drives."""

    world: World
    decisions: Decisions
    heartbeats: Heartbeats
    limits: LimitsTimer
    clock: Clock


def open_term(
    run_dir: Path, *, bind: str, job: str, on_event: Callable[[Event], None] | None, notes: deque[str]
) -> Term | int:
    """Become the run's supervisor. An exit code instead: the run has ended already.

    It listens before it takes the lease, which names the address.

    Raises:
        ConflictError: another supervisor holds the run.
    """
    spec, run_id, clock = read_spec(run_dir), read_run_id(run_dir), SystemClock()
    pool = ConnectionPool(
        token=run_token(run_dir),
        greeting=greeting_reader(GREETING, me="the supervisor"),
        channels=CHANNELS,
    )
    home = SupervisorHome(run_dir, job=job, clock=clock)
    host, port = pool.listen(bind)
    earlier = home.take_over(run_id, (host, port))
    if (ended := home.ended(earlier)) is not None:
        home.lease.give_back()
        pool.shutdown()
        return ended.exit_code
    limits = LimitsTimer(LimitsGuard(limits=spec.limits, grace_s=spec.recovery.grace_s), clock)
    machine = _machine(spec, run_id, run_dir, earlier, limits, home)
    journal = Journal(
        log=home.open_log(run_id), home=home, limits=limits, machine=machine, on_event=on_event, notes=notes
    )
    started: JsonObject = {"term": home.lease.term, "pid": os.getpid(), "address": f"{host}:{port}", **home.allocation}
    journal.append("supervisor.started", started)
    for text in home.damage:
        journal.say(f"the run goes on without a part of its log: {text}")
    home.start()
    world = World(run_dir=run_dir, run_id=run_id, machine=machine, journal=journal, home=home, pool=pool)
    liveness = HostLiveness(timing=spec.recovery.timing)
    return Term(
        world=world,
        decisions=Decisions(machine, world, clock),
        heartbeats=Heartbeats(pool=pool, liveness=liveness, clock=clock),
        limits=limits,
        clock=clock,
    )


def _machine(
    spec: RunSpec, run_id: str, run_dir: Path, earlier: EventsInOrder, limits: LimitsTimer, home: SupervisorHome
) -> RecoveryStateMachine:
    """In the state that earlier events lead to; their replay may take longer than a lease lasts."""
    with keeping(home.lease):
        now_ns = max(earlier.newest_ns, limits.clock.wall_ns())
        state = rebuild_in_order(earlier.telling(limits.guard.add, home.add_earlier), now_ns=now_ns)
    settings = settings_of(spec, run_id=run_id, run_dir=run_dir)
    return RecoveryStateMachine(settings=settings, policy=load_policy(spec.recovery.policy), state=state)
