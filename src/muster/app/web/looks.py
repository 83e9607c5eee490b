"""What the watching page shows of each run, brought up to date by a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muster.app.inspect.event_format import step_figures
from muster.app.inspect.logs import REMOTE_LOOK_EVERY_S
from muster.app.inspect.watch import View, Watcher
from muster.core.clock import SystemClock
from muster.core.errors import MusterError
from muster.core.event_log import in_words
from muster.core.protocols import Clock
from muster.core.typed_json import Json, JsonObject
from muster.report.render.series import series
from muster.storage.run_registry import RunDir

ACCOUNT_SHARE = 8
"""The ledger is folded again after so many times what folding it took: charts are what the page is for."""


@dataclass(kw_only=True)
class Shown:
    """One run as the page shows it."""

    run_id: str
    view: JsonObject = field(default_factory=dict)
    """As the terminal's ``muster watch`` has it."""
    version: int = 0
    """Rises with every change of ``account``; 0: there is none yet."""
    account: JsonObject = field(default_factory=dict)
    """The report and its curves, as of some seconds ago."""


@dataclass
class Looks:
    """Looks at the runs every ``every_s`` until they have ended, once ``begin`` was called. Changes nothing in them."""

    runs: Sequence[RunDir]
    every_s: float
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        self._watchers = [Watcher(run, clock=self.clock, account_share=ACCOUNT_SHARE) for run in self.runs]
        self._shown = {run.run_id: Shown(run_id=run.run_id) for run in self.runs}
        self._over = threading.Event()

    def begin(self) -> None:
        """One thread a run: a slow back end holds up no other run."""
        for watcher in self._watchers:
            name = f"muster-watch-{watcher.run.run_id}"
            threading.Thread(target=self._follow, args=(watcher,), name=name, daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def answer(self, have: Mapping[str, Json]) -> JsonObject:
        """Every run's view, and the account of those of which ``have`` (run id -> version) has another one."""
        runs: list[Json] = []
        for run in self.runs:
            shown = self._shown[run.run_id]
            row: dict[str, Json] = {"run_id": shown.run_id, "view": dict(shown.view), "version": shown.version}
            if shown.version and have.get(shown.run_id) != shown.version:
                row["account"] = dict(shown.account)
            runs.append(row)
        return {"runs": runs}

    def look(self, watcher: Watcher) -> bool:
        """Bring one run up to date; return whether there is more to come."""
        shown, before = self._shown[watcher.run.run_id], watcher.report
        try:
            view, problem = watcher.look(), None
        except (MusterError, OSError) as error:  # a back end that does not answer now may later
            view, problem = watcher.view, str(error)
        if view.ended:
            watcher.fold()
        account = shown.account
        if watcher.report is not None and (watcher.report is not before or not shown.version):
            account = {"report": watcher.report.to_json(), "series": series(watcher.report.ledger)}
        new = account is not shown.account
        self._shown[shown.run_id] = Shown(
            run_id=shown.run_id,
            view={**view_json(view), "problem": problem},
            version=shown.version + new,
            account=account,
        )
        return not view.ended

    def _follow(self, watcher: Watcher) -> None:
        every_s = self.every_s if watcher.launcher.remote is None else max(self.every_s, REMOTE_LOOK_EVERY_S)
        while self.look(watcher):
            if self._over.wait(every_s):
                return


def view_json(view: View) -> JsonObject:
    """A look in plain JSON types; None is what is not known."""
    left = None if view.total_steps is None else view.total_steps - view.step
    evals = [(step, each) for step, each in sorted(view.evals.items()) if each.loss is not None]
    return {
        "name": view.name,
        "state": view.state,
        "ended": view.ended,
        "sentence": view.sentence,
        "step": view.step,
        "total_steps": view.total_steps,
        "eta_s": None if view.ended or left is None or not view.step_every_s else left * view.step_every_s,
        "step_age_s": None if view.ended else view.step_age_s,
        "attempt": view.attempt,
        "world_size": view.world_size,
        "layout": dict(view.layout),
        "figures": list(step_figures(view.numbers)),
        "heldout": None if not evals else {"step": evals[-1][0], "loss": evals[-1][1].loss},
        "hosts": [
            {
                "name": host.name,
                "state": host.state,
                "ranks": [
                    {"rank": rank.rank, "phase": rank.phase, "pid": rank.pid} for _, rank in sorted(host.ranks.items())
                ],
            }
            for host in sorted(view.hosts.values(), key=lambda host: (len(host.name), host.name))
        ],
        "tiers": [{"tier": tier.tier, "step": tier.step, "age_s": tier.age_s} for tier in view.tiers],
        "incidents": list(view.incidents),
        "damaged": list(in_words(view.damaged)),
    }
