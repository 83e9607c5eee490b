"""The replicator: copies snapshots to lower tiers, so that neither a rank nor the agent waits for a network or a disk.

A program of its own (``python -m muster.agent.replicator.main``), one per host: it copies snapshots to a peer's memory
and writes checkpoints to the disk or the bucket (``checkpoint_writer``: those that ranks hand over; ``memory_flush``:
those made of snapshots, which need no rank). It imports no torch. Orders come from the agent as lines on stdin
(``protocol.replicator_orders``), and so do its answers on stdout: first the address where other replicators connect.

Between replicators: the authenticated handshake of ``transport.secure_session``, then ``protocol.replicator_peers`` and
raw bytes (``transfer``). A version that is overwritten while it is read is refused by its stamp, a damaged one by its
checksum; neither is ever committed. A ring that copies arrive in has one writer, the newest attempt's
(``SnapshotReceiver``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from muster.agent.replicator import snapshot_cleanup
from muster.agent.replicator.checkpoint_writer import (
    decode_request,
    listen_for_ranks,
    log_error,
    write_shard_for,
)
from muster.agent.replicator.memory_flush import commit_flushed, flush
from muster.agent.replicator.replication import SnapshotReceiver, SnapshotSender, connect, decode_peer
from muster.agent.replicator.transfer import PeerStream, SliceSource, answer_read, receive_version, send_blocks
from muster.checkpoint_format.fences import NonceOf, nonces_of, unbound
from muster.checkpoint_format.snapshot_ring import NoRoom, Ring, Version, file_name, refuse
from muster.core import environment
from muster.core.errors import CheckpointError, ConflictError, MusterError
from muster.core.processes import forgive_outputs
from muster.core.snapshots import PEER_SLOTS, SnapshotCopy, SnapshotNotIntact, Tier
from muster.core.typed_json import Unreadable
from muster.protocol.codec import encode, reader_of
from muster.protocol.hello import Refused
from muster.protocol.replicator_orders import (
    TO_REPLICATOR,
    CopyNext,
    CopyTo,
    FetchVersion,
    FlushOrder,
    FromReplicator,
    ListenAddress,
    LogNote,
    ToReplicator,
)
from muster.protocol.replicator_peers import (
    PeerHello,
    PushRefused,
    PushVersion,
    ReadSlices,
    ReadVersion,
    VersionFollows,
    WantBlocks,
)
from muster.protocol.to_agent import FlushSnapshots
from muster.protocol.to_supervisor import FlushCommitted, SnapshotsFlushed, SnapshotsRejected
from muster.protocol.version import MINE, incompatible
from muster.storage.memory_dir import MemoryDir
from muster.transport.listening import listen_on, raise_soft_limit
from muster.transport.secure_session import run_token
from muster.transport.stream_server import serve_streams, stop_serving

#: A dead agent's replicator ends when its stdin closes; then its port is free.
PREDECESSOR_S = 1.0
#: A replicator that died is back within this time, on the same port: a fetch is retried for this long.
RESTART_S = 2.0
_decode_order = reader_of(TO_REPLICATOR)


class Replicator:
    """Serves, fetches and sends; one thread per connection, and one for each rank whose snapshots are copied."""

    def __init__(self, *, memory: Path, token: bytes, bind: str, port: int = 0) -> None:
        """``port``: a dead predecessor's, so that the others need no new address; any port where it is taken."""
        self.memory, self.token = memory, token
        self.listener = _listen(bind, port)
        host, port = self.listener.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        self.receiver = SnapshotReceiver()
        self._slices = SliceSource()
        self.senders: list[SnapshotSender] = []
        self._copies: CopyTo | None = None
        """Of the newest attempt here."""
        self.nonce_of: NonceOf = unbound
        self._sending = threading.Lock()
        self._flushing = threading.Lock()

    def serve(self) -> None:
        serve_streams(self.listener, self.token, self._talk, decode=decode_peer, peer="a peer", log=log_error)

    def close(self) -> None:
        """Let ``serve`` return; connections go on. The program itself never does: it ends with its stdin."""
        stop_serving(self.listener)

    def _talk(self, stream: PeerStream) -> None:
        hello = stream.receive()
        if not isinstance(hello, PeerHello):
            raise CheckpointError(f"a peer began with {type(hello).__name__}")
        problem = incompatible(MINE, hello.version, me="a replicator", them="its peer")
        if problem is not None:
            stream.send(Refused(version=MINE, reason=problem))
            raise CheckpointError(problem)
        while True:
            request = stream.receive()
            if isinstance(request, ReadVersion | ReadSlices | WantBlocks):
                self._answer_read(request, stream)
            elif isinstance(request, PushVersion):
                self._receive(request, stream)

    def _answer_read(self, request: ReadVersion | ReadSlices | WantBlocks, stream: PeerStream) -> None:
        ring = Ring.open(self._path(request.file), writable=True)
        try:
            if isinstance(request, ReadVersion):
                answer_read(ring, request, stream)
            elif isinstance(request, ReadSlices):
                self._slices.describe(ring, request, stream)
            else:
                send_blocks(ring, request, stream)
        except CheckpointError as error:
            version = ring.find(request.copy.step, request.copy.attempt)
            if version is not None:
                self._reject(ring, version, str(error))
            raise
        finally:
            ring.close()

    def _receive(self, request: PushVersion, stream: PeerStream) -> None:
        """Receive a copy. Refused where a newer attempt writes to that ring, or there is no room."""
        path = self._path(request.file)
        try:
            with self.receiver.writer(path.name, request.attempt, stream.sock):
                try:
                    receive_version(path, request, stream, slots=PEER_SLOTS)
                except NoRoom:  # raised before anything was answered
                    if not self._drop_former_copies(request.attempt):
                        raise
                    receive_version(path, request, stream, slots=PEER_SLOTS)
        except (NoRoom, ConflictError) as error:
            stream.send(PushRefused(reason=str(error), no_room=isinstance(error, NoRoom)))

    def _drop_former_copies(self, attempt: int) -> bool:
        """Make room for an attempt's copies: those of ranks that another host holds now. Whether there were any.

        Every rank has its state when copies are made: until the new holder has its copy, a lost host costs the steps
        since the last save. Without room there would be no copies from then on.
        """
        copies = self._copies
        if copies is None or copies.attempt != attempt:
            return False
        return snapshot_cleanup.drop_other_copies(self.memory, layout=copies.layout, ranks=copies.copies_of)

    def _path(self, name: str) -> Path:
        return self.memory / Path(name).name  # never a path: a peer names files only

    def fetch(self, order: FetchVersion) -> None:
        """Get one version; the target appears under its final name when it is complete."""
        stream = connect(order.address, self.token)
        try:
            stream.send(ReadVersion(file=order.file, copy=order.copy))
            answer = stream.receive()
            if isinstance(answer, Refused):
                raise CheckpointError(answer.reason)
            if not isinstance(answer, VersionFollows):
                raise CheckpointError(f"{order.file} of step {order.copy.step} is no longer there")
            part = self.memory / f"{order.target}.part"
            part.unlink(missing_ok=True)
            receive_version(part, answer, stream)
            os.rename(part, self.memory / order.target)
        finally:
            stream.close()

    def handle(self, order: ToReplicator) -> None:
        if isinstance(order, CopyTo):
            self._copy_to(order)
        elif isinstance(order, CopyNext):
            for sender in self.senders:
                sender.wake()
        elif isinstance(order, FetchVersion):
            threading.Thread(target=self._fetch, args=(order,), daemon=True).start()
        else:
            threading.Thread(target=self._flush, args=(order,), daemon=True).start()

    def _copy_to(self, order: CopyTo) -> None:
        for sender in self.senders:
            sender.stop()
        self.receiver.expect(order.attempt)
        self._copies = order
        self.senders = []
        for rank in order.ranks if order.peer is not None else ():
            assert order.peer is not None
            own, copy = file_name("own", order.layout, rank), file_name("peer", order.layout, rank)
            sender = SnapshotSender(
                self.memory / own, copy, peer=order.peer, attempt=order.attempt, token=self.token, note=self._note,
                reject=self._reject,
            )  # fmt: skip
            self.senders.append(sender)
            threading.Thread(target=sender.run, name=f"send {own}", daemon=True).start()

    def _note(self, text: str) -> None:
        self.send(LogNote(text=text))

    def _reject(self, ring: Ring, version: Version, reason: str) -> None:
        """A receiver found a version damaged: if it is damaged here, drop it and report to the agent."""
        try:
            ring.verify(version)
        except CheckpointError:
            if ring.checksum(version) is None:
                return  # overwritten meanwhile
            ring.drop(version)
            tier, layout, rank, _ = ring.path.name.split(".")
            held: Tier = "peer" if tier == "peer" else "memory"
            copy = SnapshotCopy(
                step=version.step, attempt=version.attempt, rank=int(rank), layout=layout, host="", tier=held
            )
            self.send(SnapshotsRejected(copies=(copy,), reason=reason))

    def _fetch(self, order: FetchVersion) -> None:
        try:
            self._fetch_with_retries(order)
        except (OSError, MusterError, ValueError) as error:
            log_error(f"fetching {order.file}: {error}")
            with contextlib.suppress(OSError):  # a full tmpfs: the rank waits until its timeout
                of_copy = isinstance(error, CheckpointError) and not isinstance(error, NoRoom)
                refuse(self.memory / order.target, str(error) or type(error).__name__, of_copy=of_copy)

    def _fetch_with_retries(self, order: FetchVersion) -> None:
        until = time.monotonic() + RESTART_S
        while True:
            try:
                return self.fetch(order)
            except ConnectionError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _flush(self, order: FlushOrder) -> None:
        with self._flushing:  # the same order twice must not write the same files at once
            self.send(self._flushed(order))

    def _flushed(self, order: FlushOrder) -> SnapshotsFlushed | FlushCommitted:
        flushed = order.flush
        try:
            if isinstance(flushed, FlushSnapshots):
                return flush(flushed, self.memory, run_id=order.run_id, nonce_of=self.nonce_of)
            return commit_flushed(flushed, run_id=order.run_id, fence=order.fence, nonce_of=self.nonce_of)
        except Exception as error:  # noqa: BLE001 (a thread's edge; the agent tells the supervisor)
            failure = str(error) or type(error).__name__
            if not isinstance(flushed, FlushSnapshots):
                return FlushCommitted(step=flushed.step, attempt=flushed.attempt, failure=failure)
            copies = error.copies if isinstance(error, SnapshotNotIntact) else ()
            return SnapshotsFlushed(step=flushed.step, attempt=flushed.attempt, failure=failure, rejected=copies)

    def send(self, message: FromReplicator) -> None:
        """One line to the agent.

        ``file`` is named because print() alone does not hold ``sys.stdout``: where another thread replaces it
        meanwhile, as pytest's capture does, print() goes on with freed memory (CPython's issue 130163).
        """
        with self._sending:
            print(encode(message).decode(), file=sys.stdout, flush=True)


