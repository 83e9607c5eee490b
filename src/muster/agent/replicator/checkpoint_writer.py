"""What the mover writes to the disk or the bucket: the shares that its host's ranks hand over.

A rank connects to a Unix socket in the host's memory folder, passes the memory that holds its share (a file
descriptor: nothing is copied) and waits for the answer in a thread of its own::

    rank  -> mover   {"t": "write", "uri", "bytes", "preamble_bytes"}
    mover -> rank    {"t": "go"}
    rank  -> mover   the descriptor, then the preamble's bytes
    mover -> rank    {"t": "busy"} every ``BUSY_S``, at last {"t": "written", "bytes", "crc32"} or {"t": "failed", ...}

A connection that ends before (the rank died, its world came to an end) stops the writing. Nothing is committed
here: rank 0 writes the marker when every share is there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from muster.checkpoint_format.shard_file import write_shard
from muster.core.errors import MusterError
from muster.transport.stream import REPLICATOR_SOCKET, Stream

#: How often a rank hears that its share is being written.
BUSY_S = 2.0


class Shares:
    """Serves the socket; one connection a share, one thread that writes it."""

    def __init__(self, *, memory: Path, token: bytes) -> None:
        self.token = token
        path = memory / REPLICATOR_SOCKET
        path.unlink(missing_ok=True)  # a dead predecessor's
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(64)

    def serve(self) -> None:
        """Block for ever."""
        answer_each(self.listener, self.token, lambda stream: take_share(stream, stream.receive()), who="a rank")


def answer_each(listener: socket.socket, token: bytes, talk: Callable[[Stream], None], *, who: str) -> None:
    """Accept for ever; each connection has a thread in which ``talk`` has it until it returns or raises."""

    def answer(sock: socket.socket) -> None:
        try:
            with sock:
                talk(Stream(sock, token, server=True))
        except (OSError, MusterError, ValueError, KeyError) as error:
            if not isinstance(error, ConnectionError):
                complain(f"answering {who}: {error}")

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=answer, args=(sock,), daemon=True).start()


def complain(text: str) -> None:
    """One line to the mover's log, where the disk has room for it: a full one ends no thread."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def take_share(stream: Stream, request: Mapping[str, Any]) -> None:
    """Write one share and answer; returns without an answer when the rank is gone."""
    size, preamble = int(request["bytes"]), bytearray(int(request["preamble_bytes"]))
    stream.send({"t": "go"})
    fd = stream.receive_file()
    try:
        stream.receive_bytes(memoryview(preamble))
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    answer: dict[str, Any] = {}
    forgotten = threading.Event()
    done, writing = socket.socketpair()

    def write() -> None:
        with writing:  # its end wakes the loop below
            answer.update(_written(str(request["uri"]), (preamble, memoryview(mapped)), forgotten))

    with done:
        threading.Thread(target=write, name=f"share {request['uri']}", daemon=True).start()
        while True:
            ready, _, _ = select.select([stream.sock, done], [], [], BUSY_S)
            if done in ready:
                stream.send(answer)
                return
            if stream.sock in ready:
                forgotten.set()  # it says nothing before we answer: it has gone
                return
            stream.send({"t": "busy"})


def _written(uri: str, parts: tuple[bytes | bytearray | memoryview, ...], forgotten: threading.Event) -> dict[str, Any]:
    """The answer to a rank: what was written, or why it was not."""
    try:
        count, crc = write_shard(uri, parts, wanted=lambda: not forgotten.is_set())
        return {"t": "written", "bytes": count, "crc32": crc}
    except Exception as error:  # noqa: BLE001 (a thread's edge; the rank makes an event of it)
        hint = error.hint if isinstance(error, MusterError) else None
        return {"t": "failed", "reason": str(error) or type(error).__name__, "hint": hint}
