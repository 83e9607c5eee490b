"""Taking the checkpoint folder's fence in parallel with the restart, since it syncs a disk or asks a bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable

from muster.core.errors import ConflictError


class Claim:
    """Begins to claim the folder when made; nothing is written there before it has been taken.

    A full disk or an unreachable bucket does not end the rank: ``again`` retries. A newer attempt's fence is kept.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        """``take``: a ``manifest.claim``, called in a thread."""
        self._error: BaseException | None = None

        def claim() -> None:
            try:
                take()
            except BaseException as error:  # noqa: BLE001 (a thread's edge: raised again where it is waited for)
                self._error = error

        self._claim = claim
        self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._claim, name="checkpoint-claim", daemon=True)
        thread.start()
        self._thread = thread  # started: it may be joined at once

    def check(self, *, wait_s: float = 0.0) -> None:
        """Raise ConflictError where a newer attempt or another copy of the run holds the folder, as far as known
        after ``wait_s``."""
        self._thread.join(wait_s)
        if not self._thread.is_alive() and isinstance(self._error, ConflictError):
            raise self._error

    def wait(self) -> None:
        """Wait for the claim. Raises ConflictError, AccessError, BackendError (see ``manifest.claim``)."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def again(self) -> None:
        """Try once more where it could not be taken, and wait. Raises as ``wait`` does."""
        self._thread.join()
        if self._error is not None and not isinstance(self._error, ConflictError):
            self._error = None
            self._start()
        self.wait()
