"""Whether a host has what the start of an attempt needs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

#: A host that joins a run under way is ready when its standbys are warm, or after this long.
WARM_S = 10.0


class Readiness:
    """``is_ready``: it has; told once by ``on_ready``, again only after ``lose``."""

    def __init__(
        self,
        *,
        has_all: Callable[[], bool],
        is_joining: Callable[[], bool],
        is_warm: Callable[[], bool],
        on_ready: Callable[[], None],
    ) -> None:
        """``is_joining``: the run began without this host, so the ranks that take steps need not wait for its standbys'
        warm-up."""
        self._has_all, self._is_joining, self._is_warm, self._on_ready = has_all, is_joining, is_warm, on_ready
        self.is_ready = False
        self._warm_by: float | None = None
        """When a host that joins is ready, warm or not; None: it is not yet warming up."""

    def due_s(self) -> float:
        """When time alone makes it ready."""
        return math.inf if self._warm_by is None or not self._has_all() else self._warm_by

    def check(self) -> None:
        if self.is_ready or not self._has_all() or (self._is_joining() and not self._is_warm_enough()):
            return
        self.is_ready, self._warm_by = True, None
        self._on_ready()

    def lose(self) -> None:
        self.is_ready, self._warm_by = False, None

    def _is_warm_enough(self) -> bool:
        if self._warm_by is None:
            self._warm_by = time.monotonic() + WARM_S
        return time.monotonic() >= self._warm_by or self._is_warm()
