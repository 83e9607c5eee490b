"""Random tokens, for benchmarks without data: uniform ids, all supervised, made without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from muster.config.sections.sources import RandomSource
from muster.data.source_type import OpenedSource, SourceType, TokenRows

if TYPE_CHECKING:
    from muster.data.arrays import Int32s

_BLOCK_TOKENS = 1_000_000


def _open(section: RandomSource) -> OpenedSource:
    return OpenedSource(
        type=SOURCE,
        section=section,
        label="random",
        identity=section.model_dump(),
        rows=lambda: iter(()),
        token_rows=lambda length, vocab_size: _token_rows(section, length, vocab_size),
    )


def _token_rows(section: RandomSource, length: int, vocab_size: int) -> TokenRows:
    """Rows from a counter-based generator."""
    import numpy as np  # here: a machine that only submits has none

    tokens = min(section.row_length or length, length) + 1

    def blocks() -> Iterator[Int32s]:
        generator = np.random.Generator(np.random.Philox(section.seed))
        rows = max(1, _BLOCK_TOKENS // tokens)
        for first in range(0, section.rows, rows):
            count = min(rows, section.rows - first) * tokens
            yield generator.integers(0, vocab_size, size=count, dtype=np.int32)

    return TokenRows(count=section.rows, tokens=tokens, blocks=blocks())


SOURCE = SourceType(section=RandomSource, open=_open)
