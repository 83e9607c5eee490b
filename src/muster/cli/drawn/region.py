"""The live region of ``muster train``: a bar with the step's numbers, and below it the last incident."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from muster.app import api

NARROW = 100
"""Columns of a terminal below which the bar is short."""


class Region(Progress):
    """Refreshed by its owner alone: a thread of its own would hold, in a terminal that is stopped, the lock that every
    ``update`` takes."""

    incident = ""
    script = ""
    """The line that the user's script is writing."""

    def __init__(self, console: api.Console | None = None) -> None:
        console = console or api.Console()
        bar = 24 if console.width >= NARROW else 10
        self.room = console.width - bar - len("s preparing  ") - 1
        """Columns for the step's numbers."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=bar),
            TextColumn("{task.fields[numbers]}"),
        )
        super().__init__(*columns, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, the script's own, and the incident where there was one, cut where the terminal ends."""
        yield from super().get_renderables()
        if self.script:
            yield Text.from_ansi(self.script, no_wrap=True, overflow="ellipsis")
        if self.incident:
            yield Text(f"  {self.incident}", style="yellow", no_wrap=True, overflow="ellipsis")
