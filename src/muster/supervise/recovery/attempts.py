"""From one attempt to the next: end the ranks, learn what lives, form a world, start it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core.batch_schedule import changed
from muster.core.layout import layout_for
from muster.policy.cluster_state import NextAttempt
from muster.protocol.ranks import RankContext, Restore
from muster.supervise.recovery.context import LEFT, Context
from muster.supervise.recovery.final_flush import finish, leave
from muster.supervise.recovery.held_snapshots import newest_held
from muster.supervise.recovery.layout import Choice, has_replica_on_other_host, needed_shards
from muster.supervise.recovery.preemption_cost import expected_loss
from muster.supervise.recovery.retained_ranks import PAUSE_S, hosts_first, keepable, kept_as, pause_s, whole_replicas
from muster.supervise.recovery.state import SECOND_NS, Host, Phase

#: A GPU's reset takes some seconds; NVIDIA states no limit.
RESET_TIMEOUT_S = 60.0
UNWATCHED = (
    "a start of this script that hangs is not noticed: until it has spoken (muster.run), start_timeout_s does not count"
)


def collect(c: Context, *, wait: bool = False) -> None:
    """End every rank of the attempt and learn which snapshots live."""
    state = c.state
    members = {name for name in [*state.active, *state.target] if state.hosts[name].connected}
    if state.attempt:
        c.log("attempt.ended", {"reason": state.open.incident_id if state.open else "restart"})
    state.phase = Phase.COLLECT
    state.resizing = False
    state.collecting = set(members)
    keep = keepable(c)
    why = state.open.incident_id if state.open else ""
    for name in sorted(members):
        host, answer_s = state.hosts[name], c.settings.collect_timeout_s
        host.kept = {}
        message: dict[str, Any] = {"t": "end", "attempt": state.attempt, "why": why}
        mine = [rank for rank in sorted(keep) if state.ranks[rank] == name]
        if mine:
            message |= {"keep": mine, "pause_s": pause_s(c)}
            answer_s += message["pause_s"] - PAUSE_S
        if host.resetting:
            message["reset"] = list(host.resettable)
            host.resettable, host.resetting = (), False
            answer_s = max(answer_s, RESET_TIMEOUT_S)
        host.end_order, host.answer_by_ns = message, c.now_ns + int(answer_s * SECOND_NS)
        c.send(name, message)
    await_answers(c)
    collected_all(c)


def await_answers(c: Context) -> None:
    """Wake the machine when the next host's time to answer is over."""
    state = c.state
    if state.phase is Phase.COLLECT and state.collecting:
        state.deadline_ns = min(state.hosts[name].answer_by_ns for name in state.collecting)


def overdue(c: Context) -> list[str]:
    """Hosts that should have ended their ranks by now and have not said so."""
    return sorted(name for name in c.state.collecting if c.state.hosts[name].answer_by_ns <= c.now_ns)


def ask_again(c: Context, name: str) -> None:
    """Its agent began anew before it had answered, and knows of no order."""
    if c.state.phase is Phase.COLLECT and name in c.state.collecting:
        c.send(name, c.state.hosts[name].end_order)


def collected_all(c: Context) -> None:
    """Once every host has reported: begin, or wait for more hosts."""
    state = c.state
    if state.phase is not Phase.COLLECT or state.collecting:
        return
    if state.open is not None:
        state.open.stages_ns["collected"] = c.now_ns - state.open.detected_ns
    usable = [name for name in state.target if state.hosts[name].connected and state.hosts[name].ready]
    if len(usable) < c.needed() or not has_store(c, usable):
        state.phase = Phase.WAIT
        state.waiting_since_ns = state.waiting_since_ns if state.waiting_since_ns is not None else c.now_ns
        missing = f"{len(usable)} of {c.needed()} hosts" if len(usable) < c.needed() else "no rendezvous store yet"
        c.log("phase.changed", {"reason": missing}, phase="wait")
        patience = getattr(c.policy, "max_wait_s", 3600.0)
        c.deadline(patience if isinstance(patience, (int, float)) and patience > 0 else 3600.0)
        return
    state.target = usable
    begin(c)


def has_store(c: Context, names: list[str]) -> bool:
    """Whether the ranks of these hosts have a place to meet: a killed fork server's store went with it."""
    return any(c.state.hosts[name].store for name in names)


