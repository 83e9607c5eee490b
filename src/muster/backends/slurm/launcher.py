"""The ``Launcher`` for Slurm: a run is a job, found by its name; the run's folder is in a shared home.

A run may be several jobs, one after another (a time limit, a requeue): all of one submission have one name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import stat
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from muster.backends.protocols import Terminal
from muster.backends.slurm.commands import Job, NoAnswer, Slurm, name_of
from muster.backends.slurm.container import srun
from muster.backends.slurm.job_outcome import SlurmJob, judge
from muster.backends.slurm.offers import offers, resolved_spec
from muster.backends.slurm.script import SCRIPT, agent_program, program, python_in_step, script
from muster.config import validation
from muster.config.spec import RunSpec
from muster.core import processes
from muster.core.clock import SystemClock
from muster.core.errors import BackendError, BusyError, ConflictError, RunFileError, UsageError
from muster.core.protocols import Clock
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk, Offer, TaskSpec
from muster.storage import job_record, run_output, run_registry
from muster.storage.job_record import SUBMISSION

#: KillWait is 30 s where a site has not changed it, and the controller adds to that.
GONE_WITHIN_S = 90.0
COMPLETING = "COMPLETING"
#: Beyond KillWait, after which every process on a node that answers is dead.
COMPLETES_S = 10.0


@dataclass(frozen=True)
class SlurmLauncher:
    """Runs jobs through the Slurm commands of this machine."""

    name: str = "slurm"
    slurm: Slurm = field(default_factory=Slurm)
    clock: Clock = field(default_factory=SystemClock)

    follow = None
    attach = None
    revive = None
    remote = None

    # ------------------------------------------------------------ before

    def offers(self, spec: RunSpec) -> list[Offer]:
        """What ``sinfo`` shows: one offer per partition and kind of node, of nodes that could take a job."""
        return offers(self.slurm.nodes(), spec)

    def resolve(self, spec: RunSpec) -> RunSpec:
        """The spec with device, ranks a host and GPU type as the partition's nodes have them."""
        resolved = resolved_spec(spec, self.slurm.nodes())
        if problems := validation.problems(resolved):
            raise RunFileError(problems)
        return resolved

    def render(self, spec: RunSpec, *, run_id: str, run_dir: str) -> JobRequest:
        """The script, and what runs in the allocation: a supervisor under a lease, an agent a node."""
        python = python_in_step(spec)
        supervisor = program("app.supervisor", python, run_id=run_id, run_dir=run_dir)
        agent = agent_program(python, run_id=run_id, run_dir=run_dir, host="host-{index}")
        hosts = spec.resources.hosts + spec.resources.spare_hosts
        return JobRequest(
            run_id=run_id,
            backend=self.name,
            run_dir=run_dir,
            tasks=(
                TaskSpec(name="supervisor", argv=tuple(supervisor)),
                TaskSpec(name="agent", argv=tuple(agent), count=hosts),
            ),
            labels={"muster-run": run_id, SUBMISSION: "1"},
            files={SCRIPT: script(spec, run_id=run_id, run_dir=run_dir)},
        )

    # ------------------------------------------------------------ submit and find

    def submit(self, request: JobRequest) -> JobHandle:
        """Find the job by its name, submit the script where there is none, and return.

        Raises:
            CapacityError: no nodes of this kind, or a limit of the site.
            AccessError: account, QOS, partition or credentials do not allow it.
            BusyError: Slurm does not answer.
            BackendError: it refused.
            ConflictError: the folder belongs to another run.
        """
        run_dir = Path(request.run_dir)
        run_registry.make_folder(run_dir / "logs")
        number = int(request.labels.get(SUBMISSION, "1"))
        with job_record.locked(run_dir):
            record = job_record.read(run_dir, SlurmJob, backend=self.name)
            if record and record.run_id != request.run_id:
                raise ConflictError(f"{run_dir} holds the run {record.run_id}", hint="choose another run_dir")
            if record and number > record.submission:
                self._refuse_second(record, run_dir)
            if not record or number > record.submission:
                record = self._new_record(request, number)
                job_record.write(run_dir, record)
            if record.job_id is None and record.state != "cancelled":
                record = replace(record, job_id=self._submit_script(request, run_dir, number), state="submitted")
                job_record.write(run_dir, record)
        return _handle(record, run_dir)

    def _refuse_second(self, record: SlurmJob, run_dir: Path) -> None:
        """Refuse a second job: both would act as the run's hosts."""
        if record.job_id is None and not self.slurm.jobs(record.run_id):
            return  # its submit was interrupted before there was a job
        status = self.poll(_handle(record, run_dir))
        if not status.state.ended and status.state is not JobState.ABSENT:
            ending = status.tasks.get("job", "").startswith("ending")
            how = "has not ended yet" if ending else "continues by itself"
            raise ConflictError(f"{record.run_id} {how}: {status.reason}", hint=f"muster down {record.run_id} ends it")

    def _submit_script(self, request: JobRequest, run_dir: Path, number: int) -> str:
        """The id of this submission's job, which is created unless it exists."""
        name = name_of(request.run_id, number)
        existing = self.slurm.jobs(request.run_id, number)
        if existing:
            return existing[-1].id
        path = run_dir / SCRIPT
        run_registry.replace_text(path, request.files[SCRIPT])
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        try:
            return self.slurm.submit(str(path), name=name)
        except NoAnswer as error:
            existing = self.slurm.jobs(request.run_id, number)  # only the answer may have been lost
            if existing:
                return existing[-1].id
            raise BusyError(str(error), hint="run `scontrol ping` to check the controller") from error

    def _new_record(self, request: JobRequest, number: int) -> SlurmJob:
        return SlurmJob(
            run_id=request.run_id, backend=self.name, submission=number, submitted_wall_ns=self.clock.wall_ns()
        )

    def find(self, run_id: str) -> JobHandle | None:
        """By the registry; failing that, by the name of a job that has not ended."""
        with contextlib.suppress(UsageError, BackendError):  # a record of another version: the job has its name
            run = run_registry.find(run_id)
            record = job_record.read(run.path, SlurmJob, backend=self.name)
            if record and record.run_id == run_id:
                return _handle(record, run.path)
        jobs = self._living(run_id)
        if not jobs:
            return None
        return JobHandle(run_id=run_id, backend=self.name, job_id=jobs[-1].id, run_dir=jobs[-1].folder)

    # ------------------------------------------------------------ watch

    def poll(self, handle: JobHandle) -> JobStatus:
        """Look once: at the queue, and for a result at the end of the supervisor's log."""
        run_dir = Path(handle.run_dir)
        record = job_record.read(run_dir, SlurmJob, backend=self.name)
        jobs = self.slurm.jobs(handle.run_id, record.submission if record else None)
        since = record.submitted_wall_ns if record else 0
        last, quiet_s = None, 0.0
        if not jobs and record and record.job_id:
            last = self.slurm.accounted(record.job_id)  # Slurm forgets a job some minutes after its end
            quiet_s = (self.clock.wall_ns() - _last_written_wall_ns(run_dir, since)) / 1e9
        is_locked = record is not None and record.job_id is None and job_record.is_locked(run_dir)
        verdict = run_output.verdict(run_dir)
        if record and verdict and not verdict.ends(record.submission, since):
            verdict = None
        return judge(record, jobs, verdict, last, run_dir=run_dir, is_locked=is_locked, quiet_s=quiet_s)

    def logs(self, handle: JobHandle, *, after: Mapping[str, int] | None = None) -> Iterator[LogChunk]:
        """What each file in the run's ``logs`` holds beyond ``after``: ranks, agents, supervisor, the job's own."""
        yield from run_output.chunks(Path(handle.run_dir), after or {})

    # ------------------------------------------------------------ end

    def cancel(self, handle: JobHandle) -> None:
        """End the run's jobs and wait until they are gone; absent is success.

        Raises:
            BackendError: Slurm does not answer, or a job does not end.
        """
        run_dir = Path(handle.run_dir)
        if run_dir.is_dir():
            with job_record.locked(run_dir):
                with contextlib.suppress(BackendError):  # damaged, or of another version: jobs have their names
                    if record := job_record.read(run_dir, SlurmJob, backend=self.name):
                        job_record.write(run_dir, replace(record, state="cancelled"))
        cancelled: set[str] = set()
        began_ns = self.clock.monotonic_ns()
        while living := self._living(handle.run_id):
            for job in living:
                if job.id not in cancelled:  # a job that is ending may submit the next one
                    cancelled.add(job.id)
                    self.slurm.cancel(job.id)
            waited_s = (self.clock.monotonic_ns() - began_ns) / 1e9
            if waited_s > 2.0 and all(job.state == COMPLETING for job in living):
                if waited_s > self.slurm.kill_wait_s() + COMPLETES_S:
                    return  # only nodes that do not answer are left: Slurm reclaims them when they do
            elif waited_s > GONE_WITHIN_S:
                names = ", ".join(f"{job.id} ({job.state})" for job in living)
                raise BackendError(f"jobs of {handle.run_id} do not end: {names}", hint="run muster down again")
            self.clock.sleep(0.2)

    def remaining(self, handle: JobHandle) -> list[str]:
        """What still exists of the run: the proof of a tear-down.

        A job that was cancelled and whose nodes do not all answer cannot be ended from here.
        """
        return [f"job {job.id} ({job.state})" for job in self._living(handle.run_id) if job.state != COMPLETING]

    def exec(self, run_id: str, argv: Sequence[str], terminal: Terminal, *, host: int | None = None) -> int:
        """Run a command on a node of the run's allocation, in a step of its own; returns its exit code.

        Raises:
            UsageError: nothing of the run is running, or it has no such host.
        """
        job, run_dir, nodes = self._running(run_id)
        name = f"host-{host or 0}"
        if name not in nodes:
            raise UsageError(f"{run_id} has no {name}", hint=f"hosts: {', '.join(nodes) or 'none yet'}")
        return execute([*srun(nodes[name], run_dir, f"--jobid={job.id}"), *argv], terminal)

    def steps(self, run_id: str) -> dict[str, list[str]]:
        """Node -> the step that starts a program on it.

        Raises:
            UsageError: nothing of the run is running.
        """
        job, run_dir, nodes = self._running(run_id)
        return {node: srun(node, run_dir, f"--jobid={job.id}") for node in dict.fromkeys(nodes.values())}

    def _running(self, run_id: str) -> tuple[Job, str, dict[str, str]]:
        """(the run's job, its folder, host -> node). Raises UsageError: nothing of it is running."""
        handle = self.find(run_id)
        running = [job for job in self.slurm.jobs(run_id) if job.state == "RUNNING"]
        if handle is None or not running:
            raise UsageError(f"{run_id} has no running job", hint=f"muster status {run_id}")
        return running[-1], handle.run_dir, hosts_of(Path(handle.run_dir), running[-1].id)

    def _living(self, run_id: str) -> list[Job]:
        return [job for job in self.slurm.jobs(run_id) if not job.ended]


