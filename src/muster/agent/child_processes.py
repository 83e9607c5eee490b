"""The programs an agent starts: data preparation, the fork server, the replicator. Argument lists only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.agent.host_state import HostState
from muster.agent.ranks import rank_environment
from muster.agent.ranks.rank_process import Standby, Worker, end_child, kill, on_exit
from muster.agent.replicator import snapshot_cleanup
from muster.agent.replicator_process import ReplicatorProcess
from muster.checkpoint_format.snapshot_ring import file_name, forget_refusal
from muster.config.spec import Recovery
from muster.core.types import Layout

#: Data preparation that was killed is restarted this often: what it has done is in the cache.
PREPARE_KILLS = 1
#: A restarted agent listens for this long to its predecessor's ranks before it answers a supervisor: they try to
#: reconnect every 0.1 s.
ADOPTION_S = 0.5


def beat_every_s(recovery: Recovery) -> float:
    """How often a rank reports its micro-batches. A new step is reported at once; a stopped rank is seen in /proc.

    Each beat wakes the agent while the ranks compute: at 75 ms this was a good part of 2 % of a core.
    """
    return min(1.0, recovery.heartbeat_timeout_s / 2, (recovery.step_timeout_s or math.inf) / 4)


@dataclass(frozen=True, kw_only=True)
class ChildEvents:
    """What the agent does about its children."""

    on_prepared: Callable[[], None]
    on_failure: Callable[[Mapping[str, Any]], None]
    """Something could not start: a ``failed`` message for the supervisor."""
    on_notice: Callable[[str], None]
    """This host is being preempted; the source of the notice."""
    on_flush: Callable[[dict[str, Any], Mapping[str, Any]], None]
    """The replicator's answer to a flush, and the order."""


