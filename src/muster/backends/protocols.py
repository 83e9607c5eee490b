"""The seams to places that run jobs: small Protocols that back ends implement and tests replace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from muster.config.spec import RunSpec
from muster.core.types import JobHandle, JobRequest, JobStatus, LogChunk, Offer
from muster.protocol.client import FromClient, SupervisorStatus
from muster.storage.home import Home


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """The terminal of a command on a host: where its output goes, and what is typed."""

    out: Callable[[bytes], object]
    err: Callable[[bytes], object]
    typed: Iterator[bytes] | None = None
    """Read in a thread of its own; None: the command gets no input."""
    tty: bool = False
    size: tuple[int, int] | None = None
    """(columns, lines)."""


class Exec(Protocol):
    """Runs a command on a host of a run (``muster exec``)."""

    def __call__(self, run_id: str, argv: Sequence[str], terminal: Terminal, *, host: int | None = None) -> int:
        """Run ``argv`` on the host (default: the first) and return its exit code.

        Raises:
            UsageError: no such host, or nothing of the run is running.
            BackendError: the host cannot be reached.
        """
        ...


class Steps(Protocol):
    """How programs are started in addition to a run, one on each of its machines."""

    def __call__(self, run_id: str) -> dict[str, list[str]]:
        """Machine, as the back end knows it -> what comes before a program there; the program's input and output are
        passed on.

        Raises:
            UsageError: nothing of the run is running.
        """
        ...


class Attach(Protocol):
    """Records a task of the job that the back end did not start itself (a supervisor in the foreground)."""

    def __call__(self, handle: JobHandle, *, task: str, pid: int) -> None: ...


class Revive(Protocol):
    """Starts again, as they were started, those of these tasks that are hosts and have ended; their names.

    Raises:
        BackendError: one cannot be started.
    """

    def __call__(self, handle: JobHandle, tasks: Collection[str]) -> list[str]: ...


class RemoteRun(Protocol):
    """Access to a run whose folder cannot be reached from this machine (pods in a cluster)."""

    def ask(
        self, run_id: str, message: FromClient, *, timeout_s: float = 5.0, resolved: str | None = None
    ) -> SupervisorStatus:
        """Send ``message`` to the run's supervisor and return its answer; ``resolved`` replaces the run file first.

        Raises:
            BackendError: it cannot be reached, or cannot answer.
        """
        ...

    def mirror(self, run_id: str, folder: Path) -> int:
        """Copy the run's events so far to ``folder``, the run folder's ``events``; return how many bytes were new.

        Raises:
            MusterError: what holds them cannot be read now.
        """
        ...

    def home(self, run_id: str) -> Home | None:
        """The run's home, where it is in a bucket that this machine reads itself; None: only the hosts see it."""
        ...


class Launcher(Protocol):
    """One way of running jobs: this machine, Slurm, GKE... Blocking calls, no hidden retries.

    ``follow``, ``exec``, ``steps``, ``attach``, ``revive`` and ``remote`` are None where a back end has no such thing.
    """

    @property
    def name(self) -> str: ...

    def offers(self, spec: RunSpec) -> list[Offer]:
        """What could be used now. Looks, changes nothing."""
        ...

    def resolve(self, spec: RunSpec) -> RunSpec:
        """The spec with what the machines decide filled in (device, ranks per host...); unchanged where nothing is.

        Raises:
            RunFileError: the spec does not fit the machines.
        """
        ...

    def render(self, spec: RunSpec, *, run_id: str, run_dir: str) -> JobRequest:
        """What would be sent, exactly. Pure: touches neither disk nor network."""
        ...

    def submit(self, request: JobRequest) -> JobHandle:
        """Create the job and return at once; the same request twice makes one job.

        Raises:
            CapacityError: no machines now.
            AccessError: not allowed.
            BackendError: the back end refused or broke.
        """
        ...

    def find(self, run_id: str) -> JobHandle | None:
        """The job labelled with ``run_id``, however it was started; None when there is none."""
        ...

    def poll(self, handle: JobHandle) -> JobStatus:
        """Look once, without blocking."""
        ...

    def logs(self, handle: JobHandle, *, after: Mapping[str, int] | None = None) -> Iterator[LogChunk]:
        """The output so far of every task beyond the positions in ``after`` (task -> byte offset)."""
        ...

    def cancel(self, handle: JobHandle) -> None:
        """End the job and everything it started; absent is success."""
        ...

    def remaining(self, handle: JobHandle) -> list[str]:
        """What still exists of the run, one phrase each; empty is the proof of a tear-down."""
        ...

    @property
    def follow(self) -> Callable[[JobHandle], Iterator[LogChunk]] | None:
        """Output from the beginning and as it comes, until the run has ended; None: ``logs`` is called again."""
        ...

    @property
    def exec(self) -> Exec | None:
        """None: hosts cannot be reached through the back end."""
        ...

    @property
    def steps(self) -> Steps | None:
        """None: the back end starts no other programs."""
        ...

    @property
    def attach(self) -> Attach | None:
        """None: the supervisor cannot run in a foreground terminal (``muster train``)."""
        ...

    @property
    def revive(self) -> Revive | None:
        """None: the back end itself replaces hosts that end, or they are not replaced."""
        ...

    @property
    def remote(self) -> RemoteRun | None:
        """None: this machine reads and writes the run's folder itself."""
        ...


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Hardware that is ours until released."""

    run_id: str
    resources: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
