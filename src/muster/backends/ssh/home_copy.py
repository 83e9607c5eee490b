"""A second host's copy of a run's home that is on the first host's disk: ``muster recover RUN --from HOST`` goes on
from it."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from muster.backends.host.place import say
from muster.backends.run_home import RUN_ID
from muster.core import processes
from muster.core.errors import BackendError, MusterError
from muster.core.protocols import Store
from muster.protocol.pipes import STORE_BYTES
from muster.storage import uris
from muster.storage.store import blobs, open_store
from muster.storage.store.patient import start_thread

EVERY_S = 5.0
LAST_S = 120.0
"""For what the run's end left to be copied."""
COPIED = ".muster-copied"
"""In the copy's folder: of which home it is; its modification time is that of the last whole round."""
CHANGING_BYTES = 1 << 16
"""A JSON file up to this size (lease, fence) may change and keep its size, and refer to other files."""


@dataclass(kw_only=True)
class HomeCopy:
    """Brings what is new in ``home`` to ``folder``, in a thread until ``stop``.

    Small JSON files and commit markers are read before the home is listed, and written after everything else: what they
    refer to is there. What ``folder`` was before ``muster recover --from`` (the home, a copy of another) is set aside.
    """

    home: str
    folder: Path
    store: Store = field(default_factory=open_store)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_thread(self._keep, "copy")

    def stop(self) -> None:
        """With what has come last."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(LAST_S)

    def _keep(self) -> None:
        said, ended = "", False
        while not ended:
            ended = self._stopped.wait(EVERY_S)
            try:
                self.once()
                said = ""
            except FileNotFoundError:  # it was removed while the round went on
                pass
            except (MusterError, OSError) as error:
                if str(error) != said:
                    say(f"the copy of the run's home is not up to date: {error}")
                said = str(error)

    def once(self) -> None:
        """One round. Raises FileNotFoundError, MusterError, OSError: it is not whole."""
        read = dict[str, bytes]()
        for name, size in self._listed(self.home).items():
            if _last(name, size):
                with contextlib.suppress(FileNotFoundError):
                    read[name] = self.store.get(uris.join(self.home, name)).data
        there = self._listed(self.home)
        if RUN_ID not in there:
            raise BackendError(f"no run is in {self.home}")
        self._set_aside()
        here = self._listed(str(self.folder))
        for name, size in there.items():
            if here.get(name) != size and not _last(name, size):
                uri, path = uris.join(self.home, name), str(self.folder / name)
                with blobs.reading(uri) as source, blobs.writing(path) as file:
                    shutil.copyfileobj(source, file, STORE_BYTES)
        for name in sorted(read.keys() & there.keys()):  # the run's id after every checkpoint: a part is no home
            self.store.put(str(self.folder / name), read[name])
        old, new = (any("/commits/step-" in name for name in names) for names in (here, read.keys() & there.keys()))
        if new or not old:  # else an older checkpoint is all that there is here
            for name in here.keys() - there.keys():
                (self.folder / name).unlink(missing_ok=True)
        processes.replace_text(self.folder / COPIED, self.home)

    def _set_aside(self) -> None:
        """What is no copy of this home: it may have what this home lacks, and other data under the same names."""
        copied = self.folder / COPIED
        if (self.folder / RUN_ID).exists() and not (copied.exists() and copied.read_text() == self.home):
            aside = self.folder.rename(f"{self.folder}.before-{time.time_ns()}")
            say(f"the run's home is on another host now: what this one had of it is in {aside}")

    def _listed(self, root: str) -> dict[str, int]:
        return {uri[len(root) + 1 :]: size for uri, size in self.store.list(root).items()}


def _last(name: str, size: int) -> bool:
    """It is written after what it may refer to."""
    return name == RUN_ID or "/commits/step-" in name or (name.endswith(".json") and size <= CHANGING_BYTES)
