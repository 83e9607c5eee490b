"""Results go to stdout; diagnostics go to stderr."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator

from muster.app import api


def result(text: str) -> None:
    """One line of the result; of text of others in it nothing is obeyed by a terminal."""
    print(api.printable(text), flush=True)


def drawn(text: str) -> None:
    """Lines of the result that were made printable where they were drawn, and have colours."""
    print(text, flush=True)


def written(text: str) -> None:
    """One line that a program of the run wrote, with its colours where stdout is a terminal."""
    drawn(api.shown(text, colours=sys.stdout.isatty()))


def folded(text: str, hang: int) -> None:
    """One line of the result; on a terminal what is longer goes on ``hang`` columns in, never within a word."""
    columns = width()
    if columns is None or len(text) <= columns:
        return result(text)
    indent = len(text) - len(text.lstrip())
    words = textwrap.wrap(
        text.lstrip(), max(20, columns), initial_indent=" " * indent, subsequent_indent=" " * hang,
        break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
    )  # fmt: skip
    result("\n".join(words))


def as_json(value: object) -> None:
    result(json.dumps(value, indent=1, ensure_ascii=False, default=str))


def info(text: str) -> None:
    print(api.printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Ctrl-C ends this command (130), not the run, and a line says so."""
    import typer

    try:
        yield
    except KeyboardInterrupt:
        info("stopped looking; the run is unchanged")
        raise typer.Exit(130) from None


def error(problem: api.MusterError) -> None:
    """Print an error: what was wrong, and the next command."""
    if isinstance(problem, api.RunFileError):
        count = len(problem.problems)
        for detail in problem.problems:
            info(f"error: {detail.render()}")
        if count > 1:
            info(f"{count} problems; nothing was started")
        return
    info(f"error: {problem}")
    if problem.hint:
        info(f"hint: {problem.hint}")


def warnings(problems: Iterable[api.Problem]) -> None:
    """Settings without effect."""
    for problem in problems:
        info(f"warning: {problem.render()}")


def doubts(sentences: Iterable[str]) -> None:
    """What may go wrong with a run that was started."""
    for sentence in sentences:
        info(f"warning: {sentence}")


def damaged(places: Iterable[api.Damage]) -> None:
    """What had to be left out of an event log: a line for each file."""
    doubts(api.damage_in_words(places))


def width() -> int | None:
    """Columns of the terminal that stdout is; None: it is none."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None


def age(seconds: float | None) -> str:
    """``0.4 s``, ``3 min``, ``2.1 h``, ``2.5 d``; ``-`` for None."""
    if seconds is None:
        return "-"
    for unit, size, digits in (("d", 86_400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{max(0.0, seconds):.1f} s"  # a writer's clock may be ahead of ours
