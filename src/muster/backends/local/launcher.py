"""The ``Launcher`` of this machine. One job is a few detached processes and a record, ``job.json``.

The record is written after each process, under a lock that is released when its holder dies. An interrupted
submit is completed by repeating it: living processes are adopted, missing ones are started.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import muster.backends.hardware as machine
from muster.backends.local.resolve import resolve
from muster.config import memory_at_logout
from muster.config.spec import RunSpec
from muster.core import environment, processes
from muster.core.clock import SystemClock, SystemShell
from muster.core.errors import BackendError, ConflictError, UsageError
from muster.core.processes import Process
from muster.core.protocols import Clock, Shell
from muster.core.typed_json import Record
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk, Offer, TaskSpec
from muster.storage import job_record, memory_dir, run_output, run_registry
from muster.storage.job_record import SUBMISSION

#: Label that tells one submission of a run from the next (after a stop, ``recover`` submits again).
_WATCHDOG = "muster.agent.watchdog"
#: Longest wait of a submit for the supervisor before: its last words (a metrics service) take a while.
SEE_OUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class _Task(Record):
    pid: int = 0
    start_ticks: int = -1
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """What it has besides the submitter's environment."""
    foreground: bool = False


@dataclass(frozen=True, kw_only=True)
class _Job(job_record.JobRecord):
    state: Literal["starting", "started", "cancelled"] = "starting"
    cwd: str
    tasks: Mapping[str, _Task] = field(default_factory=dict)

    def with_task(self, name: str, process: Process, task: _Task) -> _Job:
        task = replace(task, pid=process.pid, start_ticks=process.start_ticks)
        return replace(self, tasks={**self.tasks, name: task})


