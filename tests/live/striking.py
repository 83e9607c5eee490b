"""Drives a run through a trial of ``trials``, recovers it as a user would, and has its end judged."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import trials
import verdict
import weather
from blows import Disks, Later, Skipped, damage, lose_power, strike_process
from cluster import spec_of
from trials import Strike, Trial
from verbs import MUSTER, Shell
from watched import Watched

from muster.chaos.target import has_agent_connection
from muster.core import processes

#: Longest wait for one more step, for a verb, and for the whole trial.
STEP_S, VERB_S, TRIAL_S = 180.0, 120.0, 600.0
#: A run that waits for somebody's help has no step for so long before it gets it.
HELP_S = 30.0
#: A run whose supervisor was killed is recovered by hand; more often than this it goes round in circles.
RECOVERIES = 12
LOOK_EVERY_S = 1.0
SUBMIT = ("submit", "run.yaml", "run_dir=disk/there")
MODULES = {
    "supervisor": "muster.app.supervisor", "keeper": "muster.agent.watchdog", "agent": "muster.agent.host_agent",
    "replicator": "muster.agent.replicator.main",
}  # fmt: skip
_ROOTS = (Path("/dev/shm"), Path(tempfile.gettempdir()))


@dataclass
class Outcome:
    """What became of a trial."""

    problems: list[str] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    """In which the run was found without a supervisor, before it was recovered."""
    recoveries: int = 0
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """``empty``: no strike could be done; such a trial says nothing, unless something went wrong by itself."""
        return "not survived" if self.problems else "survived" if self.applied else "empty"

    def to_json(self) -> dict[str, object]:
        return {"verdict": self.verdict, **asdict(self)}


class References:
    """Undisturbed runs, one of each course; kept in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._guard = threading.Lock()

    def __call__(self, trial: Trial) -> Path:
        """The folder of the ended run: on one host, since neither hosts nor spares may change a bit."""
        there = self._folder / trial.course()
        with self._guard:
            if not (there / "whole").exists():
                self._make(trial, there)
        return there / "run"

    @staticmethod
    def _make(trial: Trial, there: Path) -> None:
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


def _shell(folder: Path, changes: dict[str, object]) -> Shell:
    own = {"data.cache_dir": str(folder / "data")}
    (folder / "run.yaml").write_text(spec_of(**changes, **own).model_dump_json(exclude_unset=True))  # JSON is YAML
    return Shell(folder)