def begin(c: Context) -> None:
    """Form a world on ``target`` and start its ranks."""
    state = c.state
    before, ranks_before = state.layout, state.ranks
    layout = None
    whole = whole_replicas(before, ranks_before, {name: set(host.kept) for name, host in state.hosts.items()})
    hosts = list(state.target)
    if len(hosts) < len(state.active):
        hosts = hosts_first(hosts, ranks_before, whole)
    while hosts and layout is None:
        layout = layout_for(c.settings.spec.parallelism.axes, len(hosts) * c.settings.ranks_per_host, resize=True)
        if layout is None:
            hosts.pop()
    if layout is None:
        leave(c, "failed", 3, f"no layout fits {len(state.target)} hosts of {c.settings.ranks_per_host} ranks")
        return
    state.active, state.target, state.layout = hosts, [], layout
    state.attempt += 1
    if state.open is not None:  # several hosts lost at once cost one attempt, not one each
        state.restarts_without_progress += 1
        state.failures += 1
    state.watched_from_ns = c.now_ns if state.watched_from_ns is None else state.watched_from_ns
    state.phase, state.stepped, state.exited, state.blamed = Phase.RUN, False, {}, set()
    state.waiting_since_ns, state.needed_hosts = None, 0
    per_host = c.settings.ranks_per_host
    state.ranks = {rank: hosts[rank // per_host] for rank in range(layout.world_size)}
    choice = newest_held(c, without=state.distrusted)
    state.resumed = (choice.step, choice.attempt) if choice else None
    kept = kept_as(before, ranks_before, layout, state.ranks, whole) if choice is not None else {}
    resume_step = choice.step if choice else -1
    if not adjust(c, max(resume_step, state.last_applied_step)):  # what was applied once is not changed after
        return
    if state.open is not None:
        state.open.stages_ns["resume_step"] = max(resume_step, 0)
        state.open.stages_ns["started"] = c.now_ns - state.open.detected_ns
    c.log(
        "attempt.started",
        {
            "world_size": layout.world_size,
            "layout": layout.sizes,
            "hosts": {name: [rank for rank, on in state.ranks.items() if on == name] for name in hosts},
            "resume_step": resume_step,
            **({"tier": "memory", "resume_attempt": choice.attempt} if choice else {}),
            **({"kept": sorted(kept)} if kept else {}),
            **({"batch_schedule": state.batch_schedule} if state.batch_schedule else {}),
            **({"skip_steps": sorted(state.skip_steps)} if state.skip_steps else {}),
            **({"cause": state.open.incident_id} if state.open else {}),
        },
        sync=True,
    )
    if state.attempt == 1:
        copied = all(peer_of(c, name) or has_replica_on_other_host(layout, state.ranks, name) for name in hosts)
        c.log("run.message", {"text": expected_loss(c.settings.spec, num_hosts=len(hosts), copied=copied)})
        if c.settings.spec.command is not None:
            c.log("run.message", {"text": UNWATCHED})
    c.await_first_step()
    for name in c.usable():
        if name not in hosts:
            c.log("phase.changed", {"reason": "held for an emergency"}, host=name, phase="spare")
    for name in hosts:
        c.send(name, start_message(c, name, choice, kept))
        state.hosts[name].kept = {}


def adjust(c: Context, resume_step: int) -> bool:
    """Ask the policy for batch and rate of the new world; False: what it says ends the run."""
    state, training = c.state, c.settings.spec.training
    ask = getattr(c.policy, "adjust", None)
    if ask is None or training is None:
        return True
    world = NextAttempt(
        num_hosts=len(state.active),
        wanted_hosts=c.settings.wanted_hosts,
        world_size=state.layout.world_size,
        data_ranks=state.layout.data_ranks,
        resume_step=resume_step,
        global_batch_size=training.global_batch_size,
    )
    try:
        wanted = dict(ask(world) or {})
        state.batch_schedule = changed(state.batch_schedule, resume_step=resume_step, batch=training.global_batch_size, wanted=wanted)
    except Exception as error:  # noqa: BLE001 (the user's code: whatever it raises is its own verdict)
        leave(c, "failed", 2, f"{type(error).__name__} in the policy's adjust(): {error}")
        return False
    return True


def start_message(
    c: Context, name: str, choice: Choice | None, kept: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """What one host is told: its ranks, where they meet, where each shard of their state lies.

    ``kept``: ranks of this attempt -> the rank of the one before whose process goes on.
    """
    kept = kept or {}
    state = c.state
    store_host = next((host for host in state.active if state.hosts[host].store), None)
    address, port = state.hosts[store_host].store or ("127.0.0.1", 0) if store_host else ("127.0.0.1", 0)
    mine = [rank for rank, on in state.ranks.items() if on == name]
    peer = peer_of(c, name)
    restore = None
    fetch = []
    if choice is not None:
        restore = Restore(step=choice.step, attempt=choice.attempt, layout=choice.layout)
        standing = state.hosts[name].kept
        lacking = [rank for rank in mine if rank not in kept or standing.get(kept[rank]) != choice.step]
        if choice.layout != state.layout and lacking:
            lacking = needed_shards(choice, name)
        for rank in lacking:
            held = choice.nearest(rank, name)
            fetch.append(
                {
                    "rank": rank,
                    "held_as": held.rank,
                    "host": held.host,
                    "tier": held.tier,
                    "address": None if held.host == name else list(state.hosts[held.host].memory or ()),
                }
            )
    contexts = [
        RankContext(
            run_id=c.settings.run_id,
            run_dir=c.settings.run_dir,
            attempt=state.attempt,
            host=name,
            rank=rank,
            local_rank=local,
            world_size=state.layout.world_size,
            local_world_size=len(mine),
            layout=state.layout,
            master_addr=address,
            master_port=port,
            restore=restore,
            replicate_snapshots=peer is not None,
            batch_schedule=state.batch_schedule,
            skip_steps=tuple(sorted(state.skip_steps)),
            kept_rank=kept.get(rank),
            failures=state.failures,
            observed_s=(c.now_ns - (state.watched_from_ns or c.now_ns)) / SECOND_NS,
        ).to_json()
        for local, rank in enumerate(mine)
    ]
    found = {
        "t": "start",
        "attempt": state.attempt,
        "contexts": contexts,
        "fetch": fetch,
        "peer": peer,
    }
    if choice is not None:
        found["restore_attempt"] = choice.attempt
    return found


def peer_of(c: Context, name: str) -> list[Any] | None:
    """Where the host's snapshots get their second copy: the next active host's mover; None: nowhere."""
    wanted = c.settings.spec.checkpoint.replicate_snapshots
    active = c.state.active
    if len(active) < 2 or wanted is False:
        return None
    if wanted is None and has_replica_on_other_host(c.state.layout, c.state.ranks, name):
        return None  # another replica holds the same state
    memory = c.state.hosts[active[(active.index(name) + 1) % len(active)]].memory
    return list(memory) if memory else None


def memory_moved(c: Context, host: Host, address: tuple[str, int]) -> None:
    """A host's mover was begun anew: the hosts that copy to it learn where it is now."""
    state, known = c.state, host.memory is not None
    host.memory = address
    if state.phase is not Phase.RUN or not known:
        return
    for name in state.active:
        if peer_of(c, name) == list(address):
            c.send(name, {"t": "peer", "peer": list(address)})


def ask_to_save(c: Context, outcome: str, code: int, *, source: str, save: bool = True) -> None:
    """Ask the ranks to save and leave; the run then ends with ``code``."""
    state, grace_s = c.state, c.settings.spec.recovery.grace_s
    state.phase, state.stop, state.stop_source, state.stop_saves = Phase.STOPPING, (outcome, code), source, save
    c.deadline(grace_s)
    order = {"kind": "stop", "save": save, "exit_code": code, "deadline_s": grace_s}
    for name in state.active:
        c.send(name, {"t": "order", "order": order})


def check_left(c: Context) -> None:
    """Ranks that were asked to leave: once all have, the run ends, or goes on in a larger world."""
    state = c.state
    if set(state.ranks) - set(state.exited):
        return
    if state.resizing and state.phase is Phase.RUN:
        collect(c)
        return
    outcome, code = state.stop or ("stopped", 130)
    # A rank leaves alike where there was no time for a save: what stands says whether there was one.
    saved = all(value in LEFT or value == 0 for value in state.exited.values())
    saved = saved and (not state.stop_saves or state.committed_step >= state.last_applied_step)
    how = "saved and left" if saved and state.stop_saves else "left"
    how += ", but not every rank could save" if not saved else ""
    why = f"{state.stop_source}: " if state.stop_source else ""
    end = finish if saved or not state.stop_saves else leave
    end(c, outcome, code, f"{why}{how} after step {state.last_applied_step}")
