"""What a pod reads of its run's home, and what it does there for a program that was killed."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from muster.core.errors import MusterError
from muster.core.protocols import Store
from muster.core.typed_json import Unreadable, decode
from muster.protocol.lease import EndRecord
from muster.storage import run_registry
from muster.storage.home import Home, open_home
from muster.storage.store import open_store

UNKNOWN_S = 3.0
"""A home that does not answer counts as held for this long: a supervisor could not start either."""
SUPERVISOR = "supervisor"


@dataclass(kw_only=True)
class RunState:
    """Of the run whose folder in this pod is ``run_dir``, as part of the JobSet ``job``."""

    run_dir: Path
    job: str = ""
    store: Store = field(default_factory=lambda: open_store(timeout_s=5.0, patience_s=5.0))
    _home: Home | None = field(default=None)
    _said: str = ""

    @property
    def home(self) -> Home:
        self._home = self._home or open_home(self.run_dir)
        return self._home

    def held_s(self) -> float:
        """For how long somebody holds the run's lease, by this pod's clock; 0: nobody does."""
        try:
            record = json.loads(self.store.get(self.home.uri_of("lease.json")).data)
            return max(0.0, (int(record.get("expires_wall_ns", 0)) - time.time_ns()) / 1e9)
        except (FileNotFoundError, ValueError, AttributeError):
            return 0.0
        except (MusterError, OSError) as error:
            self._say(f"the run's home does not answer: {error}")
            return UNKNOWN_S

    def ended(self) -> int | None:
        """The exit code with which this JobSet's supervisor ended the run; None: the run goes on, or one cannot know
        (only a home in a bucket says so)."""
        if self.home.is_folder or not self.job:
            return None
        try:
            end = decode(EndRecord, self.store.get(self.home.uri_of("end.json")).data)
        except (FileNotFoundError, Unreadable):
            return None
        return end.exit_code if (end.job, end.submission) == (self.job, self._submission()) else None

    def withdraw_end(self, code: int) -> None:
        """The run was to end with ``code`` for this time alone: the same JobSet's next supervisor goes on."""
        with contextlib.suppress(MusterError, OSError):
            if self.ended() == code:
                self.store.delete(self.home.uri_of("end.json"))

    def ship(self, writer: str, timeout_s: float) -> None:
        """Bring home what a killed program left in ``run_dir``; where another one writes in its place, nothing."""
        if self.home.is_folder:
            return
        try:
            if writer == SUPERVISOR and (term := self._newest_term()):
                run_id = run_registry.existing_id(self.run_dir) or ""
                self.home.open_log(run_id, SUPERVISOR, term).close()
            self.home.start(writer).stop(timeout_s)
        except (MusterError, OSError) as error:
            self._say(f"the last events stay behind: {error}")

    def _newest_term(self) -> int:
        names = (path.name.split(".") for path in (self.run_dir / "events").glob(f"{SUPERVISOR}.*.jsonl"))
        return max((int(term) for _, term, *_ in names if term.isdecimal()), default=0)

    def _submission(self) -> str:
        with contextlib.suppress(OSError):
            return (self.run_dir / "submission").read_text().strip()
        return ""

    def _say(self, text: str) -> None:
        if text != self._said:
            print(text, file=sys.stderr, flush=True)
        self._said = text