def hosts_of(run_dir: Path, job_id: str) -> dict[str, str]:
    """Host -> node, as recorded by the job's batch program; empty where it has not yet."""
    try:
        return dict(json.loads(processes.read_plain(run_dir / f"hosts-{job_id}.json")))
    except (OSError, ValueError):
        return {}


def _last_written_wall_ns(run_dir: Path, least: int) -> int:
    """When a process of the run last wrote a log, an event or its lease; ``least`` where it is not known."""
    latest = least
    for path in (run_dir / "lease.json", *run_dir.glob("logs/*.log"), *run_dir.glob("events/*.jsonl")):
        with contextlib.suppress(OSError):
            latest = max(latest, path.stat().st_mtime_ns)
    return latest


def _handle(record: SlurmJob, run_dir: Path) -> JobHandle:
    return JobHandle(run_id=record.run_id, backend="slurm", job_id=record.job_id or "", run_dir=str(run_dir))


def execute(argv: Sequence[str], terminal: Terminal) -> int:
    """Run ``argv`` (an ``srun``) with the terminal's input and output; return the command's exit code.

    Raises:
        BackendError: there is no srun here.
    """
    try:
        return _on_a_terminal(argv, terminal) if terminal.tty else _over_pipes(argv, terminal)
    except FileNotFoundError as error:
        raise BackendError(f"no {argv[0]} on this machine", hint="run it on a login node of the cluster") from error


