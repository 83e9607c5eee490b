"""What a virtual host's agent does with the supervisor's messages."""

from __future__ import annotations

from muster.core.layout import Layout
from muster.core.types import Checksum
from muster.protocol.to_agent import (
    CommitFlushed,
    DropCopies,
    EndAttempt,
    FlushedFile,
    FlushSnapshots,
    PeerMoved,
    StartAttempt,
    ToAgent,
)
from muster.protocol.to_supervisor import FlushCommitted, SnapshotsFlushed
from muster.protocol.values import CommandRanks
from muster.simulate.host_time import VirtualHost
from muster.simulate.stepping_hosts import SteppingHosts

#: Of files that no virtual host writes.
_CHECKSUM = Checksum(value="0" * 16)


def handle_message(cluster: SteppingHosts, name: str, message: ToAgent) -> None:
    """A message of the supervisor reaches a host, if that is up and linked."""
    host = cluster.hosts.get(name)
    if host is None or not host.up or not host.linked:
        return
    match message:
        case StartAttempt() if message.attempt > host.attempt:
            host.begin(message.attempt, [context.rank for context in message.contexts])
            host.copies_to = message.peer[0] if message.peer is not None else None
            host.starts_from = tuple(fetch.copy for fetch in message.fetch)
            cluster.maybe_begin(message)
        case PeerMoved():
            host.copies_to = message.peer[0]
        case EndAttempt():
            cluster.end_ranks(host, message)
        case CommandRanks():
            handle_command(cluster, message)
        case FlushSnapshots():
            flush(cluster, host, message)
        case CommitFlushed():
            commit_flushed(cluster, host, message)
        case DropCopies():
            host.drop(message.copies)


def handle_command(cluster: SteppingHosts, command: CommandRanks) -> None:
    """Save and exit (or only exit) after the current step; ranks that hang in their save do neither."""
    if not cluster.stepping:
        return
    if not cluster.ranks_obey:
        cluster.halt("detect")
        return
    cluster.leave_after_step(command.exit_code, save=command.save)


def flush(cluster: SteppingHosts, host: VirtualHost, order: FlushSnapshots) -> None:
    """Write the requested shards, if this host holds them, they are intact and the disk takes them."""
    copies = [shard.copy for shard in order.ranks]
    rotten = tuple(copy for copy in copies if copy in host.rotten)
    failure = None
    if not all(host.holds(copy) for copy in copies):
        failure = "no longer held"
    elif rotten:
        failure = f"the snapshot of rank {rotten[0].rank} is not intact"
    elif not cluster.disk_takes:
        failure = "no space left on device"
    files = () if failure else tuple(
        FlushedFile(rank=shard.rank, name=f"rank-{shard.rank}", bytes=1, checksum=_CHECKSUM, data_offset=0)
        for shard in order.ranks
    )  # fmt: skip
    answer = SnapshotsFlushed(step=order.step, attempt=order.attempt, files=files, failure=failure, rejected=rotten)
    cluster.receive_later(cluster.draw("flush", cluster.stages.flush_s), host, answer)


def commit_flushed(cluster: SteppingHosts, host: VirtualHost, order: CommitFlushed) -> None:
    """Put the marker, if every rank's shard was written once."""
    whole = sorted(file.rank for file in order.files) == list(range(Layout.from_key(order.layout).world_size))
    if not whole:
        answer = FlushCommitted(step=order.step, attempt=order.attempt, failure="a shard is missing")
    else:
        answer = FlushCommitted(step=order.step, attempt=order.attempt, uri=order.uri, bytes=1)
        cluster.report_checkpoint(host, order.step, order.attempt, order.uri)
    cluster.receive_from(host, answer)
