"""From one attempt to the next: end the ranks, learn which snapshots hosts hold, form a layout, start it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from muster.config.spec import RunSpec
from muster.core.batch_schedule import changed
from muster.core.layout import Layout
from muster.core.typed_json import Json, JsonObject
from muster.policy.cluster_state import NextAttempt
from muster.policy.snapshot_holders import holders_to_log, leaves_rack, snapshot_holders
from muster.protocol.held_snapshots import Choice, has_replica_on_other_host, needed_shards, replica_peers
from muster.protocol.ranks import REQUESTED_EXIT_CODES, RankContext, Restore
from muster.protocol.to_agent import EndAttempt, FetchShard, PeerMoved, StartAttempt
from muster.protocol.values import Address, CommandRanks
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import finish, flush_and_finish
from muster.supervise.recovery.inputs import SECOND_NS
from muster.supervise.recovery.phases import Draining, EndOrder, NextHosts, Running, Stopping, Waiting
from muster.supervise.recovery.state import Attempt, Host

#: A GPU's reset takes some seconds; NVIDIA states no limit.
RESET_TIMEOUT_S = 60.0
#: A host that could not start tries again (``agent.programs.fork_server``); an attempt that needs it waits this long.
AFTER_FAILURE_S = 60.0
UNWATCHED = (
    "start-up hangs are not detected until the script first calls muster.run; start_timeout_s applies from then on"
)
SPARE = "kept as a spare"
#: Least time for a retained rank to pause, however short the steps are: the machine may be busy.
PAUSE_S = 4.0
#: Times the longest of the last steps: a step during a recovery is slower than those before.
PAUSE_STEPS = 1.5
#: Added for what is not computing: its last event, its snapshot.
PAUSE_MARGIN_S = 1.0


def drain(ctx: SupervisorContext, following: NextHosts) -> None:
    """End every rank of the attempt and learn which snapshots the hosts hold; ``following`` comes next."""
    state = ctx.state
    members = {name for name in (*state.active, *following.hosts) if state.hosts[name].connected}
    incident_id = state.open.incident_id if state.open else ""
    if state.attempt:
        log_end(ctx, following)
    draining = state.phase if isinstance(state.phase, Draining) else Draining(next=following)
    if draining is not state.phase:
        ctx.enter(draining)
    keep = retainable_ranks(ctx, following.hosts)
    for name in sorted(members):
        host, answer_s = state.hosts[name], ctx.settings.drain_timeout_s
        host.ranks.retained = {}
        message = EndAttempt(attempt=state.attempt, why=incident_id)
        local_ranks = tuple(rank for rank in sorted(keep) if state.ranks[rank] == name)
        if local_ranks:
            message = replace(message, keep=local_ranks, pause_s=pause_s(ctx))
            answer_s += message.pause_s - PAUSE_S
        if host.health.resetting:
            message = replace(message, reset=host.health.resettable)
            host.health.resettable, host.health.resetting = (), False
            answer_s = max(answer_s, RESET_TIMEOUT_S)
        draining.waiting[name] = EndOrder(message=message, answer_by_ns=ctx.now_ns + int(answer_s * SECOND_NS))
        ctx.send(name, message)
    draining.await_next()
    start_when_drained(ctx)


def log_end(ctx: SupervisorContext, following: NextHosts) -> None:
    """That the attempt ends, and what comes next; again where that changes without a decision."""
    reason = ctx.state.open.incident_id if ctx.state.open else "restart"
    end: JsonObject = {"reason": reason, "next_hosts": following.hosts[:], "needed_hosts": following.needed}
    ctx.log("attempt.ended", end)


def resend_end(ctx: SupervisorContext, draining: Draining, name: str) -> None:
    """Its agent restarted before it had answered, and does not know the message."""
    if name in draining.waiting:
        ctx.send(name, draining.waiting[name].message)


def start_when_drained(ctx: SupervisorContext) -> None:
    """Once every host has reported: start the attempt, or wait for more hosts."""
    state, phase = ctx.state, ctx.state.phase
    if not isinstance(phase, Draining) or phase.waiting:
        return
    if state.open is not None:
        state.open.stages_ns["collected"] = ctx.now_ns - state.open.detected_ns
    following, needed = phase.next, ctx.needed(phase.next)
    usable = ready_hosts(ctx, following)
    if len(usable) < needed:  # hosts that became ready meanwhile
        following.hosts += [name for name in ctx.usable() if name not in following.hosts]
        usable = ready_hosts(ctx, following)
    usable = usable[: ctx.settings.wanted_hosts]
    if len(usable) < needed or not has_rendezvous_store(ctx, usable):
        if following.waiting_since_ns is None:
            following.waiting_since_ns = ctx.now_ns
        ctx.enter(Waiting(next=following))
        missing = f"{len(usable)} of {needed} hosts" if len(usable) < needed else "no rendezvous store yet"
        log_waiting(ctx, following)
        ctx.log("phase.changed", {"reason": missing}, phase="wait")
        ctx.deadline(patience_s(ctx, following))
        return
    start_attempt(ctx, usable)


def patience_s(ctx: SupervisorContext, following: NextHosts) -> float:
    """How long to wait before the policy is asked: for hosts that are to come as long as it says, for one that is here
    and not ready as long as for a start; less where it has said that it cannot start."""
    spec = ctx.settings.spec
    name, limit_s = unready_host(ctx, following), spec.recovery.start_timeout_s
    limit_s += spec.setup_timeout_s if spec.setup else 0.0
    if name is None:
        return ctx.policy.max_wait_s
    return min(limit_s, AFTER_FAILURE_S) if ctx.state.hosts[name].readiness.start_failed else limit_s


def unready_host(ctx: SupervisorContext, following: NextHosts) -> str | None:
    """Where enough hosts for the next attempt are connected: one of them that could not start yet."""
    here = [name for name in following.hosts if ctx.state.hosts[name].connected]
    if len(here) < ctx.needed(following):
        return None
    ready = ready_hosts(ctx, following)
    return next((name for name in here if name not in ready or ctx.state.hosts[name].machine.store is None), None)


def ready_hosts(ctx: SupervisorContext, following: NextHosts) -> list[str]:
    """Those of the next attempt that could start now."""
    hosts = ctx.state.hosts
    return [name for name in following.hosts if hosts[name].connected and hosts[name].readiness.ready]


def log_waiting(ctx: SupervisorContext, following: NextHosts) -> None:
    """Which hosts there are; again whenever there is another one."""
    ctx.log("run.waiting", {"hosts": following.hosts[:], "needed_hosts": following.needed})


def has_rendezvous_store(ctx: SupervisorContext, names: list[str]) -> bool:
    """Whether one of the hosts that an attempt on ``names`` takes has a rendezvous store: a killed fork server takes
    its store with it. A spare's is not used: it would not hear that its store was."""
    chosen, layout = _choose_hosts(ctx, names, _whole_replicas(ctx))
    return layout is None or any(ctx.state.hosts[name].machine.store for name in chosen)


