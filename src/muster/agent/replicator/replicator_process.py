"""The mover as the agent's child: started, told what to do, started again when it dies.

The agent never waits for it: orders go through a pipe that does not block, answers come through the agent's selector.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from muster.agent.ranks.rank_process import is_stopped, open_pidfd

if TYPE_CHECKING:
    from muster.agent.host_agent import Agent

#: The agent's first word to the supervisor names the mover's address: it waits so long for it, once.
FIRST_WAIT_S = 20.0
#: A mover that died so soon so often will die again: the host goes on without (no copies, ranks write themselves).
YOUNG_S = 10.0
YOUNG_DEATHS = 5
_NOTES = "mover.json"
_ASKED = {"flushed": "flush", "flush_committed": "flush_commit"}


class ReplicatorProcess:
    """One at a time. What it must know (where copies go, what is being fetched) is said again to a successor.

    Where copies go, and the port, also lie in the host's memory folder: an agent that is begun anew starts a mover too,
    while the ranks train on and nobody else tells it.
    """

    def __init__(self, *, agent: Agent) -> None:
        self.agent = agent
        self.address: list[Any] | None = None
        """Where other hosts' movers reach it."""
        self._child: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self._young = 0
        self._port = 0
        self._heard = b""
        self._unsaid = bytearray()
        self._peers: dict[str, Any] | None = None
        self._fetches: list[dict[str, Any]] = []
        self._flushes: list[dict[str, Any]] = []
        """Without an answer yet, oldest first."""
        self._stopped_since: float | None = None

    def start(self) -> None:
        """Start the first one and wait for its address."""
        self._recall()
        child = self._start()
        until = time.monotonic() + FIRST_WAIT_S
        assert child.stdout is not None
        while self.address is None and self._child is child and time.monotonic() < until:
            if select.select([child.stdout], [], [], 0.1)[0] and not self._hear(child):
                return

    def _recall(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            known = json.loads((self.agent.memory / _NOTES).read_text())
            self._port, self._peers = int(known["port"]), known["peers"]

    def _note(self) -> None:
        with contextlib.suppress(OSError):
            path = self.agent.memory / _NOTES
            path.with_suffix(".part").write_text(json.dumps({"port": self._port, "peers": self._peers}))
            path.with_suffix(".part").rename(path)

    def _start(self) -> subprocess.Popen[bytes]:
        log = self._log()
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "muster.agent.replicator.main",
                "--run-dir",
                str(self.agent.run_dir),
                "--memory",
                str(self.agent.memory),
                "--bind",
                self.agent.bind,
                "--port",
                str(self._port),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        assert child.stdin is not None and child.stdout is not None
        os.set_blocking(child.stdin.fileno(), False)
        os.set_blocking(child.stdout.fileno(), False)
        self._child, self._began_s = child, time.monotonic()
        self._heard, self._stopped_since = b"", None
        self._unsaid.clear()
        self.agent.hub.watch(child.stdout.fileno(), lambda: self._heard_of(child))
        fd = open_pidfd(child.pid)
        assert fd is not None  # not reaped yet
        self.agent.hub.watch(fd, lambda: self._died(fd, child))
        return child

    def _log(self) -> IO[bytes]:
        path = self.agent.run_dir / "logs" / f"mover-{self.agent.host}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path, "ab")
        except OSError:  # a full disk must not keep the mover from starting again
            return open(os.devnull, "ab")

    # ------------------------------------------------------------ orders

    def peers(self, *, peer: list[Any] | None, layout: str, ranks: list[int], world: int) -> None:
        """In attempt ``world`` these ranks' snapshots are copied to ``peer``; what was fetched before is forgotten."""
        self._peers = {"do": "peers", "peer": peer, "layout": layout, "ranks": ranks, "world": world}
        self._fetches.clear()
        self._note()
        self._tell(self._peers)

    def peer_moved(self, peer: list[Any] | None) -> None:
        """The peer's mover was started again elsewhere."""
        if self._peers is not None and self._peers["peer"] != peer:
            self._peers = {**self._peers, "peer": peer}
            self._note()
            self._tell(self._peers)

    def copy(self, step: int) -> None:
        """A snapshot lies ready. Left out where the mover does not keep up: the next one comes soon."""
        if not self._unsaid:
            self._tell({"do": "copy", "step": step})

    def served(self) -> None:
        """The world steps: what was fetched for its start has served, and is not fetched again."""
        self._fetches.clear()

    def fetch(self, order: dict[str, Any]) -> None:
        """Get one version from another host."""
        self._fetches.append(order)
        self._tell(order)

    def flush(self, message: Mapping[str, Any], *, fence: int) -> None:
        """Hand on a supervisor's ``flush`` or ``flush_commit``; ``Agent.flushed`` gets one answer to each, always."""
        order = {**message, "do": message["t"], "run_id": self.agent.run_id}
        order["fence"] = max(fence, int(message.get("fence", 0)))
        self._flushes.append(order)
        if self._child is None:
            self._give_up_flushes("no mover runs on this host")
        else:
            self._tell(order)

    def _tell(self, order: Mapping[str, Any]) -> None:
        self._unsaid += json.dumps(order).encode() + b"\n"
        self._say()

    def _say(self) -> None:
        """Write what the pipe takes now; a mover that stands still must not hold the agent."""
        if self._child is None or self._child.stdin is None:
            self._unsaid.clear()
            return
        with contextlib.suppress(OSError):
            while self._unsaid:
                del self._unsaid[: os.write(self._child.stdin.fileno(), self._unsaid[:4096])]

    # ------------------------------------------------------------ hearing and watching

    def _heard_of(self, child: subprocess.Popen[bytes]) -> None:
        self._hear(child)

    def _hear(self, child: subprocess.Popen[bytes]) -> bool:
        """Take what it says; False at its end."""
        assert child.stdout is not None
        try:
            data = os.read(child.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            self.agent.hub.unwatch(child.stdout.fileno())
            return False
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            found = json.loads(line)
            if found["t"] == "address":
                self._came(found["address"])
            elif found["t"] == "note":
                self.agent.log_event("run.message", {"text": found["text"]})
            else:
                self._answer(found)
        return True

    def _came(self, address: list[Any]) -> None:
        again = self._port != 0
        self.address, self._port = address, int(address[1])
        self._note()
        if not again:
            return
        for order in [self._peers, *self._fetches, *self._flushes]:
            if order is not None and not (self.agent.memory / str(order.get("target", ""))).is_file():
                self._tell(order)
        if self.agent.spec.checkpoint.snapshot_every_steps:
            self.agent.tell({"t": "memory", "memory": address})

    def _answer(self, found: dict[str, Any]) -> None:
        asked = (_ASKED[found["t"]], found["step"], found["attempt"])
        for order in self._flushes:
            if (order["do"], order["step"], order["attempt"]) == asked:
                self._flushes.remove(order)
                self.agent.flushed(found, order)
                return

    def _give_up_flushes(self, reason: str) -> None:
        for order in list(self._flushes):
            said = next(answer for answer, asked in _ASKED.items() if asked == order["do"])
            found = {"t": said, "step": order["step"], "attempt": order["attempt"]}
            self._answer({**found, "ok": False, "reason": reason})

    def watch(self) -> None:
        """End a mover that somebody stopped: its successor goes on. Write what the pipe did not take before."""
        if self._child is None:
            return
        if self._unsaid:
            self._say()
        if not is_stopped(self._child.pid):
            self._stopped_since = None
            return
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since > self.agent.spec.recovery.heartbeat_timeout_s:
            self._child.kill()

    def _died(self, fd: int, child: subprocess.Popen[bytes]) -> None:
        """The pidfd fired: start the next one; training went on meanwhile."""
        self.agent.hub.unwatch(fd)
        os.close(fd)
        code = child.wait()
        self._hear(child)  # its last words; a pipe holds no more than one read takes
        assert child.stdin is not None and child.stdout is not None
        self.agent.hub.unwatch(child.stdout.fileno())
        with contextlib.suppress(OSError):
            child.stdin.close()
        child.stdout.close()
        if self._child is not child or self.agent.leaving is not None:
            return
        self._child = None
        self._young = self._young + 1 if time.monotonic() - self._began_s < YOUNG_S else 1
        again = self._young < YOUNG_DEATHS
        text = f"the mover on {self.agent.host} died with code {code}"
        text += " and was started again" if again else f" {YOUNG_DEATHS} times: no more copies to other hosts"
        self.agent.log_event("run.message", {"text": text})
        if again:
            self._start()
        else:
            self._give_up_flushes(text)

    def end(self) -> None:
        """End it; never waits long."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
