"""Which documents train, which are held out, and how often: arithmetic on row numbers, the same everywhere.

No random stream is used: rows are ordered by a keyed hash of their number, so the choice does not change with a
library's version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from muster.data.arrays import Bytes, Float32s, Int64s
from muster.data.schedule import hashed_order

Overlong = Literal["drop", "split", "truncate"]


@dataclass(frozen=True)
class Documents:
    """Documents as ranges of one token array. A document of n tokens takes n - 1 positions."""

    rows: Int64s
    """The row each comes from"""
    starts: Int64s
    """First token"""
    lengths: Int64s
    """Positions"""
    seconds: Int64s = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Where a second document begins in the same range (preferences); 0: nowhere. None given: nowhere in any."""
    grades: Float32s = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """Of preferences: by how much a pair's first answer is better, or whether an answer is good (1) or bad (-1)."""

    def __post_init__(self) -> None:
        for name in ("seconds", "grades"):
            if len(array := getattr(self, name)) != len(self.rows):
                object.__setattr__(self, name, np.zeros(len(self.rows), dtype=array.dtype))

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def take(self, positions: Int64s | NDArray[np.bool_]) -> Documents:
        return Documents(**{each.name: getattr(self, each.name)[positions] for each in fields(self)})


def joined(parts: Sequence[Documents]) -> Documents:
    """Those of all parts, in order."""
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return Documents(none, none, none)
    names = [each.name for each in fields(Documents)]
    return Documents(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


#: What is counted of rows: over-long ones by what became of them, ones without a token, ones whose answer is empty,
#: documents left out because none of their targets counts, and rows of which no document remained for that reason;
#: over-long answers of conversations of which a shorter one fits.
COUNTS = ("dropped", "truncated", "split", "empty", "empty_completions", "masked", "masked_rows", "dropped_answers")


def cut(
    row_tokens: Int64s,
    supervised: Bytes,
    *,
    length: int,
    on_overlong: Overlong,
    first_token: int = 0,
    of_rows: Int64s | None = None,
    seconds: Int64s | None = None,
    grades: Float32s | None = None,
    shares_room: bool = False,
) -> tuple[Documents, dict[str, int]]:
    """Rows of ``row_tokens[i]`` tokens, end to end from ``first_token`` of the token array on, as documents of at most
    ``length`` positions; and the ``COUNTS``. ``supervised``: the mask of these rows. ``of_rows``: the number of the
    row that each is of, where several are of one. ``seconds``, ``grades``: of each, as in ``Documents``;
    ``shares_room``: a second document is stored in the first one's place of another store, so the longer one counts.

    A split row's parts share one token (the last target of one is the first input of the next), so no
    prediction is lost. Documents without a supervised target are left out.
    """
    row_starts = np.cumsum(row_tokens) - row_tokens
    positions = row_tokens - 1
    long = (positions if not shares_room or seconds is None else room(positions, seconds)) > length
    keep = positions >= 1
    parts = np.ones(len(row_tokens), dtype=np.int64)
    if on_overlong == "drop":
        keep = keep & ~long
    elif on_overlong == "truncate":
        positions = np.minimum(positions, length)
    else:
        parts = np.where(long, -(-positions // length), 1)
    parts = np.where(keep, parts, 0)
    of_rows = np.arange(len(row_tokens)) if of_rows is None else of_rows
    places = np.repeat(np.arange(len(row_tokens)), parts)
    rows = of_rows[places]
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = row_starts[places] + number * length
    lengths = np.minimum(positions[places] - number * length, length)
    long_rows = np.unique(of_rows[long])
    shortened = np.isin(long_rows, of_rows[keep]) if on_overlong == "drop" else np.zeros(len(long_rows), dtype=bool)
    documents = Documents(rows=rows, starts=starts, lengths=lengths)
    if seconds is not None and grades is not None:
        documents = replace(documents, seconds=seconds[places], grades=grades[places])
    useful = targets(documents, supervised) > 0
    outcome = {"drop": "dropped", "truncate": "truncated", "split": "split"}[on_overlong]
    counts = {
        **dict.fromkeys(COUNTS, 0),
        outcome: len(long_rows) - int(shortened.sum()),
        "dropped_answers": int(np.isin(of_rows[long], long_rows[shortened]).sum()),
        "empty": int((row_tokens < 2).sum()),
        "masked": int((~useful).sum()),
        "masked_rows": len(np.unique(rows)) - len(np.unique(rows[useful])),
    }
    return replace(documents, starts=starts + first_token).take(useful), counts


def room(positions: Int64s, seconds: Int64s) -> Int64s:
    """Positions that the longer of two documents takes which share a range."""
    result: Int64s = np.maximum(seconds - 1, positions - seconds)
    return result


def targets(documents: Documents, supervised: Bytes) -> Int64s:
    """Targets of each document that count; ``supervised``: the mask of the tokens that ``documents`` are ranges of."""
    counted = np.concatenate([[0], np.cumsum(supervised, dtype=np.int64)])
    result: Int64s = counted[documents.starts + documents.lengths + 1] - counted[documents.starts + 1]
    return result


def hold_out(
    documents: Documents, fraction: float, *, parts_are_apart: bool = True
) -> tuple[Documents, Documents, Int64s]:
    """(train, held out, held-out row numbers): whole rows, at least one where there are two or more.

    A single row (one long text) gives up the last part of its documents instead, if ``parts_are_apart`` (those of a
    chat begin alike); then no row number is held out.
    """
    none = np.zeros(0, dtype=np.int64)
    present = np.unique(documents.rows)
    if fraction <= 0 or len(documents) < 2 or (len(present) == 1 and not parts_are_apart):
        return documents, documents.take(none), none
    if len(present) == 1:
        count = max(1, math.floor(fraction * len(documents)))
        positions = np.arange(len(documents))
        return documents.take(positions[:-count]), documents.take(positions[-count:]), none
    count = min(len(present) - 1, max(1, round(fraction * len(present))))
    chosen = np.sort(present[hashed_order(len(present), "heldout")[:count]])
    out = np.isin(documents.rows, chosen)
    return documents.take(~out), documents.take(out), chosen


def mix_rows(parts: Sequence[Documents], weights: Sequence[float], by_row: Sequence[bool]) -> list[Documents]:
    """The documents of an epoch of the mixture, for each source.

    Weights are shares of documents; of rows where ``by_row``, since a chat is as many documents as its template makes.
    """
    units = [
        np.unique(part.rows, return_inverse=True)[1] if whole else np.arange(len(part))
        for part, whole in zip(parts, by_row, strict=True)
    ]
    uses = mix([int(unit.max()) + 1 if len(unit) else 0 for unit in units], weights)
    result = []
    for part, unit, use in zip(parts, units, uses, strict=True):
        result.append(part.take(np.repeat(np.arange(len(part)), use[unit])))
    return result


def mix(rows: Sequence[int], weights: Sequence[float]) -> list[Int64s]:
    """How often each row of each source is used in an epoch of the mixture: one int64 array a source.

    Shares of rows follow the weights. The source that its weight favours least is used exactly once; the others
    repeat, the remainder being the first of a fixed random order. Sources of equal weight and unequal size thus
    repeat the smaller one.
    """
    shares = [weight / sum(weights) for weight in weights]
    total = max(count / share for count, share in zip(rows, shares, strict=True))
    result = []
    for place, (count, share) in enumerate(zip(rows, shares, strict=True)):
        target = max(round(total * share), 1) if count else 0
        whole, rest = divmod(target, count) if count else (0, 0)
        uses = np.full(count, whole, dtype=np.int64)
        uses[hashed_order(count, f"mixture-{place}")[:rest]] += 1
        result.append(uses)
    return result