@dataclass(frozen=True)
class LocalLauncher:
    """Runs jobs as detached processes of this user on this machine."""

    name: str = "local"
    clock: Clock = field(default_factory=SystemClock)
    shell: Shell = field(default_factory=SystemShell)
    environ: Mapping[str, str] = field(default_factory=environment.inherited)
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL in ``cancel``."""

    follow = None
    exec = None
    steps = None
    remote = None

    # ------------------------------------------------------------ before

    def offers(self, spec: RunSpec) -> list[Offer]:
        """This machine, once."""
        gpus = machine.gpus(self.shell, self.environ)
        return [
            Offer(
                backend=self.name,
                machine=platform.node() or "this machine",
                location="here",
                accelerator=gpus[0].name if gpus else "cpu",
                gpus_per_node=len(gpus),
                gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
                usd_per_node_hour=0.0,
                peak_flops_per_gpu=None,
                max_nodes=spec.resources.hosts + spec.resources.spare_hosts,
                mode="owned",
            )
        ]

    def resolve(self, spec: RunSpec) -> RunSpec:
        """The spec with device and ranks per host as this machine has them. Raises as ``resolve.resolve``."""
        return resolve(spec, self.offers(spec)[0])

    def render(self, spec: RunSpec, *, run_id: str, run_dir: str) -> JobRequest:
        """A supervisor, and an agent per host and spare: "hosts" are processes here."""
        common = ("--run-dir", run_dir, "--run-id", run_id)
        # -P: a module in the current folder never shadows the library's.
        supervisor = TaskSpec(name="supervisor", argv=(sys.executable, "-P", "-m", "muster.app.supervisor", *common))
        agent = TaskSpec(
            name="agent",
            argv=(
                *(sys.executable, "-P", "-m", _WATCHDOG, *common, "--host", "host-{index}"),
                *("--hosts-here", str(spec.resources.hosts), "--no-metadata-server"),
            ),
            count=spec.resources.hosts + spec.resources.spare_hosts,
        )
        return JobRequest(
            run_id=run_id,
            backend=self.name,
            run_dir=run_dir,
            tasks=(supervisor, *self._with_gpus(agent, spec)),
            labels={"muster-run": run_id, SUBMISSION: "1"},
        )

    def _with_gpus(self, agent: TaskSpec, spec: RunSpec) -> list[TaskSpec]:
        """The agents, each with GPUs of its own where several hosts share this machine's."""
        each = spec.resources.ranks_per_host
        if spec.resources.device != "cuda" or agent.count == 1 or each is None:
            return [agent]
        shares = machine.shares(machine.gpus(self.shell, self.environ), agent.count, each)
        copies = [_copy(agent, index) for index in range(agent.count)]
        return [
            replace(agent, name=name, argv=argv, count=1, env={**agent.env, "CUDA_VISIBLE_DEVICES": visible})
            for (name, argv), visible in zip(copies, shares, strict=True)
        ]

    # ------------------------------------------------------------ submit and find

    def submit(self, request: JobRequest) -> JobHandle:
        """Start what is missing of the request and return; the same request twice makes one job.

        Raises:
            BackendError: a process cannot be started, or the supervisor of the submission before does not exit.
            ConflictError: the folder belongs to another run.
        """
        run_dir = Path(request.run_dir)
        run_registry.make_folder(run_dir / "logs")
        number = int(request.labels.get(SUBMISSION, "1"))
        self._see_out(request, run_dir, number)
        with job_record.locked(run_dir):
            record = self._readable_record(request.run_id, run_dir)
            if record and record.run_id != request.run_id:
                raise ConflictError(f"{run_dir} holds the run {record.run_id}", hint="choose another run_dir")
            if not record or number > record.submission:
                now, cwd = self.clock.wall_ns(), os.getcwd()
                record = _Job(
                    run_id=request.run_id, backend=self.name, submission=number, submitted_wall_ns=now, cwd=cwd
                )
                job_record.write(run_dir, record)
            if record.state != "cancelled":
                self._start_missing(request, record, run_dir)
        return replace(_handle(record, run_dir), warnings=memory_at_logout.doubts())

    def attach(self, handle: JobHandle, *, task: str, pid: int) -> None:
        """Record a process that runs ``task`` but was not started here (a supervisor in the foreground)."""
        run_dir = Path(handle.run_dir)
        with job_record.locked(run_dir):
            record = job_record.read(run_dir, _Job, backend=self.name)
            if record and (process := processes.look(pid)):
                job_record.write(run_dir, record.with_task(task, process, _Task(foreground=True)))

    def revive(self, handle: JobHandle, tasks: Collection[str]) -> list[str]:
        """Start again, as they were started, those of these hosts whose processes are gone; their names.

        Neither the supervisor, nor a host whose agent is still on its way out, nor anything of a cancelled job.

        Raises:
            BackendError: the job's record cannot be read or written, or a process cannot be started.
        """
        run_dir = Path(handle.run_dir)
        started = []
        with job_record.locked(run_dir):
            record = job_record.read(run_dir, _Job, backend=self.name)
            if record is None or record.state != "started":
                return []
            living = processes.labelled(handle.run_id)
            for name, task in record.tasks.items():
                if name not in tasks or processes.lives(task.pid, task.start_ticks) or not _startable(task, living):
                    continue
                process = self._started(name, task, living, run_id=handle.run_id, run_dir=run_dir)
                record = record.with_task(name, process, task)
                job_record.write(run_dir, record)
                started.append(name)
        return started

    def find(self, run_id: str) -> JobHandle | None:
        """By the registry; else by the label of a living process."""
        with contextlib.suppress(UsageError, BackendError):
            run = run_registry.find(run_id)
            record = job_record.read(run.path, _Job, backend=self.name)
            if record:
                return _handle(record, run.path)
        for process in processes.labelled(run_id):
            return JobHandle(run_id=run_id, backend=self.name, job_id=str(process.pid), run_dir=process.run_dir)
        return None

    def _readable_record(self, run_id: str, run_dir: Path) -> _Job | None:
        """The record; a damaged one is set aside once nothing lives that it could be about. Raises BackendError."""
        try:
            return job_record.read(run_dir, _Job, backend=self.name)
        except BackendError as error:
            if processes.labelled(run_id):
                raise
            job_record.set_damaged_aside(run_dir, error)
            return None

    def _see_out(self, request: JobRequest, run_dir: Path, number: int) -> None:
        """Wait for the supervisor of the submission before, which has ended its run and is on its way out: taken over,
        it would leave this one without any. Before the lock, which it may need for its end."""
        before = None
        with contextlib.suppress(BackendError):  # a damaged one is replaced where nothing runs
            before = job_record.read(run_dir, _Job, backend=self.name)
        if before is None or number <= before.submission:
            return
        argvs = [task.argv for task in request.tasks if task.name == "supervisor"]
        found = [process for process in processes.labelled(request.run_id) if process.argv in argvs]
        self._wait_until(lambda: not _living(found), SEE_OUT_S)
        if left := _living(found):
            why = f"the supervisor that ended {request.run_id} does not exit (process {left[0].pid})"
            raise BackendError(why, hint=f"muster down {request.run_id}, then the same command again")

    def _start_missing(self, request: JobRequest, record: _Job, run_dir: Path) -> None:
        living = processes.labelled(request.run_id)
        for task in request.tasks:
            for index in range(task.count):
                name, argv = _copy(task, index)
                if name in record.tasks:
                    continue
                new = _Task(argv=argv, env=dict(task.env))
                process = self._started(name, new, living, run_id=request.run_id, run_dir=run_dir)
                record = record.with_task(name, process, new)
                job_record.write(run_dir, record)
        job_record.write(run_dir, replace(record, state="started"))

    def _started(self, name: str, task: _Task, living: Sequence[Process], *, run_id: str, run_dir: Path) -> Process:
        for process in living:
            if process.argv == task.argv:
                return process
        env = processes.environment(self.environ, run_id=run_id, run_dir=str(run_dir), extra=task.env)
        return processes.start(task.argv, env=env, log=run_dir / "logs" / f"{name}.log", cwd=run_dir)

    # ------------------------------------------------------------ watch

    def poll(self, handle: JobHandle) -> JobStatus:
        """Look once: at the record, at ``/proc``, and for a result at the end of the supervisor's log."""
        run_dir = Path(handle.run_dir)
        try:
            record = job_record.read(run_dir, _Job, backend=self.name)
        except BackendError as error:  # damaged: living processes are still found by their label, a result in the log
            if processes.labelled(handle.run_id):
                return JobStatus(state=JobState.RUNNING, reason=f"{error}; muster down ends what runs")
            if (verdict := run_output.verdict(run_dir)) is not None:
                return JobStatus(state=JobState(verdict.outcome), reason=verdict.reason, exit_code=verdict.exit_code)
            return JobStatus(state=JobState.FAILED, reason=f"{error}; muster recover begins a new one")
        if not record:
            return JobStatus(state=JobState.ABSENT, reason=f"no job of {handle.run_id} on this machine")
        living = {name: processes.lives(task.pid, task.start_ticks) for name, task in record.tasks.items()}
        tasks_text = {
            name: f"running (pid {record.tasks[name].pid})" if alive else "ended"
            for name, alive in sorted(living.items())
        }
        state, reason, code = _judge(record, living, run_output.verdict(run_dir))
        return JobStatus(state=state, reason=reason, exit_code=code, tasks=tasks_text)

    def logs(self, handle: JobHandle, *, after: Mapping[str, int] | None = None) -> Iterator[LogChunk]:
        """What each file in the run's ``logs`` holds beyond ``after``; the rest of a split character follows later."""
        yield from run_output.chunks(Path(handle.run_dir), after or {})

    # ------------------------------------------------------------ end

    def cancel(self, handle: JobHandle) -> None:
        """SIGTERM to the job's processes, after a grace SIGKILL to everything with its label; absent is success.

        Raises:
            BackendError: something could not be ended.
        """
        run_dir = Path(handle.run_dir)
        if not run_dir.is_dir():
            self._end(handle, [])
            return
        # A submit meanwhile waits until nothing is left: what it starts is not ended half.
        with job_record.locked(run_dir):
            recorded, record = list[Process](), None
            with contextlib.suppress(BackendError):  # damaged: the label finds them
                record = job_record.read(run_dir, _Job, backend=self.name)
            if record:
                recorded = [Process(pid=task.pid, start_ticks=task.start_ticks) for task in record.tasks.values()]
                with contextlib.suppress(BackendError):  # a full disk keeps no process alive
                    job_record.write(run_dir, replace(record, state="cancelled"))
            self._end(handle, recorded)

    def _end(self, handle: JobHandle, recorded: Sequence[Process]) -> None:
        run_id, spared = handle.run_id, processes.ancestors()
        processes.send([process for process in recorded if process.pid not in spared], signal.SIGTERM)
        remaining = functools.partial(_remaining, run_id, recorded, spared)
        self._wait_until(lambda: not remaining(), self.grace_s if recorded else 0.0)
        for _ in range(20):  # a process can fork between the look and the kill
            if not (left := remaining()):
                break
            processes.send(left, signal.SIGKILL)
            self._wait_until(lambda: not remaining(), 1.0)
        if left := remaining():
            pids = ", ".join(str(process.pid) for process in left[:5])
            raise BackendError(
                f"{len(left)} processes of {run_id} do not end: {pids}",
                hint="run `muster down` again, or inspect them with `ps`",
            )
        _remove_memory(Path(handle.run_dir), run_id)

    def remaining(self, handle: JobHandle) -> list[str]:
        """What still exists of the run: the proof of a tear-down."""
        left = _remaining(handle.run_id, [], processes.ancestors())
        lines = [f"process {process.pid}: {' '.join(process.argv)[:80]}" for process in left]
        ours, _ = memory_dir.left_over(Path(handle.run_dir), handle.run_id)
        return lines + [f"memory {path}" for path in ours]

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        until = self.clock.monotonic_ns() + int(seconds * 1e9)
        while self.clock.monotonic_ns() < until and not condition():
            self.clock.sleep(0.05)


