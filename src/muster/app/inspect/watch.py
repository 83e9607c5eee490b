"""Watch: where a run is, again and again, for a person. Reads events and asks the supervisor; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.app.inspect.event_format import total_steps
from muster.app.inspect.home_view import as_of_now, home_of, once, status_in
from muster.app.inspect.logs import REMOTE_LOOK_EVERY_S, new_events
from muster.app.inspect.report import report
from muster.app.inspect.status import job, mirror, spec_of, supervisor_status
from muster.checkpoint_format.snapshot_ring import SnapshotInfo, list_snapshots
from muster.core.clock import SystemClock
from muster.core.errors import MusterError
from muster.core.event_details.incidents import IncidentDecided, IncidentDetected, IncidentResolved
from muster.core.event_details.run import RunFinished
from muster.core.event_log import Damage, EventReader
from muster.core.events import Event
from muster.core.protocols import Clock
from muster.protocol.client import SupervisorStatus
from muster.report.api import Report
from muster.report.run_view import HostView, RunView
from muster.storage import run_registry
from muster.storage.memory_dir import MemoryDir
from muster.storage.run_registry import RunDir

__all__ = ["HostView", "View", "Watcher", "watch"]

LOOK_EVERY_S = 0.5
SHOWN_INCIDENTS = 5
#: The ledger is folded again after so long, and after so many times what folding it took: a long log is looked at
#: seldom enough that looking costs little.
ACCOUNT_EVERY_S, ACCOUNT_SHARE = 10.0, 20
SHOWN_LOSSES = 3


@dataclass(frozen=True, kw_only=True)
class TierView:
    """The newest complete version in one tier."""

    tier: str
    step: int | None
    """None: nothing there (or not to be seen from this machine)."""
    age_s: float | None


@dataclass(frozen=True, kw_only=True)
class Account:
    """The ledger's figures so far."""

    goodput_active: float | None
    goodput_purchased: float | None
    usd: float | None
    losses: tuple[tuple[str, float], ...]
    """The largest categories besides productive time: name, share of the purchased host-time."""


@dataclass(kw_only=True)
class View(RunView):
    """One look at one run: its folded events, and what its back end and supervisor say."""

    run: RunDir
    state: str = "waiting"
    """Of the job, as its back end sees it."""
    ended: bool = False
    phase: str | None = None
    sentence: str = ""
    """Why it is where it is."""
    total_steps: int | None = None
    step_age_s: float | None = None
    tiers: tuple[TierView, ...] = ()
    incidents: tuple[str, ...] = ()
    """The last ones, as sentences, oldest first."""
    account: Account | None = None
    """As of some seconds ago."""
    news: list[Event] = field(default_factory=list)
    """Events since the look before."""
    damaged: tuple[Damage, ...] = ()
    """Places of the log that were left out."""


