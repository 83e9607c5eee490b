"""The seams to places that run jobs: small Protocols that back ends implement and tests replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from muster.config.spec import RunSpec
from muster.core.types import JobHandle, JobRequest, JobStatus, LogChunk, Offer


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """Somebody who runs a command on a host: where its output goes, and what is typed."""

    out: Callable[[bytes], object]
    err: Callable[[bytes], object]
    typed: Iterator[bytes] | None = None
    """Read in a thread of its own; None: the command gets no input."""
    tty: bool = False
    size: tuple[int, int] | None = None
    """(columns, lines)."""


class Launcher(Protocol):
    """One way of running jobs: a laptop, Slurm, GKE... Blocking calls, no hidden retries.

    A back end may have, besides: ``resolve(spec)`` (what its machines decide of a run file), ``exec(run_id, argv,
    terminal, *, host)`` (a command on a host; its exit code), ``remaining(handle)`` (what a tear-down left),
    ``follow(handle)`` (output as it comes, where a stream can be had: else ``logs`` is asked again), and where
    ``folder_is_remote`` (the run's folder is out of this machine's reach) ``ask(run_id, message, ...)`` (a question
    to the supervisor) and ``mirror(run_id, folder)`` (the events so far).
    """

    name: str

    def offers(self, spec: RunSpec) -> list[Offer]:
        """What could be used now. Looks, changes nothing."""
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


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Hardware that is ours until released."""

    run_id: str
    resources: tuple[str, ...] = ()
    usd_per_hour: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)


class Provisioner(Protocol):
    """Creates and removes hardware, where that is a step of its own (Google Cloud)."""

    def ensure(self, spec: RunSpec, *, run_id: str) -> Lease:
        """Make what is missing; what is there already is left alone."""
        ...

    def find(self, run_id: str) -> Lease | None:
        """What exists under the run's label."""
        ...

    def release(self, run_id: str) -> list[str]:
        """Remove everything under the label; returns what still exists afterwards."""
        ...
