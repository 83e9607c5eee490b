"""The programs an agent starts: data preparation, the fork server, the mover. Argument lists only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from muster.agent.ranks.rank_environment import fork_server_environment, opens_contexts
from muster.agent.ranks.rank_process import Standby, Worker, open_pidfd
from muster.agent.replicator import snapshot_cleanup
from muster.agent.replicator.replicator_process import ReplicatorProcess
from muster.checkpoint_format.snapshot_ring import file_name, forget_refusal
from muster.config.spec import Recovery
from muster.core.types import Layout

if TYPE_CHECKING:
    from muster.agent.host_agent import Agent


#: Data preparation that somebody killed is begun again so often: what it has done it finds in the cache.
PREPARE_KILLS = 1


def beat_every_s(recovery: Recovery) -> float:
    """How often a rank tells of its micro-batches. A new step it tells at once; whether it is stopped, the kernel says.

    Each beat wakes the agent beside the ranks' own work: at 75 ms this was a good part of 2 % of a core.
    """
    return min(1.0, recovery.heartbeat_timeout_s / 2, (recovery.step_timeout_s or math.inf) / 4)


class Programs:
    """Children that are not ranks."""

    def __init__(self, *, agent: Agent) -> None:
        self.agent = agent
        self.prepared = False
        self.coming: set[int] = set()
        """Places whose standbys were asked for and are not yet here."""
        self._unfit = False
        """A standby could not open a context on its GPU: none tries it again."""
        self.mover = ReplicatorProcess(agent=agent)
        self.forkserver_pid: int | None = None
        self._forkserver_deaths = 0
        self._prepare: subprocess.Popen[str] | None = None
        self._prepare_kills = 0
        self._notices: subprocess.Popen[bytes] | None = None
        self._step_s: deque[float] = deque(maxlen=20)
        self._last_step_s: float | None = None
        self._layout = ""
        self._ranks: list[int] = []
        self._peer_copy = False
        self._served = 0
        """Attempt that steps, so that what was fetched for it has served."""
        self._tidied = 0
        """Attempt whose own snapshots stand, so that those of other layouts have served."""

    @property
    def memory_address(self) -> list[Any] | None:
        """Where other hosts find this one's snapshots; None where it holds none."""
        return self.mover.address if self.agent.spec.checkpoint.snapshot_every_steps else None

    # ------------------------------------------------------------ starting

    def start(self) -> None:
        """Prepare data and import torch at the same time; a predecessor's fork server comes by itself."""
        self._start_prepare()
        self.mover.start()
        self._start_notices()
        if self._adoptable():
            self.agent.contact_after = time.monotonic() + 0.5  # ranks look for us every 0.1 s
        else:
            self._start_forkserver()

    def reload(self) -> None:
        """The run file changed: prepare its data again. Fork server and standbys stay: they hold imports only."""
        self.prepared = False
        self._start_prepare()

    def _start_prepare(self) -> None:
        if self.agent.spec.data is None:
            self.prepared = True
            return
        log = self._log_file("prepare")
        self._prepare = subprocess.Popen(
            [sys.executable, "-m", "muster.data", "--run-dir", str(self.agent.run_dir)],
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        log.close()
        fd = open_pidfd(self._prepare.pid)
        assert fd is not None
        self.agent.hub.watch(fd, lambda: self._prepare_done(fd))

    def _prepare_done(self, fd: int) -> None:
        assert self._prepare is not None
        self.agent.hub.unwatch(fd)
        os.close(fd)
        out, _ = self._prepare.communicate()
        code, self._prepare = self._prepare.returncode, None
        found: dict[str, Any] = {}
        with contextlib.suppress(ValueError, IndexError):
            found = json.loads(out.strip().splitlines()[-1])
        if code < 0 and self._prepare_kills < PREPARE_KILLS and self.agent.leaving is None:
            self._prepare_kills += 1
            text = f"data preparation on {self.agent.host} was ended by signal {-code} and is begun again"
            self.agent.log_event("run.message", {"text": text})
            self._start_prepare()
            return
        if code != 0:
            self.agent.failed(
                str(
                    found.get(
                        "error", f"data preparation ended with code {code}; see logs/prepare-{self.agent.host}.log"
                    )
                ),
                exit_code=int(found.get("exit_code", 1)),
                hint=found.get("hint") or ("code -9 without a user's kill is lack of memory" if code == -9 else None),
            )
            return
        self.agent.log_event("data.prepared", found)
        self.prepared = True
        self.agent.check_ready()

    def _adoptable(self) -> bool:
        """A living fork server of a dead predecessor will connect by itself."""
        try:
            pid = int((self.agent.memory / "forkserver.pid").read_text())
            return b"muster.rank.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return False

    def _start_forkserver(self) -> None:
        log = self._log_file("forkserver")
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "muster.rank.fork_server",
                "--run-dir",
                str(self.agent.run_dir),
                "--agent-socket",
                str(self.agent.socket_path),
                "--bind",
                self.agent.bind,
                "--beat-every-s",
                str(beat_every_s(self.agent.spec.recovery)),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=fork_server_environment(self.agent.spec, os.environ, cores=len(os.sched_getaffinity(0))),
            start_new_session=True,
        )
        log.close()
        self.forkserver_pid = child.pid
        (self.agent.memory / "forkserver.pid").write_text(str(child.pid))
        fd = open_pidfd(child.pid)
        if fd is not None:
            self.agent.hub.watch(fd, lambda: self._forkserver_died(fd, child))

    def _forkserver_died(self, fd: int, child: subprocess.Popen[bytes]) -> None:
        self.agent.hub.unwatch(fd)
        os.close(fd)
        code = child.wait()
        if self.agent.leaving is not None or child.pid != self.forkserver_pid:
            return
        self._forkserver_deaths += 1
        if self._forkserver_deaths > 2 and code != 0:
            tail = self._tail("forkserver")
            self.agent.failed(f"the fork server on {self.agent.host} died with code {code}: {tail}")
            return
        self._start_forkserver()

    def _log_file(self, name: str) -> IO[bytes]:
        path = self.agent.run_dir / "logs" / f"{name}-{self.agent.host}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "ab")

    def _tail(self, name: str) -> str:
        with contextlib.suppress(OSError):
            text = (self.agent.run_dir / "logs" / f"{name}-{self.agent.host}.log").read_text(errors="replace")
            return text.strip().splitlines()[-1] if text.strip() else "no output"
        return "no output"

    # ------------------------------------------------------------ standbys

    def forkserver_came(self, pid: int) -> None:
        self.forkserver_pid = pid
        self._forkserver_deaths = 0
        self.coming.clear()
        self.refill()

    def forkserver_gone(self, reason: str) -> None:
        self.coming.clear()

    @property
    def contexts(self) -> bool:
        """Whether standbys open a CUDA context while they wait."""
        return opens_contexts(self.agent.spec) and not self._unfit

    def refill(self) -> None:
        """Keep one standby for each rank of the host (or only what is needed, where none are wanted)."""
        if self.agent.spec.recovery.warm_standby or not self.agent.crew.workers:
            here = {standby.local_rank for standby in self.agent.crew.standbys.values()}
            self.spawn([place for place in range(self.agent.ranks_per_host) if place not in here])

    def spawn(self, places: Iterable[int]) -> None:
        """Have a standby forked for each of these local ranks, unless one is on its way."""
        missing = [place for place in places if place not in self.coming]
        if missing and self.agent.forkserver is not None:
            self.coming.update(missing)
            order = {"t": "spawn", "local_ranks": missing, "contexts": self.contexts}
            self.agent.hub.send(self.agent.forkserver, order)

    def came(self, standby: Standby) -> None:
        self.coming.discard(standby.local_rank)

    def unfit(self, standby: Standby) -> None:
        """It could not open a context, and what CUDA is in it now nobody knows: plain ones from here on."""
        self._unfit = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(standby.pid, signal.SIGKILL)
        self.refill()

    def from_forkserver(self, message: dict[str, Any]) -> None:
        if message.get("t") == "exited":
            self.agent.crew.exited(int(message["pid"]), int(message["code"]))
        elif message.get("t") == "store":
            self.agent.new_store(message["store"])

    # ------------------------------------------------------------ progress

    def stepped(self, worker: Worker, step: int) -> None:
        """A rank begins ``step``, so the one before is applied and its snapshot lies ready.

        The first rank's steps are the watchdog's clock, and the sign that standbys may be forked in peace.
        """
        if worker.rank == min(other.rank for other in self.agent.crew.workers.values()):
            now = time.monotonic()
            if self._last_step_s is not None:
                self._step_s.append(now - self._last_step_s)
            self._last_step_s = now
            self.refill()
            self._tidy(worker.attempt)
        self.mover.served()
        self.mover.copy(step - 1)

    def _tidy(self, attempt: int) -> None:
        """The world steps: what was fetched for its start has served, and soon what another layout left."""
        if self._served != attempt:
            self._served = attempt
            snapshot_cleanup.drop_fetched(self.agent.memory)
        if self._tidied == attempt or not self._layout or not self.agent.spec.checkpoint.snapshot_every_steps:
            return
        if snapshot_cleanup.stands(
            self.agent.memory, layout=self._layout, ranks=self._ranks, attempt=attempt, replicate_snapshots=self._peer_copy
        ):
            self._tidied = attempt
            snapshot_cleanup.drop_other_layouts(self.agent.memory, keep={self._layout})

    def step_timeout_s(self) -> float:
        """The limit given, or ten median steps and at least 30 s."""
        given = self.agent.spec.recovery.step_timeout_s
        if given is not None:
            return given
        return max(30.0, 10 * statistics.median(self._step_s)) if self._step_s else 600.0

    # ------------------------------------------------------------ notices of the cloud

    def _start_notices(self) -> None:
        """On a cloud's machine, or where MUSTER_METADATA names a server: listen for the end of this host."""
        if self.agent.spec.backend in ("local", "slurm") and "MUSTER_METADATA" not in os.environ:
            return
        self._notices = subprocess.Popen(
            [sys.executable, "-m", "muster.agent.preemption_watcher"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._notices.stdout is not None
        fd = self._notices.stdout.fileno()
        os.set_blocking(fd, False)
        self.agent.hub.watch(fd, lambda: self._notice_came(fd))

    def _notice_came(self, fd: int) -> None:
        said = os.read(fd, 4096)
        if not said:  # it has ended: no metadata server here
            self.agent.hub.unwatch(fd)
            return
        for line in said.splitlines():
            found = json.loads(line)
            if found["notice"] == "preempted":
                self.agent.noticed("the metadata server: preempted")
            else:
                detail = {
                    "notice": found["notice"],
                    "source": f"the metadata server: {found['value']}",
                    "grace_s": 60.0,
                }
                self.agent.log_event("termination.notice", detail)

    # ------------------------------------------------------------ the state of a new world

    def fetch(self, message: dict[str, Any]) -> dict[str, str]:
        """Where each needed shard will lie on this host; what lies elsewhere is on its way at once."""
        contexts = message["contexts"]
        if not contexts:
            return {}
        self._layout = Layout(**contexts[0]["layout"]).key
        self._ranks = [int(context["rank"]) for context in contexts]
        self._peer_copy = message.get("peer") is not None
        self.mover.peers(
            peer=message.get("peer"), layout=self._layout, ranks=self._ranks, world=int(message["attempt"])
        )
        restore = contexts[0].get("restore")
        if restore is None:
            snapshot_cleanup.begin_course(self.agent.memory, layout=self._layout, origin=None, step=-1, attempt=0)
            return {}
        key = Layout(**restore["layout"]).key
        step, attempt = int(restore["step"]), int(message["restore_attempt"])
        snapshot_cleanup.begin_course(self.agent.memory, layout=self._layout, origin=key, step=step, attempt=attempt)
        sources = {}
        for item in message["fetch"]:
            rank, tier = int(item["rank"]), "own" if item["tier"] == "memory" else "peer"
            held_as = int(item.get("held_as", rank))
            if item["address"] is None:
                sources[str(rank)] = str(self.agent.memory / file_name(tier, key, held_as))
                continue
            target = file_name("fetched", key, rank)
            forget_refusal(self.agent.memory / target)
            self.mover.fetch(
                {
                    "do": "fetch",
                    "address": item["address"],
                    "file": file_name(tier, key, held_as),
                    "target": target,
                    "step": restore["step"],
                    "attempt": message["restore_attempt"],
                }
            )
            sources[str(rank)] = str(self.agent.memory / target)
        return sources

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        """End every child; never waits long."""
        self.mover.end()
        for child in (self._prepare, self._notices):
            if child is not None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1)
        if self.forkserver_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.forkserver_pid, signal.SIGKILL)
