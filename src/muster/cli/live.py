"""What a person sees while a run trains: a progress line on a terminal, plain lines in a pipe, a table at the end."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muster.app import api
from muster.app.api import Event, RunDir, RunSpec, RunView
from muster.app.inspect.event_format import Narrator, line, short_time, step_figures, total_steps
from muster.app.run.script_output import ScriptOutput
from muster.cli import output, tables

if TYPE_CHECKING:
    from rich.progress import TaskID

    from muster.cli.drawn.region import Region


#: Whose output is shown; None: everybody's.
Ranks = frozenset[int] | None
NO_RANK: Ranks = frozenset()
LOOK_EVERY_S = 0.2


class Display(api.Sink):
    """Takes a run's events as they come, in a thread of its own. ``Display`` itself prints plain lines."""

    name = "stdout"
    shows_run = True
    tend_every_s = LOOK_EVERY_S

    def __init__(self, spec: RunSpec, ranks: Ranks = NO_RANK) -> None:
        self.spec = spec
        self.ranks = ranks
        self.script: ScriptOutput | None = None
        self._looked = 0.0
        self.summary = RunView()
        self.run: RunDir | None = None
        self.line = Narrator()
        self.doubts: tuple[str, ...] = ()
        """What may go wrong with it besides."""
        self.silent = False
        """stdout takes no more."""

    def started(self, run: RunDir, doubts: tuple[str, ...] = ()) -> None:
        """The run has a folder and is about to start. Prints nothing yet: it may be called from any thread."""
        self.run, self.doubts = run, doubts
        self.line = Narrator(run.path)
        if self.ranks != NO_RANK:
            self.script = ScriptOutput(run.logs, self.ranks)

    def open(self) -> None:
        """Say which run this is, and how to leave it."""
        if self.run is not None:
            self.info(f"run {self.run.run_id} in {self.run.path}")
            for sentence in self.doubts:
                self.info(f"warning: {sentence}")

    def info(self, text: str) -> None:
        """One line on stderr, which may be gone while stdout is not."""
        with contextlib.suppress(OSError):
            output.info(text)

    def event(self, event: Event) -> None:
        """Show one event. Never raises for what it does not know."""
        self.summary.add(event)
        if not self.silent:
            if event.kind != "step" or time.monotonic() > self._looked + LOOK_EVERY_S:
                self.tell_output()  # it was written before
            self.show(event)

    def tend(self) -> None:
        if not self.silent:
            self.tell_output()

    def tell_output(self, *, last: bool = False) -> None:
        """What ranks have written since."""
        if self.script is not None and (lines := self.script.look(last=last)):
            self.print_script("\n".join(lines))
        self._looked = time.monotonic()

    def show(self, event: Event) -> None:
        """On stdout."""
        self.scroll(event)

    def left_out(self, count: int) -> None:
        """The terminal or the pipe took nothing for a while."""
        if not self.silent:
            self.print(f"({count} lines left out: muster events {self.run.run_id if self.run else 'last'} has all)")

    def gone(self, why: str) -> bool:
        """stderr still gets the verdict."""
        if self.silent:
            return False
        self.silent = True
        if self.run is not None:
            run_id = self.run.run_id
            self.info(f"{why}: the run goes on; muster logs -f {run_id} shows it, muster stop {run_id} ends it")
        return True

    def scroll(self, event: Event) -> None:
        """Print the event's line."""
        text = self.line(event)
        if text is not None:
            self.print(text)

    def print(self, text: str) -> None:
        output.result(text)

    def print_script(self, text: str) -> None:
        """Lines that a rank has written: nothing but colours of what a terminal obeys is left in them."""
        output.drawn(text)

    def total(self) -> int | None:
        """Steps of the whole run, as soon as they are known."""
        return total_steps(self.spec, self.summary.data)

    def close(self) -> None:
        """Nothing moves any more."""

    def end(self, code: int | None) -> None:
        """The run's last lines, and its verdict."""
        if not self.silent:
            self.tell_output(last=True)
            self.close()
        if self.run is not None and code is not None and (problem := self.finish(self.run)) is not None:
            self.info(problem)

    def finish(self, run: RunDir) -> str | None:
        """Print before and after, and where things are; return what went wrong, if anything did."""
        result = self.summary
        for text in () if self.silent else tables.before_and_after(result):
            output.result(text)
        if result.outcome == "succeeded":
            self.info(f"done: {result.reason}")
            self.info(f"  folder       {run.path}")
            own = self.spec.command is not None  # its model is known to the script alone
            self.info(f"  hint: muster report {run.run_id}" + ("" if own else f", muster export {run.run_id}"))
            return None
        if result.outcome in ("stopped", "preempted"):
            return f"{result.outcome}: {result.reason}\nhint: muster recover --watch {run.run_id} continues from here"
        reason, _, hint = (result.reason or "the run ended without a verdict").partition(" (hint: ")
        hints = f"hint: {hint.removesuffix(')')}\n" if hint else ""
        return f"error: {reason}\n{hints}hint: muster logs {run.run_id}; its folder is {run.path}"


