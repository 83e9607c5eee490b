"""Copies of snapshots in another host's memory: who sends which, and who may write where they arrive."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from muster.agent.replicator.checkpoint_writer import complain
from muster.checkpoint_format.snapshot_ring import Ring
from muster.core.errors import CheckpointError, ConflictError, MusterError
from muster.transport.stream import TIMEOUT_S, Stream

#: A peer without room is asked again after so long.
ASK_AGAIN_S = 30.0


class Pusher:
    """Copies one rank's snapshots to the peer, over a connection of its own.

    Which one is the rank's to say (``Ring.order``): the ranks of all hosts agree on the step, and none orders the next
    one before every peer holds it. The rank learns that it is there from the ring too.
    """

    def __init__(self, own: Path, there: str, *, peer: tuple[str, int], world: int, token: bytes) -> None:
        """``own``: the rank's ring. ``there``: its copy's file at the peer. ``world``: the attempt."""
        self._own, self._there, self._peer, self._world, self._token = own, there, peer, world, token
        self.say: Callable[[str], None] = lambda text: None
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._stopped = False
        self._stream: Stream | None = None
        self._pushed = (-1, -1)
        self._ask_s = 0.0
        self._refused = False

    def wake(self) -> None:
        """The rank may have ordered another one."""
        self._wanted.set()

    def stop(self) -> None:
        """Send no more, from this moment on; a copy under way is given up."""
        with self._lock:
            self._stopped = True
            _shut(self._stream.sock if self._stream is not None else None)
        self._wanted.set()

    def run(self) -> None:
        """Push what is ordered until ``stop``."""
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._stopped:
                return
            if time.monotonic() < self._ask_s:
                continue
            try:
                self._push()
            except (OSError, MusterError, ValueError, KeyError) as error:
                if not self._stopped:
                    complain(f"copying {self._own.name} to {self._peer}: {error}")
                self._disconnect()

    def _push(self) -> None:
        ring = Ring.open(self._own, writable=True)
        try:
            version = ring.find(*ring.ordered())
            if version is None or self._pushed == (version.step, version.attempt):
                return
            stream = self._stream or self._connect()
            stream.send(
                {
                    "t": "push",
                    "file": self._there,
                    "world": self._world,
                    "header": ring.header.decode(),
                    "slot_bytes": ring.slot_bytes,
                    "step": version.step,
                    "attempt": version.attempt,
                    "keep": ring.agreed(),
                }
            )
            answer = stream.receive()
            if answer.get("t") == "refused":
                self._was_refused(str(answer["reason"]), no_room=bool(answer["no_room"]))
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
            with self._lock:  # what an older attempt's peer holds must not be noted once another one is copied to
                if not self._stopped:
                    ring.note_copied(version, world=self._world)
                    self._pushed = (version.step, version.attempt)
        finally:
            ring.close()

    def _was_refused(self, reason: str, *, no_room: bool) -> None:
        self._ask_s = time.monotonic() + ASK_AGAIN_S
        complain(f"the peer takes no copy of {self._own.name}: {reason}")
        if no_room and not self._refused:
            self._refused = True
            self.say(
                f"no copies of this host's snapshots: {reason} at {self._peer[0]}; training goes on, a lost host costs "
                "the steps since the last save (checkpoint.replicate_snapshots: false asks for no copies)"
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


class Arrivals:
    """Who writes to the rings that copies arrive in: for each file one connection, of the newest attempt seen.

    A host that stood still while it was replaced wakes up and goes on sending: its bytes must not land in a slot that
    its successor fills.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._world = -1
        self._files: dict[str, _File] = {}

    def expect(self, world: int) -> None:
        """This host belongs to attempt ``world``: older ones are over."""
        with self._lock:
            self._world = max(self._world, world)

    @contextlib.contextmanager
    def writer(self, name: str, world: int, sock: socket.socket) -> Iterator[None]:
        """Be the one that writes to ``name``: an older connection is shut, and has let go when this is entered.

        Raises ConflictError where a newer attempt was seen.
        """
        with self._lock:
            file = self._files.setdefault(name, _File())
            if world < max(self._world, file.world):
                raise ConflictError(f"{name} is written by attempt {max(self._world, file.world)}, not by {world}")
            if file.sock is not sock:
                _shut(file.sock)
            file.world, file.sock = world, sock
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
        self.world = -1
        self.sock: socket.socket | None = None
        self.writing = threading.Lock()


def _shut(sock: socket.socket | None) -> None:
    """End a connection under whoever uses it; its close resets it, or a sender might wait at a full window."""
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.shutdown(socket.SHUT_RDWR)
