"""Copies of snapshots in another host's memory: the sender's side, and who may write where they arrive."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from muster.agent.replicator.checkpoint_writer import log_error
from muster.agent.replicator.transfer import PeerStream, send_slot
from muster.checkpoint_format.snapshot_ring import Ring, Version
from muster.core.errors import CheckpointError, ConflictError, MusterError
from muster.core.snapshots import SnapshotCopy
from muster.protocol.codec import reader_of
from muster.protocol.hello import Refused
from muster.protocol.replicator_peers import REPLICATOR_PEERS, Go, Held, PeerHello, PushRefused, PushVersion
from muster.protocol.version import MINE
from muster.transport.stream import TIMEOUT_S, Stream

#: What replicators say to each other.
decode_peer = reader_of(REPLICATOR_PEERS)
#: A version is ordered when it is copied, and counts when its checksum is there: waited for this long.
COMMIT_WAIT_S = 30.0
#: A peer without room is asked again after this long.
RETRY_S = 30.0


class SnapshotSender:
    """Copies one rank's snapshots to the peer, over a connection of its own.

    The rank decides which (``Ring.request_copy``): the ranks of all hosts agree on the step, and none requests the
    next one before every peer holds it. The rank learns from the ring too that a copy has arrived.
    """

    def __init__(
        self, own: Path, copy: str, *, peer: tuple[str, int], attempt: int, token: bytes,
        note: Callable[[str], None] = lambda text: None,
        reject: Callable[[Ring, Version, str], None] = lambda ring, version, reason: None,
    ) -> None:  # fmt: skip
        """``own``: the rank's ring. ``copy``: its copy's file at the peer. ``note``: to the run's log. ``reject``: of a
        version that the peer found damaged."""
        self._own, self._copy, self._peer, self._attempt, self._token = own, copy, peer, attempt, token
        self._note, self._reject = note, reject
        self._ordered = threading.Event()
        self._lock = threading.Lock()
        self._stopped = False
        self._stream: PeerStream | None = None
        self._sent = (-1, -1)
        self._retry_at_s = 0.0
        self._refused = False

    def wake(self) -> None:
        """The rank may have ordered another one."""
        self._ordered.set()

    def stop(self) -> None:
        """Send nothing more; a copy under way is abandoned."""
        with self._lock:
            self._stopped = True
            _shut(self._stream.sock if self._stream is not None else None)
        self._ordered.set()

    def run(self) -> None:
        """Send what is ordered until ``stop``."""
        while True:
            self._ordered.wait()
            self._ordered.clear()
            if self._stopped:
                return
            if time.monotonic() < self._retry_at_s:
                continue
            try:
                self._send()
            except (OSError, MusterError, ValueError) as error:
                if not self._stopped:
                    log_error(f"copying {self._own.name} to {self._peer}: {error}")
                self._disconnect()

    def _send(self) -> None:
        ring = Ring.open(self._own, writable=True)
        try:
            version = self._ordered_version(ring)
            if version is None:
                return
            stream = self._stream or self._connect()
            layout = self._own.name.split(".")[1]
            copy = SnapshotCopy(
                step=version.step, attempt=version.attempt, rank=version.rank, layout=layout, host="", tier="memory"
            )
            stream.send(
                PushVersion(
                    file=self._copy, attempt=self._attempt, header=ring.header.decode(), slot_bytes=ring.slot_bytes,
                    copy=copy, keep=ring.agreed(),
                )
            )  # fmt: skip
            answer = stream.receive()
            if isinstance(answer, PushRefused):
                self._on_refusal(answer.reason, no_room=answer.no_room)
                return
            if isinstance(answer, Refused):
                self._on_refusal(answer.reason, no_room=False)
                raise ConnectionError(answer.reason)
            if isinstance(answer, Go):
                try:
                    if not send_slot(ring, version, stream):
                        self._disconnect()  # the peer ends a connection over which no whole version came
                        return
                except CheckpointError as error:
                    self._reject(ring, version, str(error))
                    raise
            elif not isinstance(answer, Held):
                raise CheckpointError(f"the peer answered {type(answer).__name__}")
            with self._lock:  # a copy at an older attempt's peer must not be recorded once there is another peer
                if not self._stopped:
                    ring.note_copied(version, world=self._attempt)
                    self._sent = (version.step, version.attempt)
        finally:
            ring.close()

    def _ordered_version(self, ring: Ring) -> Version | None:
        """The version to send, once it counts; None: nothing new is ordered, or it never counted."""
        until = time.monotonic() + COMMIT_WAIT_S
        ordered = ring.requested_copy()
        while ordered not in ((-1, -1), self._sent) and ring.requested_copy() == ordered and not self._stopped:
            version = ring.find(*ordered)
            if version is not None or time.monotonic() > until:
                return version
            time.sleep(0.01)
        return None

    def _on_refusal(self, reason: str, *, no_room: bool) -> None:
        self._retry_at_s = time.monotonic() + RETRY_S
        log_error(f"the peer refuses a copy of {self._own.name}: {reason}")
        if no_room and not self._refused:
            self._refused = True
            self._note(
                f"no copies of this host's snapshots: {reason} at {self._peer[0]}; training continues, a lost host "
                "costs the steps since the last save (checkpoint.replicate_snapshots: false turns copies off)"
            )

    def _connect(self) -> PeerStream:
        stream = connect(self._peer, self._token)
        with self._lock:
            self._stream = stream
            if self._stopped:
                raise ConnectionError("no more copies to this peer")
        return stream

    def _disconnect(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def connect(address: tuple[str, int], token: bytes) -> PeerStream:
    """A stream to another host's replicator; the hello with this one's version is sent."""
    stream = Stream(socket.create_connection(address, timeout=TIMEOUT_S), token, server=False, decode=decode_peer)
    stream.send(PeerHello(version=MINE))
    return stream


class SnapshotReceiver:
    """Which connection writes to the rings that copies arrive in: one per file, of the newest attempt seen.

    A host that was stopped while it was replaced resumes sending: its bytes must not land in a slot that its
    successor fills.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt = -1
        self._files: dict[str, _File] = {}

    def expect(self, attempt: int) -> None:
        """This host is part of ``attempt``: older ones are over."""
        with self._lock:
            self._attempt = max(self._attempt, attempt)

    @contextlib.contextmanager
    def writer(self, name: str, attempt: int, sock: socket.socket) -> Iterator[None]:
        """Become the only writer of ``name``: an older connection is shut, and has finished when this is entered.

        Raises ConflictError where a newer attempt was seen.
        """
        with self._lock:
            file = self._files.setdefault(name, _File())
            newest = max(self._attempt, file.attempt)
            if attempt < newest:
                raise ConflictError(f"{name} is written by attempt {newest}, not by {attempt}")
            if file.sock is not sock:
                _shut(file.sock)
            file.attempt, file.sock = attempt, sock
        with file.writing:
            with self._lock:
                if file.sock is not sock:
                    raise ConflictError(f"{name} is written by a newer connection")
            try:
                yield
            finally:
                with self._lock:
                    if file.sock is sock:
                        file.sock = None


class _File:
    def __init__(self) -> None:
        self.attempt = -1
        self.sock: socket.socket | None = None
        self.writing = threading.Lock()


def _shut(sock: socket.socket | None) -> None:
    """End a connection that a thread uses; closing resets it, or a sender might wait at a full window."""
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.shutdown(socket.SHUT_RDWR)
