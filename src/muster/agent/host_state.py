"""What the parts of one host's agent share. Plain values: each part is given this, never the agent itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.agent.host_event_log import HostLog
from muster.agent.ranks.rank_process import Standby, Worker
from muster.config.spec import RunSpec
from muster.transport.connections import Connection, ConnectionPool

#: Compute Engine's; only its machines resolve the name.
METADATA_URL = "http://metadata.google.internal"


@dataclass(kw_only=True)
class HostState:
    """One host of one run."""

    run_dir: Path
    run_id: str
    host: str
    bind: str
    memory: Path
    """The host's folder in memory: snapshots, sockets."""
    spec: RunSpec
    hub: ConnectionPool
    log: HostLog
    environ: Mapping[str, str] = field(default_factory=dict)
    """What the programs started here inherit."""
    hosts_here: int = 1
    """Agents of the run that share this machine's cores."""
    metadata_url: str | None = None
    """The cloud's metadata server, which announces the end of this host; None: no cloud machine."""
    supervisor: Connection | None = None
    fork_server: Connection | None = None
    fork_server_pid: int | None = None
    newest_attempt: int = 0
    """That a supervisor named: a flush is committed in its name."""
    attempt: int = 0
    """Of the ranks here."""
    standbys: dict[int, Standby] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)
    """By pid, like ``standbys``."""
    exit_reason: str | None = None
    """Set once this agent is to exit."""

    @property
    def socket_path(self) -> Path:
        return self.memory / "agent.sock"

    @property
    def ranks_per_host(self) -> int:
        return self.spec.resources.ranks_per_host or 1

    def living(self) -> list[Worker]:
        """Ranks whose processes exist."""
        return [worker for worker in self.workers.values() if worker.exit_code is None and worker.pidfd >= 0]

    def send(self, message: Mapping[str, Any]) -> None:
        """To the supervisor, where one is connected."""
        if self.supervisor is not None:
            self.hub.send(self.supervisor, message)

    def start_program(self, log: str, module: str, *words: str, **streams: Any) -> subprocess.Popen[Any]:
        """Start ``python -m module words``, in a session of its own; it writes to ``logs/{log}-HOST.log``.

        ``streams``: stdin, stdout where they are others, and what else ``Popen`` takes.
        """
        path = self.log_path(log)
        with contextlib.suppress(OSError):  # a full disk must not prevent a start
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        with open(path if os.access(path, os.W_OK) else os.devnull, "ab") as output:
            given = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **streams}
            return subprocess.Popen([sys.executable, "-m", module, *words], start_new_session=True, **given)

    def log_path(self, program: str) -> Path:
        return self.run_dir / "logs" / f"{program}-{self.host}.log"

    def note(self, text: str) -> None:
        """An informational message in the run's log."""
        self.log.write("run.message", {"text": text})

    def request_exit(self, reason: str) -> None:
        """Exit once the messages at hand are answered."""
        self.exit_reason = self.exit_reason or reason
