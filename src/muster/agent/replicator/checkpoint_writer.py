"""What the replicator writes to the disk or the bucket: the shards that its host's ranks hand over.

A rank connects to a Unix socket in the host's memory folder, passes the memory that holds its shard (a file
descriptor: nothing is copied) and waits for the answer in a thread of its own; the messages are
``protocol.handover``'s. What is written is summed on the way, preamble and all.

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

from muster.checkpoint_format.shard_file import write_shard
from muster.core.errors import MusterError
from muster.protocol.codec import reader_of
from muster.protocol.handover import TO_WRITER, Busy, WriteFailed, WriteShard, Written
from muster.protocol.replicator_peers import Go
from muster.storage.memory_dir import MemoryDir
from muster.transport.listening import BACKLOG, bind_path
from muster.transport.stream import REPLICATOR_SOCKET, Stream

#: How often progress is reported to a rank whose shard is still being written.
BUSY_S = 2.0


def listen_for_ranks(memory: MemoryDir) -> socket.socket:
    """The socket; each of its connections is for ``write_shard_for``."""
    listener = bind_path(memory.bind_address(REPLICATOR_SOCKET))
    listener.listen(BACKLOG)
    return listener


def log_error(text: str) -> None:
    """One line to the replicator's log, where the disk has room: a full disk ends no thread."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


#: What a rank asks for.
decode_request = reader_of(TO_WRITER)


def write_shard_for(stream: Stream[WriteShard]) -> None:
    """Read one request, write its shard and answer; returns without an answer when the rank is gone."""
    request = stream.receive()
    preamble = bytearray(request.preamble_bytes)
    stream.send(Go())
    fd = stream.receive_file()
    try:
        stream.receive_bytes(memoryview(preamble))
        mapped = mmap.mmap(fd, request.bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    answers: list[Written | WriteFailed] = []
    cancelled = threading.Event()
    done, writing = socket.socketpair()

    def write() -> None:
        with writing:  # its end wakes the loop below
            answers.append(_write(request.uri, (preamble, memoryview(mapped)), cancelled))

    with done:
        threading.Thread(target=write, name=f"shard {request.uri}", daemon=True).start()
        while True:
            ready, _, _ = select.select([stream.sock, done], [], [], BUSY_S)
            if done in ready:
                stream.send(answers[0])
                return
            if stream.sock in ready:
                cancelled.set()  # a rank sends nothing before the answer: it has disconnected
                return
            stream.send(Busy())


def _write(
    uri: str, parts: tuple[bytes | bytearray | memoryview, ...], cancelled: threading.Event
) -> Written | WriteFailed:
    """The answer to a rank: what was written, or why it failed."""
    try:
        stored = write_shard(uri, parts, still_needed=lambda: not cancelled.is_set())
        return Written(bytes=stored.bytes, checksum=stored.checksum)
    except Exception as error:  # noqa: BLE001 (a thread's edge; the rank logs an event)
        hint = error.hint if isinstance(error, MusterError) else None
        return WriteFailed(reason=str(error) or type(error).__name__, hint=hint)