@dataclass
class Watcher:
    """Folds a run's events between looks."""

    run: RunDir
    clock: Clock = field(default_factory=SystemClock)
    account_share: int = ACCOUNT_SHARE

    def __post_init__(self) -> None:
        self.launcher, self.handle = job(self.run)
        self.spec = spec_of(self.run)
        self.view = View(run=self.run, total_steps=self.spec.training.steps)
        self._reader = EventReader(self.run.events)
        self.report: Report | None = None
        """As of some seconds ago."""
        self._account_due_ns = 0

    def look(self) -> View:
        """The run now. The same object each time, brought up to date."""
        status = self.launcher.poll(self.handle)
        mirror(self.launcher, self.run, once(self._reader))
        view = self.view
        view.state, view.ended, view.sentence = status.state.value, status.state.ended, status.reason
        view.news = new_events(self._reader)
        view.damaged = tuple(self._reader.damaged)
        for event in view.news:
            view.add(event)
        view.total_steps = total_steps(self.spec, view.data)
        self._ask()
        now_ns = self.clock.wall_ns()
        view.step_age_s = (now_ns - view.newest.wall_ns) / 1e9 if view.newest else None
        view.tiers = tuple(self._tiers(now_ns))
        self._account(now_ns)
        return view

    def _ask(self) -> None:
        """The supervisor's own status, where one answers; else the back end's."""
        self.view.phase = None
        live = None if self.view.ended else self._live()
        if live:
            self.view.phase, self.view.sentence = live.phase, live.reason

    def _live(self) -> SupervisorStatus | None:
        home = home_of(self.run, self.launcher)
        said = status_in(home) if home is not None else None
        return as_of_now(said, self.clock.wall_ns()) if said is not None else supervisor_status(self.run)

    def _tiers(self, now_ns: int) -> Iterator[TierView]:
        folders = [memory.folder for memory in MemoryDir.of_run(self.run.path).values()]
        held = [snapshot for folder in folders for snapshot in list_snapshots(folder)]
        for tier in ("memory", "peer"):
            step = _complete([snapshot for snapshot in held if snapshot.tier == tier], self.view.world_size)
            at = self.view.applied_ns(step)
            yield TierView(tier=tier, step=step, age_s=None if at is None else (now_ns - at) / 1e9)
        newest, committed_ns = max(self.view.committed.values(), default=(None, 0))
        yield TierView(
            tier="disk" if not (self.spec.checkpoint.dir or "").partition("://")[1] else "bucket",
            step=newest,
            age_s=None if newest is None else (now_ns - committed_ns) / 1e9,
        )

    def _account(self, now_ns: int) -> None:
        """Now and then, and when something has changed about figures and sentences."""
        kinds = {IncidentDetected.kind, IncidentDecided.kind, IncidentResolved.kind, RunFinished.kind}
        if now_ns < self._account_due_ns and not any(event.kind in kinds for event in self.view.news):
            return
        began_ns = self.clock.monotonic_ns()
        self.fold()
        took_ns = self.clock.monotonic_ns() - began_ns
        wait_ns = self.account_share * took_ns if self._account_due_ns else 0  # the first loads the ledger, too
        self._account_due_ns = now_ns + max(int(ACCOUNT_EVERY_S * 1e9), wait_ns)

    def fold(self) -> None:
        """Figures and sentences come from the whole log, which is read for them."""
        try:
            self.report = report(str(self.run.path), brought=True)
        except MusterError:
            return
        document = self.report.document
        self.view.incidents = tuple(incident.sentence for incident in document.incidents[-SHOWN_INCIDENTS:])
        shares = {name: spent.share or 0.0 for name, spent in document.categories.items() if name != "productive"}
        losses = sorted(shares.items(), key=lambda item: -item[1])[:SHOWN_LOSSES]
        self.view.account = Account(
            goodput_active=document.goodput.active,
            goodput_purchased=document.goodput.purchased,
            usd=document.cost.usd,
            losses=tuple((name, share) for name, share in losses if share > 0.001),
        )


def watch(reference: str, *, every_s: float = LOOK_EVERY_S, clock: Clock | None = None) -> Iterator[View]:
    """A look every ``every_s`` until the run has ended, that one included.

    Raises:
        UsageError: no such run.
    """
    clock = clock or SystemClock()
    watcher = Watcher(run_registry.find(reference), clock=clock)
    if watcher.launcher.remote is not None:
        every_s = max(every_s, REMOTE_LOOK_EVERY_S)
    while True:
        view = watcher.look()
        yield view
        if view.ended:
            return
        clock.sleep(every_s)


def _complete(held: list[SnapshotInfo], world_size: int) -> int | None:
    """The newest step that every rank has in this tier."""
    ranks: dict[tuple[int, int, str], set[int]] = {}
    for snapshot in held:
        ranks.setdefault((snapshot.step, snapshot.attempt, snapshot.layout), set()).add(snapshot.rank)
    return max((step for (step, _, _), here in ranks.items() if len(here) >= world_size > 0), default=None)
