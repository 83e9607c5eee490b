"""The mover: takes snapshots to the lower tiers, so that neither a rank nor the agent waits for a network or a disk.

A program of its own (``python -m muster.agent.replicator.main``), one a host: it copies snapshots to a peer's memory and
writes checkpoints to the disk or the bucket (``persist``: those that ranks hand over; ``flush``: those made of
snapshots, which need no rank). It imports no torch. Orders come from the agent as JSON lines on stdin:

* ``peers``: which host's mover gets a copy of which ranks' snapshots from now on, in which attempt;
* ``copy``: a step was taken, look what its ranks want copied (``Pusher``);
* ``fetch``: get one version from another host for a restore;
* ``flush``, ``flush_commit``: write one version as a checkpoint (see ``flush``).

Answers are JSON lines on stdout: first the address where other movers reach this one, then what was flushed, and notes
for the run's log.

Between movers: the authenticated handshake of ``core.wire``, a request frame, a header frame with the
sizes, the raw bytes, and a frame with their checksum. A version that tears while it is read (the rank
overwrote the slot) is refused by its stamp, a damaged one by its checksum; neither is ever committed. A ring that
copies arrive in has one writer, the newest attempt's (``Arrivals``).
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

from muster.agent.replicator.checkpoint_writer import Shares, answer_each, complain
from muster.agent.replicator.memory_flush import commit_flushed, flush
from muster.agent.replicator.replication import Arrivals, Pusher
from muster.checkpoint_format.snapshot_ring import FETCHED_SLOTS, PEER_SLOTS, NoRoom, Ring, file_name, refuse
from muster.core.errors import CheckpointError, ConflictError, MusterError
from muster.transport.secure_session import read_token
from muster.transport.stream import TIMEOUT_S, Stream

#: A dead agent's mover ends when its stdin does; its port is free then.
PREDECESSOR_S = 1.0
#: A mover that died is there again within this time, on the same port: for so long a fetch is tried again.
RESTART_S = 2.0
_FLUSH = {"flush": ("flushed", flush), "flush_commit": ("flush_committed", commit_flushed)}


def write_version(
    directory: Path,
    name: str,
    header: bytes,
    slot_bytes: int,
    stream: Stream,
    found: Mapping[str, Any],
    *,
    slots: int = FETCHED_SLOTS,
) -> None:
    """Take one version from ``stream`` into ``directory/name`` and commit it if its checksum fits.

    ``found``: its step and attempt, and ``keep``, a step whose slot is not written to. What is newer was given up.
    Raises NoRoom.
    """
    ring = Ring.create(directory / name, header=header, slot_bytes=slot_bytes, slots=slots)
    try:
        step, attempt = int(found["step"]), int(found["attempt"])
        ring.forget_after(step, attempt=attempt)
        if ring.find(step, attempt) is not None:
            stream.send({"t": "held"})
            return
        slot = ring.begin(spare=(int(found.get("keep", -1)),))
        stream.send({"t": "go"})
        crc = stream.receive_bytes(ring.slot(slot))
        stream.send({"t": "got"})
        end = stream.receive()
        if end.get("t") != "whole":
            return
        if end["crc"] != crc:
            raise CheckpointError(f"{name} of step {step} arrived damaged or torn")
        version = ring.commit(slot, step=step, attempt=attempt)
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
    """Serves, fetches and pushes; one thread per connection, and one for each rank whose snapshots are copied."""

    def __init__(self, *, memory: Path, token: bytes, bind: str, port: int = 0) -> None:
        """``port``: a dead predecessor's, so that the others need no new address; any where it is taken."""
        self.memory, self.token = memory, token
        self.listener = _listen(bind, port)
        self.address = list(self.listener.getsockname()[:2])
        self.arrivals = Arrivals()
        self.pushers: list[Pusher] = []
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
                self._take(name, request, stream)

    def _take(self, name: str, request: Mapping[str, Any], stream: Stream) -> None:
        """A copy comes. Refused where a newer attempt writes to that ring, or there is no room."""
        header, size = str(request["header"]).encode(), int(request["slot_bytes"])
        try:
            with self.arrivals.writer(name, int(request["world"]), stream.sock):
                write_version(self.memory, name, header, size, stream, request, slots=PEER_SLOTS)
        except (NoRoom, ConflictError) as error:
            stream.send({"t": "refused", "reason": str(error), "no_room": isinstance(error, NoRoom)})

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

    def obey(self, order: Mapping[str, Any]) -> None:
        if order["do"] == "peers":
            self._copy_to(order["peer"], str(order["layout"]), order["ranks"], int(order["world"]))
        elif order["do"] == "copy":
            for pusher in self.pushers:
                pusher.wake()
        elif order["do"] == "fetch":
            threading.Thread(target=self._fetch, args=(dict(order),), daemon=True).start()
        elif order["do"] in _FLUSH:
            threading.Thread(target=self._flush, args=(dict(order),), daemon=True).start()

    def _copy_to(self, peer: list[Any] | None, layout: str, ranks: Iterable[int], world: int) -> None:
        for pusher in self.pushers:
            pusher.stop()
        self.arrivals.expect(world)
        self.pushers = []
        for rank in ranks if peer is not None else ():
            own, there = file_name("own", layout, rank), file_name("peer", layout, rank)
            pusher = Pusher(self.memory / own, there, peer=tuple(peer or ()), world=world, token=self.token)
            pusher.say = self._note
            self.pushers.append(pusher)
            threading.Thread(target=pusher.run, name=f"push {own}", daemon=True).start()

    def _note(self, text: str) -> None:
        self.say({"t": "note", "text": text})

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
    for target in (mover.serve, shares.serve):
        threading.Thread(target=target, daemon=True).start()
    for line in sys.stdin:
        mover.obey(json.loads(line))


if __name__ == "__main__":
    main()
