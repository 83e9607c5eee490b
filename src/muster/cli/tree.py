"""The live tree of ``muster up`` and ``muster down``: redrawn in place on a terminal, a line for each change elsewhere.

The work runs in a thread of its own, and this one draws: Ctrl-C is handled at once, even while the work waits.
"""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer

from muster.cli.live_region import Growing, cut, grows, plain

if TYPE_CHECKING:
    from muster.app.cluster.progress_tree import Event, Progress, Row, Tree

REDRAWN_EVERY_S = 0.5
COLOURS = {"active": "33", "trouble": "31", "done": "32", "pending": "2"}
MARKS = {"active": "*", "trouble": "!", "done": "+", "pending": "."}
Result = TypeVar("Result")
QUIET = ("looking", "absent")
"""Steps that are not logged."""


def watched(work: Callable[[Progress], Result], *, again: str, undo: str | None = None, live: bool = True) -> Result:
    """Call ``work`` with somewhere to send its events, draw them, and return what it returns.

    ``again`` is the command that resumes after an interruption, ``undo`` the one that removes what was created.
    Exits with 130 on Ctrl-C: operations that Google has begun continue there and are billed, which is printed.
    """
    events: SimpleQueue[tuple[str, Any]] = SimpleQueue()

    def run() -> None:
        try:
            events.put(("result", work(lambda event: events.put(("event", event)))))
        except BaseException as error:  # noqa: BLE001 (a thread's edge: raised again where the person is)
            events.put(("error", error))

    display = LiveTree(sys.stderr) if live and grows(sys.stderr) else PlainTree()
    threading.Thread(target=run, daemon=True).start()
    try:
        while True:
            try:
                kind, item = events.get(timeout=REDRAWN_EVERY_S)
            except Empty:
                display.tick()
                continue
            if kind == "event":
                display.take(item)
                continue
            display.close()
            if kind == "error":
                raise item
            outcome: Result = item
            return outcome
    except KeyboardInterrupt:
        _interrupted(display, again, undo)
        raise typer.Exit(130) from None


