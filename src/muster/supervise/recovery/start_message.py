"""What a host is sent when an attempt starts: its ranks, where they meet, where each shard of their state is."""

from __future__ import annotations

from collections.abc import Mapping

from muster.policy.snapshot_holders import leaves_rack
from muster.protocol.held_snapshots import Choice, has_replica_on_other_host, needed_shards, replica_peers
from muster.protocol.ranks import RankContext, Restore
from muster.protocol.to_agent import FetchShard, PeerMoved, StartAttempt
from muster.protocol.values import Address
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.inputs import SECOND_NS
from muster.supervise.recovery.phases import Running
from muster.supervise.recovery.state import Host


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
    stores = (store for host in state.active if (store := state.hosts[host].store))
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
            batch_schedule=state.batch_schedule,
            skip_steps=tuple(sorted(state.skip_steps)),
            kept_rank=retained.get(rank),
            failures=state.failures,
            observed_s=(ctx.now_ns - (state.watched_from_ns or ctx.now_ns)) / SECOND_NS,
        )
        for local, rank in enumerate(local_ranks)
    )


def _fetches(ctx: SupervisorContext, name: str, choice: Choice, retained: Mapping[int, int]) -> tuple[FetchShard, ...]:
    """Shards that the host's ranks need and its retained ranks do not hold, and where each is."""
    state = ctx.state
    paused = state.hosts[name].retained
    missing = [
        rank for rank in state.ranks_on(name) if rank not in retained or paused.get(retained[rank]) != choice.step
    ]
    if choice.layout != state.layout and missing:
        missing = needed_shards(choice, name)
    copies = ((rank, choice.nearest(rank, name)) for rank in missing)
    return tuple(
        FetchShard(rank=rank, copy=held, address=None if held.host == name else state.hosts[held.host].memory)
        for rank, held in copies
    )


def peer_of(ctx: SupervisorContext, name: str) -> Address | None:
    """The replicator of the host that holds copies of this one's snapshots; None: nobody does."""
    holder = _holder_of(ctx, name)
    return None if holder is None else ctx.state.hosts[holder].memory


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
            seen = {leaves_rack(state.hosts[name].place, state.hosts[other].place) for other in others}
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
    state, known = ctx.state, host.memory is not None
    host.memory = address
    if not isinstance(state.phase, Running) or not known:
        return
    for name in state.active:
        if peer_of(ctx, name) == address:
            ctx.send(name, PeerMoved(peer=address))