def _over_pipes(argv: Sequence[str], terminal: Terminal) -> int:
    given = subprocess.PIPE if terminal.typed is not None else subprocess.DEVNULL
    child = subprocess.Popen(list(argv), stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    readers = [
        _thread(_copy, _read(stream.fileno()), write)
        for stream, write in ((child.stdout, terminal.out), (child.stderr, terminal.err))
    ]
    if terminal.typed is not None and child.stdin is not None:
        _thread(_type_in, terminal.typed, child.stdin.fileno(), child.stdin.close)
    code = child.wait()
    for reader in readers:
        reader.join(5.0)
    return code


def _on_a_terminal(argv: Sequence[str], terminal: Terminal) -> int:
    """Through a pseudo-terminal, so that keys such as Ctrl-C go to the command."""
    ours, theirs = pty.openpty()
    if terminal.size is not None:
        columns, lines = terminal.size
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    child = subprocess.Popen([argv[0], "--pty", *argv[1:]], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    reader = _thread(_copy, _read(ours), terminal.out)
    if terminal.typed is not None:
        _thread(_type_in, terminal.typed, ours, lambda: None)
    code = child.wait()
    reader.join(2.0)
    with contextlib.suppress(OSError):
        os.close(ours)
    return code


def _thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _read(descriptor: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # reading a terminal whose other end is closed raises EIO
        while data := os.read(descriptor, 1 << 16):
            yield data


def _copy(pieces: Iterator[bytes], write: Callable[[bytes], object]) -> None:
    for piece in pieces:
        write(piece)


def _type_in(pieces: Iterator[bytes], descriptor: int, close: Callable[[], None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        for piece in pieces:
            while piece:
                piece = piece[os.write(descriptor, piece) :]
    with contextlib.suppress(OSError):
        close()
