"""What a data source is: its section of the run file, its rows, and what it needs. One value for each type.

Packages add types by an entry point of the group ``muster.data_sources``, whose name is the ``type`` in run files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.config.sections.sources import SOURCE_TYPES, Source
from muster.core.registry import Registry
from muster.core.typed_json import JsonObject
from muster.data.task import Row

if TYPE_CHECKING:  # a machine that only submits has no numpy
    from muster.data.arrays import Int32s


@dataclass(frozen=True, kw_only=True)
class OpenedSource:
    """A source whose files have been found: what it is (for the fingerprint) and its rows."""

    type: SourceType
    section: Source
    label: str
    """What messages and statistics call it."""
    identity: JsonObject
    """Stands for the rows' content in the fingerprint of prepared data (JSON values)."""
    rows: Callable[[], Iterator[Row]]
    """The training rows from the first one on; called several times."""
    heldout_rows: Callable[[], Iterator[Row]] | None = None
    """None: the source has no held-out part of its own."""
    locate: Callable[[int, bool], str] = lambda index, heldout: f"row {index + 1}"
    """(a row's number from 0, whether of ``heldout_rows``) -> its place, for messages: ``file:line``."""
    expected_rows: int | None = None
    read: Meter | None = None
    """How much of its files the rows given out so far took."""
    token_rows: Callable[[int, int], TokenRows] | None = None
    """(sequence length, vocabulary size) -> rows of token ids, of a source that needs no tokenizer and has no rows."""

    def how_far(self, rows: int, heldout: bool) -> tuple[int, int]:
        """(done, total) after so many rows, in rows or bytes; total 0: not known."""
        if self.read is not None and not heldout:
            return min(self.read.bytes, self.read.total), self.read.total
        return rows, 0 if heldout else max(self.expected_rows or 0, rows)


@dataclass
class Meter:
    """Bytes of files that have been read, of those that there are."""

    bytes: int = 0
    total: int = 0


@dataclass(frozen=True)
class TokenRows:
    """Rows that are token ids already; every token is supervised."""

    count: int
    tokens: int
    """Of each row: one more than its positions."""
    blocks: Iterator[Int32s]
    """End to end all rows."""


@dataclass(frozen=True, kw_only=True)
class SourceType:
    """One type of data source."""

    section: type[Source]
    """Its members of ``data.sources``: a `Source` with ``type`` and keys of its own."""
    open: Callable[[Any], OpenedSource]
    """Find the section's files and identify their content; reads no rows yet.

    Raises UsageError (no such file, or unreadable), AccessError (private, missing), BackendError (unreachable).
    """
    task: str | None = None
    """The task (``muster.tasks``) whose questions its held-out rows ask; None: they ask none."""
    scoring_context: Callable[[Any], JsonObject] = lambda section: {}
    """What the task needs of a section to score answers, beyond the row: ``database``, ``level`` and ``seed``."""


#: The run file's table, whose sections it reads too.
SOURCES: Registry[SourceType] = SOURCE_TYPES


def open_source(section: Source) -> OpenedSource:
    """Open a member of ``data.sources``; errors as ``SourceType.open`` has them."""
    return SOURCES.get(section.type).open(section)
