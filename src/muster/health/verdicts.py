"""What a look at hardware concludes: one finding per fact, in classes that say what is to be done.

A finding that needs no action is worth keeping (a figure with the one that was expected); one whose tool could not
run, or whose report was cut, is *incomplete* and is never taken for healthy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """From harmless to grave; ``INCOMPLETE`` is outside that order (see ``worst``)."""

    HEALTHY = "healthy"
    APP = "app"  # the user's program or a library: never held against a host
    NOTE = "note"  # shown, nothing follows
    INCOMPLETE = "incomplete"  # a tool could not run, or a report was cut
    RESET = "reset"  # end the ranks, reset the GPU, look again
    DRAIN = "drain"  # the host leaves at the next good moment
    REPLACE = "replace"  # the host leaves now

    @property
    def faulty(self) -> bool:
        """Something is to be done about the host or its GPU."""
        return self in (Verdict.RESET, Verdict.DRAIN, Verdict.REPLACE)


_ORDER = tuple(Verdict)


@dataclass(frozen=True)
class Finding:
    """One fact and what follows from it. Texts are for people; empty where there is nothing to say."""

    check: str
    """What was looked at, dotted: ``gpu.xid``, ``gpu.ecc``, ``net.port``, ``net.busbw``."""
    verdict: Verdict
    message: str
    """One sentence: what is wrong (or was measured), with its value."""
    _: KW_ONLY
    host: str = ""
    gpu: int | None = None
    evidence: str = ""
    """The line or field that shows it, as the tool printed it."""
    value: str = ""
    expected: str = ""
    source: str = ""
    """Where ``expected`` or the rule is from, with a date where figures age."""
    command: str = ""
    """What to type next."""


def worst(findings: Iterable[Finding]) -> Verdict:
    """The gravest verdict; a host that could not be read whole is ``INCOMPLETE``, unless something faulty was found.

    No findings at all are ``INCOMPLETE``: nothing was looked at.
    """
    return max((one.verdict for one in findings), key=_ORDER.index, default=Verdict.INCOMPLETE)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 healthy (notes and the user's own errors included), 6 something is faulty, 1 incomplete."""
    verdict = worst(findings)
    if verdict.faulty:
        return 6
    return 1 if verdict is Verdict.INCOMPLETE else 0