# ---------------------------------------------------------------- tasks and records


def _copy(task: TaskSpec, index: int) -> tuple[str, tuple[str, ...]]:
    """Name and argv of one copy; ``{index}`` stands for its number where a whole word ends with it."""
    argv = tuple(word.removesuffix("{index}") + str(index) if word == "host-{index}" else word for word in task.argv)
    if argv == task.argv and task.count == 1:
        return task.name, argv
    return f"{task.name}-host-{index}", argv


def _handle(record: _Job, run_dir: Path) -> JobHandle:
    return JobHandle(run_id=record.run_id, backend="local", job_id=record.run_id, run_dir=str(run_dir))


def _startable(task: _Task, living: Sequence[Process]) -> bool:
    """It is a host, and the agent of the one before it has ended: two of one name would share its memory."""
    if _WATCHDOG not in task.argv:
        return False
    arguments = task.argv[task.argv.index(_WATCHDOG) + 1 :]
    agents = (process.argv for process in living if "muster.agent.host_agent" in process.argv)
    return all(argv[-len(arguments) :] != arguments for argv in agents)


# ---------------------------------------------------------------- judging


def _judge(
    record: _Job, living: Mapping[str, bool], verdict: run_output.Verdict | None
) -> tuple[JobState, str, int | None]:
    alive, before = sum(living.values()), None
    if verdict is not None and not verdict.ends(record.submission, record.submitted_wall_ns):
        before, verdict = verdict, None
    if alive == 0 and before is not None and record.state != "starting":  # since then no supervisor held the run
        return JobState(before.outcome), f"{before.reason}; what was started since then ended at once", before.exit_code
    if record.state == "cancelled" and (verdict is None or verdict.outcome == "preempted"):
        # SIGTERM means preemption to a supervisor; this one came from `cancel`.
        return JobState.STOPPED, "muster down ended it" + (f", {alive} processes are ending" if alive else ""), None
    if verdict is not None:
        return JobState(verdict.outcome), verdict.reason, verdict.exit_code
    if record.state == "starting":
        reason = f"{alive} processes started; the submit was interrupted" if alive else "being started"
        return JobState.WAITING, reason, None
    if alive == 0:
        return JobState.FAILED, "its processes ended without a result; see the logs", None
    if living.get("supervisor") is False:
        left = f"{alive} agents are" if alive != 1 else "1 agent is"
        return JobState.RUNNING, f"the supervisor is gone, {left} left; `muster recover` takes over", None
    return JobState.RUNNING, f"{alive} of {len(living)} processes run", None


# ---------------------------------------------------------------- leftovers


def _living(found: Sequence[Process]) -> list[Process]:
    return [process for process in found if processes.lives(process.pid, process.start_ticks)]


def _remaining(run_id: str, recorded: Sequence[Process], spared: set[int]) -> list[Process]:
    living = {process.pid: process for process in processes.labelled(run_id)}
    living |= {process.pid: process for process in _living(recorded)}
    return [process for pid, process in sorted(living.items()) if pid not in spared]


def _remove_memory(run_dir: Path, run_id: str) -> None:
    """Delete the snapshots in memory that killed agents left. Another user's folder of such a name is none of ours."""
    ours, theirs = memory_dir.left_over(run_dir, run_id)
    for path in ours:
        shutil.rmtree(path, ignore_errors=True)
    for path in theirs:
        print(f"note: {path} belongs to another user: the run did not make it, and it is left alone", file=sys.stderr)
