"""The fork server as the agent's child: started or adopted, told what to fork, restarted when it dies."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterable

from muster.agent.host_identity import SOCKET, HostIdentity
from muster.agent.ranks import rank_environment
from muster.agent.ranks.rank_process import kill, on_exit
from muster.config.spec import Recovery, RunSpec
from muster.core import processes
from muster.core.errors import AccessError
from muster.protocol.codec import reader_of
from muster.protocol.fork_server import (
    FROM_FORK_SERVER,
    ChildExited,
    ChildStopped,
    ForkServerHello,
    FromForkServer,
    NewStore,
    SpawnStandbys,
)
from muster.protocol.to_supervisor import StartFailed
from muster.protocol.values import Address, StoreAddress
from muster.transport.connections import Connection, ConnectionPool

MODULE = "muster.rank.fork_server"
#: In the host's folder in memory: its pid, and when it started in the kernel's ticks.
PID_FILE = "forkserver.pid"
#: One that died this often before it connected will die again, for a while: it is said, and tried again later.
DEATHS = 3
#: First after this time, then after twice as long each time: an import of torch beside ranks that train costs them.
AGAIN_S, MOST_S = 15.0, 300.0


def beat_every_s(recovery: Recovery) -> float:
    """How often a rank reports its micro-batches. A new step is reported at once; a stop is not to be told by silence.

    Each beat wakes the agent while the ranks compute, so only the step timeout says how many there have to be.
    """
    return min(1.0, (recovery.step_timeout_s or math.inf) / 4)


class ForkServer:
    """One at a time. It outlives the agent, and connects to the agent's successor by itself."""

    def __init__(
        self,
        *,
        identity: HostIdentity,
        hub: ConnectionPool,
        spec: Callable[[], RunSpec],
        is_ending: Callable[[], bool],
        on_failure: Callable[[StartFailed | None], None],
        on_exited: Callable[[int, int], None],
        on_stopped: Callable[[int], None],
        on_store: Callable[[StoreAddress], None],
        on_note: Callable[[str], None],
    ) -> None:
        """``on_failure``: why it cannot be started, None: it is. ``on_exited``: a child's pid and exit code.
        ``on_stopped``: one that a signal has stopped."""
        self._identity, self._hub, self._spec, self._is_ending = identity, hub, spec, is_ending
        self._on_failure, self._on_exited, self._on_stopped = on_failure, on_exited, on_stopped
        self._on_store, self._on_note = on_store, on_note
        self.store: Address | None = None
        """Its rendezvous store for the next attempt; None while it is not connected."""
        self._peer: Connection | None = None
        self._pid: int | None = None
        self._socket = str(identity.memory.path(SOCKET))
        """Where it looks for an agent."""
        self.started = False
        self.follows = False
        """Another agent was here before: its ranks may live, and connect by themselves."""
        self._deaths = 0
        self._again_s = math.inf
        """When one is started that could not be before."""
        self._spawning: set[int] = set()
        """Local ranks whose standbys were ordered and have not registered yet."""
        self._registered: set[int] = set()
        """Pids of its children that have."""
        self._stillborn = 0
        """How many in a row have not."""
        self._contexts_fail = False
        """A standby could not open a context on its GPU: none tries again."""

    # ------------------------------------------------------------ the process

    def start(self) -> bool:
        """Start one; False where a dead predecessor's still lives, which connects by itself."""
        self.started, self.follows = True, self._identity.memory.exists(PID_FILE)
        if self._predecessors_lives():
            return False
        self._start()
        return True

    def _predecessors_lives(self) -> bool:
        """By the record that the predecessor left: pids are used again."""
        try:
            pid, ticks = (int(word) for word in self._identity.memory.read(PID_FILE).split())
            found = processes.look(pid)
            is_ours = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
        except (OSError, ValueError, AccessError):
            return False
        return is_ours and found is not None and found.start_ticks == ticks and MODULE in found.argv

    def _start(self) -> None:
        identity, spec = self._identity, self._spec()
        try:
            given = identity.variables(spec)
        except AccessError as error:
            self._again_s = time.monotonic() + AGAIN_S
            self._on_failure(StartFailed(reason=str(error), exit_code=error.exit_code, hint=error.hint))
            return
        environ = rank_environment.fork_server_environment(
            spec, given, cores=len(os.sched_getaffinity(0)), hosts_here=identity.hosts_here
        )
        socket = str(identity.memory.path(SOCKET))
        child = identity.start_program(
            "forkserver", MODULE, "--run-dir", str(identity.run_dir), "--bind", identity.bind,
            "--agent-socket", socket, "--beat-every-s", str(beat_every_s(spec.recovery)),
            env=environ,
        )  # fmt: skip
        self._pid, self._socket = child.pid, socket
        self._record()
        on_exit(self._hub, child.pid, lambda: self._on_exit(child))

    def _record(self) -> None:
        started = processes.look(self._pid) if self._pid is not None else None
        if started is not None:
            with contextlib.suppress(OSError):  # a full memory: a successor of this agent starts another one
                self._identity.memory.replace(PID_FILE, f"{started.pid} {started.start_ticks}".encode())

    def on_memory_renewed(self) -> None:
        """The host's memory folder was made anew. Under another name a fork server that knows it takes over."""
        self._record()
        if self._socket != str(self._identity.memory.path(SOCKET)):
            self.shutdown()

    def _on_exit(self, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        if self._is_ending() or child.pid != self._pid:
            return
        self._deaths += 1
        if self._deaths >= DEATHS and code != 0:
            tail = "no output"
            with contextlib.suppress(OSError, IndexError):
                log = self._identity.log_path("forkserver").read_text(errors="replace")
                tail = log.strip().splitlines()[-1]
            limit = processes.memory_limit()
            tail += f" (it may have {limit >> 20} MiB of addresses, RLIMIT_AS: ulimit -v)" if limit else ""
            self._again_s = time.monotonic() + min(AGAIN_S * 2 ** (self._deaths - DEATHS), MOST_S)
            self._fail(f"the fork server on {self._identity.host} died with code {code}: {tail}")
            return
        self._start()

    def _fail(self, reason: str) -> None:
        self._on_failure(StartFailed(reason=reason))

    def due_s(self) -> float:
        """When ``watch`` is to be called."""
        return self._again_s

    def watch(self) -> None:
        """What kept one from starting may be over: room in memory, a library that is there again."""
        if time.monotonic() >= self._again_s:
            self._again_s = math.inf
            self._start()

    def shutdown(self) -> None:
        """End it, and with it the stores; never waits."""
        if self._pid is not None:
            kill(self._pid)

    # ------------------------------------------------------------ its connection

    @property
    def connected(self) -> bool:
        return self._peer is not None

    def is_peer(self, peer: Connection) -> bool:
        return peer is self._peer

    def on_hello(self, peer: Connection, hello: ForkServerHello) -> None:
        """It has imported everything, or has found this agent after the death of another one."""
        peer.expect(reader_of(FROM_FORK_SERVER), self._on_message)
        self._peer, self._pid, self.store = peer, hello.pid, hello.store
        self._deaths, self._again_s = 0, math.inf
        self._on_failure(None)
        self._spawning.clear()
        self._registered = set(hello.children)
        if hello.unforkable:
            words = "ranks are new processes, each in the seconds that its imports take, instead of forks"
            self._on_note(f"{self._identity.host}: {words}: {hello.unforkable}")

    def _on_message(self, _peer: Connection, message: FromForkServer) -> None:
        match message:
            case ChildExited():
                self._on_exited(message.pid, message.code)
                if message.pid not in self._registered:
                    self._on_stillborn(message.code)
                self._registered.discard(message.pid)
            case ChildStopped():
                self._on_stopped(message.pid)
            case StoreAddress():
                self.store = message.store
                self._on_store(message)

    def _on_stillborn(self, code: int) -> None:
        """A standby ended before it said which one it is: all that are on their way are ordered again."""
        ordered = sorted(self._spawning)
        self._spawning.clear()
        self._stillborn += 1
        if self._stillborn < DEATHS:
            self.spawn(ordered)
        else:
            host = self._identity.host
            self._fail(f"standbys on {host} end before they reach their agent, the last one with code {code}")

    def on_lost(self) -> None:
        """The connection is closed."""
        self._peer = self.store = None
        self._spawning.clear()

    def reaps(self, parent: int) -> bool:
        """Whether process ``parent`` is the one that reports its children's exit codes, and that a signal stops one."""
        return self._peer is not None and parent == self._pid

    def order_store(self) -> None:
        """Each attempt has a rendezvous store of its own: have the next one's made."""
        if self._peer is not None:
            self._hub.send(self._peer, NewStore())

    # ------------------------------------------------------------ standbys

    @property
    def opens_contexts(self) -> bool:
        """Whether standbys open a CUDA context while they wait."""
        return rank_environment.opens_contexts(self._spec()) and not self._contexts_fail

    def give_up_contexts(self) -> None:
        """A standby could not open a context: standbys without one from here on."""
        self._contexts_fail = True

    def spawn(self, local_ranks: Iterable[int]) -> None:
        """Have a standby forked for each of these local ranks, unless one was ordered already."""
        missing = [local_rank for local_rank in local_ranks if local_rank not in self._spawning]
        if missing and self._peer is not None:
            self._spawning.update(missing)
            self._hub.send(self._peer, SpawnStandbys(local_ranks=tuple(missing), contexts=self.opens_contexts))

    def on_standby(self, local_rank: int, pid: int) -> None:
        """One that was ordered has registered."""
        self._spawning.discard(local_rank)
        self._registered.add(pid)
        self._stillborn = 0
