"""The mover: takes snapshots to the lower tiers, so that neither a rank nor the agent waits for a network or a disk.

A program of its own (``python -m muster.agent.mover``), one a host: it copies snapshots to a peer's memory and
writes checkpoints to the disk or the bucket (``persist``: those that ranks hand over; ``flush``: those made of
snapshots, which need no rank). It imports no torch. Orders come from the agent as JSON lines on stdin:

* ``peers``: which host's mover gets a copy of which ranks' snapshots from now on;
* ``copy``: a step was taken, send its snapshot to the peer;
* ``fetch``: get one version from another host for a restore;
* ``flush``, ``flush_commit``: write one version as a checkpoint (see ``flush``).

Answers are JSON lines on stdout: first the address where other movers reach this one, then what was flushed.

Between movers: the authenticated handshake of ``core.wire``, a request frame, a header frame with the
sizes, the raw bytes, and a frame with their checksum. A version that tears while it is read (the rank
overwrote the slot) is refused by its stamp, a damaged one by its checksum; neither is ever committed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.agent.flush import commit_flushed, flush
from muster.agent.persist import Shares, answer_each, complain
from muster.core.errors import CheckpointError, MusterError
from muster.core.ring import Ring, file_name, refuse
from muster.core.stream import TIMEOUT_S, Stream
from muster.core.wire import read_token

#: A dead agent's mover ends when its stdin does; its port is free then.
PREDECESSOR_S = 1.0
#: A mover that died is there again within this time, on the same port: for so long a fetch is tried again.
RESTART_S = 2.0
_FLUSH = {"flush": ("flushed", flush), "flush_commit": ("flush_committed", commit_flushed)}


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
        version = ring.commit(slot, step=int(found["step"]), attempt=int(found["attempt"]))
        ring.seal(version, end.get("seal"))
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
    seal, whole = ring.sealed(version), ring.find(step, attempt) == version
    stream.send({"t": "whole" if whole else "torn", "crc": crc, "seal": seal})
    stream.receive()


class Mover:
    """Serves and fetches; one thread per connection, one for pushes."""

    def __init__(self, *, memory: Path, token: bytes, bind: str, port: int = 0) -> None:
        """``port``: a dead predecessor's, so that the others need no new address; any where it is taken."""
        self.memory, self.token = memory, token
        self.listener = _listen(bind, port)
        self.address = list(self.listener.getsockname()[:2])
        self.peer: list[Any] | None = None
        self.layout = ""
        self.ranks: list[int] = []
        self.pushes: queue.Queue[int] = queue.Queue(maxsize=1)
        self.pushed: dict[int, tuple[int, int]] = {}
        self._saying = threading.Lock()
        self._flushing = threading.Lock()

    def serve(self) -> None:
        answer_each(self.listener, self.token, self._talk, who="a peer")

    def _talk(self, stream: Stream) -> None:
        while True:
            request = stream.receive()
            name = Path(str(request["file"])).name  # never a path: a peer names files, not places
            if request["t"] == "read":
                ring = Ring.open(self.memory / name)
                read_version(ring, int(request["step"]), int(request["attempt"]), stream)
                ring.close()
            elif request["t"] == "push":
                header, size = str(request["header"]).encode(), int(request["slot_bytes"])
                write_version(self.memory, name, header, size, stream, request)

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
                complain(f"copying to the peer {peer}: {error}")
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
            seal, whole = ring.sealed(version), ring.find(version.step, version.attempt) == version
            stream.send({"t": "whole" if whole else "torn", "crc": crc, "seal": seal})
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
        elif order["do"] in _FLUSH:
            threading.Thread(target=self._flush, args=(dict(order),), daemon=True).start()

    def _fetch(self, order: Mapping[str, Any]) -> None:
        try:
            self._fetch_patiently(order)
        except (OSError, MusterError, ValueError, KeyError) as error:
            complain(f"fetching {order['file']}: {error}")
            with contextlib.suppress(OSError):  # a full tmpfs: the rank waits its time out
                refuse(self.memory / order["target"], str(error) or type(error).__name__)

    def _fetch_patiently(self, order: Mapping[str, Any]) -> None:
        until = time.monotonic() + RESTART_S
        while True:
            try:
                return self.fetch(order)
            except ConnectionError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _flush(self, order: Mapping[str, Any]) -> None:
        kind, act = _FLUSH[order["do"]]
        answer = {"t": kind, "step": order["step"], "attempt": order["attempt"]}
        try:
            with self._flushing:  # the same order twice must not write the same files at once
                answer |= {"ok": True, **act(order, self.memory)}
        except Exception as error:  # noqa: BLE001 (a thread's edge; the agent tells the supervisor)
            answer |= {"ok": False, "reason": str(error) or type(error).__name__}
        self.say(answer)

    def say(self, message: Mapping[str, Any]) -> None:
        """One line to the agent."""
        with self._saying:
            print(json.dumps(message), flush=True)


def _listen(bind: str, port: int) -> socket.socket:
    until = time.monotonic() + PREDECESSOR_S
    while port:
        try:
            return socket.create_server((bind, port), backlog=64)
        except OSError:
            if time.monotonic() > until:
                break
            time.sleep(0.02)
    return socket.create_server((bind, 0), backlog=64)


def main() -> None:
    parser = argparse.ArgumentParser(description="Muster's snapshot mover (started by the agent)")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--memory", required=True, type=Path)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--port", type=int, default=0, help="a dead predecessor's")
    arguments = parser.parse_args()
    os.setpriority(
        os.PRIO_PROCESS, 0, int(os.environ.get("MUSTER_NICE", "0"))
    )  # not the keeper's: copies must not press the ranks
    token = read_token(str(arguments.run_dir / "token"))
    mover = Mover(memory=arguments.memory, token=token, bind=arguments.bind, port=arguments.port)
    shares = Shares(memory=arguments.memory, token=token)
    mover.say({"t": "address", "address": mover.address})
    for target in (mover.serve, mover.push_loop, shares.serve):
        threading.Thread(target=target, daemon=True).start()
    for line in sys.stdin:
        mover.obey(json.loads(line))


if __name__ == "__main__":
    main()
