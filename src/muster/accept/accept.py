"""Use case of ``muster accept``: a place is climbed by its ladder, and the record written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from muster import backends
from muster.accept import record
from muster.accept.ladder import Climbed, Meter, Unit, climb
from muster.accept.levels import OVERRIDES, trial
from muster.app.cluster.up_down import cluster_of
from muster.config import load
from muster.core import environment
from muster.core.clock import SystemClock, SystemShell
from muster.core.protocols import Clock, Shell
from muster.core.typed_json import JsonObject

EMULATED = "a bucket's emulator (STORAGE_EMULATOR_HOST)"


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What came of it."""

    climbed: tuple[Climbed, ...]
    unit: Unit
    record: JsonObject
    path: Path
    signature: Path | None
    evidence: Path | None
    """For a bug report; None: nothing failed."""

    @property
    def accepted(self) -> bool:
        return bool(self.record["accepted"])


def accept(
    run_file: str,
    overrides: Sequence[str] = (),
    *,
    budget: float,
    folder: Path,
    key: Path | None = None,
    rehearsal: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
    clock: Clock | None = None,
    shell: Shell | None = None,
) -> Accepted:
    """Climb until a level fails, the budget would be passed, or the top; clear up; write the record. Blocks for an hour
    or two. ``rehearsal``: what replaces the real place in a rehearsal; not needed for machines that show it
    themselves.

    Raises:
        RunFileError: the run file does not hold.
        UsageError: what a host costs is not known (others' clusters are counted in host-hours then); the folder cannot
            be written; the key cannot sign.
    """
    loaded = load.load(run_file, [*overrides, *OVERRIDES])
    has_cluster = backends.get(loaded.spec.backend).provisioning.cluster is not None
    tried = trial(loaded, cluster_of(loaded.spec) if has_cluster else None, budget)
    if environment.current().storage_emulator:
        rehearsal = rehearsal or EMULATED
    began, meter = datetime.now(UTC), Meter(budget=budget, unit=tried.unit, clock=clock or SystemClock())
    climbed = climb(tried.levels(), tried.clearing(), meter, tell)
    rehearsal = rehearsal or tried.rehearsal
    found = record.record(tried.spec, climbed, budget=budget, unit=tried.unit, began=began, rehearsal=rehearsal)
    path = record.write(folder, found)
    signature = record.sign(path, key, found, shell or SystemShell()) if key is not None else None
    evidence = None if found["accepted"] else record.pack(folder, tried.run)
    return Accepted(
        climbed=tuple(climbed), unit=tried.unit, record=found, path=path, signature=signature, evidence=evidence
    )
