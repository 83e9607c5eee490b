"""The mover: copies snapshots between hosts, so that neither a rank nor the agent waits for a network.

A program of its own (``python -m muster.agent.mover``). Orders come from the agent as JSON lines on stdin:

* ``peers``: which host's mover gets a copy of which ranks' snapshots from now on;
* ``copy``: a step was taken, send its snapshot to the peer;
* ``fetch``: get one version from another host for a restore.

Between movers: the authenticated handshake of ``core.wire``, a request frame, a header frame with the
sizes, the raw bytes, and a frame with their checksum. A version that tears while it is read (the rank
overwrote the slot) is refused by its stamp, a damaged one by its checksum; neither is ever committed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import sys
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.core.errors import AccessError, CheckpointError, MusterError
from muster.core.ring import Ring, file_name
from muster.core.wire import Session, read_token

CHUNK_BYTES = 4 * 1024 * 1024
TIMEOUT_S = 30.0


class Stream:
    """A blocking connection between two movers."""

    def __init__(self, sock: socket.socket, token: bytes, *, server: bool) -> None:
        sock.settimeout(TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.session = sock, Session(token, server=server)
        self._queued: list[dict[str, Any]] = []
        self._flush()
        while not self.session.ready:
            self._pump()

    def send(self, message: Mapping[str, Any]) -> None:
        self.session.send(message)
        self._flush()

    def receive(self) -> dict[str, Any]:
        while not self._queued:
            self._pump()
        return self._queued.pop(0)

    def send_bytes(self, data: memoryview) -> int:
        """Send raw bytes; returns their CRC-32."""
        crc = 0
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            crc = zlib.crc32(part, crc)
            self.sock.sendall(part)
        return crc

    def receive_bytes(self, into: memoryview) -> int:
        """Fill ``into`` with raw bytes; returns their CRC-32. Raises ConnectionError when they end early."""
        crc, done = 0, 0
        while done < len(into):
            count = self.sock.recv_into(into[done : done + CHUNK_BYTES])
            if not count:
                raise ConnectionError(f"ended after {done} of {len(into)} bytes")
            crc = zlib.crc32(into[done : done + count], crc)
            done += count
        return crc

    def _flush(self) -> None:
        out = self.session.outgoing()
        if out:
            self.sock.sendall(out)

    def _pump(self) -> None:
        # One byte short of a frame's end would swallow raw bytes that follow it: frames and raw bytes
        # never follow each other without an answer in between (see ``fetch`` and ``push``).
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionError("the other mover closed the connection")
        self._queued += self.session.receive(data)
        self._flush()


def write_version(
    directory: Path, name: str, header: bytes, slot_bytes: int, stream: Stream, found: Mapping[str, Any]
) -> None:
    """Take one version from ``stream`` into ``directory/name`` and commit it if its checksum fits."""
    ring = Ring.create(directory / name, header=header, slot_bytes=slot_bytes)
    try:
        slot = ring.begin()
        stream.send({"t": "go"})
        crc = stream.receive_bytes(ring.slot(slot))
        stream.send({"t": "got"})
        end = stream.receive()
        if end.get("t") != "whole":
            return
        if end["crc"] != crc:
            raise CheckpointError(f"{name} of step {found['step']} arrived damaged or torn")
        ring.commit(slot, step=int(found["step"]), attempt=int(found["attempt"]))
        stream.send({"t": "held"})
    finally:
        ring.close()


def read_version(ring: Ring, step: int, attempt: int, stream: Stream) -> None:
    """Send one version over ``stream``; says ``torn`` when the rank overwrote it meanwhile."""
    version = ring.find(step, attempt)
    if version is None:
        stream.send({"t": "absent"})
        return
    header = ring.header.decode()
    stream.send({"t": "version", "step": step, "attempt": attempt, "header": header, "slot_bytes": ring.slot_bytes})
    if stream.receive().get("t") != "go":
        return
    crc = stream.send_bytes(ring.slot(version.slot))
    stream.receive()
    whole = ring.find(step, attempt) == version
    stream.send({"t": "whole" if whole else "torn", "crc": crc})
    stream.receive()


class Mover:
    """Serves and fetches; one thread per connection, one for pushes."""

    def __init__(self, *, memory: Path, token: bytes, bind: str) -> None:
        self.memory, self.token = memory, token
        self.listener = socket.create_server((bind, 0), backlog=64)
        self.address = list(self.listener.getsockname()[:2])
        self.peer: list[Any] | None = None
        self.layout = ""
        self.ranks: list[int] = []
        self.pushes: queue.Queue[int] = queue.Queue(maxsize=1)
        self.pushed: dict[int, tuple[int, int]] = {}

    def serve(self) -> None:
        while True:
            sock, _ = self.listener.accept()
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        try:
            with sock:
                stream = Stream(sock, self.token, server=True)
                while True:
                    request = stream.receive()
                    name = Path(str(request["file"])).name  # never a path: a peer names files, not places
                    if request["t"] == "read":
                        ring = Ring.open(self.memory / name)
                        read_version(ring, int(request["step"]), int(request["attempt"]), stream)
                        ring.close()
                    elif request["t"] == "push":
                        write_version(
                            self.memory,
                            name,
                            str(request["header"]).encode(),
                            int(request["slot_bytes"]),
                            stream,
                            request,
                        )
        except (OSError, MusterError, ValueError, KeyError) as error:
            if not isinstance(error, ConnectionError):
                print(f"answering a peer: {error}", file=sys.stderr, flush=True)

    def fetch(self, order: Mapping[str, Any]) -> None:
        """Get one version; the target appears under its final name when it is whole."""
        with socket.create_connection(tuple(order["address"]), timeout=TIMEOUT_S) as sock:
            stream = Stream(sock, self.token, server=False)
            stream.send({"t": "read", "file": order["file"], "step": order["step"], "attempt": order["attempt"]})
            found = stream.receive()
            if found.get("t") != "version":
                raise CheckpointError(f"{order['file']} of step {order['step']} is no longer there")
            part = f"{order['target']}.part"
            (self.memory / part).unlink(missing_ok=True)
            write_version(self.memory, part, str(found["header"]).encode(), int(found["slot_bytes"]), stream, found)
            os.rename(self.memory / part, self.memory / order["target"])

    def push_loop(self) -> None:
        """Copy the newest version of every rank to the peer; a slow peer skips steps, never queues them."""
        stream: Stream | None = None
        connected: list[Any] | None = None
        while True:
            self.pushes.get()
            peer = self.peer
            if peer is None:
                continue
            try:
                if stream is None or connected != peer:
                    stream = Stream(socket.create_connection(tuple(peer), timeout=TIMEOUT_S), self.token, server=False)
                    connected = peer
                for rank in self.ranks:
                    self._push(stream, rank)
            except (OSError, MusterError, ValueError) as error:
                print(f"copying to the peer {peer}: {error}", file=sys.stderr, flush=True)
                stream = None

    def _push(self, stream: Stream, rank: int) -> None:
        ring = Ring.open(self.memory / file_name("own", self.layout, rank), writable=True)
        try:
            version = next(iter(ring.versions()), None)
            if version is None or self.pushed.get(rank) == (version.step, version.attempt):
                return
            stream.send(
                {
                    "t": "push",
                    "file": file_name("peer", self.layout, rank),
                    "header": ring.header.decode(),
                    "slot_bytes": ring.slot_bytes,
                    "step": version.step,
                    "attempt": version.attempt,
                }
            )
            if stream.receive().get("t") != "go":
                raise ConnectionError("the peer refused a copy")
            crc = stream.send_bytes(ring.slot(version.slot))
            stream.receive()
            whole = ring.find(version.step, version.attempt) == version
            stream.send({"t": "whole" if whole else "torn", "crc": crc})
            if whole and stream.receive().get("t") == "held":
                self.pushed[rank] = (version.step, version.attempt)
                ring.note_copied(version)
        finally:
            ring.close()

    def obey(self, order: Mapping[str, Any]) -> None:
        if order["do"] == "peers":
            self.peer, self.layout, self.ranks = order["peer"], order["layout"], order["ranks"]
            self.pushed.clear()
        elif order["do"] == "copy":
            try:
                self.pushes.put_nowait(int(order["step"]))
            except queue.Full:
                pass
        elif order["do"] == "fetch":
            threading.Thread(target=self._fetch, args=(dict(order),), daemon=True).start()

    def _fetch(self, order: Mapping[str, Any]) -> None:
        try:
            self.fetch(order)
        except (OSError, MusterError, ValueError, AccessError) as error:
            print(f"fetching {order['file']}: {error}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Muster's snapshot mover (started by the agent)")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--memory", required=True, type=Path)
    parser.add_argument("--bind", required=True)
    arguments = parser.parse_args()
    os.setpriority(
        os.PRIO_PROCESS, 0, int(os.environ.get("MUSTER_NICE", "0"))
    )  # not the keeper's: copies must not press the ranks
    mover = Mover(memory=arguments.memory, token=read_token(str(arguments.run_dir / "token")), bind=arguments.bind)
    print(json.dumps({"address": mover.address}), flush=True)
    for target in (mover.serve, mover.push_loop):
        threading.Thread(target=target, daemon=True).start()
    for line in sys.stdin:
        mover.obey(json.loads(line))


if __name__ == "__main__":
    main()