class ChildProcesses:
    """Children that are not ranks."""

    def __init__(self, *, host: HostState, events: ChildEvents) -> None:
        self._host, self._events = host, events
        self.prepared = False
        self._spawning: set[int] = set()
        """Local ranks whose standbys were ordered and have not registered yet."""
        self._contexts_fail = False
        """A standby could not open a context on its GPU: none tries again."""
        self.replicator = ReplicatorProcess(host=host, on_flush=events.on_flush)
        self._fork_server_deaths = 0
        self._prepare: subprocess.Popen[str] | None = None
        self._prepare_kills = 0
        self._preemption_watcher: subprocess.Popen[bytes] | None = None
        self._step_s: deque[float] = deque(maxlen=20)
        self._last_step_s: float | None = None
        self._layout = ""
        self._ranks: list[int] = []
        self._replicates = False
        self._fetched_dropped = 0
        """Attempt that has taken a step, so that its fetched snapshots were dropped."""
        self._layouts_dropped = 0
        """Attempt that has snapshots of its own, so that those of other layouts were dropped."""

    @property
    def memory_address(self) -> list[Any] | None:
        """Where other hosts fetch this one's snapshots; None where it holds none."""
        return self.replicator.address if self._host.spec.checkpoint.snapshot_every_steps else None

    # ------------------------------------------------------------ starting

    def start(self) -> bool:
        """Prepare data and import torch at the same time; False where a predecessor's fork server is to reconnect."""
        self._start_prepare()
        self.replicator.start()
        if self._host.metadata_url is not None:
            self._start_preemption_watcher(self._host.metadata_url)
        if self._has_adoptable_fork_server():
            return False
        self._start_fork_server()
        return True

    def reload(self) -> None:
        """The run file changed: prepare its data again. Fork server and standbys stay: they hold imports only."""
        self.prepared = False
        self._start_prepare()

    def _start_prepare(self) -> None:
        if self._host.spec.data is None:
            self.prepared = True
            return
        arguments = ("--run-dir", str(self._host.run_dir))
        self._prepare = self._host.start_program(
            "prepare", "muster.data", *arguments, stdout=subprocess.PIPE, text=True
        )
        on_exit(self._host.hub, self._prepare.pid, self._on_prepare_exit)

    def _on_prepare_exit(self) -> None:
        assert self._prepare is not None
        host = self._host
        out, _ = self._prepare.communicate()
        code, self._prepare = self._prepare.returncode, None
        result: dict[str, Any] = {}
        with contextlib.suppress(ValueError, IndexError):
            result = json.loads(out.strip().splitlines()[-1])
        if code < 0 and self._prepare_kills < PREPARE_KILLS and host.exit_reason is None:
            self._prepare_kills += 1
            host.note(f"data preparation on {host.host} was ended by signal {-code} and is restarted")
            self._start_prepare()
            return
        if code != 0:
            reason = result.get("error", f"data preparation ended with code {code}; see logs/prepare-{host.host}.log")
            hint = result.get("hint") or ("code -9 without a user's kill is lack of memory" if code == -9 else None)
            self._fail(str(reason), exit_code=int(result.get("exit_code", 1)), hint=hint)
            return
        host.log.write("data.prepared", result)
        self.prepared = True
        self._events.on_prepared()

    def _fail(self, reason: str, *, exit_code: int = 1, hint: str | None = None) -> None:
        self._events.on_failure({"t": "failed", "reason": reason, "exit_code": exit_code, "hint": hint})

    def _has_adoptable_fork_server(self) -> bool:
        """A living fork server of a dead predecessor connects by itself."""
        try:
            pid = int((self._host.memory / "forkserver.pid").read_text())
            return b"muster.rank.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return False

    def _start_fork_server(self) -> None:
        host = self._host
        environ = rank_environment.fork_server_environment(
            host.spec, host.environ, cores=len(os.sched_getaffinity(0)), hosts_here=host.hosts_here
        )
        child = host.start_program(
            "forkserver", "muster.rank.fork_server", "--run-dir", str(host.run_dir), "--bind", host.bind,
            "--agent-socket", str(host.socket_path), "--beat-every-s", str(beat_every_s(host.spec.recovery)),
            env=environ,
        )  # fmt: skip
        host.fork_server_pid = child.pid
        (host.memory / "forkserver.pid").write_text(str(child.pid))
        on_exit(host.hub, child.pid, lambda: self._on_fork_server_exit(child))

    def _on_fork_server_exit(self, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        if self._host.exit_reason is not None or child.pid != self._host.fork_server_pid:
            return
        self._fork_server_deaths += 1
        if self._fork_server_deaths > 2 and code != 0:
            tail = "no output"
            with contextlib.suppress(OSError, IndexError):
                tail = self._host.log_path("forkserver").read_text(errors="replace").strip().splitlines()[-1]
            self._fail(f"the fork server on {self._host.host} died with code {code}: {tail}")
            return
        self._start_fork_server()

    # ------------------------------------------------------------ standbys

    def on_fork_server(self, pid: int) -> None:
        self._host.fork_server_pid = pid
        self._fork_server_deaths = 0
        self._spawning.clear()
        self.replenish_standbys()

    def on_fork_server_lost(self) -> None:
        self._spawning.clear()

    @property
    def opens_contexts(self) -> bool:
        """Whether standbys open a CUDA context while they wait."""
        return rank_environment.opens_contexts(self._host.spec) and not self._contexts_fail

    def replenish_standbys(self) -> None:
        """Keep one standby for each rank of the host (or only what is needed, where the run file wants none)."""
        host = self._host
        if host.spec.recovery.warm_standby or not host.workers:
            present = {standby.local_rank for standby in host.standbys.values()}
            self.spawn([local_rank for local_rank in range(host.ranks_per_host) if local_rank not in present])

    def spawn(self, local_ranks: Iterable[int]) -> None:
        """Have a standby forked for each of these local ranks, unless one was ordered already."""
        missing = [local_rank for local_rank in local_ranks if local_rank not in self._spawning]
        if missing and self._host.fork_server is not None:
            self._spawning.update(missing)
            message = {"t": "spawn", "local_ranks": missing, "contexts": self.opens_contexts}
            self._host.hub.send(self._host.fork_server, message)

    def on_standby_ready(self, standby: Standby) -> None:
        self._spawning.discard(standby.local_rank)

    def on_standby_unusable(self, standby: Standby) -> None:
        """It could not open a context, and its CUDA state is unknown: standbys without a context from here on."""
        self._contexts_fail = True
        kill(standby.pid)
        self.replenish_standbys()

    # ------------------------------------------------------------ progress

    def on_step(self, worker: Worker, step: int) -> None:
        """A rank begins ``step``, so the one before is applied and its snapshot is ready.

        The first rank's steps are the step watchdog's clock, and the sign that standbys may be forked undisturbed.
        """
        if worker.rank == min(other.rank for other in self._host.workers.values()):
            now = time.monotonic()
            if self._last_step_s is not None:
                self._step_s.append(now - self._last_step_s)
            self._last_step_s = now
            self.replenish_standbys()
            self._clean_up_snapshots(worker.attempt)
        self.replicator.forget_fetches()
        self.replicator.copy(step - 1)

    def _clean_up_snapshots(self, attempt: int) -> None:
        """The attempt takes steps: drop what was fetched for its start, and soon what another layout left."""
        memory = self._host.memory
        if self._fetched_dropped != attempt:
            self._fetched_dropped = attempt
            snapshot_cleanup.drop_fetched(memory)
        if self._layouts_dropped == attempt or not self._layout:
            return
        if self._host.spec.checkpoint.snapshot_every_steps and snapshot_cleanup.has_snapshots(
            memory, layout=self._layout, ranks=self._ranks, attempt=attempt, replicate_snapshots=self._replicates
        ):
            self._layouts_dropped = attempt
            snapshot_cleanup.drop_other_layouts(memory, keep={self._layout})

    def step_timeout_s(self) -> float:
        """The limit given, or ten median steps and at least 30 s."""
        limit_s = self._host.spec.recovery.step_timeout_s
        if limit_s is not None:
            return limit_s
        return max(30.0, 10 * statistics.median(self._step_s)) if self._step_s else 600.0

    # ------------------------------------------------------------ preemption notices of the cloud

    def _start_preemption_watcher(self, url: str) -> None:
        child = subprocess.Popen(
            [sys.executable, "-m", "muster.agent.preemption_watcher", url],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert child.stdout is not None
        self._preemption_watcher, fd = child, child.stdout.fileno()
        os.set_blocking(fd, False)
        self._host.hub.watch(fd, lambda: self._on_preemption_notice(fd))

    def _on_preemption_notice(self, fd: int) -> None:
        output = os.read(fd, 4096)
        if not output:  # it has ended: no metadata server here
            self._host.hub.unwatch(fd)
            return
        for line in output.splitlines():
            notice = json.loads(line)
            if notice["notice"] == "preempted":
                self._events.on_notice("the metadata server: preempted")
            else:
                source = f"the metadata server: {notice['value']}"
                detail = {"notice": notice["notice"], "source": source, "grace_s": 60.0}
                self._host.log.write("termination.notice", detail)

    # ------------------------------------------------------------ the state that an attempt starts from

    def fetch(self, message: dict[str, Any]) -> dict[str, str]:
        """The path of each needed shard on this host; those that other hosts hold are being fetched."""
        contexts, memory = message["contexts"], self._host.memory
        if not contexts:
            return {}
        self._layout = Layout(**contexts[0]["layout"]).key
        self._ranks = [int(context["rank"]) for context in contexts]
        self._replicates = message.get("peer") is not None
        self.replicator.set_peer(
            peer=message.get("peer"), layout=self._layout, ranks=self._ranks, attempt=int(message["attempt"])
        )
        restore = contexts[0].get("restore")
        if restore is None:
            snapshot_cleanup.begin_layout(memory, layout=self._layout, origin=None, step=-1, attempt=0)
            return {}
        key = Layout(**restore["layout"]).key
        step, attempt = int(restore["step"]), int(message["restore_attempt"])
        snapshot_cleanup.begin_layout(memory, layout=self._layout, origin=key, step=step, attempt=attempt)
        sources = {}
        for item in message["fetch"]:
            rank, tier = int(item["rank"]), "own" if item["tier"] == "memory" else "peer"
            held = file_name(tier, key, int(item.get("held_as", rank)))
            if item["address"] is None:
                sources[str(rank)] = str(memory / held)
                continue
            target = file_name("fetched", key, rank)
            forget_refusal(memory / target)
            version = {"file": held, "step": step, "attempt": attempt}
            self.replicator.fetch({"do": "fetch", "address": item["address"], "target": target, **version})
            sources[str(rank)] = str(memory / target)
        return sources

    # ------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """End every child; never waits long."""
        self.replicator.shutdown()
        end_child(self._prepare)
        end_child(self._preemption_watcher)
        if self._host.fork_server_pid is not None:
            kill(self._host.fork_server_pid)
