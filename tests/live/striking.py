"""Applies a trial of ``strikes`` to a real run and judges the end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import strikes
from cluster import checkpoint_hash, spec_of
from strikes import Strike, Trial
from verbs import MUSTER, Shell
from watched import Watched

from muster.chaos.network import Disk
from muster.chaos.target import has_agent_connection
from muster.core import processes
from muster.core.errors import UsageError
from muster.report.audit.invariants import broken, check
from muster.storage.memory_dir import MemoryDir, left_over

#: Longest wait for one more step, and for the whole trial.
STEP_S, TRIAL_S = 90.0, 300.0
#: A run whose supervisor was killed is recovered by hand; more often than this it goes round in circles.
RECOVERIES = 12
TEMPORARY = re.compile(r"\.(tmp|part)$")
_PIDFD_GETFD = 438  # of every architecture (pidfd_getfd(2))


class Skipped(Exception):
    """A strike that could not be applied: its target is not there."""


@dataclass
class Outcome:
    """What became of a trial."""

    problems: list[str] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    recoveries: int = 0
    seconds: float = 0.0

    @property
    def survived(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, object]:
        return {"verdict": "survived" if self.survived else "not survived", **asdict(self)}


class References:
    """Undisturbed runs, one of each course; kept in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, trial: Trial) -> Path:
        """The folder of the ended run: on one host, since neither hosts nor spares may change a bit."""
        there = self._folder / f"ranks{trial.ranks()}-replicas{trial.replicas}-exact{int(trial.exact)}"
        if not (there / "whole").exists():
            shutil.rmtree(there, ignore_errors=True)
            there.mkdir(parents=True)
            calm = {"resources.hosts": 1, "resources.min_hosts": 1, "resources.spare_hosts": 0,
                    "resources.ranks_per_host": trial.ranks(), "recovery.heartbeat_timeout_s": 30.0}  # fmt: skip
            shell = _shell(there, {**trial.changes(), **calm})
            done = subprocess.run(
                [*MUSTER, "train", "run.yaml", "run_dir=run"], cwd=there, env=shell.env, check=False,
                capture_output=True, text=True, timeout=TRIAL_S,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            (there / "whole").touch()
        return there / "run"


def _shell(folder: Path, changes: dict[str, object]) -> Shell:
    (folder / "run.yaml").write_text(spec_of(**changes).model_dump_json(exclude_unset=True))  # JSON is YAML
    return Shell(folder)


class Driven:
    """One trial under way, in ``folder``, which is empty."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self.trial, self.outcome = trial, Outcome()
        self.shell = _shell(folder, trial.changes())
        self.dir, self.seen = folder / "there", Watched(folder / "there")
        self.run_id, self._until = "", time.monotonic() + TRIAL_S
        self._later: list[threading.Timer] = []
        self._undo: list[Callable[[], None]] = []

    # ------------------------------------------------------------ the course

    def go(self, reference: Path) -> Outcome:
        began = time.monotonic()
        try:
            self.run_id = self.shell.run("submit", "run.yaml", "run_dir=there").stdout.strip()
            self._mount()  # its folder is new to it; nothing is saved before its ranks have started, seconds later
            for strike in self.trial.strikes:
                self._reach(lambda step=strike.step: self.seen.step() >= step)  # type: ignore[misc]
                self._strike(strike)
            self._reach(lambda: False)
            self._settle()
            self._judge(reference)
        except (AssertionError, subprocess.TimeoutExpired) as problem:
            self.outcome.problems.append(str(problem)[:1500])
        finally:
            self.outcome.seconds = round(time.monotonic() - began, 1)
            self._clean()
        return self.outcome

    def _mount(self) -> None:
        self.disk: Disk | None = None
        if any(strike.kind == "disk full" for strike in self.trial.strikes):
            disk = Disk(self.dir / "checkpoints")
            with contextlib.suppress(UsageError):  # said where it is to be filled
                disk.up()
                self.disk = disk
                self._undo.append(disk.down)

    def _reach(self, condition: Callable[[], bool]) -> None:
        """Until it holds or the run has its right end; a run without a supervisor is recovered, as a user would."""
        step, moved = -1, time.monotonic()
        while not condition():
            if self.seen.step() != step:
                step, moved = self.seen.step(), time.monotonic()
            now = time.monotonic()
            assert now < moved + STEP_S, f"no step after {step} within {STEP_S:.0f} s\n{self._story()}"
            assert now < self._until, f"not done within {TRIAL_S:.0f} s, at step {step}\n{self._story()}"
            if not self.pids("supervisor"):
                state, reason = self._state()
                if state == "succeeded":
                    return
                self.outcome.states.append(state)
                ended = state in ("failed", "stopped", "preempted", "cancelled")
                if ended and state not in strikes.may_end(self.trial):
                    self.outcome.problems.append(f"the run ended as {state}: {reason}")
                assert self.outcome.recoveries < RECOVERIES, f"recovered {RECOVERIES} times\n{self._story()}"
                self.outcome.recoveries += 1
                self._verbs(["recover"])
                moved = time.monotonic()
                time.sleep(1)
            time.sleep(0.05)

    def _state(self) -> tuple[str, str]:
        done = subprocess.run(
            [*MUSTER, "status", str(self.dir), "--json"], cwd=self.shell.folder, env=self.shell.env, check=False,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        if done.returncode != 0:
            return f"status says {done.returncode}", done.stderr[-300:]
        found = json.loads(done.stdout)
        return str(found["state"]), str(found["reason"])

    def _end_after(self, seconds: float, act: Callable[[], None]) -> None:
        """End what lasts a while: on a thread, since verbs are waited for meanwhile."""
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()
        self._later.append(timer)

    def _settle(self) -> None:
        for timer in self._later:
            timer.join()
        until = time.monotonic() + 20
        while processes.labelled(self.run_id):
            if time.monotonic() > until:
                break
            time.sleep(0.1)

    # ------------------------------------------------------------ strikes

    def _strike(self, strike: Strike) -> None:
        name = f"{strike.kind}: {strike.target}"
        try:
            if strike.kind in strikes.OF_A_PROCESS:
                pids = self.pids(strike.target, f"host-{strike.host}")
                if not pids:
                    raise Skipped("no such process")
                said = self._strike_process(strike, pids[int(strike.amount * 1000) % len(pids)])
            elif strike.kind in strikes.OF_A_FILE:
                said = self._damage(strike)
            elif strike.kind == "verbs":
                said = self._verbs(strikes.VERBS[strike.target])
            else:
                said = self._strike_disk(strike)
            self.outcome.applied.append(f"{name} ({said}) at step {self.seen.step()}")
        except (Skipped, ProcessLookupError, psutil.Error) as reason:
            self.outcome.skipped.append(f"{name}: {reason or type(reason).__name__}")
        except OSError as reason:
            self.outcome.skipped.append(f"{name}: {reason.strerror}")

    def _strike_process(self, strike: Strike, pid: int) -> str:
        if strike.kind in ("kill", "term"):
            os.kill(pid, signal.SIGKILL if strike.kind == "kill" else signal.SIGTERM)
            return f"pid {pid}"
        if strike.kind == "pause":
            os.kill(pid, signal.SIGSTOP)
            ticks = getattr(processes.look(pid), "start_ticks", -1)
            self._end_after(strike.amount, lambda: _go_on(pid, ticks))
            return f"pid {pid}, {strike.amount} s"
        if strike.kind == "memory limit":
            limit = psutil.Process(pid).memory_info().vms + int(strike.amount * (16 << 20))
            resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
            return f"pid {pid}, {limit >> 20} MiB"
        if strike.kind == "file limit":
            limit = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1 + int(strike.amount * 4)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
            return f"pid {pid}, {limit} files"
        return f"pid {pid}, {shut_a_socket(pid, strike.amount)}"

    def _damage(self, strike: Strike) -> str:
        host = f"host-{strike.host}"
        pattern, folder = strikes.FILES[strike.target].format(host=host), self.dir
        if pattern.startswith("@"):
            memory = MemoryDir.of_run(self.dir).get(host)
            if memory is None:
                raise Skipped(f"{host} has no memory folder")
            pattern, folder = pattern[1:], memory.folder
        found = sorted(path for path in folder.glob(pattern) if path.is_file() and path.stat().st_size)
        if not found:
            raise Skipped("no such file")
        path = max(found, key=lambda path: path.stat().st_mtime_ns)
        data = path.read_bytes()
        broken_data = strikes.damaged(data, strike.kind, strike.amount)
        if broken_data == data:
            raise Skipped("nothing changes")
        at = next((n for n, (a, b) in enumerate(zip(data, broken_data, strict=False)) if a != b), len(broken_data))
        with open(path, "r+b") as file:  # in place: others have it open or mapped
            if strike.kind == "cut":
                file.truncate(len(broken_data))
            else:
                file.seek(at)
                file.write(broken_data[at : at + 64])
        return f"{path.name} of {len(data)} bytes, at {at}"

    def _strike_disk(self, strike: Strike) -> str:
        there = self.dir / "checkpoints"
        if strike.kind == "disk full":
            if self.disk is None:
                raise Skipped("nothing can be mounted")
            disk = self.disk
            disk.fill()
            self._end_after(strike.amount, disk.free)
        else:
            if os.geteuid() != 0 or not there.is_dir():
                raise Skipped("not root, or no folder")
            mount = ["mount", "-t", "tmpfs", "-o", "ro", "muster-away", str(there)]
            if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
                raise Skipped("nothing can be mounted")

            def back() -> None:
                subprocess.run(["umount", "--lazy", str(there)], check=False, capture_output=True)

            self._end_after(strike.amount, back)
        return f"{strike.amount} s"

    def _verbs(self, names: tuple[str, ...] | list[str]) -> str:
        words = {"submit": ("submit", "run.yaml", "run_dir=there")}
        begun = [self.shell.start(*words.get(name, (name, str(self.dir)))) for name in names]
        codes = []
        for name, process in zip(names, begun, strict=True):
            try:
                _, err = process.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                self.outcome.problems.append(f"muster {name} does not return")
                continue
            codes.append(f"{name} {process.returncode}")
            if "Traceback" in err:
                self.outcome.problems.append(f"muster {name}: {err[-600:]}")
        return ", ".join(codes)

    # ------------------------------------------------------------ processes

    def pids(self, program: str, host: str = "") -> list[int]:
        """Of the run's processes of this program (on this host), oldest first."""
        modules = {"supervisor": "muster.app.supervisor", "keeper": "muster.agent.watchdog",
                   "agent": "muster.agent.host_agent", "replicator": "muster.agent.replicator.main"}  # fmt: skip
        living = {process.pid: process for process in processes.labelled(self.run_id)}
        if program == "supervisor":
            return [pid for pid, process in living.items() if modules[program] in process.argv]
        mine = {pid: p for pid, p in living.items() if host in p.argv or any(f"-{host}-" in word for word in p.argv)}
        if program in modules:
            return sorted(pid for pid, process in mine.items() if modules[program] in process.argv)
        forks = {pid for pid, process in mine.items() if "muster.rank.fork_server" in process.argv}
        servers = {pid for pid in forks if psutil.Process(pid).ppid() not in forks}
        if program == "fork_server":
            return sorted(servers)
        ranks = {pid for pid, where in self.seen.ranks().values() if where == host} & forks
        standbys = {pid for pid in forks - servers - ranks if has_agent_connection(pid)}
        return sorted(ranks if program == "rank" else standbys)

    # ------------------------------------------------------------ the verdict

    def _judge(self, reference: Path) -> None:
        problems = self.outcome.problems
        found = broken(check(self.dir, reference=reference))
        if any(line.split(":")[1].split(" (")[0].strip() in strikes.LOGS for line in self.outcome.applied):
            # What a damaged file held is missing; of the rest only the results can be told.
            named = set(re.findall(r"\((\S+\.jsonl) of ", " ".join(self.outcome.applied)))
            found = [
                line
                for line in found
                if (line.startswith(("I4", "I5")) and "in one alone" not in line)
                or (line.startswith("log") and not any(name in line for name in named))
            ]
        problems += found
        if checkpoint_hash(self.dir / "checkpoints") != checkpoint_hash(reference / "checkpoints"):
            problems.append("the final weights are not the undisturbed run's")
        for process in processes.labelled(self.run_id):
            problems.append(f"left: process {process.pid} {' '.join(process.argv)[:120]}")
        problems += [f"left: {folder}" for folder in left_over(self.dir, self.run_id)[0]]
        problems += [f"left: {path}" for path in self.dir.rglob("*") if TEMPORARY.search(path.name)]

    def _story(self) -> str:
        lines = [
            f"{event.wall_ns / 1e9:.3f} {event.host} a{event.attempt} {event.kind} s={event.step} {dict(event.detail)}"
            for event in self.seen.events()
            if event.kind not in ("step", "phase.changed", "clock.offset")
        ]
        return "\n".join(line[:300] for line in lines[-12:])

    def _clean(self) -> None:
        for timer in self._later:
            timer.join()  # seconds at most
        if self.run_id:
            for _ in range(3):
                processes.send(processes.labelled(self.run_id), signal.SIGKILL)
                time.sleep(0.05)
            for folder in left_over(self.dir, self.run_id)[0]:
                shutil.rmtree(folder, ignore_errors=True)
        for act in self._undo:
            act()


def _go_on(pid: int, ticks: int) -> None:
    if processes.lives(pid, ticks):
        os.kill(pid, signal.SIGCONT)


def shut_a_socket(pid: int, share: float) -> str:
    """Shut both directions of one of another process's sockets; needs the right to trace it."""
    held = sorted(
        int(name) for name in os.listdir(f"/proc/{pid}/fd") if os.readlink(f"/proc/{pid}/fd/{name}").startswith("sock")
    )
    if not held:
        raise Skipped("it holds no socket")
    number = held[int(share * len(held))]
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    try:
        fd = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
        if fd < 0:
            raise Skipped(os.strerror(ctypes.get_errno()))
    finally:
        os.close(pidfd)
    with socket.socket(fileno=fd) as copy:
        kind = f"{copy.family.name} fd {number}"
        copy.shutdown(socket.SHUT_RDWR)
    return kind


def drive(seed: int, folder: Path, references: References) -> Outcome:
    """The trial of ``seed``; ``folder`` is made and, where the run survived, removed."""
    trial = strikes.draw(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome = Driven(trial, folder).go(references(trial))
    if outcome.survived:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome
