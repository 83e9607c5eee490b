"""What makes a bucket unkind: time, the limit of each object, answers that fail or get lost. And the bill."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import dataclass

from fakes.gcs.objects import Refused

#: The classes of Google's price list; what it does not name (pieces of an upload) is free.
CLASS_A = {
    "buckets.insert", "buckets.list", "objects.compose", "objects.copy", "objects.insert", "objects.list",
    "objects.move", "objects.patch", "objects.restore", "objects.rewrite", "objects.update",
}  # fmt: skip
CLASS_B = {"buckets.get", "buckets.getStorageLayout", "objects.get"}


@dataclass(frozen=True)
class Latency:
    """Seconds from a request to its answer: log-normal. The defaults are a bucket in the run's own region."""

    median_s: float = 0.060
    p99_s: float = 0.300

    def draw(self, chance: random.Random) -> float:
        return chance.lognormvariate(math.log(self.median_s), math.log(self.p99_s / self.median_s) / 2.326)


@dataclass(frozen=True)
class Faults:
    """Probabilities, for each request: ``unavailable`` is 503 and nothing done, ``lost`` is done, and the connection
    ends without an answer."""

    unavailable: float = 0.01
    lost: float = 0.002


class Weather:
    """The draws of one seed; not thread-safe."""

    def __init__(self, latency: Latency | None, faults: Faults | None, seed: int) -> None:
        self.latency, self.faults, self.chance = latency, faults, random.Random(seed)

    def draw(self) -> tuple[float, bool, bool]:
        """(seconds until the answer, whether it is 503, whether it is lost) of the next request."""
        wait_s = self.latency.draw(self.chance) if self.latency else 0.0
        faults = self.faults or Faults(0, 0)
        return wait_s, self.chance.random() < faults.unavailable, self.chance.random() < faults.lost


class Limit:
    """Mutations of one object: ``per_s`` a second and no burst. What was refused does not count; not thread-safe."""

    def __init__(self, per_s: float | None) -> None:
        self.apart_s = 1 / per_s if per_s else 0.0
        self.last: dict[tuple[str, str], float] = {}

    def check(self, bucket: str, *names: str) -> None:
        """Raises Refused (429) where one of the objects was changed a moment ago; else all of them are changed now."""
        now = time.monotonic()
        for name in names:
            if self.apart_s and now - self.last.get((bucket, name), -math.inf) < self.apart_s:
                raise Refused(
                    429, "rateLimitExceeded",
                    f"The object {bucket}/{name} exceeded the rate limit for object mutation operations (create, "
                    "update, and delete). Please reduce your request rate. See "
                    "https://cloud.google.com/storage/docs/gcs429.",
                )  # fmt: skip
        self.last |= {(bucket, name): now for name in names}


class Bill:
    """Requests by class (``A``, ``B``, ``free``, ``refused``: 4xx and 5xx cost nothing) and by operation."""

    def __init__(self) -> None:
        self.anew()

    def anew(self) -> None:
        """Forget what was counted."""
        self.classes: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.since_s = time.monotonic()

    def add(self, operation: str, *, refused: bool = False) -> None:
        kind = "A" if operation in CLASS_A else "B" if operation in CLASS_B else "free"
        self.classes["refused" if refused else kind] += 1
        self.operations[operation] += not refused

    def per_hour(self) -> dict[str, float]:
        """Requests of each class an hour, at the rate since ``anew``."""
        hours = max(time.monotonic() - self.since_s, 1e-3) / 3600
        return {kind: self.classes[kind] / hours for kind in ("A", "B", "free", "refused")}
