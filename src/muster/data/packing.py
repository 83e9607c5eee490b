"""Documents into sequences of one length: best fit, longest first, window by window.

A plan of packing is a list of bins, each a list of document numbers; no document is cut here. Within a window of
documents each goes into the fullest bin it fits (best-fit decreasing: within 22 % of the optimum plus a constant,
Johnson 1973). A new window keeps nothing of the one before it, so memory and disorder stay bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from muster.data.arrays import Int64s

#: Documents looked at together; larger packs a little tighter and needs more memory.
WINDOW = 65_536


def pack(lengths: Sequence[int] | Int64s, capacity: int, *, window: int = WINDOW) -> Iterator[list[list[int]]]:
    """Bins of document numbers, window by window, each bin's lengths summing to at most ``capacity``. Deterministic.

    Raises:
        ValueError: a document is longer than ``capacity``, or empty.
    """
    for start in range(0, len(lengths), window):
        part = list(map(int, lengths[start : start + window]))
        if max(part) > capacity or min(part) < 1:
            raise ValueError(f"document lengths must be 1 to {capacity}, got {min(part)} to {max(part)}")
        yield [[start + document for document in each] for each in _pack_window(part, capacity)]


def _pack_window(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins by free space; a bit set of the spaces in use finds the tightest fit in one shift."""
    order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    bins: list[list[int]] = []
    open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0
    for document in order:
        length = lengths[document]
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            number = open_bins[space].pop()
            if not open_bins[space]:
                spaces ^= 1 << space
            bins[number].append(document)
        else:
            space = capacity
            number = len(bins)
            bins.append([document])
        left = space - length
        if left:
            open_bins[left].append(number)
            spaces |= 1 << left
    return bins