def _whole_replicas(ctx: SupervisorContext) -> list[tuple[int, ...]]:
    retained = {name: set(host.ranks.retained) for name, host in ctx.state.hosts.items()}
    return whole_replicas(ctx.state.layout, ctx.state.ranks, retained)


def _choose_hosts(
    ctx: SupervisorContext, hosts: list[str], whole: Sequence[Sequence[int]]
) -> tuple[tuple[str, ...], Layout | None]:
    """The hosts that the largest layout on ``hosts`` takes, and that layout; None: there is none."""
    if len(hosts) < len(ctx.state.active):
        hosts = prefer_hosts_of_whole_replicas(hosts, ctx.state.ranks, whole)
    layout = ctx.largest_layout(len(hosts))
    return tuple(hosts[: layout.world_size // ctx.settings.ranks_per_host if layout else 0]), layout


def start_attempt(ctx: SupervisorContext, hosts: list[str]) -> None:
    """Form the largest layout on ``hosts`` and start its ranks."""
    state, per_host = ctx.state, ctx.settings.ranks_per_host
    before, ranks_before = state.layout, state.ranks
    whole = _whole_replicas(ctx)
    chosen, layout = _choose_hosts(ctx, hosts, whole)
    if layout is None:
        reason = f"no layout fits {len(hosts)} hosts of {per_host} ranks"
        flush_and_finish(ctx, "failed", 3, reason)
        return
    choice = ctx.newest_held()
    current = Attempt(
        hosts=chosen,
        ranks={rank: chosen[rank // per_host] for rank in range(layout.world_size)},
        layout=layout,
        resumed=(choice.step, choice.attempt) if choice else None,
        holders=snapshot_holders([state.hosts[name].machine.place for name in chosen], state.current.holders),
    )
    # What was applied once is not changed afterwards.
    if not adjust_batch(ctx, current, max(choice.step if choice else -1, state.last_applied_step)):
        return
    retained = rank_mapping(before, ranks_before, layout, current.ranks, whole) if choice is not None else {}
    state.begin_attempt(state.attempt + 1, current, ctx.now_ns)
    ctx.enter(Running())
    _log_start(ctx, choice, retained)
    ctx.await_first_step()
    for name in ctx.usable():
        if name not in state.active:
            ctx.log("phase.changed", {"reason": SPARE}, host=name, phase="spare")
    for name in state.active:
        ctx.send(name, start_message(ctx, name, choice, retained))
        state.hosts[name].ranks.retained = {}


def _log_start(ctx: SupervisorContext, choice: Choice | None, retained: Mapping[int, int]) -> None:
    state, hosts = ctx.state, ctx.state.active
    resume_step = choice.step if choice else -1
    optional: dict[str, Json] = {
        "copies": dict(holders_to_log(hosts, state.current.holders)),
        "tier": "memory" if choice else None,
        "resume_attempt": choice.attempt if choice else None,
        "kept": sorted(retained),
        "batch_schedule": [segment.to_json() for segment in state.steps.batch_schedule],
        "skip_steps": sorted(state.steps.skipped),
        "cause": state.open.incident_id if state.open else None,
    }
    ctx.log(
        "attempt.started",
        {
            "world_size": state.layout.world_size,
            "layout": state.layout.sizes,
            "hosts": {name: ctx.state.ranks_on(name) for name in hosts},
            "resume_step": resume_step,
            **{key: value for key, value in optional.items() if value},
        },
        sync=True,
    )
    if state.attempt == 1:
        copied = all(peer_of(ctx, name) or has_replica(ctx, name) for name in hosts)
        ctx.log("run.message", {"text": expected_loss(ctx.settings.spec, num_hosts=len(hosts), copied=copied)})
        if (outside := copies_leave_rack(ctx)) is not None:
            ctx.log("run.message", {"text": f"copies leave the rack: {outside}"})
        if ctx.settings.spec.command is not None:
            ctx.log("run.message", {"text": UNWATCHED})


def adjust_batch(ctx: SupervisorContext, current: Attempt, resume_step: int) -> bool:
    """Ask the policy for batch and rate of the new attempt; False: its answer ends the run."""
    state, training = ctx.state, ctx.settings.spec.training
    if ctx.policy.adjust is None or training is None:
        return True
    attempt = NextAttempt(
        num_hosts=len(current.hosts),
        wanted_hosts=ctx.settings.wanted_hosts,
        world_size=current.layout.world_size,
        data_ranks=current.layout.data_ranks,
        resume_step=resume_step,
        global_batch_size=training.global_batch_size,
    )
    try:
        requested = dict(ctx.policy.adjust(attempt) or {})
        state.steps.batch_schedule = changed(
            state.steps.batch_schedule, resume_step=resume_step, batch=training.global_batch_size, requested=requested
        )
    except Exception as error:  # noqa: BLE001 (the user's code: any error ends the run with its text)
        flush_and_finish(ctx, "failed", 2, f"{type(error).__name__} in the policy's adjust(): {error}")
        return False
    return True


def enter_stopping(ctx: SupervisorContext, stopping: Stopping) -> None:
    """Ranks leave: they were asked to, or do so by themselves."""
    grace_s = ctx.settings.spec.recovery.grace_s
    end: JsonObject = {"outcome": stopping.outcome, "exit_code": stopping.exit_code, "source": stopping.source}
    more: JsonObject = {"save": stopping.saves, "deadline_s": grace_s, "by_user": stopping.by_user}
    ctx.log("run.stopping", {**end, **more}, sync=True)
    ctx.enter(stopping)
    ctx.deadline(grace_s)


def ask_to_save(ctx: SupervisorContext, stopping: Stopping) -> None:
    """Ask the ranks to save (where it says so) and exit; the run then ends as it says."""
    grace_s = ctx.settings.spec.recovery.grace_s
    enter_stopping(ctx, stopping)
    command = CommandRanks(kind="stop", save=stopping.saves, exit_code=stopping.exit_code, deadline_s=grace_s)
    for name in ctx.state.active:
        ctx.send(name, command)


def check_ranks_exited(ctx: SupervisorContext) -> None:
    """Once all ranks that were asked to exit have: end the run, or start a larger attempt."""
    state, phase, exited = ctx.state, ctx.state.phase, ctx.state.progress.exited
    if set(state.ranks) - set(exited):
        return
    if isinstance(phase, Running):
        drain(ctx, ctx.following())
    elif isinstance(phase, Stopping):
        # A rank's exit code is the same where there was no time for a save: the committed step tells.
        saved = all(value in REQUESTED_EXIT_CODES or value == 0 for value in exited.values())
        saved = saved and (not phase.saves or state.saves.committed_step >= state.last_applied_step)
        result = "saved and left" if saved and phase.saves else "left"
        result += ", but not every rank could save" if not saved else ""
        source = f"{phase.source}: " if phase.source else ""
        end_run = functools.partial(flush_and_finish, by_user=phase.by_user)
        end = finish if saved or not phase.saves else end_run
        end(ctx, phase.outcome, phase.exit_code, f"{source}{result} after step {state.last_applied_step}")


def start_message(
    ctx: SupervisorContext, name: str, choice: Choice | None, retained: Mapping[int, int]
) -> StartAttempt:
    """For one host. ``retained``: ranks of this attempt -> the rank of the one before whose process continues."""
    return StartAttempt(
        attempt=ctx.state.attempt,
        contexts=_contexts(ctx, name, choice, retained),
        fetch=_fetches(ctx, name, choice, retained) if choice is not None else (),
        peer=peer_of(ctx, name),
        copies_of=_copies_of(ctx, name),
    )


def _contexts(
    ctx: SupervisorContext, name: str, choice: Choice | None, retained: Mapping[int, int]
) -> tuple[RankContext, ...]:
    state, local_ranks = ctx.state, ctx.state.ranks_on(name)
    stores = (store for host in state.active if (store := state.hosts[host].machine.store))
    address, port = next(stores, ("127.0.0.1", 0))
    restore = Restore(step=choice.step, attempt=choice.attempt, layout=choice.layout) if choice is not None else None
    return tuple(
        RankContext(
            run_id=ctx.settings.run_id,
            run_dir=ctx.settings.run_dir,
            attempt=state.attempt,
            host=name,
            rank=rank,
            local_rank=local,
            world_size=state.layout.world_size,
            local_world_size=len(local_ranks),
            layout=state.layout,
            master_addr=address,
            master_port=port,
            restore=restore,
            replicate_snapshots=peer_of(ctx, name) is not None,
            batch_schedule=state.steps.batch_schedule,
            skip_steps=tuple(sorted(state.steps.skipped)),
            kept_rank=retained.get(rank),
            failures=state.failures.count,
            observed_s=(ctx.now_ns - (state.failures.watched_from_ns or ctx.now_ns)) / SECOND_NS,
        )
        for local, rank in enumerate(local_ranks)
    )


def _fetches(ctx: SupervisorContext, name: str, choice: Choice, retained: Mapping[int, int]) -> tuple[FetchShard, ...]:
    """Shards that the host's ranks need and its retained ranks do not hold, and where each is."""
    state = ctx.state
    paused = state.hosts[name].ranks.retained
    missing = [
        rank for rank in state.ranks_on(name) if rank not in retained or paused.get(retained[rank]) != choice.step
    ]
    if choice.layout != state.layout and missing:
        missing = needed_shards(choice, name)
    copies = ((rank, choice.nearest(rank, name)) for rank in missing)
    return tuple(
        FetchShard(rank=rank, copy=held, address=None if held.host == name else state.hosts[held.host].machine.memory)
        for rank, held in copies
    )


def peer_of(ctx: SupervisorContext, name: str) -> Address | None:
    """The replicator of the host that holds copies of this one's snapshots; None: there is none."""
    holder = _holder_of(ctx, name)
    return None if holder is None else ctx.state.hosts[holder].machine.memory


def copies_leave_rack(ctx: SupervisorContext) -> str | None:
    """Whether each host's state is in another rack too, as a copy or in a replica, for people; None: there is no copy
    of it."""
    state, unknown, inside = ctx.state, 0, 0
    for name in state.active:
        holder = _holder_of(ctx, name)
        copies = () if holder is None else (holder,)
        outside: set[bool | None] = set()
        for rank in state.ranks_on(name):
            others = {*copies, *(state.ranks[twin] for twin in replica_peers(state.layout, rank))} - {name}
            if not others:
                return None
            seen = {leaves_rack(state.hosts[name].machine.place, state.hosts[other].machine.place) for other in others}
            outside.add(True if True in seen else None if None in seen else False)
        inside, unknown = inside + (False in outside), unknown + (False not in outside and None in outside)
    if inside:
        return f"no: of {inside} of {len(state.active)} hosts they stay in it"
    return f"unknown: {unknown} of {len(state.active)} hosts have no label (MUSTER_RACK)" if unknown else "yes"


def _holder_of(ctx: SupervisorContext, name: str) -> str | None:
    """The host that holds copies of this one's snapshots."""
    requested = ctx.settings.spec.checkpoint.replicate_snapshots
    active, holders = ctx.state.active, ctx.state.current.holders
    if not holders or requested is False:
        return None
    if requested is None and has_replica(ctx, name):
        return None
    return active[holders[active.index(name)]]


def has_replica(ctx: SupervisorContext, name: str) -> bool:
    """Whether replicas on other hosts hold the same state as this one's ranks."""
    return not ctx.local_steps and has_replica_on_other_host(ctx.state.layout, ctx.state.ranks, name)


def _copies_of(ctx: SupervisorContext, name: str) -> tuple[int, ...]:
    """Ranks of other hosts whose snapshots this host holds copies of."""
    state = ctx.state
    active, holders = state.active, state.current.holders
    here = active.index(name)
    senders = (active[index] for index, holder in enumerate(holders) if holder == here)
    return tuple(rank for sender in senders if _holder_of(ctx, sender) for rank in state.ranks_on(sender))


def on_replicator_address(ctx: SupervisorContext, host: Host, address: Address) -> None:
    """A host's replicator was restarted: the hosts that copy to it are sent its new address."""
    state, known = ctx.state, host.machine.memory is not None
    host.machine.memory = address
    if not isinstance(state.phase, Running) or not known:
        return
    for name in state.active:
        if peer_of(ctx, name) == address:
            ctx.send(name, PeerMoved(peer=address))


def retainable_ranks(ctx: SupervisorContext, hosts: Collection[str]) -> set[int]:
    """Ranks that could continue on ``hosts`` without a new process, as far as is known when their attempt is ended."""
    state, spec = ctx.state, ctx.settings.spec
    layout, size, progress = state.layout, state.layout.ranks_per_replica, state.progress
    replicated = max(layout.dp_replicate, spec.parallelism.dp_replicate) > 1  # one of several may be left
    if not (replicated and spec.replicas_survive):
        return set()
    if not progress.stepped or spec.command or not spec.checkpoint.snapshot_every_steps:
        return set()
    if spec.training is not None and not spec.training.optimizer.traits.restores_exactly:
        return set()  # the replicas would drift apart
    ranks_to_keep: set[int] = set()
    for replica in range(layout.dp_replicate):
        ranks = range(replica * size, (replica + 1) * size)
        if not any(rank in progress.exited or rank in progress.blamed for rank in ranks) and all(
            state.ranks.get(rank) in hosts and _stays(ctx, state.ranks[rank]) for rank in ranks
        ):
            ranks_to_keep |= set(ranks)
    return ranks_to_keep


def pause_s(ctx: SupervisorContext) -> float:
    """How long a retained rank may take to pause before it is replaced like any other."""
    needed_s = PAUSE_STEPS * max(ctx.state.steps.recent_s, default=0.0) + PAUSE_MARGIN_S
    limit = ctx.settings.spec.recovery.step_timeout_s  # a step that takes longer is a hang
    return max(PAUSE_S, needed_s if limit is None else min(needed_s, limit))


def _stays(ctx: SupervisorContext, name: str) -> bool:
    host = ctx.state.hosts[name]
    return host.connected and not host.quarantined


def whole_replicas(layout: Layout, ranks: Mapping[int, str], retained: Mapping[str, set[int]]) -> list[tuple[int, ...]]:
    """The replicas of which every rank is paused on its host; each as its ranks, in order."""
    size = layout.ranks_per_replica
    every = [tuple(range(start, start + size)) for start in range(0, layout.world_size, size)]
    return [replica for replica in every if all(rank in retained.get(ranks.get(rank, ""), ()) for rank in replica)]


def prefer_hosts_of_whole_replicas(
    hosts: Sequence[str], ranks: Mapping[int, str], whole: Sequence[Sequence[int]]
) -> list[str]:
    """``hosts`` with those of whole replicas in front, so that a smaller attempt consists of them."""
    first = list(dict.fromkeys(ranks[rank] for replica in whole for rank in replica))
    return [name for name in first if name in hosts] + [name for name in hosts if name not in first]


def rank_mapping(
    old: Layout, before: Mapping[int, str], new: Layout, after: Mapping[int, str], whole: Sequence[Sequence[int]]
) -> dict[int, int]:
    """Rank of the new attempt -> the rank of the old one whose process continues as it.

    A replica continues as one on the same hosts in the same order: its ranks then hold the same shards.
    """
    if replace(old, dp_replicate=1) != replace(new, dp_replicate=1):
        return {}
    size = new.ranks_per_replica
    free = list(whole)
    mapping: dict[int, int] = {}
    starts = range(0, new.world_size, size)
    keeping_its_number = {replica[0] for replica in whole}
    for start in sorted(starts, key=lambda start: start not in keeping_its_number):
        places = [after[rank] for rank in range(start, start + size)]
        alike = [replica for replica in free if [before[rank] for rank in replica] == places]
        same = next((replica for replica in alike if replica[0] == start), next(iter(alike), None))
        if same is not None:
            free.remove(same)
            mapping |= {start + number: rank for number, rank in enumerate(same)}
    return mapping


def expected_loss(spec: RunSpec, *, num_hosts: int, copied: bool) -> str:
    """One or two sentences for a run on ``num_hosts`` hosts; ``copied``: another host holds each one's state."""
    every, grace_s = spec.checkpoint.every_steps, f"{spec.recovery.grace_s:g} s"
    since = "every step, since nothing is saved on the way"
    if every:
        interval = "every_steps: auto" if every == "auto" else f"every {every} steps"
        since = f"the steps since the last save ({interval})"
    all_at_once = (
        f"if every host goes at once, the state is saved where a save as long as the last fits into {grace_s}, "
        f"else that costs {since}"
    )
    if num_hosts == 1 and not spec.resources.spare_hosts:
        return f"at a preemption notice the state is saved where a save fits into {grace_s}; else that costs {since}"
    if num_hosts == 1 or not copied:
        alone = "no other host holds its state (checkpoint.replicate_snapshots, dp_replicate)"
        return f"a lost host costs {since}: {alone}; {all_at_once}"
    if spec.resources.spare_hosts:
        goes_on = "a spare takes over"
    elif (spec.resources.min_hosts or num_hosts) < num_hosts:
        goes_on = "the others go on"
    else:
        goes_on = "the run waits for a host"
    return f"a host that is preempted costs no applied step, and {goes_on}; {all_at_once}"