def show_cursor() -> None:
    """Show stdout's cursor, which a progress line that did not come to its end has left hidden. Never waits.

    By a descriptor of its own: one that does not block would be shared with the shell.
    """
    with contextlib.suppress(OSError, ValueError):
        terminal = os.open(os.ttyname(sys.stdout.fileno()), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.write(terminal, b"\x1b[?25h")
        finally:
            os.close(terminal)


class LiveDisplay(Display):
    """The same on a terminal: events scroll, the step's numbers and the last incident are below them."""

    def __init__(self, spec: RunSpec, progress: Region, ranks: Ranks = NO_RANK) -> None:
        super().__init__(spec, ranks)
        self.progress = progress
        self.task = progress.add_task("starting", total=None, numbers="")
        self._drawn = 0.0

    def open(self) -> None:
        super().open()
        self.info("Ctrl-C saves and ends it; closing this terminal leaves it running")
        self.progress.start()

    def gone(self, why: str) -> bool:
        """Its progress line cannot be taken away in order."""
        show_cursor()
        return super().gone(why)

    def tend(self) -> None:
        super().tend()
        if not self.silent:
            self.progress.script = self.script.unended if self.script is not None else ""
            self.progress.refresh()
            self._drawn = time.monotonic()

    def show(self, event: Event) -> None:
        if event.kind == "step" and event.step is not None:
            self.progress.update(
                self.task,
                description="training",
                total=self.total(),
                completed=event.step,
                numbers=self.numbers(event.step),
            )
            if time.monotonic() > self._drawn + LOOK_EVERY_S:
                self.tend()
            return
        if event.kind in ("incident.detected", "incident.resolved"):
            count = self.summary.incident_count
            self.progress.incident = f"{count} incident{'s' * (count != 1)}; {line(event)}"
        sentence = {
            "host.allocated": "preparing data, importing torch",
            "attempt.started": "starting ranks",
            "model.ready": "first step",
            "incident.detected": "recovering",
            "phase.changed": self._sentence_of(event.phase),
            "termination.notice": "saving",
        }.get(event.kind)
        if sentence is not None:
            self.progress.update(self.task, description=sentence)
        self.scroll(event)

    def _sentence_of(self, phase: str | None) -> str | None:
        if phase == "start" and self.spec.command is not None:
            return "running"
        return "held; Ctrl-C ends it" if phase == "hold" else None

    def numbers(self, step: int) -> str:
        """``12/400  ETA 3 min  loss 2.3451  8,812 tokens/s  MFU 35.5%``: what is known, and fits."""
        total, pace = self.total(), self.summary.step_every_s
        eta = [] if total is None or pace is None else [f"ETA {short_time((total - step) * pace)}"]
        parts = [f"{step}/{total}" if total else f"step {step}", *eta, *step_figures(self.summary.numbers)]
        while len(text := "  ".join(parts)) > self.progress.room and len(parts) > 1:
            parts.pop()
        return text

    def print(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def print_script(self, text: str) -> None:
        from rich.text import Text

        self.progress.console.print(Text.from_ansi(text), highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.script = ""  # it has just been printed as a line
        self.progress.remove_task(self.task)
        self.progress.stop()


def display_of(spec: RunSpec, ranks: str | None = None) -> Display:
    """The display of a run, chosen by what stdout is. ``ranks``: whose output is shown, as in ``0,3`` or ``all``; by
    default that of a script's rank 0.

    Raises:
        UsageError: ``ranks`` names none.
    """
    shown = _ranks(ranks) if ranks is not None else frozenset({0}) if spec.command is not None else NO_RANK
    if not sys.stdout.isatty():
        return Display(spec, shown)
    from muster.cli.drawn.region import Region

    return LiveDisplay(spec, Region(), shown)


def _ranks(given: str) -> Ranks:
    if given == "all":
        return None
    numbers = given.split(",")
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise api.UsageError(f"--ranks: {given!r} names no ranks", hint="--ranks 0,3 or --ranks all")
    return frozenset(map(int, numbers))


#: Seconds between two lines about data preparation.
_PREPARING_S = 10.0


@contextmanager
def preparing() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for data preparation on a terminal's stderr; elsewhere a line per stage, and one each 10 s."""
    if not sys.stderr.isatty():
        said: dict[str, float] = {}

        def tell(source: str, done: int, total: int) -> None:
            now = time.monotonic()
            if now - said.get(source, -math.inf) >= _PREPARING_S:
                said[source] = now
                output.info(f"{source}: {done / total:.0%}" if done and total else source)

        yield tell
        return
    from rich.progress import Progress

    with Progress(console=api.Console(stderr=True), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(source: str, done: int, total: int) -> None:
            if source not in tasks:
                tasks[source] = progress.add_task(source, total=total or None)
            progress.update(tasks[source], completed=done, total=total or None)

        yield show
