"""A console that shows text of others: no control character of it reaches a terminal, only rich's own."""

from __future__ import annotations

from collections.abc import Iterable

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from muster.core.redact import printable


class Console(console.Console):
    """Rich's, with the characters that ``printable`` escapes escaped in all that is drawn."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
