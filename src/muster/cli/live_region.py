"""Lines on a terminal that are written again in place. It keeps to the screen's height and never hides the cursor."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TextIO

LEAST_COLUMNS, LEAST_LINES = 20, 4
USUAL = (80, 24)


class Growing:
    """A picture at the bottom of the terminal. The cursor is always at the start of the line below it.

    ``size`` says (columns, lines) now; a terminal may be resized between two pictures.
    """

    def __init__(self, stream: TextIO, size: Callable[[], tuple[int, int]] | None = None) -> None:
        self.stream = stream
        self._size = size or (lambda: terminal_size(stream))
        self._widths: list[int] = []
        """Cells of each line of the picture on the screen."""

    def size(self) -> tuple[int, int]:
        """Columns and lines that a picture may use."""
        columns, lines = self._size()
        return max(LEAST_COLUMNS, columns - 1), max(LEAST_LINES, lines - 1)

    def show(self, lines: Sequence[str]) -> None:
        """Put these in place of the last picture; what does not fit on the screen is left out at the end."""
        _, height = self.size()
        self._replace(lines[:height])

    def above(self, line: str) -> None:
        """A line that stays, above the picture, which has to be shown again."""
        self._replace([line])
        self._widths = []

    def leave(self, lines: Sequence[str]) -> None:
        """The last picture, whole: it stays, and may scroll."""
        self._replace(lines)
        self._widths = []

    def _replace(self, lines: Sequence[str]) -> None:
        columns, height = self._size()
        # A terminal that became narrower has folded the lines of the last picture.
        rows = min(sum(1 + max(0, width - 1) // max(1, columns) for width in self._widths), max(1, height) - 1)
        text = "\r" + (f"\x1b[{rows}A" if rows else "") + "\x1b[J"
        # First, because Ctrl-C may come in the middle of writing: what is buffered by then is written all the same.
        self._widths = [cells(line) for line in lines]
        self.stream.write(text + "".join(f"{line}\r\n" for line in lines))
        self.stream.flush()


def grows(stream: TextIO) -> bool:
    """Whether the stream is a terminal on which the cursor can be moved."""
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except ValueError:  # closed
        return False


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and lines; some terminals (of build machines) say 0."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return USUAL
    return columns or USUAL[0], lines or USUAL[1]


def plain(text: str) -> str:
    """Without anything that would move the cursor: text from a service goes to the terminal through this."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def cut(text: str, width: int) -> str:
    """At most so many cells."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def cells(line: str) -> int:
    """How wide a line is, colours aside."""
    import re

    from rich.cells import cell_len

    return cell_len(re.sub(r"\x1b\[[0-9;]*m", "", line))
