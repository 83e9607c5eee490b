"""A host without a supervisor whose ranks have ended: it waits with its snapshots, then saves them, then exits.

A supervisor that connects during the wait finds all of them in memory. What would be lost when this host exits is saved
by its replicator as a checkpoint, where it is the whole state; a partial state is held for as long, then reported lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from muster.agent.heartbeat import lease_is_given_back
from muster.agent.host_identity import HostIdentity
from muster.config.spec import RunSpec
from muster.core.layout import Layout
from muster.core.snapshots import SnapshotCopy
from muster.protocol.held_snapshots import Choice, newest_complete
from muster.protocol.to_agent import CommitFlushed, FlushSnapshots
from muster.protocol.to_supervisor import FlushCommitted, SnapshotsFlushed

#: Without a supervisor and without work an agent waits this long, or ``recovery.keep_hosts_after_failure_s`` where that
#: is longer.
GRACE_PERIOD_S = 120.0
#: After the end of the run: its supervisor gave the lease back, and could not tell this host (its agent was just
#: starting). A supervisor that was started at once for the same run connects within it.
RELEASED_S = 15.0
REASON = "no supervisor and no work"
"""Why it exited, in its last event (a back end may look for it)."""


class UnsupervisedHost:
    """Counts from the later of two moments: the supervisor was lost, the last rank ended."""

    def __init__(
        self,
        *,
        identity: HostIdentity,
        spec: Callable[[], RunSpec],
        is_working: Callable[[], bool],
        held: Callable[[], Sequence[SnapshotCopy]],
        flush: Callable[[FlushSnapshots | CommitFlushed], None],
        on_note: Callable[[str], None],
        on_exit: Callable[[str], None],
    ) -> None:
        """``is_working``: a rank lives here; ``held``: the snapshots here; ``flush`` is the replicator's."""
        self._identity, self._spec, self._is_working, self._held = identity, spec, is_working, held
        self._flush, self._on_note, self._on_exit = flush, on_note, on_exit
        self._since_s = time.monotonic()
        self._was_held = not lease_is_given_back(identity.run_dir, me=identity.host)
        """Before a run's next supervisor starts, the lease is what the last one left: only one that was held during
        this agent's life and is given back now tells that the run has ended."""
        self._saving: Choice | None = None
        self._deadline_s = 0.0
        self._failed: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """The supervisor was lost just now."""
        self._since_s, self._saving, self._was_held = time.monotonic(), None, True

    def watch(self) -> None:
        """No supervisor answers: when the wait is over have the newest version saved, and exit."""
        now = time.monotonic()
        if self._is_working():
            self.begin()
        elif self._saving is not None:
            if now > self._deadline_s:
                self._exit(f"step {self._saving.step} was not saved within {self._grace_period_s():g} s")
        elif now - self._since_s > self._wait_s():
            self._save(now)

    def on_flush(self, answer: SnapshotsFlushed | FlushCommitted) -> None:
        """The replicator's answer to what ``watch`` ordered."""
        version = self._saving
        if version is None or (version.step, version.attempt) != (answer.step, answer.attempt):
            return  # a supervisor came back meanwhile
        if answer.failure is not None:
            self._on_note(f"step {version.step} was not saved: {answer.failure}")
            self._failed.add((version.step, version.attempt))
            self._saving = None  # an older version may be intact
        elif isinstance(answer, SnapshotsFlushed) and answer.files:
            step, attempt, layout = version.step, version.attempt, version.layout.key
            self._flush(
                CommitFlushed(step=step, attempt=attempt, layout=layout, uri=self._directory(), files=answer.files)
            )
        else:  # committed, now or earlier
            self._on_exit(REASON)

    def _directory(self) -> str:
        return self._spec().checkpoint_uri(self._identity.run_dir)

    def _wait_s(self) -> float:
        given_back = lease_is_given_back(self._identity.run_dir, me=self._identity.host)
        self._was_held = self._was_held or not given_back
        return self._grace_period_s(RELEASED_S if self._was_held and given_back else GRACE_PERIOD_S)

    def _grace_period_s(self, least_s: float = GRACE_PERIOD_S) -> float:
        return max(least_s, self._spec().recovery.keep_hosts_after_failure_s)

    def _save(self, now: float) -> None:
        held = self._held()
        intact = [snapshot for snapshot in held if (snapshot.step, snapshot.attempt) not in self._failed]
        version = newest_complete(intact)
        if version is None:
            self._exit(_partial_state(held))
            return
        is_first = any(snapshot.rank == 0 and snapshot.tier == "memory" for snapshot in held)
        if not is_first and now - self._since_s < self._grace_period_s() + self._spec().recovery.grace_s:
            return  # the host of rank 0 may hold it too, and two must not write the same files
        self._saving, self._deadline_s = version, now + self._grace_period_s()
        step, attempt, layout = version.step, version.attempt, version.layout.key
        ranks = version.flush_shards(self._identity.host)
        self._flush(FlushSnapshots(step=step, attempt=attempt, layout=layout, uri=self._directory(), ranks=ranks))

    def _exit(self, lost: str | None) -> None:
        if lost is not None:
            self._on_note(f"{self._identity.host} exits without a supervisor: {lost}")
        self._on_exit(REASON)


def _partial_state(held: Iterable[SnapshotCopy]) -> str | None:
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
