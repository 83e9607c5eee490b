"""The replicator: copies snapshots to lower tiers, so that neither a rank nor the agent waits for a network or a disk.

A program of its own (``python -m muster.agent.replicator.main``), one per host: it copies snapshots to a peer's memory
and writes checkpoints to the disk or the bucket (``checkpoint_writer``: those that ranks hand over; ``memory_flush``:
those made of snapshots, which need no rank). It imports no torch. Orders come from the agent as JSON lines on stdin:

* ``peers``: which host's replicator gets a copy of which ranks' snapshots from now on, in which attempt;
* ``copy``: a step was taken, see what its ranks have ordered to be copied (``SnapshotSender``);
* ``fetch``: get one version from another host for a restore;
* ``flush``, ``flush_commit``: write one version as a checkpoint (see ``memory_flush``).

Answers are JSON lines on stdout: first the address where other replicators connect, then what was flushed, and notes
for the run's log.

Between replicators: the authenticated handshake of ``transport.secure_session``, a request frame, a header frame with
the sizes, the raw bytes, and a frame with their checksum. A version that is overwritten while it is read is refused by
its stamp, a damaged one by its checksum; neither is ever committed. A ring that copies arrive in has one writer, the
newest attempt's (``SnapshotReceiver``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from muster.agent.replicator.checkpoint_writer import listen_for_ranks, log_error, serve_connections, write_shard_for
from muster.agent.replicator.memory_flush import commit_flushed, flush
from muster.agent.replicator.replication import SnapshotReceiver, SnapshotSender
from muster.checkpoint_format.snapshot_ring import NoRoom, Ring, file_name, refuse
from muster.core import environment
from muster.core.errors import CheckpointError, ConflictError, MusterError
from muster.core.snapshot_slots import FETCHED_SLOTS, PEER_SLOTS
from muster.transport.secure_session import read_token
from muster.transport.stream import TIMEOUT_S, Stream

#: A dead agent's replicator ends when its stdin closes; then its port is free.
PREDECESSOR_S = 1.0
#: A replicator that died is back within this time, on the same port: a fetch is retried for this long.
RESTART_S = 2.0
_FLUSH = {"flush": ("flushed", flush), "flush_commit": ("flush_committed", commit_flushed)}


def write_version(
    directory: Path,
    name: str,
    header: bytes,
    slot_bytes: int,
    stream: Stream,
    version: Mapping[str, Any],
    *,
    slots: int = FETCHED_SLOTS,
) -> None:
    """Receive one version into ``directory/name`` and commit it if its checksum matches.

    ``version``: its step and attempt, and ``keep``, a step whose slot is not written to. Newer versions were abandoned.
    Raises NoRoom.
    """
    ring = Ring.create(directory / name, header=header, slot_bytes=slot_bytes, slots=slots)
    try:
        step, attempt = int(version["step"]), int(version["attempt"])
        ring.forget_after(step, attempt=attempt)
        if ring.find(step, attempt) is not None:
            stream.send({"t": "held"})
            return
        slot = ring.begin(spare=(int(version.get("keep", -1)),))
        stream.send({"t": "go"})
        crc = stream.receive_bytes(ring.slot(slot))
        stream.send({"t": "got"})
        end = stream.receive()
        if end.get("t") != "whole":
            return
        if end["crc"] != crc:
            raise CheckpointError(f"{name} of step {step} arrived damaged or incomplete")
        ring.seal(ring.commit(slot, step=step, attempt=attempt), end.get("seal"))
        stream.send({"t": "held"})
    finally:
        ring.close()


def read_version(ring: Ring, step: int, attempt: int, stream: Stream) -> None:
    """Send one version over ``stream``; answers ``torn`` when the rank overwrote it meanwhile."""
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


class Replicator:
    """Serves, fetches and sends; one thread per connection, and one for each rank whose snapshots are copied."""

    def __init__(self, *, memory: Path, token: bytes, bind: str, port: int = 0) -> None:
        """``port``: a dead predecessor's, so that the others need no new address; any port where it is taken."""
        self.memory, self.token = memory, token
        self.listener = _listen(bind, port)
        self.address = list(self.listener.getsockname()[:2])
        self.receiver = SnapshotReceiver()
        self.senders: list[SnapshotSender] = []
        self._sending = threading.Lock()
        self._flushing = threading.Lock()

    def serve(self) -> None:
        serve_connections(self.listener, self.token, self._talk, peer="a peer")

    def _talk(self, stream: Stream) -> None:
        while True:
            request = stream.receive()
            name = Path(str(request["file"])).name  # never a path: a peer names files only
            if request["t"] == "read":
                ring = Ring.open(self.memory / name)
                read_version(ring, int(request["step"]), int(request["attempt"]), stream)
                ring.close()
            elif request["t"] == "push":
                self._receive(name, request, stream)

    def _receive(self, name: str, request: Mapping[str, Any], stream: Stream) -> None:
        """Receive a copy. Refused where a newer attempt writes to that ring, or there is no room."""
        header, size = str(request["header"]).encode(), int(request["slot_bytes"])
        try:
            with self.receiver.writer(name, int(request["world"]), stream.sock):
                write_version(self.memory, name, header, size, stream, request, slots=PEER_SLOTS)
        except (NoRoom, ConflictError) as error:
            stream.send({"t": "refused", "reason": str(error), "no_room": isinstance(error, NoRoom)})

    def fetch(self, order: Mapping[str, Any]) -> None:
        """Get one version; the target appears under its final name when it is complete."""
        with socket.create_connection(tuple(order["address"]), timeout=TIMEOUT_S) as sock:
            stream = Stream(sock, self.token, server=False)
            stream.send({"t": "read", "file": order["file"], "step": order["step"], "attempt": order["attempt"]})
            version = stream.receive()
            if version.get("t") != "version":
                raise CheckpointError(f"{order['file']} of step {order['step']} is no longer there")
            part = f"{order['target']}.part"
            (self.memory / part).unlink(missing_ok=True)
            header, slot_bytes = str(version["header"]).encode(), int(version["slot_bytes"])
            write_version(self.memory, part, header, slot_bytes, stream, version)
            os.rename(self.memory / part, self.memory / order["target"])

    def handle(self, order: Mapping[str, Any]) -> None:
        if order["do"] == "peers":
            self._copy_to(order["peer"], str(order["layout"]), order["ranks"], int(order["world"]))
        elif order["do"] == "copy":
            for sender in self.senders:
                sender.wake()
        elif order["do"] == "fetch":
            threading.Thread(target=self._fetch, args=(dict(order),), daemon=True).start()
        elif order["do"] in _FLUSH:
            threading.Thread(target=self._flush, args=(dict(order),), daemon=True).start()

    def _copy_to(self, peer: list[Any] | None, layout: str, ranks: Iterable[int], attempt: int) -> None:
        for sender in self.senders:
            sender.stop()
        self.receiver.expect(attempt)
        self.senders = []
        for rank in ranks if peer is not None else ():
            own, copy = file_name("own", layout, rank), file_name("peer", layout, rank)
            sender = SnapshotSender(
                self.memory / own, copy, peer=tuple(peer or ()), attempt=attempt, token=self.token, note=self._note
            )
            self.senders.append(sender)
            threading.Thread(target=sender.run, name=f"send {own}", daemon=True).start()

    def _note(self, text: str) -> None:
        self.send({"t": "note", "text": text})

    def _fetch(self, order: Mapping[str, Any]) -> None:
        try:
            self._fetch_with_retries(order)
        except (OSError, MusterError, ValueError, KeyError) as error:
            log_error(f"fetching {order['file']}: {error}")
            with contextlib.suppress(OSError):  # a full tmpfs: the rank waits until its timeout
                refuse(self.memory / order["target"], str(error) or type(error).__name__)

    def _fetch_with_retries(self, order: Mapping[str, Any]) -> None:
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
        self.send(answer)

    def send(self, message: Mapping[str, Any]) -> None:
        """One line to the agent."""
        with self._sending:
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
    parser = argparse.ArgumentParser(description="Muster's snapshot replicator (started by the agent)")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--memory", required=True, type=Path)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--port", type=int, default=0, help="a dead predecessor's")
    arguments = parser.parse_args()
    # Not the watchdog's niceness: copies must not slow the ranks.
    os.setpriority(os.PRIO_PROCESS, 0, environment.current().nice)
    token = read_token(str(arguments.run_dir / "token"))
    replicator = Replicator(memory=arguments.memory, token=token, bind=arguments.bind, port=arguments.port)
    ranks = listen_for_ranks(arguments.memory)
    replicator.send({"t": "address", "address": replicator.address})
    for target in (replicator.serve, lambda: serve_connections(ranks, token, write_shard_for, peer="a rank")):
        threading.Thread(target=target, daemon=True).start()
    for line in sys.stdin:
        replicator.handle(json.loads(line))


if __name__ == "__main__":
    main()
