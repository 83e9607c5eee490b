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
from muster.checkpoint_format.snapshot_ring import Ring
from muster.core.errors import CheckpointError, ConflictError, MusterError
from muster.transport.stream import TIMEOUT_S, Stream

#: A peer without room is asked again after this long.
RETRY_S = 30.0


class SnapshotSender:
    """Copies one rank's snapshots to the peer, over a connection of its own.

    The rank decides which (``Ring.order``): the ranks of all hosts agree on the step, and none orders the next one
    before every peer holds it. The rank learns from the ring too that a copy has arrived.
    """

    def __init__(
        self, own: Path, copy: str, *, peer: tuple[str, int], attempt: int, token: bytes,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """``own``: the rank's ring. ``copy``: its copy's file at the peer. ``note``: to the run's log."""
        self._own, self._copy, self._peer, self._attempt, self._token = own, copy, peer, attempt, token
        self._note = note
        self._ordered = threading.Event()
        self._lock = threading.Lock()
        self._stopped = False
        self._stream: Stream | None = None
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
            except (OSError, MusterError, ValueError, KeyError) as error:
                if not self._stopped:
                    log_error(f"copying {self._own.name} to {self._peer}: {error}")
                self._disconnect()

    def _send(self) -> None:
        ring = Ring.open(self._own, writable=True)
        try:
            version = ring.find(*ring.ordered())
            if version is None or self._sent == (version.step, version.attempt):
                return
            stream = self._stream or self._connect()
            name = {"file": self._copy, "world": self._attempt, "step": version.step, "attempt": version.attempt}
            shape = {"header": ring.header.decode(), "slot_bytes": ring.slot_bytes}
            stream.send({"t": "push", **name, **shape, "keep": ring.agreed()})
            answer = stream.receive()
            if answer.get("t") == "refused":
                self._on_refusal(str(answer["reason"]), no_room=bool(answer["no_room"]))
                return
            if answer.get("t") == "go":
                crc = stream.send_bytes(ring.slot(version.slot))
                stream.receive()
                seal, whole = ring.sealed(version), ring.find(version.step, version.attempt) == version
                stream.send({"t": "whole" if whole else "torn", "crc": crc, "seal": seal})
                if not whole:
                    return
                answer = stream.receive()
            if answer.get("t") != "held":
                raise CheckpointError(f"the peer answered {answer.get('t')!r}")
            with self._lock:  # a copy at an older attempt's peer must not be recorded once there is another peer
                if not self._stopped:
                    ring.note_copied(version, world=self._attempt)
                    self._sent = (version.step, version.attempt)
        finally:
            ring.close()

    def _on_refusal(self, reason: str, *, no_room: bool) -> None:
        self._retry_at_s = time.monotonic() + RETRY_S
        log_error(f"the peer refuses a copy of {self._own.name}: {reason}")
        if no_room and not self._refused:
            self._refused = True
            self._note(
                f"no copies of this host's snapshots: {reason} at {self._peer[0]}; training continues, a lost host "
                "costs the steps since the last save (checkpoint.replicate_snapshots: false turns copies off)"
            )

    def _connect(self) -> Stream:
        sock = socket.create_connection(self._peer, timeout=TIMEOUT_S)
        stream = Stream(sock, self._token, server=False)
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
