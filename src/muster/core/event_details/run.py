"""Details of a run's life, and of its supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from muster.core.event_detail import Detail, OpenDetail
from muster.core.typed_json import JsonObject

Outcome: TypeAlias = Literal["succeeded", "failed", "stopped", "preempted"]


@dataclass(frozen=True, kw_only=True)
class RunSubmitted(Detail):
    kind: ClassVar = "run.submitted"
    doc: ClassVar = "The intent, written before anything is done about it."
    spec_digest: Annotated[str, "SHA-256 of the resolved run file"]
    backend: Annotated[str, "name"]
    version: Annotated[str, "of Muster"]
    argv: Annotated[tuple[str, ...] | None, "command line, secrets removed"] = None
    name: Annotated[str | None, "of the run"] = None
    plan: Annotated[JsonObject | None, "what it was started from: step_s_by_item, item of a step -> seconds"] = None


@dataclass(frozen=True, kw_only=True)
class RunMessage(OpenDetail):
    kind: ClassVar = "run.message"
    doc: ClassVar = "Informational message; nothing is read back from it."
    text: Annotated[str, "one sentence"]


@dataclass(frozen=True, kw_only=True)
class RunRestarted(Detail):
    kind: ClassVar = "run.restarted"
    doc: ClassVar = "`muster restart` with a corrected run file: errors and restarts are counted from zero again."
    reason: Annotated[str, "one sentence"]
    checkpoint_dir_changed: Annotated[bool, "the corrected file names another folder: nothing is committed there"] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class StopRequested(Detail):
    kind: ClassVar = "stop.requested"
    doc: ClassVar = "A user asked to stop the run; written on arrival, in any phase."
    source: Annotated[str, "what asked: muster stop, a signal"]
    exit_code: Annotated[int, "what the run will answer"]
    save: Annotated[bool, "whether the ranks save first"]
    force: Annotated[bool, "at once, without waiting for a save under way"]


@dataclass(frozen=True, kw_only=True)
class RunStopping(Detail):
    kind: ClassVar = "run.stopping"
    doc: ClassVar = "Ranks are asked to exit after the current step; then the run ends so."
    outcome: Annotated[Outcome, "succeeded, failed, stopped or preempted"]
    exit_code: Annotated[int, "what the run will answer"]
    source: Annotated[str, "what asked for it"]
    save: Annotated[bool, "whether the ranks save first"]
    deadline_s: Annotated[float, "seconds from here; then the hosts write what their memory holds"]
    by_user: Annotated[bool, "a user asked: a second request does not wait"]


@dataclass(frozen=True, kw_only=True)
class RunWaiting(Detail):
    kind: ClassVar = "run.waiting"
    doc: ClassVar = "Ranks are gone, and too few hosts are ready for the next attempt."
    hosts: Annotated[tuple[str, ...], "chosen for the next attempt so far"]
    needed_hosts: Annotated[int, "with so many it starts"]


@dataclass(frozen=True, kw_only=True)
class RunHeld(Detail):
    kind: ClassVar = "run.held"
    doc: ClassVar = "It failed; its hosts are kept for a corrected run (`muster restart`)."
    exit_code: Annotated[int, "of the failure"]
    reason: Annotated[str, "the verdict, one sentence"]
    hold_s: Annotated[float, "seconds from here; then the run ends"]


@dataclass(frozen=True, kw_only=True)
class RunEnding(Detail):
    kind: ClassVar = "run.ending"
    doc: ClassVar = "It will end so, once the hosts have written what only their memory holds."
    outcome: Annotated[Outcome, "succeeded, failed, stopped or preempted"]
    exit_code: Annotated[int, "process exit code"]
    reason: Annotated[str, "the verdict, one sentence"]
    by_user: Annotated[bool, "a user asked: a second request does not wait"]


@dataclass(frozen=True, kw_only=True)
class RunFinished(Detail):
    kind: ClassVar = "run.finished"
    doc: ClassVar = "The end: nothing of this run acts after it."
    outcome: Annotated[Outcome, "succeeded, failed, stopped or preempted"]
    exit_code: Annotated[int, "process exit code"]
    reason: Annotated[str, "the verdict, one sentence"]
    final_step: Annotated[int | None, "last applied step"] = None


@dataclass(frozen=True, kw_only=True)
class SupervisorStarted(Detail):
    kind: ClassVar = "supervisor.started"
    doc: ClassVar = "A supervisor took the lease."
    term: Annotated[int, "lease generation, rises by one"]
    pid: Annotated[int, "process id"]
    heads: Annotated[Mapping[str, str] | None, "event file -> SHA-256 of the last line seen"] = None
    address: Annotated[str | None, "host:port"] = None
    job: Annotated[str | None, "of a home in a bucket: the back end's name for the job that it is part of"] = None
    submission: Annotated[str | None, "its number; None: an older version wrote it, or nothing was submitted"] = None


@dataclass(frozen=True, kw_only=True)
class SupervisorEnded(Detail):
    kind: ClassVar = "supervisor.ended"
    doc: ClassVar = "It gave the lease back."
    reason: Annotated[str, "why"]


@dataclass(frozen=True, kw_only=True)
class HashHeads(Detail):
    kind: ClassVar = "log.hash_heads"
    doc: ClassVar = "The supervisor cites the other writers' chains."
    heads: Annotated[Mapping[str, str], "event file -> SHA-256 of the last line seen"]


@dataclass(frozen=True, kw_only=True)
class LogDamaged(Detail):
    kind: ClassVar = "log.damaged"
    doc: ClassVar = "The writer found its event file damaged, left it as it was, and goes on in another one: this one."
    file: Annotated[str, "the damaged file"]
    line: Annotated[int, "its first line that is damaged, counted from 1"]
    reason: Annotated[str, "what is wrong with it"]
    continued_in: Annotated[str, "the file that goes on"]


@dataclass(frozen=True, kw_only=True)
class ConnectionRefused(Detail):
    kind: ClassVar = "connection.refused"
    doc: ClassVar = "A peer speaks another protocol, or a message of it could not be read: its connection was closed."
    who: Annotated[str, "a host's name, `a client`, or `a new connection` that has not said who it is"]
    reason: Annotated[str, "what was wrong, one sentence"]


DETAILS: tuple[type[Detail], ...] = (
    RunSubmitted, RunMessage, RunRestarted, StopRequested, RunStopping, RunWaiting, RunHeld, RunEnding, RunFinished,
)  # fmt: skip
SUPERVISOR_DETAILS: tuple[type[Detail], ...] = (
    SupervisorStarted,
    SupervisorEnded,
    HashHeads,
    LogDamaged,
    ConnectionRefused,
)
