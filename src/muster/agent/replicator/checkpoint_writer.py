"""What the replicator writes to the disk or the bucket: the shards that its host's ranks hand over.

A rank connects to a Unix socket in the host's memory folder, passes the memory that holds its shard (a file
descriptor: nothing is copied) and waits for the answer in a thread of its own::

    rank       -> replicator  {"t": "write", "uri", "bytes", "preamble_bytes"}
    replicator -> rank        {"t": "go"}
    rank       -> replicator  the descriptor, then the preamble's bytes
    replicator -> rank        {"t": "busy"} every ``BUSY_S``, then {"t": "written", "bytes", "crc32"} or {"t": "failed"}

A connection that ends early (the rank died, its attempt was ended) stops the write. Nothing is committed here:
rank 0 writes the marker when every shard is there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.checkpoint_format.shard_file import write_shard
from muster.core.errors import MusterError
from muster.transport.stream import REPLICATOR_SOCKET, Stream

#: How often a rank is told that its shard is still being written.
BUSY_S = 2.0


def listen_for_ranks(memory: Path) -> socket.socket:
    """The socket; each of its connections is for ``write_shard_for``."""
    path = memory / REPLICATOR_SOCKET
    path.unlink(missing_ok=True)  # a dead predecessor's
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def serve_connections(listener: socket.socket, token: bytes, talk: Callable[[Stream], None], *, peer: str) -> None:
    """Never returns; each connection has a thread in which ``talk`` uses it until it returns or raises."""

    def answer(sock: socket.socket) -> None:
        try:
            with sock:
                talk(Stream(sock, token, server=True))
        except (OSError, MusterError, ValueError, KeyError) as error:
            if not isinstance(error, ConnectionError):
                log_error(f"answering {peer}: {error}")

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=answer, args=(sock,), daemon=True).start()


def log_error(text: str) -> None:
    """One line to the replicator's log, where the disk has room: a full disk ends no thread."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write_shard_for(stream: Stream) -> None:
    """Read one request, write its shard and answer; returns without an answer when the rank is gone."""
    request = stream.receive()
    size, preamble = int(request["bytes"]), bytearray(int(request["preamble_bytes"]))
    stream.send({"t": "go"})
    fd = stream.receive_file()
    try:
        stream.receive_bytes(memoryview(preamble))
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    answer: dict[str, Any] = {}
    cancelled = threading.Event()
    done, writing = socket.socketpair()

    def write() -> None:
        with writing:  # its end wakes the loop below
            answer.update(_write(str(request["uri"]), (preamble, memoryview(mapped)), cancelled))

    with done:
        threading.Thread(target=write, name=f"shard {request['uri']}", daemon=True).start()
        while True:
            ready, _, _ = select.select([stream.sock, done], [], [], BUSY_S)
            if done in ready:
                stream.send(answer)
                return
            if stream.sock in ready:
                cancelled.set()  # a rank sends nothing before the answer: it has disconnected
                return
            stream.send({"t": "busy"})


def _write(uri: str, parts: tuple[bytes | bytearray | memoryview, ...], cancelled: threading.Event) -> dict[str, Any]:
    """The answer to a rank: what was written, or why it failed."""
    try:
        count, crc = write_shard(uri, parts, wanted=lambda: not cancelled.is_set())
        return {"t": "written", "bytes": count, "crc32": crc}
    except Exception as error:  # noqa: BLE001 (a thread's edge; the rank logs an event)
        hint = error.hint if isinstance(error, MusterError) else None
        return {"t": "failed", "reason": str(error) or type(error).__name__, "hint": hint}
