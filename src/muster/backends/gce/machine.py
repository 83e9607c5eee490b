"""What a machine of a run knows of itself: its metadata, read once at its start, and how far it has come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from muster.backends.gce.placement import RUNS
from muster.backends.google import metadata
from muster.backends.google.http import Unreachable
from muster.core import processes
from muster.core.errors import BackendError
from muster.core.protocols import Clock, Store
from muster.storage import uris

FOLDER = "machines"
"""Of the home: ``NAME/BOOT.STAGE``, one line each."""
HOST = "host"
"""The role of a machine without the supervisor."""
PATIENCE_S = 100.0
"""Refused connections and 503 are normal while a machine boots, and during maintenance."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    name: str
    zone: str
    address: str
    """Of its first interface, by which hosts and supervisor reach each other."""
    boot: str
    role: str
    run_id: str
    home: str
    files: str
    """Digest of the run's files (``run_folder``)."""
    submission: str
    token_secret: str
    hugging_face_secret: str = ""
    gpus: int = 0

    @property
    def run_dir(self) -> Path:
        return Path(RUNS) / self.run_id

    @property
    def writer(self) -> str:
        """What names its event files in the run's home. A reset may take lines from its disk that the home has, so
        files of an earlier boot are not continued."""
        return f"{self.name}-{self.boot.replace('-', '')[:12]}"

    def tell(self, store: Store, stage: str, said: str) -> None:
        """Put a stage of the start-up into the home, as the start-up script does. Raises as the store."""
        uri = uris.join(self.home, FOLDER, self.name, f"{self.boot}.{stage}")
        store.put(uri, f"{time.time():.0f} {said}\n".encode())


def read(clock: Clock) -> Machine:
    """This machine. Asked again until the metadata server is well.

    Raises:
        Unreachable: there is no metadata server, or the machine is no run's.
    """
    return Machine(
        name=_value("name", clock),
        zone=_value("zone", clock).rpartition("/")[2],
        address=_value("network-interfaces/0/ip", clock),
        boot=processes.boot_id(),
        role=_value("attributes/muster-role", clock),
        run_id=_value("attributes/muster-run", clock),
        home=_value("attributes/muster-home", clock),
        files=_value("attributes/muster-files", clock),
        submission=_value("attributes/muster-submission", clock),
        token_secret=_value("attributes/muster-token-secret", clock),
        hugging_face_secret=_value("attributes/muster-hugging-face-secret", clock, default=""),
        gpus=int(_value("attributes/muster-gpus", clock)),
    )


def _value(key: str, clock: Clock, default: str | None = None) -> str:
    waited_s = 0.0
    while True:
        try:
            return metadata.read(f"instance/{key}").strip()
        except Unreachable as error:
            if "404" in str(error):
                if default is not None:
                    return default
                raise BackendError(f"this machine's metadata has no {key}: it is no run's") from error
            if waited_s >= PATIENCE_S:
                raise
            clock.sleep(1.0)
            waited_s += 1.0
