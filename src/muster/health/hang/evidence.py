"""What was captured of a run that hangs, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from muster.core.typed_json import Record
from muster.health.hang.flight_recorder import Recorder
from muster.health.hang.process_state import CgroupState, ProcessState
from muster.health.hang.ras import Ras
from muster.health.hang.stacks import Thread, main_thread
from muster.health.verdicts import Finding

#: Where a stack would be.
NO_SPY = "py-spy is not installed there (it comes with the extra inspect)"


class Kind(StrEnum):
    """Why a rank holds the others up."""

    STOPPED = "stopped"  # SIGSTOP, a debugger, a freezer
    DEAD = "dead"  # its process is gone
    GIL = "gil"  # code in C keeps Python's lock
    CODE = "code"  # a line of the program
    MISMATCH = "mismatch"  # ranks called different collectives, or one of different shape
    LOADER = "loader"  # waits for data
    GPU = "gpu"
    LINK = "link"
    UNKNOWN = "unknown"

    @property
    def hardware(self) -> bool:
        """Another host may help; for the others it would not."""
        return self in (Kind.GPU, Kind.LINK)


class Confidence(StrEnum):
    HIGH = "high"  # seen directly, or two sources agree
    MEDIUM = "medium"  # one source
    LOW = "low"  # what is missing might say otherwise


@dataclass(frozen=True, kw_only=True)
class RankEvidence(Record):
    """Of one rank; what is None was not captured."""

    rank: int
    host: str = ""
    pid: int | None = None
    step: int | None = None
    phase: str = ""
    process: ProcessState | None = None
    cgroup: CgroupState | None = None
    answers: bool | None = None
    """Whether its reporting thread answered; None: it was not asked."""
    recorder: Recorder | None = None
    threads: tuple[Thread, ...] | None = None
    findings: tuple[Finding, ...] = ()
    """Of its host and GPU."""
    missing: tuple[str, ...] = ()
    """Why a part is not there, one sentence each."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    ranks: tuple[RankEvidence, ...]
    world: int | None = None
    """Ranks of the run; None: those that were captured, and those that their recorders name."""
    ras: Ras | None = None
    missing: tuple[str, ...] = ()
    """Files that could not be read, hosts that did not answer: one sentence each."""


@dataclass(frozen=True, kw_only=True)
class Culprit(Record):
    """A rank that others wait for. Texts are empty where nothing is known."""

    rank: int
    kind: Kind
    confidence: Confidence
    because: str
    """What shows it, as the end of a sentence that begins with the rank."""
    host: str = ""
    gpu: int | None = None
    group: str = ""
    operation: str = ""
    place: str = ""
    """``file:line`` where it is."""
    other_place: str = ""
    """Of a mismatch: where the other ranks are."""

    @property
    def sentence(self) -> str:
        """One line for people."""
        host = f" on {self.host}" if self.host else ""
        place = f" at {self.place}" if self.place else ""
        other = f"; the others at {self.other_place}" if self.other_place else ""
        return f"rank {self.rank}{host} {self.because}{place}{other}"


@dataclass(frozen=True, kw_only=True)
class Analysis(Record):
    """``culprits``: surest first, then by rank; empty if none can be named, and ``summary`` says why."""

    culprits: tuple[Culprit, ...] = ()
    victims: int = 0
    summary: str = ""
    missing: tuple[str, ...] = ()
    """What was not captured and might change the answer."""

    @property
    def sentence(self) -> str:
        if not self.culprits:
            return self.summary
        named = "; ".join(one.sentence for one in self.culprits[:2])
        more = f"; and {len(self.culprits) - 2} more" if len(self.culprits) > 2 else ""
        waits = f" ({self.victims} {'rank waits' if self.victims == 1 else 'ranks wait'} for it)"
        return named + more + (waits if self.victims else "")


def in_words(one: RankEvidence) -> str:
    """One line on a rank: process, the operation it is in, its line."""
    host = f" on {one.host}" if one.host else ""
    parts = [f"step {one.step}"] if one.step is not None and one.step >= 0 else []
    if one.process is not None:
        where = f" in {one.process.wchan}" if one.process.wchan else ""
        parts.append(f"process {one.process.words}{where}")
    if one.cgroup is not None and one.cgroup.oom_kills:
        parts.append(f"{one.cgroup.oom_kills} killed for memory in its cgroup")
    if one.recorder is not None:
        waiting = one.recorder.unfinished
        last = waiting[0] if waiting else None
        parts.append(
            f"in {last.name} number {last.number} of {one.recorder.groups[last.group].words}"
            if last
            else "in no collective"
        )
    main = main_thread(one.threads or ())
    if main is not None and main.frames:
        frame = main.user_line or main.frames[0]
        parts.append(f"{frame.function} at {frame.place}" + (", holds Python's lock" if main.blocked_in_c else ""))
    elif NO_SPY in one.missing:
        parts.append(f"its line is not known: {NO_SPY}")
    parts += [finding.message for finding in one.findings[:2]]
    return f"rank {one.rank}{host}: {'; '.join(parts) or 'nothing captured'}"
