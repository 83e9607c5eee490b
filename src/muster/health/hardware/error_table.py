"""The tables of Xid and SXid numbers as typed rows, and what a run file adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from muster.catalog.rows import table, typed
from muster.health.hardware.kernel_log import Family
from muster.health.verdicts import Verdict


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """What is known of some numbers; the fields are explained at the head of ``catalog/health/xid.yaml``."""

    name: str
    numbers: tuple[int, ...]
    what: str
    verdict: Verdict
    source: str
    again: Verdict | None = None
    decides: bool = True
    scope: Literal["gpu", "host"] = "gpu"
    by_line: bool = False
    beside_app: Verdict | None = None
    memory: bool = False

    @property
    def if_again(self) -> Verdict:
        """The verdict when it comes again on the same GPU within a day."""
        return self.again or {Verdict.RESET: Verdict.DRAIN, Verdict.DRAIN: Verdict.REPLACE}.get(
            self.verdict, self.verdict
        )


@dataclass(frozen=True, kw_only=True)
class OwnNumbers:
    """Xid numbers that the run file judges itself (``check.xid_ignore``, ``check.xid_fatal``)."""

    ignore: frozenset[int] = frozenset()
    fatal: frozenset[int] = frozenset()


@cache
def error_rows(family: Family) -> Mapping[int, ErrorRow]:
    """Number -> row. A number that is not there is unknown."""
    name = family.value.lower()
    rows = typed(ErrorRow, table(f"{name}.yaml", "health")[f"{name}s"])
    return {number: row for row in rows.values() for number in row.numbers}