class PlainTree:
    """Prints a line for each change that is news."""

    def __init__(self) -> None:
        from muster.app.cluster.progress_tree import Tree

        self.tree: Tree = Tree()
        self.started_s = time.monotonic()
        self._said: dict[str, str] = {}

    def take(self, event: Event) -> None:
        """Fold one event, and show it."""
        from muster.app.cluster.progress_tree import Began, Changed, Said

        self.tree.take(event, time.monotonic())
        if isinstance(event, Said):
            self.say(event.text)
        elif isinstance(event, Began):
            self._said = {}
            self.say(f"{event.title}: {len(event.nodes)} resources")
        elif isinstance(event, Changed) and event.step not in QUIET and self._said.get(event.key) != event.step:
            self._said[event.key] = event.step
            row = next(row for row in self.tree.rows(time.monotonic()) if row.key == event.key)
            took = f" ({_length(row.seconds)})" if row.state == "done" and row.seconds is not None else ""
            self.say(f"{event.key}: {row.words}{took}")

    def say(self, text: str) -> None:
        """One line."""
        since = time.monotonic() - self.started_s
        print(f"{since:6.0f} s  {plain(text)}", file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Nothing happened for a while."""

    def close(self) -> None:
        """Nothing is shown any more."""


class LiveTree(PlainTree):
    """Draws the whole tree again and again, in place."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream, self.growing = stream, Growing(stream)
        self._drawn_s = float("-inf")

    def take(self, event: Event) -> None:
        from muster.app.cluster.progress_tree import Began, Said

        if isinstance(event, Began):
            self.close()  # the last picture stays as it ended
        self.tree.take(event, time.monotonic())
        if isinstance(event, Said):
            for line in textwrap.wrap(plain(event.text), self.growing.size()[0], subsequent_indent="  "):
                self.growing.above(line)
        # Looks come many a second; ten pictures a second are enough for anybody.
        if time.monotonic() - self._drawn_s > 0.1 or isinstance(event, (Began, Said)):
            self.tick()

    def tick(self) -> None:
        self._drawn_s = time.monotonic()
        if self.tree.title:
            self.growing.show(self._lines(self.growing.size()))

    def close(self) -> None:
        if self.tree.title:
            self.growing.leave(self._lines((self.growing.size()[0], None)))
            self.tree.title = ""

    def _lines(self, size: tuple[int, int | None]) -> list[str]:
        now_s = time.monotonic()
        encoding = getattr(self.stream, "encoding", None) or "ascii"
        return picture(
            self.tree,
            now_s,
            width=size[0],
            height=size[1],
            ascii_only=not _can(encoding, "├─└│…"),
            colours="NO_COLOR" not in os.environ,
        )


def picture(
    tree: Tree, now_s: float, *, width: int, height: int | None, ascii_only: bool = False, colours: bool = False
) -> list[str]:
    """The tree as lines of at most ``width`` cells, at most ``height`` of them: what is at work stays longest."""
    rows = tree.rows(now_s)
    shown = rows if height is None or len(rows) + 1 <= height else _most_important(rows, max(1, height - 2))
    head = f"{tree.title}  {_length(now_s - tree.began_s)}"
    lines = [cut(plain(head), width)]
    branches = _branches(shown, rows)
    widest = max((len(branch) + len(row.key) for branch, row in zip(branches, shown, strict=True)), default=0)
    room = min(widest, max(16, width - 24))
    for branch, row in zip(branches, shown, strict=True):
        lines.append(_line(row, branch, room, width, colours))
    if len(shown) < len(rows):
        counts = ", ".join(f"{count} {words}" for words, count in _counts([r for r in rows if r not in shown]).items())
        lines.append(cut(f"{len(rows) - len(shown)} more: {counts}", width))
    return [line.translate(_ASCII) for line in lines] if ascii_only else lines


def _line(row: Row, branch: str, room: int, width: int, colours: bool) -> str:
    from rich.cells import cell_len

    name = cut(branch + row.key, room)
    seconds = "" if row.seconds is None else f"  {_length(row.seconds)}"
    words = cut(plain(row.words), max(4, width - room - 4 - len(seconds)))
    start = f"{MARKS[row.state]} {name:<{room}}  "
    if not colours or not words or cell_len(start + words + seconds) > width:
        return cut(start + words + seconds, width)
    return f"{start}\x1b[{COLOURS[row.state]}m{words}\x1b[0m{seconds}"


def _most_important(rows: Sequence[Row], room: int) -> list[Row]:
    """Trouble, then what is at work, then what waits, then what is done; in the tree's order."""
    rank = {"trouble": 0, "active": 1, "pending": 2, "done": 3}
    chosen = sorted(range(len(rows)), key=lambda index: (rank[rows[index].state], index))[:room]
    return [rows[index] for index in sorted(chosen)]


def _branches(shown: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """The prefix of each name; a row whose parent is not shown hangs below the nearest ancestor that is."""
    parents = {row.key: row.parent for row in rows}
    visible = {row.key for row in shown}

    def parent(key: str) -> str | None:
        above = parents[key]
        while above is not None and above not in visible:
            above = parents[above]
        return above

    above = {row.key: parent(row.key) for row in shown}
    last = {above[row.key]: row.key for row in shown}  # the last child of each
    found = []
    for row in shown:
        text, key = "", row.key
        while above[key] is not None:
            is_last = last[above[key]] == key
            ends = ("└─ " if is_last else "├─ ") if key == row.key else ("   " if is_last else "│  ")
            text, key = ends + text, str(above[key])
        found.append(text)
    return found


def _counts(rows: Sequence[Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        words = "waiting" if row.state == "pending" else row.words.partition(":")[0]
        found[words] = found.get(words, 0) + 1
    return found


def _interrupted(display: PlainTree, again: str, undo: str | None) -> None:
    """Print what exists, and how to resume."""
    from muster.cli import output

    bills, making = display.tree.bills(), display.tree.making
    display.close()
    output.info("stopped by you; operations that have begun continue")
    for one in bills:
        price = "its price is not known" if one.usd_per_hour is None else f"about ${one.usd_per_hour:.2f} an hour"
        output.info(f"billed: {one.key} ({one.bills}), {price}")
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


def _can(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


_ASCII = str.maketrans({"├": "|", "└": "`", "│": "|", "─": "-", "…": "~"})
