"""The JobSet that this pod belongs to, as the API server has it; a thread asks, so that no answer holds the pod up."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.pod.continuation import API
from muster.core.errors import MusterError
from muster.core.typed_json import JsonObject, at, child, children, text


@dataclass(kw_only=True)
class OwnJobSet:
    """Named ``NAMESPACE/NAME``."""

    which: str
    connect: Callable[[], Cluster]
    _cluster: Cluster | None = field(default=None)

    def goes(self, timeout_s: float) -> bool | None:
        """Whether all of its pods are taken away (the queue evicts it, or it was deleted); None: no answer."""
        answer = self._look(timeout_s)
        return None if answer is None else all_pods_go(answer[0])

    def age_s(self, timeout_s: float, now: datetime.datetime) -> float | None:
        """Seconds since it was allowed to run; None: no answer."""
        answer = self._look(timeout_s)
        since = runs_since(answer[0]) if answer is not None else None
        return None if since is None else (now - since).total_seconds()

    def _look(self, timeout_s: float) -> tuple[JsonObject | None] | None:
        """(the object or None where it is gone); None: no answer in time."""
        answers: list[tuple[JsonObject | None]] = []

        def ask() -> None:
            namespace, _, name = self.which.partition("/")
            with contextlib.suppress(MusterError, OSError):
                self._cluster = self._cluster or self.connect()
                metadata: JsonObject = {"name": name, "namespace": namespace}
                answers.append((self._cluster.get({"apiVersion": API, "kind": "JobSet", "metadata": metadata}),))

        thread = threading.Thread(target=ask, name="own-jobset", daemon=True)
        thread.start()
        thread.join(timeout_s)
        return answers[0] if answers else None


def all_pods_go(jobset: JsonObject | None) -> bool:
    """Absent, being deleted, or suspended."""
    if jobset is None or text(jobset, "metadata", "deletionTimestamp"):
        return True
    return at(jobset, "spec", "suspend") is True


def runs_since(jobset: JsonObject | None) -> datetime.datetime | None:
    """When it was last resumed, else made: an allocation counts from before that."""
    if jobset is None:
        return None
    resumed = [
        text(row, "lastTransitionTime")
        for row in children(child(jobset, "status"), "conditions")
        if (text(row, "type"), text(row, "status")) == ("Suspended", "False")
    ]
    found = next(iter(resumed), "") or text(jobset, "metadata", "creationTimestamp")
    try:
        return datetime.datetime.fromisoformat(found.replace("Z", "+00:00"))
    except ValueError:
        return None
