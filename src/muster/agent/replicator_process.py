"""The replicator as the agent's child: started, given orders, restarted when it dies.

The agent never waits for it: orders go through a non-blocking pipe, answers come through the agent's selector.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace

from muster.agent.host_identity import HostIdentity
from muster.agent.ranks.rank_process import end_child, is_stopped, on_exit
from muster.core.errors import AccessError
from muster.core.heartbeat_timing import CONFIRM_SHARE, LOOK_SHARE
from muster.core.typed_json import Unreadable, decode
from muster.core.typed_json import encode as encode_record
from muster.protocol.codec import encode, reader_of
from muster.protocol.replicator_orders import (
    FROM_REPLICATOR,
    CopyNext,
    CopyTo,
    FetchVersion,
    FlushOrder,
    FromReplicator,
    ListenAddress,
    LogNote,
    ReplicatorRecord,
    ToReplicator,
)
from muster.protocol.to_agent import CommitFlushed, FlushSnapshots
from muster.protocol.to_supervisor import FlushCommitted, SnapshotsFlushed, SnapshotsRejected
from muster.protocol.values import Address
from muster.transport.connections import ConnectionPool

#: The agent's first message to the supervisor names the replicator's address: it waits this long for it, once.
FIRST_WAIT_S = 20.0
#: A replicator that died this early this often will die again: the host continues without (no copies, ranks write
#: checkpoints themselves).
YOUNG_S = 10.0
YOUNG_DEATHS = 5
#: What its pipe did not take is offered again so soon.
FULL_S = 0.05
_STATE = "replicator.json"
_decode = reader_of(FROM_REPLICATOR)

FlushAnswer = SnapshotsFlushed | FlushCommitted


class ReplicatorProcess:
    """One at a time. A successor is told again where copies go and what is being fetched.

    Where copies go, and the port, are also in the host's memory folder: a restarted agent starts a replicator too,
    while the ranks train on, and the supervisor does not repeat it.
    """

    def __init__(
        self,
        *,
        identity: HostIdentity,
        hub: ConnectionPool,
        limit_s: Callable[[], float],
        is_ending: Callable[[], bool],
        on_flush: Callable[[FlushAnswer, FlushOrder], None],
        on_moved: Callable[[Address], None],
        on_rejected: Callable[[SnapshotsRejected], None],
        on_note: Callable[[str], None],
    ) -> None:
        """``limit_s``: one that is stopped for longer is replaced. ``on_flush(answer, order)`` is
        called once for each flush, always; ``on_moved``: a successor listens there; ``on_note``: a line for the log."""
        self._identity, self._hub, self._limit_s, self._is_ending = identity, hub, limit_s, is_ending
        self._on_flush, self._on_moved, self._on_rejected, self._on_note = on_flush, on_moved, on_rejected, on_note
        self.address: Address | None = None
        """Where other hosts' replicators connect."""
        self._child: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._young_deaths = 0
        self._port = 0
        self._incoming = b""
        self._outgoing = bytearray()
        self._copies: CopyTo | None = None
        self._fetches: list[FetchVersion] = []
        self._flushes: list[FlushOrder] = []
        """Without an answer yet, oldest first."""
        self._looked_s = 0.0
        self._stopped_since: float | None = None
        self._replaced: subprocess.Popen[bytes] | None = None
        """Ended by ``restart``."""
        self._listening = False
        """The child has bound its sockets."""

    def start(self) -> None:
        """Start the first one and wait for its address."""
        self._load_state()
        child = self._start()
        until = time.monotonic() + FIRST_WAIT_S
        assert child.stdout is not None
        while self.address is None and self._child is child and time.monotonic() < until:
            if select.select([child.stdout], [], [], 0.1)[0] and not self._read(child):
                return

    def restart(self) -> None:
        """Its socket file is gone, or the whole memory folder: a successor listens there again."""
        if self._child is not None and self._listening:
            self._replaced, self._listening = self._child, False
            self._child.kill()

    def _load_state(self) -> None:
        with contextlib.suppress(OSError, AccessError, Unreadable):
            record = decode(ReplicatorRecord, self._identity.memory.read(_STATE))
            self._port, self._copies = record.port, record.peers

    def _save_state(self) -> None:
        with contextlib.suppress(OSError):
            record = ReplicatorRecord(port=self._port, peers=self._copies)
            self._identity.memory.replace(_STATE, encode_record(record))

    def _start(self) -> subprocess.Popen[bytes]:
        identity = self._identity
        child = identity.start_program(
            "replicator", "muster.agent.replicator.main", "--run-dir", str(identity.run_dir),
            "--memory", str(identity.memory.folder), "--bind", identity.bind, "--port", str(self._port),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        os.set_blocking(child.stdin.fileno(), False)
        os.set_blocking(child.stdout.fileno(), False)
        self._child, self._started_s, self._listening = child, time.monotonic(), False
        self._incoming, self._stopped_since = b"", None
        self._outgoing.clear()
        self._hub.watch(child.stdout.fileno(), lambda: self._read(child))
        on_exit(self._hub, child.pid, lambda: self._on_exit(child))
        return child

    # ------------------------------------------------------------ orders

    def copy_to(self, order: CopyTo) -> None:
        """An attempt's ranks' snapshots are copied to its peer; earlier fetches are forgotten."""
        self._fetches.clear()
        self._set_copies(order)

    def on_peer_moved(self, peer: Address) -> None:
        """The peer's replicator was restarted at another address."""
        if self._copies is not None and self._copies.peer != peer:
            self._set_copies(replace(self._copies, peer=peer))

    def _set_copies(self, order: CopyTo) -> None:
        self._copies = order
        self._save_state()
        self._send(order)

    def copy(self) -> None:
        """A snapshot is ready. Omitted where the replicator does not keep up: the next one comes soon."""
        if not self._outgoing and self._copies is not None and self._copies.peer is not None:
            self._send(CopyNext())

    def forget_fetches(self) -> None:
        """The attempt takes steps: what was fetched for its start is not needed again."""
        self._fetches.clear()

    def fetch(self, order: FetchVersion) -> None:
        self._fetches.append(order)
        self._send(order)

    def flush(self, flush: FlushSnapshots | CommitFlushed, *, fence: int, alone: bool = False) -> None:
        """Have a version written, or committed; ``on_flush`` gets one answer to each, always."""
        order = FlushOrder(flush=flush, run_id=self._identity.run_id, fence=fence, alone=alone)
        self._flushes.append(order)
        if self._child is None:
            self._fail_flushes("no replicator runs on this host")
        else:
            self._send(order)

    def _send(self, order: ToReplicator) -> None:
        self._outgoing += encode(order) + b"\n"
        self._write()

    def _write(self) -> None:
        """Write what the pipe takes now; a stopped replicator must not block the agent."""
        if self._child is None or self._child.stdin is None:
            self._outgoing.clear()
            return
        with contextlib.suppress(OSError):
            while self._outgoing:
                del self._outgoing[: os.write(self._child.stdin.fileno(), self._outgoing[:4096])]

    # ------------------------------------------------------------ answers, and the process itself

    def _read(self, child: subprocess.Popen[bytes]) -> bool:
        """Handle its output; False at its end."""
        assert child.stdout is not None
        try:
            data = os.read(child.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            self._hub.unwatch(child.stdout.fileno())
            return False
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        for line in lines:
            try:
                message = _decode(line)
            except Unreadable as error:
                self._on_note(f"the replicator on {self._identity.host} said what cannot be read: {error}")
                continue
            self._on_message(message)
        return True

    def _on_message(self, message: FromReplicator) -> None:
        match message:
            case ListenAddress():
                self._on_address(message.address)
            case LogNote():
                self._on_note(message.text)
            case SnapshotsRejected():
                self._on_rejected(message)
            case _:
                self._on_answer(message)

    def _on_address(self, address: Address) -> None:
        is_restart = self._port != 0
        self.address, self._port, self._listening = address, address[1], True
        self._save_state()
        if not is_restart:
            return
        if self._copies is not None:
            self._send(self._copies)
        for fetch in self._fetches:
            if not self._identity.memory.exists(fetch.target):
                self._send(fetch)
        for flush in self._flushes:
            self._send(flush)
        self._on_moved(address)

    def _on_answer(self, answer: FlushAnswer) -> None:
        for order in self._flushes:
            if is_answer(answer, order.flush):
                self._flushes.remove(order)
                self._on_flush(answer, order)
                return

    def _fail_flushes(self, reason: str) -> None:
        for order in list(self._flushes):
            step, attempt = order.flush.step, order.flush.attempt
            if isinstance(order.flush, FlushSnapshots):
                self._on_answer(SnapshotsFlushed(step=step, attempt=attempt, failure=reason))
            else:
                self._on_answer(FlushCommitted(step=step, attempt=attempt, failure=reason))

    def due_s(self) -> float:
        """When ``watch`` is to look at it at the latest: whoever is awake earlier does so then."""
        if self._child is None:
            return math.inf
        write_s = time.monotonic() + FULL_S if self._outgoing else math.inf
        share = LOOK_SHARE if self._stopped_since is None else CONFIRM_SHARE
        return min(write_s, self._looked_s + share * self._limit_s())

    def watch(self) -> None:
        """Kill a replicator that stays stopped: its successor continues. Write what the pipe did not take before."""
        if self._child is None:
            return
        if self._outgoing:
            self._write()
        now, limit_s = time.monotonic(), self._limit_s()
        if now - self._looked_s < CONFIRM_SHARE * limit_s:
            return
        self._looked_s = now
        if not is_stopped(self._child.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        else:
            self._child.kill()

    def _on_exit(self, child: subprocess.Popen[bytes]) -> None:
        """Start the next one; training continued meanwhile."""
        code = child.wait()
        self._read(child)  # its last output; a pipe holds no more than one read takes
        assert child.stdin is not None and child.stdout is not None
        self._hub.unwatch(child.stdout.fileno())
        with contextlib.suppress(OSError):
            child.stdin.close()
        child.stdout.close()
        if self._child is not child or self._is_ending():
            return
        self._child = None
        if child is self._replaced:
            self._start()
            return
        self._young_deaths = self._young_deaths + 1 if time.monotonic() - self._started_s < YOUNG_S else 1
        restart = self._young_deaths < YOUNG_DEATHS
        text = f"the replicator on {self._identity.host} died with code {code}"
        text += " and was restarted" if restart else f" {YOUNG_DEATHS} times: no more copies to other hosts"
        self._on_note(text)
        if restart:
            self._start()
        else:
            self._fail_flushes(text)

    def shutdown(self) -> None:
        """End it; never waits long."""
        child, self._child = self._child, None
        end_child(child)


def is_answer(answer: FlushAnswer, flush: FlushSnapshots | CommitFlushed) -> bool:
    of_same_kind = isinstance(answer, SnapshotsFlushed) == isinstance(flush, FlushSnapshots)
    return of_same_kind and (answer.step, answer.attempt) == (flush.step, flush.attempt)