def _listen(bind: str, port: int) -> socket.socket:
    until = time.monotonic() + PREDECESSOR_S
    while port:
        try:
            return listen_on(bind, port)
        except OSError:
            if time.monotonic() > until:
                break
            time.sleep(0.02)
    return listen_on(bind)


def main() -> None:
    forgive_outputs("stderr")  # stdout speaks to the agent
    parser = argparse.ArgumentParser(description="Muster's snapshot replicator (started by the agent)")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--memory", required=True, type=Path)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--port", type=int, default=0, help="a dead predecessor's")
    arguments = parser.parse_args()
    raise_soft_limit()
    # Not the watchdog's niceness: copies must not slow the ranks.
    os.setpriority(os.PRIO_PROCESS, 0, environment.current().nice)
    token = run_token(arguments.run_dir)
    memory = MemoryDir.open(arguments.memory)
    replicator = Replicator(memory=memory.folder, token=token, bind=arguments.bind, port=arguments.port)
    replicator.nonce_of = nonces_of(arguments.run_dir)
    ranks = listen_for_ranks(memory)
    replicator.send(ListenAddress(address=replicator.address))

    def serve_ranks() -> None:
        serve_streams(ranks, token, write_shard_for, decode=decode_request, peer="a rank", log=log_error)

    for target in (replicator.serve, serve_ranks):
        threading.Thread(target=target, daemon=True).start()
    for line in sys.stdin.buffer:
        try:
            order = _decode_order(line)
        except Unreadable as error:
            log_error(f"an order of the agent: {error}")
            continue
        replicator.handle(order)


if __name__ == "__main__":
    main()
