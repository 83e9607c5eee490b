"""The replicator as the agent's child: started, given orders, restarted when it dies.

The agent never waits for it: orders go through a non-blocking pipe, answers come through the agent's selector.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

from muster.agent.host_state import HostState
from muster.agent.ranks.rank_process import end_child, is_stopped, on_exit

#: The agent's first message to the supervisor names the replicator's address: it waits this long for it, once.
FIRST_WAIT_S = 20.0
#: A replicator that died this early this often will die again: the host continues without (no copies, ranks write
#: checkpoints themselves).
YOUNG_S = 10.0
YOUNG_DEATHS = 5
_STATE = "replicator.json"
_ANSWER_TO = {"flush": "flushed", "flush_commit": "flush_committed"}


class ReplicatorProcess:
    """One at a time. A successor is told again where copies go and what is being fetched.

    Where copies go, and the port, are also in the host's memory folder: a restarted agent starts a replicator too,
    while the ranks train on, and the supervisor does not repeat it.
    """

    def __init__(self, *, host: HostState, on_flush: Callable[[dict[str, Any], Mapping[str, Any]], None]) -> None:
        """``on_flush(answer, order)`` is called once for each flush, always."""
        self._host, self._on_flush = host, on_flush
        self.address: list[Any] | None = None
        """Where other hosts' replicators connect."""
        self._child: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._young_deaths = 0
        self._port = 0
        self._incoming = b""
        self._outgoing = bytearray()
        self._peer_order: dict[str, Any] | None = None
        self._fetches: list[dict[str, Any]] = []
        self._flushes: list[dict[str, Any]] = []
        """Without an answer yet, oldest first."""
        self._stopped_since: float | None = None

    def start(self) -> None:
        """Start the first one and wait for its address."""
        self._load_state()
        child = self._start()
        until = time.monotonic() + FIRST_WAIT_S
        assert child.stdout is not None
        while self.address is None and self._child is child and time.monotonic() < until:
            if select.select([child.stdout], [], [], 0.1)[0] and not self._read(child):
                return

    def _load_state(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = json.loads((self._host.memory / _STATE).read_text())
            self._port, self._peer_order = int(state["port"]), state["peers"]

    def _save_state(self) -> None:
        with contextlib.suppress(OSError):
            path = self._host.memory / _STATE
            path.with_suffix(".part").write_text(json.dumps({"port": self._port, "peers": self._peer_order}))
            path.with_suffix(".part").rename(path)

    def _start(self) -> subprocess.Popen[bytes]:
        host = self._host
        child = host.start_program(
            "replicator", "muster.agent.replicator.main", "--run-dir", str(host.run_dir), "--memory", str(host.memory),
            "--bind", host.bind, "--port", str(self._port), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        os.set_blocking(child.stdin.fileno(), False)
        os.set_blocking(child.stdout.fileno(), False)
        self._child, self._started_s = child, time.monotonic()
        self._incoming, self._stopped_since = b"", None
        self._outgoing.clear()
        host.hub.watch(child.stdout.fileno(), lambda: self._read(child))
        on_exit(host.hub, child.pid, lambda: self._on_exit(child))
        return child

    # ------------------------------------------------------------ orders

    def set_peer(self, *, peer: list[Any] | None, layout: str, ranks: list[int], attempt: int) -> None:
        """In ``attempt`` these ranks' snapshots are copied to ``peer``; earlier fetches are forgotten."""
        self._peer_order = {"do": "peers", "peer": peer, "layout": layout, "ranks": ranks, "world": attempt}
        self._fetches.clear()
        self._save_state()
        self._send(self._peer_order)

    def on_peer_moved(self, peer: list[Any] | None) -> None:
        """The peer's replicator was restarted at another address."""
        if self._peer_order is not None and self._peer_order["peer"] != peer:
            self._peer_order = {**self._peer_order, "peer": peer}
            self._save_state()
            self._send(self._peer_order)

    def copy(self, step: int) -> None:
        """A snapshot is ready. Omitted where the replicator does not keep up: the next one comes soon."""
        if not self._outgoing:
            self._send({"do": "copy", "step": step})

    def forget_fetches(self) -> None:
        """The attempt takes steps: what was fetched for its start is not needed again."""
        self._fetches.clear()

    def fetch(self, order: dict[str, Any]) -> None:
        self._fetches.append(order)
        self._send(order)

    def flush(self, message: Mapping[str, Any], fence: int) -> None:
        """Forward a ``flush`` or ``flush_commit``; ``on_flush`` gets one answer to each, always."""
        order = {**message, "do": message["t"], "run_id": self._host.run_id}
        order["fence"] = max(fence, int(message.get("fence", 0)))
        self._flushes.append(order)
        if self._child is None:
            self._fail_flushes("no replicator runs on this host")
        else:
            self._send(order)

    def _send(self, order: Mapping[str, Any]) -> None:
        self._outgoing += json.dumps(order).encode() + b"\n"
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
            self._host.hub.unwatch(child.stdout.fileno())
            return False
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["t"] == "address":
                self._on_address(message["address"])
            elif message["t"] == "note":
                self._host.note(message["text"])
            else:
                self._on_answer(message)
        return True

    def _on_address(self, address: list[Any]) -> None:
        is_restart = self._port != 0
        self.address, self._port = address, int(address[1])
        self._save_state()
        if not is_restart:
            return
        for order in [self._peer_order, *self._fetches, *self._flushes]:
            if order is not None and not (self._host.memory / str(order.get("target", ""))).is_file():
                self._send(order)
        if self._host.spec.checkpoint.snapshot_every_steps:
            self._host.send({"t": "memory", "memory": address})

    def _on_answer(self, answer: dict[str, Any]) -> None:
        answered = (answer["t"], answer["step"], answer["attempt"])
        for order in self._flushes:
            if (_ANSWER_TO[order["do"]], order["step"], order["attempt"]) == answered:
                self._flushes.remove(order)
                self._on_flush(answer, order)
                return

    def _fail_flushes(self, reason: str) -> None:
        for order in list(self._flushes):
            answer = {"t": _ANSWER_TO[order["do"]], "step": order["step"], "attempt": order["attempt"]}
            self._on_answer({**answer, "ok": False, "reason": reason})

    def watch(self) -> None:
        """Kill a replicator that is stopped: its successor continues. Write what the pipe did not take before."""
        if self._child is None:
            return
        if self._outgoing:
            self._write()
        if not is_stopped(self._child.pid):
            self._stopped_since = None
            return
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since > self._host.spec.recovery.heartbeat_timeout_s:
            self._child.kill()

    def _on_exit(self, child: subprocess.Popen[bytes]) -> None:
        """Start the next one; training continued meanwhile."""
        host = self._host
        code = child.wait()
        self._read(child)  # its last output; a pipe holds no more than one read takes
        assert child.stdin is not None and child.stdout is not None
        host.hub.unwatch(child.stdout.fileno())
        with contextlib.suppress(OSError):
            child.stdin.close()
        child.stdout.close()
        if self._child is not child or host.exit_reason is not None:
            return
        self._child = None
        self._young_deaths = self._young_deaths + 1 if time.monotonic() - self._started_s < YOUNG_S else 1
        restart = self._young_deaths < YOUNG_DEATHS
        text = f"the replicator on {host.host} died with code {code}"
        text += " and was restarted" if restart else f" {YOUNG_DEATHS} times: no more copies to other hosts"
        host.note(text)
        if restart:
            self._start()
        else:
            self._fail_flushes(text)

    def shutdown(self) -> None:
        """End it; never waits long."""
        child, self._child = self._child, None
        end_child(child)
