"""This host's part in the run's home: threads ship its files and bring the run file, so that the loop never waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from muster.storage.home import Home, HomeSync
from muster.transport.connections import ConnectionPool

#: How soon a run file that could not be had is asked for again.
AGAIN_S = 1.0
#: What the last lines of a host may take to reach the home, of the time that its pod has left.
SHIP_S = 20.0


class HostHome:
    """Ships from ``start`` to ``stop``."""

    def __init__(self, *, home: Home, hub: ConnectionPool, on_note: Callable[[str], None]) -> None:
        """``on_note``: an informational message for the run's log; called in the loop."""
        self._home, self._hub, self._on_note = home, hub, on_note
        self._sync: HomeSync | None = None
        self._ending = threading.Event()
        self._trouble: str | None = None

    def start(self, writer: str) -> None:
        """From here on what ``writer`` writes reaches the home."""
        self._sync = self._home.start(writer)

    def watch(self, supervised: bool) -> None:
        """Call it in every turn of the loop: a home that cannot be reached is noted, once, and its return too.

        ``supervised``: a supervisor is connected; while none is, the lease is looked at more often.
        """
        if self._sync is not None:
            self._sync.lonely(not supervised)
        trouble = self._sync.trouble if self._sync is not None else None
        if trouble is not None and self._trouble is None:
            self._on_note(f"events wait on this host: its run's home cannot be written ({trouble})")
        elif trouble is None and self._trouble is not None:
            self._on_note("the run's home can be written again; nothing that waited was lost")
        self._trouble = trouble

    def fetch(self, on_here: Callable[[], None]) -> None:
        """Bring the newest run file; ``on_here`` is called in the loop once it is there, however long that takes."""
        if self._home.is_folder:
            on_here()
            return
        reading, writing = os.pipe()

        def here() -> None:
            if reason := os.read(reading, 1000):
                self._on_note(f"this host waits for its run file: {reason.decode(errors='replace')}")
                return
            self._hub.unwatch(reading)
            os.close(reading)
            on_here()

        self._hub.watch(reading, here)
        threading.Thread(target=self._fetch, args=(writing,), name="home-fetch", daemon=True).start()

    def _fetch(self, writing: int) -> None:
        noted = False
        while not self._ending.is_set():
            try:
                self._home.fetch()
            except Exception as error:  # noqa: BLE001 (whatever it is: a host that ends this thread waits for ever)
                if not noted:
                    os.write(writing, f"{type(error).__name__}: {error}".encode()[:500])
                noted = True
                time.sleep(AGAIN_S)
            else:
                os.close(writing)  # which the loop sees
                return

    def stop(self) -> None:
        """Ship the rest; bounded."""
        self._ending.set()
        if self._sync is not None:
            self._sync.stop(SHIP_S)


def ship_rest(home: Home, writer: str) -> None:
    """Ship what an agent that was killed left behind, where no other one follows it on this machine; bounded."""
    if not home.is_folder:
        home.start(writer).stop(SHIP_S)