class Driven:
    """One trial under way, in ``folder``, which is empty."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self.trial, self.outcome, self.folder = trial, Outcome(), folder
        self.shell = _shell(folder, trial.changes())
        self.dir = folder / "disk" / "there"
        self.seen = Watched(self.dir)
        # Its own roots: what is in them at the end is left over. A socket's path must be short (unix(7)).
        self.memory = next(root for root in _ROOTS if root.is_dir()) / f"strike-{secrets.token_hex(4)}"
        self.temporary = folder / "temporary"
        for made in (self.memory, self.temporary, self.dir.parent):
            made.mkdir(mode=0o700)
        self.shell.env |= {"MUSTER_MEMORY_DIR": str(self.memory), "TMPDIR": str(self.temporary)}
        self.shell.env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # its default is in TMPDIR
        if any(strike.kind == "power" for strike in trial.strikes):
            library, synced = weather.build(folder), str(folder / "synced")
            self.shell.env |= {"LD_PRELOAD": str(library), "MUSTER_WEATHER_SYNCED": synced}
        self.run_id, self._until, self._looked = "", time.monotonic() + TRIAL_S, 0.0
        self.traces, self.later = verdict.Traces(), Later()
        self.disks = Disks()
        self._leader: processes.Process | None = None
        self._helped = False

    # ------------------------------------------------------------ the course

    def go(self, reference: Path) -> Outcome:
        began = time.monotonic()
        try:
            filled = {strike.target for strike in self.trial.strikes if strike.kind == "disk full"}
            if "run's folder" in filled:
                self.disks.put(self.dir.parent)
            self.run_id = self.shell.run(*SUBMIT).stdout.strip()
            if "checkpoints" in filled:  # the run's folder was new to it; nothing is saved in its first seconds
                self.disks.put(self.dir / "checkpoints")
            for strike in self.trial.strikes:
                self._reach(lambda step=strike.step: self.seen.step() >= step)  # type: ignore[misc]
                self._strike(strike)
            self._reach(lambda: False)
            self.later.join()
            self.traces.settle(self.run_id)
            self.outcome.problems += verdict.judge(self.dir, reference, self.outcome.applied)
            self.outcome.problems += self.traces.left(self.run_id)
            self.outcome.problems += verdict.files_left(self.folder, self.memory, self.temporary)
        except (AssertionError, subprocess.TimeoutExpired) as problem:
            self.outcome.problems.append(str(problem)[:3000])
        except Exception:  # noqa: BLE001 (the other trials go on)
            self.outcome.problems.append(f"the driver itself: {traceback.format_exc()[-1500:]}")
        finally:
            self.outcome.seconds = round(time.monotonic() - began, 1)
            self._clean()
        return self.outcome

    def _reach(self, condition: Callable[[], bool]) -> None:
        """Until it holds or the run has its right end; a run without a supervisor is recovered, as a user would."""
        step, moved = -1, time.monotonic()
        while not condition():
            now = time.monotonic()
            if self.seen.step() != step:
                step, moved = self.seen.step(), now
            assert now < moved + STEP_S, f"no step after {step} within {STEP_S:.0f} s\n{self._story()}"
            assert now < self._until, f"not done within {TRIAL_S:.0f} s, at step {step}\n{self._story()}"
            if now > self._looked + LOOK_EVERY_S:
                self.traces.look(self.run_id)
                if not self._is_led():
                    if self._state_is_right():
                        return
                    self._recover()
                    moved = time.monotonic()
                elif now > moved + HELP_S and self._helps():
                    moved = time.monotonic()
                self._looked = time.monotonic()
            time.sleep(0.05)

    def _is_led(self) -> bool:
        if self._leader is None or not processes.lives(self._leader.pid, self._leader.start_ticks):
            self._leader = next(map(processes.look, self.pids("supervisor")), None)
        return self._leader is not None

    def _state_is_right(self) -> bool:
        state, reason = self._state()
        if state == "succeeded":
            return True
        self.outcome.states.append(state)
        ended = state in ("failed", "stopped", "preempted", "cancelled")
        if ended and not trials.may_end(self.trial, state, reason):
            again = any("the run ended" in problem for problem in self.outcome.problems)
            self.outcome.problems.append(f"the run ended as {state}: {reason}")
            assert not again, f"it ends once more after it was recovered\n{self._story()}"
        return False

    def _recover(self) -> None:
        assert self.outcome.recoveries < RECOVERIES, f"recovered {RECOVERIES} times\n{self._story()}"
        self.outcome.recoveries += 1
        said = self._verbs(["recover"])
        if said != "recover 0":
            time.sleep(2)  # whatever prevented it takes a while to end

    def _helps(self) -> bool:
        """Whether it waits for somebody's help, which ``trials.MAY_WAIT`` says it may; that was done then, once."""
        said = [str(event.detail["text"]) for event in self.seen.events("run.message")]
        if self._helped or not any(trials.may_wait(self.trial, text) for text in said):
            return False
        self._helped = True
        self.outcome.states.append("waits for help")
        self._verbs(["down"])
        self._recover()
        return True

    def _state(self) -> tuple[str, str]:
        done = subprocess.run(
            [*MUSTER, "status", str(self.dir), "--json"], cwd=self.shell.folder, env=self.shell.env, check=False,
            capture_output=True, text=True, timeout=VERB_S,
        )  # fmt: skip
        if done.returncode != 0:
            return f"status says {done.returncode}", done.stderr[-300:]
        found = json.loads(done.stdout)
        return str(found["state"]), str(found["reason"])

    # ------------------------------------------------------------ strikes

    def _strike(self, strike: Strike) -> None:
        step = self.seen.step()
        try:
            if step >= trials.STEPS:
                raise Skipped("the run is at its end")
            if strike.kind in trials.OF_A_PROCESS:
                pids = self.pids(strike.target, f"host-{strike.host}")
                if not pids:
                    raise Skipped("no such process")
                said = strike_process(strike, pids[int(strike.amount * 1000) % len(pids)], self.later)
            elif strike.kind in trials.OF_A_FILE:
                said = damage(strike, self.dir, self.folder / "data", self.later)
            elif strike.kind == "power":
                processes.send(self.traces.living(self.run_id), signal.SIGKILL)
                self.traces.settle(self.run_id)
                shutil.rmtree(self.memory)
                self.memory.mkdir(mode=0o700)
                said = lose_power(self.folder / "disk", self.folder / "synced", strike.amount)
            elif strike.kind == "verbs":
                said = self._verbs(trials.VERBS[strike.target])
            elif strike.kind == "disk full":
                folder = self.dir / "checkpoints" if strike.target == "checkpoints" else self.dir.parent
                said = self.disks.fill(folder, strike.amount, self.later)
            else:
                folder = self.dir / "checkpoints" if strike.target == "checkpoints" else self.dir
                said = self.disks.take_away(folder, strike.amount, self.later)
            self.outcome.applied.append(f"{strike.name} ({said}) at step {step}")
        except (Skipped, psutil.Error) as reason:
            self.outcome.skipped.append(f"{strike.name}: {reason or type(reason).__name__}")
        except OSError as reason:
            self.outcome.skipped.append(f"{strike.name}: {reason.strerror}")

    def _verbs(self, names: tuple[str, ...] | list[str]) -> str:
        begun = [self.shell.start(*(SUBMIT if name == "submit" else (name, str(self.dir)))) for name in names]
        codes = []
        for name, process in zip(names, begun, strict=True):
            try:
                _, err = process.communicate(timeout=VERB_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                self.outcome.problems.append(f"muster {name} does not return")
                continue
            codes.append(f"{name} {process.returncode}")
            if "Traceback" in err or "this is a bug" in err:
                self.outcome.problems.append(f"muster {name}: {err[-600:]}")
        return ", ".join(codes)

    # ------------------------------------------------------------ processes

    def pids(self, program: str, host: str = "") -> list[int]:
        """Of the run's processes of this program (on this host), oldest first."""
        living = {process.pid: process for process in processes.labelled(self.run_id)}
        if program == "supervisor":
            return [pid for pid, process in living.items() if MODULES[program] in process.argv]
        mine = {pid: p for pid, p in living.items() if host in p.argv or any(f"-{host}-" in word for word in p.argv)}
        if program in MODULES:
            return sorted(pid for pid, process in mine.items() if MODULES[program] in process.argv)
        forks = {pid for pid, process in mine.items() if "muster.rank.fork_server" in process.argv}
        servers = {pid for pid in forks if psutil.Process(pid).ppid() not in forks}
        if program == "fork_server":
            return sorted(servers)
        ranks = {pid for pid, where in self.seen.ranks().values() if where == host} & forks
        others = forks - servers - ranks
        standbys = {pid for pid in others if has_agent_connection(pid)}
        return sorted({"rank": ranks, "store": others - standbys}.get(program, standbys))

    # ------------------------------------------------------------ the end

    def _story(self) -> str:
        lines = [
            f"{event.wall_ns / 1e9:.3f} {event.host} a{event.attempt} {event.kind} s={event.step} {dict(event.detail)}"
            for event in self.seen.events()
            if event.kind not in ("step", "phase.changed", "clock.offset")
        ]
        living = [" ".join((str(found.pid), *found.argv[:4])) for found in processes.labelled(self.run_id)]
        return "\n".join(line[:300] for line in [*lines[-12:], *living])

    def _clean(self) -> None:
        self.later.join()
        if self.run_id:
            for _ in range(3):
                processes.send(self.traces.living(self.run_id), signal.SIGKILL)
                time.sleep(0.05)
        if self.outcome.problems and self.dir.parent.is_mount():
            shutil.copytree(self.dir, self.folder / "there", ignore=_specials)
        self.disks.down()
        if self.outcome.problems:
            shutil.copytree(self.memory, self.folder / "memory", ignore=_specials)
        shutil.rmtree(self.memory, ignore_errors=True)


def _specials(folder: str, names: list[str]) -> set[str]:
    """Sockets and pipes, which cannot be copied."""
    return {name for name in names if not os.path.isfile(f"{folder}/{name}") and not os.path.isdir(f"{folder}/{name}")}


def drive(seed: int, folder: Path, references: References) -> Outcome:
    """The trial of ``seed``; ``folder`` is made and, where the run survived, removed."""
    trial = trials.draw(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reference = references(trial)
    outcome = Driven(trial, folder).go(reference)
    if not outcome.problems:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome
