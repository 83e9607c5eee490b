"""The live tree of ``muster up`` and ``muster down``: redrawn in place on a terminal, a line for each change elsewhere.

The work runs in a thread of its own, rich draws in another: Ctrl-C is handled at once, even while the work waits.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import typer
from rich.console import ConsoleOptions, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment, SegmentLines
from rich.text import Text
from rich.tree import Tree as Drawn

from muster.app import api
from muster.app.cluster.progress_tree import Began, Changed, Event, Progress, Row, Said, Tree
from muster.cli import output

STATES = {"trouble": ("!", "red"), "active": ("*", "yellow"), "pending": (".", "dim"), "done": ("+", "green")}
"""Mark and style of each state; the first stay in sight longest on a small terminal."""
Result = TypeVar("Result")
QUIET = ("looking", "absent")
"""Steps that are not logged."""
INDENT = 4
"""Cells of one level of rich's tree."""


def watched(work: Callable[[Progress], Result], *, again: str, undo: str | None = None, live: bool = True) -> Result:
    """Call ``work`` with somewhere to send its events, draw them, and return what it returns.

    ``again`` is the command that resumes after an interruption, ``undo`` the one that removes what was created.
    Exits with 130 on Ctrl-C: operations that Google has begun continue there and are billed, which is printed.
    """
    events: SimpleQueue[Event | None] = SimpleQueue()
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(work(events.put))
        except BaseException as error:  # noqa: BLE001 (a thread's edge: raised again where the person is)
            ended.set_exception(error)
        events.put(None)

    console = Terminal(stderr=True)
    display = LiveTree(console) if live and sys.stderr.isatty() and console.is_interactive else PlainTree()
    threading.Thread(target=run, daemon=True).start()
    try:
        while True:
            event = events.get()
            if event is None:
                display.close()
                return ended.result()
            display.take(event)
    except KeyboardInterrupt:
        _interrupted(display, again, undo)
        raise typer.Exit(130) from None


class Terminal(api.Console):
    """Never hides the cursor, so that a killed command leaves a usable terminal."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class PlainTree:
    """Prints a line for each change that is news."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.started_s = time.monotonic()
        self._said: dict[str, str] = {}

    def take(self, event: Event) -> None:
        self.tree.take(event, time.monotonic())
        if isinstance(event, Said):
            self.say(event.text)
        elif isinstance(event, Began):
            self.begin(event)
        else:
            self.change(event)

    def begin(self, event: Began) -> None:
        """Another graph of resources is worked on."""
        self._said = {}
        self.say(f"{event.title}: {len(event.nodes)} resources")

    def change(self, event: Changed) -> None:
        """One resource is in another step."""
        if event.step not in QUIET and self._said.get(event.key) != event.step:
            self._said[event.key] = event.step
            row = next(row for row in self.tree.rows(time.monotonic()) if row.key == event.key)
            took = f" ({_length(row.seconds)})" if row.state == "done" and row.seconds is not None else ""
            self.say(f"{event.key}: {row.text}{took}")

    def say(self, text: str) -> None:
        output.info(f"{time.monotonic() - self.started_s:6.0f} s  {plain(text)}")

    def close(self) -> None:
        """Nothing is shown any more."""


class LiveTree(PlainTree):
    """Draws the whole tree again and again, in place."""

    def __init__(self, console: api.Console) -> None:
        super().__init__()
        self.console = console
        self.live: Live | None = None
        self._whole = False
        self._widths: list[int] = []
        """Cells of each line of the picture on the screen."""

    def take(self, event: Event) -> None:
        if isinstance(event, Began):
            self.close()  # the last picture stays as it ended
        super().take(event)

    def begin(self, event: Began) -> None:
        self._whole, self._widths = False, []
        self.live = Live(console=self.console, get_renderable=self._picture, redirect_stdout=False)
        self.live.start(refresh=True)

    def change(self, event: Changed) -> None:
        """The next picture has it."""

    def say(self, text: str) -> None:
        self.console.print(plain(text), markup=False, highlight=False)

    def close(self) -> None:
        self._whole = True
        if self.live is not None:
            self.live.stop()

    def _picture(self) -> RenderableType:
        height = None if self._whole else self.console.height - 1
        drawn = picture(self.tree, time.monotonic(), self.console.options, height)
        lines = self.console.render_lines(drawn, pad=False)
        # A terminal that became narrower has folded the lines of the last picture: rich erases one row for each.
        folded = sum((width - 1) // self.console.width for width in self._widths if width)
        erase = (ControlType.ERASE_IN_LINE, 2)
        if folded:
            self.console.control(Control(ControlType.CARRIAGE_RETURN, *[erase, (ControlType.CURSOR_UP, 1)] * folded))
        self._widths = [Segment.get_line_length(line) for line in lines]
        return SegmentLines(lines, new_lines=True)


def picture(tree: Tree, now_s: float, options: ConsoleOptions, height: int | None = None) -> Group:
    """The tree, one line a row, in at most ``height`` lines: what is at work stays longest."""
    rows = tree.rows(now_s)
    shown = rows if height is None or len(rows) < height else _most_important(rows, max(1, height - 2))
    parents = {row.key: row.parent for row in rows}
    depths: dict[str | None, int] = {None: 0}
    for row in shown:
        # A row whose parent is not shown hangs below the nearest ancestor that is.
        while parents[row.key] not in depths:
            parents[row.key] = parents[str(parents[row.key])]
        depths[row.key] = depths[parents[row.key]] + INDENT
    widest = max((depths[row.key] + len(row.key) for row in shown), default=0)
    room = min(widest, max(16, options.max_width - 24))
    drawn: dict[str | None, Drawn] = {
        None: Drawn(_line(f"{plain(tree.title)}  {_length(now_s - tree.began_s)}", options))
    }
    for row in shown:
        label = _label(row, room - depths[row.key], options.max_width - room, options)
        drawn[row.key] = drawn[parents[row.key]].add(label)
    if len(shown) == len(rows):
        return Group(drawn[None])
    left = [row for row in rows if row not in shown]
    counts = Counter("waiting" if row.state == "pending" else row.text.partition(":")[0] for row in left)
    more = ", ".join(f"{count} {label}" for label, count in counts.items())
    return Group(drawn[None], _line(f"{len(left)} more: {more}", options))


def _label(row: Row, room: int, rest: int, options: ConsoleOptions) -> Text:
    """``* name      creating  3 s``: the name in ``room`` cells, the text in what ``rest`` leaves."""
    mark, style = STATES[row.state]
    name, text = _line(row.key, options), _line(plain(row.text), options, style)
    seconds = "" if row.seconds is None else f"  {_length(row.seconds)}"
    name.truncate(max(1, room), pad=True)
    text.truncate(max(4, rest - 4 - len(seconds)))
    return _line("", options).append(f"{mark} ").append(name).append("  ").append(text).append(seconds)


def _line(text: str, options: ConsoleOptions, style: str = "") -> Text:
    """Text that is cut where the terminal ends."""
    return Text(text, style, no_wrap=True, overflow="crop" if options.ascii_only else "ellipsis")


def _most_important(rows: Sequence[Row], room: int) -> list[Row]:
    """Trouble, then what is at work, then what waits, then what is done; in the tree's order."""
    chosen = sorted(rows, key=lambda row: list(STATES).index(row.state))[:room]
    return [row for row in rows if row in chosen]


def _interrupted(display: PlainTree, again: str, undo: str | None) -> None:
    """Print what exists, and how to resume."""
    bills, making = display.tree.bills(), display.tree.making
    display.close()
    output.info("stopped by you; operations that have begun continue")
    for row in bills:
        price = "its price is not known" if row.usd_per_hour is None else f"about ${row.usd_per_hour:.2f} an hour"
        output.info(f"billed: {row.key} ({row.bills}), {price}")
    if making and not bills:
        output.info("nothing that is billed by the hour had been created, as far as this command saw")
    output.info(f"hint: {again} resumes")
    if undo is not None:
        output.info(f"hint: {undo} removes what was created")


def _length(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def plain(text: str) -> str:
    """Without anything that would move the cursor: text from a service goes to the terminal through this."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
