"""Hosts that come, go and come back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core.layout import layout_for
from muster.core.types import IncidentKind
from muster.supervise.recovery import final_flush
from muster.supervise.recovery.attempts import ask_again, begin, check_left, collected_all, has_store
from muster.supervise.recovery.context import Context
from muster.supervise.recovery.final_flush import finish
from muster.supervise.recovery.incidents import incident
from muster.supervise.recovery.state import SECOND_NS, Host, HostDown, HostUp, Phase


def host_up(c: Context, given: HostUp) -> None:
    host = c.state.hosts.setdefault(given.host, Host(name=given.host))
    hello = given.hello
    if not host.connected and (host.met or not hello.get("attempt")):
        came_back(host)
    host.met = True
    host.connected, host.store, host.kept, host.slow = True, None, {}, False
    host.alive = {int(rank): pid for rank, pid in hello.get("alive", {}).items()}
    host.exited = {int(rank) for rank in hello.get("exited", ())}
    host.attempt = int(hello.get("attempt", 0))
    host.snapshots = list(hello.get("snapshots", []))
    if int(hello.get("step", 0)) > c.state.last_applied_step:  # taken while nobody supervised
        c.state.last_applied_step = int(hello["step"])
        c.state.restarts_without_progress = 0
    c.state.attempt = max(c.state.attempt, host.attempt if c.state.phase is Phase.ADOPT else 0)
    c.send(given.host, {"t": "welcome", "attempt": c.state.attempt})
    if not host.allocated:
        host.allocated = True
        price = c.settings.host_price.get(given.host, c.settings.usd_per_host_hour)
        price = 0.0 if price is None and c.settings.free_hosts else price
        c.log(
            "host.allocated",
            {
                "gpus": c.settings.ranks_per_host,
                "role": "active",
                **({"usd_per_hour": price} if price is not None else {}),
            },
            host=given.host,
        )
    if host.attempt < c.state.attempt and host.alive:
        c.send(given.host, {"t": "end", "attempt": c.state.attempt - 1, "why": "of an older attempt"})
    before = c.state.phase
    if hello.get("ready"):
        host_ready(c, host, hello)
    if before is Phase.ADOPT:
        try_adopt(c)
    elif before is Phase.FLUSH:
        final_flush.returned(c, given.host)
    elif before is Phase.COLLECT:
        ask_again(c, given.host)
    elif before is Phase.RUN and given.host in c.state.active:
        check_returned_agent(c, host, {int(rank) for rank in hello.get("exited", ())})


def came_back(host: Host) -> None:
    """It was away: that it was told to go says nothing any more."""
    host.going_s = None
    if host.until_return:
        host.quarantined = host.until_return = False


def answered_late(c: Context, host: Host, message: Mapping[str, Any]) -> None:
    """A host that was given up because its ranks did not end in time has ended them after all."""
    host.slow, host.connected = False, True
    host.snapshots, host.alive, host.kept = list(message["snapshots"]), {}, {}
    c.log("run.message", {"text": f"{host.name} has ended its ranks after all and is used again"}, host=host.name)
    host_ready(c, host, {})


def held_off_long_enough(c: Context, name: str) -> None:
    """A host whose link flapped is looked at again."""
    host = c.state.hosts[name]
    if host.quarantined and not host.hold_off_s:
        return  # meanwhile it was taken out for good
    was_out, host.quarantined, host.hold_off_s, host.asked_about = host.quarantined, False, 0.0, False
    if was_out:
        c.log("run.message", {"text": f"{name} was held off long enough and may be used again", "cleared": name})
    if host.connected and host.ready:
        host_ready(c, host, {})


def check_returned_agent(c: Context, host: Host, exited: set[int]) -> None:
    """An agent came back while its host's ranks belong to the running attempt: are they all there?

    Ranks in ``exited`` are reported one by one, with their codes, in the messages that follow.
    """
    gone = set(c.state.exited) | exited
    mine = {rank for rank, name in c.state.ranks.items() if name == host.name and rank not in gone}
    if host.attempt == c.state.attempt and mine <= set(host.alive):
        return
    incident(
        c,
        IncidentKind.RANK_EXIT,
        host=host.name,
        evidence=f"the agent on {host.name} came back without ranks {sorted(mine - set(host.alive))}",
    )


def host_ready(c: Context, host: Host, message: Mapping[str, Any]) -> None:
    host.ready, host.cannot_start, host.asked_about = True, False, False
    host.store = (message["store"][0], int(message["store"][1])) if message.get("store") else host.store
    host.memory = (message["memory"][0], int(message["memory"][1])) if message.get("memory") else host.memory
    phase = c.state.phase
    if phase is Phase.BOOT:
        if len(c.usable()) >= c.settings.wanted_hosts:
            c.state.target = c.usable()[: c.settings.wanted_hosts]
            begin(c)
    elif phase is Phase.WAIT:
        capacity_came(c, host)
    elif phase is Phase.RUN and host.name not in c.state.active and not host.quarantined:  # noqa: SIM102 (it acts)
        if not look_for_growth(c):
            c.log("phase.changed", {"reason": "held for an emergency"}, host=host.name, phase="spare")


def look_for_growth(c: Context) -> bool:
    """Whether hosts outside a world that is too small could make it larger: the policy is asked, once a host."""
    state = c.state
    if state.resizing or len(state.active) >= c.settings.wanted_hosts:
        return False
    idle = [name for name in c.usable() if name not in state.active]
    new = [name for name in idle if not state.hosts[name].asked_about]
    room = c.settings.wanted_hosts - len(state.active)
    if not new or ranks_that_fit(c, len(state.active) + min(len(idle), room)) <= state.layout.world_size:
        return False  # half a group is of no use: it waits for its other half
    for name in new:
        state.hosts[name].asked_about = True
    evidence = f"{new[0]} is ready" if len(new) == 1 else f"{len(new)} hosts are ready: {', '.join(new[:4])}"
    incident(c, IncidentKind.HOST_RETURNED, host=new[0], evidence=evidence)
    for name in new if state.phase is Phase.RUN and not state.resizing else ():
        failures = state.hosts[name].failures_ns
        if failures:  # not taken in for what it did: once that has passed, the policy is asked again
            oldest_s = (c.now_ns - min(failures)) / SECOND_NS
            c.alarm(f"back:{name}", max(0.0, c.settings.host_failure_window_s - oldest_s) + 1.0)
    return True


def ranks_that_fit(c: Context, num_hosts: int) -> int:
    """Ranks of the largest world that so many hosts can form; 0: none."""
    for hosts in range(num_hosts, 0, -1):
        layout = layout_for(c.settings.spec.parallelism.axes, hosts * c.settings.ranks_per_host, resize=True)
        if layout is not None:
            return layout.world_size
    return 0


def start_failed_aside(c: Context, name: str, reason: str) -> bool:
    """Note a host that cannot start; whether the run can do without it for now (a bad spare)."""
    host, phase = c.state.hosts[name], c.state.phase
    host.cannot_start = True
    if phase is Phase.BOOT:
        hopeful = [each for each in c.state.hosts.values() if each.connected and not each.cannot_start]
        needed = len(hopeful) < c.settings.wanted_hosts
    elif phase in (Phase.RUN, Phase.COLLECT, Phase.WAIT):
        needed = name in (c.state.active if phase is Phase.RUN else c.state.target)
    else:
        return False
    if not needed:
        c.log("run.message", {"text": f"{name} cannot start and is set aside: {reason}"}, host=name)
    return not needed


def capacity_came(c: Context, host: Host) -> None:
    if host.name not in c.state.target and not host.quarantined:
        c.state.target.append(host.name)
    usable = [name for name in c.state.target if c.state.hosts[name].ready and c.state.hosts[name].connected]
    if len(usable) >= c.needed() and has_store(c, usable):
        c.state.target = usable[: c.settings.wanted_hosts]
        begin(c)


def host_down(c: Context, given: HostDown) -> None:
    host = c.state.hosts.get(given.host)
    if host is None or not host.connected:
        if host is not None:
            host.slow = False
        return
    host.connected = host.ready = False
    host.snapshots, host.kept = [], {}
    c.log("host.lost", {"evidence": given.why}, host=given.host)
    phase = c.state.phase
    if phase is Phase.STOPPING:
        for rank, name in c.state.ranks.items():
            if name == given.host:
                c.state.exited.setdefault(rank, -9)
        check_left(c)
    elif phase is Phase.FLUSH:
        final_flush.lost(c, given.host)
    elif given.host in (c.state.active if phase is Phase.RUN else c.state.target) and phase in (
        Phase.RUN,
        Phase.COLLECT,
        Phase.WAIT,
    ):
        evidence = f"{given.host}: {given.why}"
        incident(c, IncidentKind.HOST_LOST, host=given.host, evidence=evidence, silent_s=given.silent_s)
    if phase is Phase.COLLECT and c.state.phase is Phase.COLLECT:
        c.state.collecting.discard(given.host)
        collected_all(c)


def try_adopt(c: Context) -> None:
    """After a supervisor's death: are all ranks of the logged attempt alive and of that attempt?"""
    state = c.state
    if not all(state.hosts[name].connected for name in state.active if name in state.hosts):
        return
    if any(name not in state.hosts for name in state.active):
        return
    fresh = all(not state.hosts[name].attempt and not state.hosts[name].snapshots for name in state.active)
    if state.ending is not None and not fresh:  # it was ending when its supervisor went
        final_flush.take_up(c)
        return
    alive = {rank for name in state.active for rank in (*state.hosts[name].alive, *state.hosts[name].exited)}
    if set(state.ranks) <= alive and all(state.hosts[name].attempt == state.attempt for name in state.active):
        state.phase, state.adopted, state.deadline_ns = Phase.RUN, state.attempt, None
        if not state.stepped:
            c.await_first_step()
        state.asked = state.asked or state.stop_before  # the ranks may not have heard of it, and may hang in their save
        c.log("run.message", {"text": f"attempt {state.attempt} goes on under a new supervisor"})
        return
    if not alive and all(state.hosts[name].attempt == 0 for name in state.active):
        # Fresh agents: the whole run was gone (a reboot, a kill of everything) and is started again.
        c.log(
            "run.message",
            {"text": f"no rank of attempt {state.attempt} survived: resuming from the newest checkpoint"},
        )
        state.phase, state.active, state.ranks, state.ending = Phase.BOOT, [], {}, None
        c.deadline(c.settings.spec.recovery.start_timeout_s)
    elif all(state.hosts[name].ready for name in state.active):
        adopt_failed(c)


def adopt_failed(c: Context) -> None:
    state = c.state
    if state.ending is not None:
        final_flush.take_up(c)
        return
    lost = [name for name in state.active if name not in state.hosts or not state.hosts[name].connected]
    for name in lost:
        state.hosts.setdefault(name, Host(name=name))
    if not any(host.connected for host in state.hosts.values()):
        finish(c, "failed", 6, "no host answers a new supervisor; start the run again to resume from its checkpoint")
        return
    state.phase = Phase.RUN
    if lost:
        incident(c, IncidentKind.HOST_LOST, host=lost[0], evidence=f"{lost[0]} did not answer a new supervisor")
        state.target = [name for name in state.target if name not in lost]
        collected_all(c)
    else:
        incident(c, IncidentKind.RANK_EXIT, evidence="ranks were missing when a new supervisor took over")
