"""This host's part in the run's home: threads ship its files and bring the run file, so that the loop never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from muster.agent.edge.background import Background
from muster.agent.values.events import Event, Noted
from muster.storage.home import Home, HomeSync

#: How soon a run file that could not be had is asked for again.
AGAIN_S = 1.0
#: What the last lines of a host may take to reach the home, of the time that its pod has left.
SHIP_S = 20.0


class HostHome:
    """Ships from ``start`` to ``stop``."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._sync: HomeSync | None = None
        self._ending = threading.Event()
        self._trouble: str | None = None

    @property
    def is_folder(self) -> bool:
        return self._home.is_folder

    def start(self, writer: str) -> None:
        """From here on what ``writer`` writes reaches the home."""
        self._sync = self._home.start(writer)

    def watch(self, *, supervised: bool) -> Iterator[Event]:
        """Call it in every turn of the loop. While no supervisor is connected, the lease is looked at more often."""
        if self._sync is None:
            return
        self._sync.seek_supervisor(not supervised)
        before, self._trouble = self._trouble, self._sync.trouble
        if before is None and self._trouble is not None:
            yield Noted(f"events wait on this host: its run's home cannot be written ({self._trouble})")
        elif before is not None and self._trouble is None:
            yield Noted("the run's home can be written again; nothing that waited was lost")

    def fetch(self, background: Background) -> None:
        """Bring the newest run file, in a thread of ``background``: it ends once the file is here, however long that
        takes, and says once why it is not."""
        noted = False
        while not self._ending.is_set():
            try:
                self._home.fetch()
                return
            except Exception as error:  # noqa: BLE001 (on any error: without this thread the host would wait forever)
                if not noted:
                    reason = f"{type(error).__name__}: {error}"[:500]
                    background.post(Noted(f"this host waits for its run file: {reason}"))
                noted = True
                time.sleep(AGAIN_S)

    def stop(self) -> None:
        """Ship the rest; bounded."""
        self._ending.set()
        if self._sync is not None:
            self._sync.stop(SHIP_S)


def ship_rest(home: Home, writer: str) -> None:
    """Ship what an agent that was killed left behind, where no other one follows it on this machine; bounded."""
    if not home.is_folder:
        home.start(writer).stop(SHIP_S)
