"""Checkpoints of a run: what is committed, newest first, and what was passed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muster.app.status import spec_of
from muster.core import manifest, runs
from muster.core.manifest import Manifest
from muster.core.runs import RunDir
from muster.core.store import open_store


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """What lies in a run's checkpoint folder."""

    run: RunDir
    directory: str
    committed: tuple[Manifest, ...]
    skipped: tuple[tuple[str, str], ...]
    """(URI, reason)."""

    def to_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run.run_id,
            "directory": self.directory,
            "committed": [
                {"step": each.step, "uri": each.uri, "attempt": each.attempt, "bytes": _bytes(each)}
                for each in self.committed
            ],
            "skipped": [{"uri": uri, "reason": reason} for uri, reason in self.skipped],
        }


def checkpoints(reference: str) -> Catalogue:
    """Look, change nothing."""
    run = runs.find(reference)
    directory = spec_of(run).checkpoint.dir or str(run.checkpoints)
    skipped: list[tuple[str, str]] = []
    found = manifest.committed(open_store(), directory, on_skip=lambda uri, reason: skipped.append((uri, reason)))
    return Catalogue(run=run, directory=directory, committed=tuple(found), skipped=tuple(skipped))


def _bytes(found: Manifest) -> int:
    return found.checkpoint(tier="disk").bytes
