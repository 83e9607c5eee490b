"""Before and after, and a run's checkpoints, as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from muster.app.api import RunView
from muster.app.inspect.checkpoints import Catalogue, Version
from muster.app.inspect.event_format import eval_figures, sample_lines
from muster.cli import output

SHOWN_SAMPLES = 5


def before_and_after(result: RunView) -> Iterator[str]:
    """First and last evaluation side by side, then a few questions and what was written for them."""
    steps = sorted(result.evals)
    if steps:
        first, last = (dict(eval_figures(result.evals[step])) for step in (steps[0], steps[-1]))
        yield ""
        yield f"{'':<20}  {f'after step {steps[0]}':>16}  {f'after step {steps[-1]}':>16}"
        for label in {**first, **last}:
            yield f"{label:<20}  {first.get(label, '-'):>16}  {last.get(label, '-'):>16}"
    for step in sorted(result.samples)[-1:]:
        yield ""
        yield f"samples after step {step}:"
        for sample in result.samples[step][:SHOWN_SAMPLES]:
            yield from sample_lines(sample)


def catalogue(result: Catalogue) -> Iterator[str]:
    """One line a version; ``>`` marks what a restart would take."""
    rows: list[tuple[str, ...]] = [("", "step", "attempt", "tier", "age", "size", "layout", "whole", "where")]
    for version in result.versions:
        where = ", ".join(version.hosts) or version.uri
        rest = (
            output.age(result.age_s(version)),
            f"{version.bytes / 2**20:.1f} MiB",
            version.layout,
            _whole(version),
            where,
        )
        rows.append((">" if version.used else "", str(version.step), f"a{version.attempt}", version.tier, *rest))
    if len(rows) == 1:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = (1, 4, 5)
    for row in rows:
        cells = [
            word.rjust(width) if column in right else word.ljust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _whole(version: Version) -> str:
    if version.problem is not None:
        return f"no: {version.problem}"
    if not version.missing:
        return "yes"
    ranks = ", ".join(str(rank) for rank in version.missing[:6]) + (" ..." if len(version.missing) > 6 else "")
    lacking = f"without {'rank' if len(version.missing) == 1 else 'ranks'} {ranks}"
    return f"with the other memory tier; {lacking}" if version.used else f"no: {lacking}"
