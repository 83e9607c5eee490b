"""What a person sees while a run trains: a progress line on a terminal, plain lines in a pipe, a table at the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muster.app.api import Event, RunDir, RunSpec, RunView
from muster.app.inspect.event_format import line, step_figures
from muster.cli import output, tables

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Display:
    """Takes a run's events as they come. ``Display`` itself prints plain lines."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.summary = RunView()

    def started(self, run: RunDir) -> None:
        """The run has a folder and is about to start."""
        output.info(f"run {run.run_id} in {run.path}")

    def event(self, event: Event) -> None:
        """Show one event. Never raises for what it does not know."""
        self.summary.add(event)
        self.scroll(event)

    def scroll(self, event: Event) -> None:
        """Print the event's line, of steps every ``log_every_steps``-th and the last."""
        every = self.spec.output.log_every_steps
        if event.kind == "step" and event.step is not None and event.step % every and event.step != self.total():
            return
        text = line(event)
        if text is not None:
            self.print(text)

    def print(self, text: str) -> None:
        """One line of the run."""
        output.result(text)

    def total(self) -> int | None:
        """Steps of the whole run, as soon as they are known."""
        training = self.spec.training
        if training.steps is not None or training.epochs is None or self.summary.data is None:
            return training.steps
        return math.ceil(self.summary.data.sequences * training.epochs / training.global_batch_size)

    def close(self) -> None:
        """Nothing is shown any more."""

    def finish(self, run: RunDir) -> str | None:
        """Print before and after, and where things are; return what went wrong, if anything did."""
        result = self.summary
        for text in tables.before_and_after(result):
            output.result(text)
        if result.outcome == "succeeded":
            output.info(f"done: {result.reason}")
            output.info(f"  folder       {run.path}")
            own = self.spec.command is not None  # its model is known to the script alone
            output.info(f"  hint: muster report {run.run_id}" + ("" if own else f", muster export {run.run_id}"))
            return None
        if result.outcome in ("stopped", "preempted"):
            return f"{result.outcome}: {result.reason}\nhint: muster recover --watch {run.run_id} continues from here"
        reason, _, hint = (result.reason or "the run ended without a verdict").partition(" (hint: ")
        hints = f"hint: {hint.removesuffix(')')}\n" if hint else ""
        return f"error: {reason}\n{hints}hint: muster logs {run.run_id}; its folder is {run.path}"


class LiveDisplay(Display):
    """The same on a terminal: events scroll, the step's numbers are below them."""

    def __init__(self, spec: RunSpec, progress: Progress) -> None:
        super().__init__(spec)
        self.progress = progress
        self.task = progress.add_task("starting", total=None, numbers="")

    def event(self, event: Event) -> None:
        self.summary.add(event)
        if event.kind == "step" and event.step is not None:
            self.progress.update(
                self.task,
                description="training",
                total=self.total(),
                completed=event.step,
                numbers="  ".join(step_figures(self.summary.numbers)),
            )
            return
        sentence = {
            "host.allocated": "preparing data, importing torch",
            "attempt.started": "starting ranks",
            "model.ready": "first step",
            "incident.detected": "recovering",
            "phase.changed": "held; Ctrl-C ends it" if event.phase == "hold" else None,
            "termination.notice": "saving",
        }.get(event.kind)
        if sentence is not None:
            self.progress.update(self.task, description=sentence)
        self.scroll(event)

    def print(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.remove_task(self.task)


@contextmanager
def watching(spec: RunSpec) -> Iterator[Display]:
    """A display for the length of a run, chosen by what stdout is."""
    if not sys.stdout.isatty():
        yield Display(spec)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, refresh_per_second=5) as progress:
        display = LiveDisplay(spec, progress)
        try:
            yield display
        finally:
            display.close()


@contextmanager
def preparing() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for data preparation on a terminal's stderr; a line per stage elsewhere."""
    if not sys.stderr.isatty():
        said: set[str] = set()

        def tell(source: str, done: int, total: int) -> None:
            if source not in said:
                said.add(source)
                output.info(source)

        yield tell
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(source: str, done: int, total: int) -> None:
            if source not in tasks:
                tasks[source] = progress.add_task(source, total=total or None)
            progress.update(tasks[source], completed=done, total=total or None)

        yield show
