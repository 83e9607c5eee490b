"""Cases by number: the same seed, target and number give the same bytes again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from fuzzing.mutation import mutated

#: Reading what a peer or a file holds takes no longer, in seconds of this process.
LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """``share``: of the cases, relative to the others'; readers that take long get few."""

    name: str
    samples: tuple[bytes, ...]
    read: Callable[[bytes], object]
    raises: tuple[type[Exception], ...]
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A case that ended in none of the ways that its target names."""

    target: str
    number: int
    reason: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.target} #{self.number}: {self.reason}: {self.data[:200]!r}"


def counts(targets: Sequence[Target], cases: int) -> dict[str, int]:
    """How many of the cases each target gets; every one at least one."""
    whole = sum(target.share for target in targets)
    return {target.name: max(1, round(cases * target.share / whole)) for target in targets}


def case(target: Target, number: int, seed: int) -> bytes:
    """The bytes of one case."""
    return mutated(target.samples, Random(f"{seed}/{target.name}/{number}"))


def run(target: Target, numbers: Iterator[int] | range, seed: int) -> Iterator[Finding]:
    """Read each; what went wrong."""
    for number in numbers:
        data = case(target, number, seed)
        reason = attempt(target, data)
        if reason is not None:
            yield Finding(target=target.name, number=number, reason=reason, data=data)


def attempt(target: Target, data: bytes) -> str | None:
    """Why the target did wrong with these bytes; None: it did right."""
    began = time.process_time()
    try:
        target.read(data)
    except target.raises:
        pass
    except Exception as error:  # noqa: BLE001 (that is what is looked for)
        return f"{type(error).__name__}: {str(error)[:200]}"
    spent_s = time.process_time() - began
    return f"{spent_s:.1f} s" if spent_s > LIMIT_S else None
