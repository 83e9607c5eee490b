"""Taking the checkpoint folder's fence, beside the restart: it syncs to a disk, or asks a bucket."""

from __future__ import annotations

import threading

from muster.core import manifest as manifests
from muster.core.seams import Store


class Claim:
    """Begins to claim the folder when made; ``wait`` before anything is written there."""

    def __init__(self, store: Store, directory_uri: str, *, run_id: str, attempt: int) -> None:
        self._error: BaseException | None = None

        def claim() -> None:
            try:
                manifests.claim(store, directory_uri, run_id=run_id, attempt=attempt)
            except BaseException as error:  # noqa: BLE001 (a thread's edge: raised again where it is waited for)
                self._error = error

        self._thread = threading.Thread(target=claim, name="checkpoint-claim", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what the claim raised, if it has."""
        if not self._thread.is_alive() and self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the claim. Raises ConflictError, AccessError, BackendError (see ``manifest.claim``)."""
        self._thread.join()
        self.check()
