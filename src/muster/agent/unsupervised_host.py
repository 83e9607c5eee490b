"""A host without a supervisor whose ranks have ended: it waits with its snapshots, then saves them, then exits.

A supervisor that connects during the wait finds all of them in memory. What would be lost when this host exits is saved
by its replicator as a checkpoint, where it is the whole state; a partial state is held for as long, then reported lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from muster.agent.host_state import HostState
from muster.checkpoint_format.snapshot_ring import SnapshotInfo, list_snapshots
from muster.core.layout import Layout
from muster.protocol.held_snapshots import Choice, Snapshot, newest_complete
from muster.storage import uris

#: Without a supervisor and without work an agent waits this long, or ``recovery.keep_hosts_after_failure_s`` where that
#: is longer.
GRACE_PERIOD_S = 120.0
REASON = "no supervisor and no work"
"""Why it exited, in its last event (a back end may look for it)."""


class UnsupervisedHost:
    """Counts from the later of two moments: the supervisor was lost, the last rank ended."""

    def __init__(self, *, host: HostState, flush: Callable[[Mapping[str, Any], int], None]) -> None:
        """``flush(order, fence)`` is the replicator's."""
        self._host, self._flush = host, flush
        self._since_s = time.monotonic()
        self._saving: Choice | None = None
        self._deadline_s = 0.0
        self._failed: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """The supervisor was lost just now."""
        self._since_s, self._saving = time.monotonic(), None

    def watch(self) -> None:
        """No supervisor answers: when the wait is over have the newest version saved, and exit."""
        now = time.monotonic()
        if self._host.living():
            self.begin()
        elif self._saving is not None:
            if now > self._deadline_s:
                self._exit(f"step {self._saving.step} was not saved within {self._grace_period_s():g} s")
        elif now - self._since_s > self._grace_period_s():
            self._save(now)

    def on_flush(self, answer: Mapping[str, Any], order: Mapping[str, Any]) -> None:
        """The replicator's answer to what ``watch`` ordered."""
        version = self._saving
        if version is None or (version.step, version.attempt) != (answer["step"], answer["attempt"]):
            return  # a supervisor came back meanwhile
        if not answer["ok"]:
            self._host.note(f"step {version.step} was not saved: {answer['reason']}")
            self._failed.add((version.step, version.attempt))
            self._saving = None  # an older version may be intact
        elif answer["t"] == "flushed" and answer["files"]:
            self._order("flush_commit", version, files=answer["files"])
        else:  # committed, now or earlier
            self._host.request_exit(REASON)

    def _grace_period_s(self) -> float:
        return max(GRACE_PERIOD_S, self._host.spec.recovery.keep_hosts_after_failure_s)

    def _save(self, now: float) -> None:
        held = list(list_snapshots(self._host.memory))
        intact = [each for each in held if (each.step, each.attempt) not in self._failed]
        version = newest_complete([Snapshot(host=self._host.host, **vars(each)) for each in intact])
        if version is None:
            self._exit(_partial_state(held))
            return
        is_first = any(snapshot.rank == 0 and snapshot.tier == "memory" for snapshot in held)
        if not is_first and now - self._since_s < self._grace_period_s() + self._host.spec.recovery.grace_s:
            return  # the host of rank 0 may hold it too, and two must not write the same files
        self._saving, self._deadline_s = version, now + self._grace_period_s()
        self._order("flush", version, ranks=version.shards_on(self._host.host))

    def _order(self, kind: str, version: Choice, **extra: Any) -> None:
        host = self._host
        directory = host.spec.checkpoint.dir or uris.join(str(host.run_dir), "checkpoints")
        order = {"t": kind, "step": version.step, "attempt": version.attempt, "layout": version.layout.key}
        self._flush({**order, "uri": directory, "alone": True, **extra}, max(host.newest_attempt, host.attempt))

    def _exit(self, lost: str | None) -> None:
        if lost is not None:
            self._host.note(f"{self._host.host} exits without a supervisor: {lost}")
        self._host.request_exit(REASON)


def _partial_state(held: Iterable[SnapshotInfo]) -> str | None:
    """The part of the newest version that is here; None: nothing is."""
    versions = [(snapshot.step, snapshot.attempt, snapshot.layout, snapshot.rank) for snapshot in held]
    if not versions:
        return None
    newest = max(version[:3] for version in versions)
    ranks = sorted({version[3] for version in versions if version[:3] == newest})
    size = Layout.from_key(newest[2]).world_size
    return (
        f"its memory held step {newest[0]} of {', '.join(f'rank {rank}' for rank in ranks)} "
        f"(of {size}), not the whole state, and was not saved"
    )
