"""A run on this machine as a fault sees it: which process is which, and how to signal or break it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, Signals

from muster.chaos.network import Disk, Network
from muster.config.spec import RunSpec
from muster.core import processes
from muster.core.errors import MusterError
from muster.core.event_details.attempts import RankStarted
from muster.core.event_details.hosts import AgentStarted
from muster.core.event_details.run import RunFinished
from muster.core.event_details.training import Step
from muster.core.event_log import Damage, EventReader
from muster.core.events import Event
from muster.core.processes import Process
from muster.protocol.ranks import FAULT_FILE, fault_done_file
from muster.storage.memory_dir import MemoryDir
from muster.storage.run_registry import RunDir, replace_text

POLL_S = 0.02
WATCHDOG = "muster.agent.watchdog"


@dataclass
class RunTarget:
    """One run, its processes and its events. ``random`` is seeded: the same drill picks the same targets."""

    run: RunDir
    spec: RunSpec
    random: random.Random
    revived_ns: int = 0
    """When the ended run was recovered."""
    injected_ns: int = 0
    """Wall clock of the last injection."""
    network: Network | None = None
    """Joins the hosts, where the fault breaks it."""
    disk: Disk | None = None
    """Holds the checkpoints, where the fault fills it."""
    _reader: EventReader = field(init=False)
    _events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = EventReader(self.run.events)

    # ------------------------------------------------------------ looking

    def events(self, *kinds: str) -> list[Event]:
        """All events so far (of these kinds), in each file's order; damaged lines, which a fault may make, are left
        out."""
        self._events += [event for _, event in self._reader.read()]
        return [event for event in self._events if not kinds or event.kind in kinds]

    @property
    def damaged(self) -> Sequence[Damage]:
        """Places of the log that were left out."""
        return self._reader.damaged

    def step(self) -> int:
        """The last step that was applied; 0: none."""
        return max((event.step or 0 for event in self.events("step")), default=0)

    def ranks(self) -> dict[int, tuple[int, str]]:
        """Rank -> (pid, host) of the newest attempt."""
        started = self.events(RankStarted.kind)
        newest = max((event.attempt for event in started), default=0)
        return {
            event.rank: (event.read(RankStarted).pid, event.host)
            for event in started
            if event.attempt == newest and event.rank is not None
        }

    def hosts(self) -> list[str]:
        """Hosts that run ranks of the newest attempt, by rank."""
        return list(dict.fromkeys(host for _, (_, host) in sorted(self.ranks().items())))

    def spares(self) -> set[str]:
        return {event.host for event in self.events("phase.changed") if event.phase == "spare"}

    def processes(self, host: str | None = None) -> list[Process]:
        """Every living process of the run, or of one of its hosts: agents, ranks, standbys."""
        ancestors = processes.ancestors()
        living = [process for process in processes.labelled(self.run.run_id) if process.pid not in ancestors]
        if host is None:
            return living
        memory = MemoryDir.of_run(self.run.path).get(host)
        pids = {
            process.pid
            for process in living
            if ("--host", host) in zip(process.argv, process.argv[1:], strict=False)
            or (memory is not None and any(str(memory.folder) in word for word in process.argv))
        }
        return [process for process in living if process.pid in pids or _parent(process.pid) in pids]

    def agent(self, host: str) -> int:
        """Pid of the agent itself (not its watchdog's)."""
        newest = self.events(AgentStarted.kind)[-len(self.hosts()) * 4 :]
        return max(event.read(AgentStarted).pid for event in newest if event.host == host)

    def fork_server(self, host: str) -> int:
        return int(MemoryDir.of_run(self.run.path)[host].read("forkserver.pid").split()[0])

    def copied_step(self) -> int:
        """The newest step that every rank has reported as held in another host's memory; 0: none."""
        return max((event.read(Step).peer_step or 0 for event in self.events(Step.kind)), default=0)

    def watchdog_pid(self, host: str) -> int:
        """Pid of the process that sends the host's heartbeat and starts its agent."""
        return self._programs(host, WATCHDOG)[0]

    def replicator_pids(self, host: str) -> list[int]:
        """Pids of the processes that copy and save the host's snapshots: one, unless it just died."""
        return self._programs(host, "muster.agent.replicator.main")

    def _programs(self, host: str, module: str) -> list[int]:
        return [process.pid for process in self.processes(host) if module in process.argv]

    def store_port(self, host: str) -> int:
        """Where the host's newest rendezvous store listens: a child of its fork server."""
        server = self.fork_server(host)
        ports = [
            port
            for process in sorted(self.processes(host), key=lambda process: process.start_ticks)
            # Ranks and standbys listen too, for their peers.
            if _parent(process.pid) == server and not has_agent_connection(process.pid)
            for port in listening(process.pid)
        ]
        if not ports:
            raise MusterError(f"{host} serves no rendezvous store", hint=self._hint())
        return ports[-1]

    def supervisor(self) -> int:
        """By its lease."""
        return int(json.loads(self.run.lease.read_text())["pid"])

    def wait(self, condition: Callable[[], object], awaited: str, timeout_s: float) -> None:
        """Poll until ``condition`` holds.

        Raises:
            MusterError: it does not in time, or the run has ended before.
        """
        until = time.monotonic() + timeout_s
        while not condition():
            ended = self.events(RunFinished.kind)
            if ended and ended[-1].wall_ns > max(self._last_start(), self.revived_ns):
                reason = ended[-1].read(RunFinished).reason
                raise MusterError(f"the run ended before {awaited}: {reason}", hint=self._hint())
            if time.monotonic() > until:
                raise MusterError(f"no {awaited} within {timeout_s:.0f} s", hint=self._hint())
            time.sleep(POLL_S)

    def _last_start(self) -> int:
        return max((event.wall_ns for event in self.events("supervisor.started")), default=0)

    def _hint(self) -> str:
        return f"muster logs {self.run.run_id}"

    # ------------------------------------------------------------ injecting

    def send(self, pids: Iterable[int], number: Signals = SIGKILL, *, again: bool = False) -> None:
        """Signal each; gone is success. ``again``: of an injection that has begun."""
        pids = list(pids)
        self.injected_ns = self.injected_ns if again else time.time_ns()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_rank(self, rank: int, number: Signals = SIGKILL) -> None:
        self.send([self.ranks()[rank][0]], number)

    def signal_host(self, host: str, number: Signals = SIGKILL) -> None:
        """All of a host's processes; twice, since one may have forked in between."""
        for again in (False, True):
            self.send([process.pid for process in self.processes(host)], number, again=again)

    def any_host(self) -> str:
        return self.random.choice(self.hosts())

    def any_rank(self) -> int:
        return self.random.choice(sorted(self.ranks()))

    def request_fault(self, fault: str, rank: int, *, always: bool, timeout_s: float) -> None:
        """Have a rank inject a fault into itself (``muster.rank.fault_injection``); returns once it has begun."""
        request = json.dumps({"fault": fault, "rank": rank, "always": always})
        replace_text(self.run.path / FAULT_FILE, request)
        done = self.run.path / fault_done_file(fault)
        self.wait(done.exists, f"{fault} in rank {rank}", timeout_s)
        self.injected_ns = done.stat().st_mtime_ns

    def start_agent(self, host: str) -> None:
        """A host that was lost, or one more: started with the arguments and environment of another host's watchdog."""
        other = next(process for process in self.processes() if WATCHDOG in process.argv)
        place = other.argv.index("--host") + 1
        entries = Path(f"/proc/{other.pid}/environ").read_text().split("\0")
        processes.start(
            (*other.argv[:place], host, *other.argv[place + 1 :]),
            env={name: value for name, _, value in (entry.partition("=") for entry in entries) if name},
            log=self.run.logs / f"agent-{host}.log",
            cwd=self.run.path,
        )

    def delete_snapshots(self) -> None:
        """Delete the snapshots in memory, as a loss of power does."""
        for memory in MemoryDir.of_run(self.run.path).values():
            with contextlib.suppress(OSError):
                memory.remove()

    def corrupt(self, path: Path) -> None:
        """Flip one bit in the middle of a file."""
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x10]))


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return 0


def has_agent_connection(pid: int) -> bool:
    """Whether it holds a Unix socket: ranks and standbys are connected to their agent, stores are not."""
    return not _sockets(pid).isdisjoint(row[6] for row in _table(pid, "unix"))


def listening(pid: int) -> list[int]:
    """TCP ports on which a process listens, read from ``/proc``."""
    sockets, rows = _sockets(pid), [*_table(pid, "tcp"), *_table(pid, "tcp6")]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets]


def _sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    links = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.add(os.readlink(fd))
    return {name[8:-1] for name in links if name.startswith("socket:[")}


def _table(pid: int, name: str) -> list[list[str]]:
    with contextlib.suppress(OSError):
        return [line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return []
