"""Where words go: stdout is data, stderr is talk."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from muster.app.api import MusterError, Problem, RunFileError


def result(text: str) -> None:
    """A line of what was asked for."""
    print(text, flush=True)


def as_json(value: Any) -> None:
    """What was asked for, for programs."""
    print(json.dumps(value, indent=1, ensure_ascii=False, default=str), flush=True)


def info(text: str) -> None:
    """A line about what is going on."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Ctrl-C ends the looking (130), not the run, and that is said."""
    import typer

    try:
        yield
    except KeyboardInterrupt:
        info("stopped looking; the run itself is left as it is")
        raise typer.Exit(130) from None


def error(problem: MusterError) -> None:
    """An error, once: what was wrong, and the next command."""
    if isinstance(problem, RunFileError):
        count = len(problem.problems)
        for each in problem.problems:
            info(f"error: {each.render()}")
        if count > 1:
            info(f"{count} problems; nothing was started")
        return
    info(f"error: {problem}")
    if problem.hint:
        info(f"hint: {problem.hint}")


def warnings(problems: Iterable[Problem]) -> None:
    """Knobs without effect."""
    for problem in problems:
        info(f"warning: {problem.render()}")
