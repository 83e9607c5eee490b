"""Before and after, and a run's checkpoints, as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from muster.app.api import RunView
from muster.app.inspect.checkpoints import Catalogue, Version
from muster.app.inspect.event_format import one_line
from muster.cli import output

SHOWN_SAMPLES = 5
#: Key of an ``eval`` event -> its label and format.
FIGURES = {
    "loss": ("held-out loss", "{:.4f}"),
    "execution_accuracy": ("execution accuracy", "{:.3f}"),
    "query_match": ("query match", "{:.3f}"),
    "baseline_accuracy": ("majority baseline", "{:.3f}"),
}


def before_and_after(result: RunView) -> Iterator[str]:
    """First and last evaluation side by side, then a few questions and what was written for them."""
    steps = sorted(result.evals)
    if steps:
        first, last = result.evals[steps[0]], result.evals[steps[-1]]
        yield ""
        yield f"{'':<20}  {f'after step {steps[0]}':>16}  {f'after step {steps[-1]}':>16}"
        for key, (words, form) in FIGURES.items():
            if first.get(key) is not None or last.get(key) is not None:
                yield f"{words:<20}  {_figure(first.get(key), form):>16}  {_figure(last.get(key), form):>16}"
    for step in sorted(result.samples)[-1:]:
        yield ""
        yield f"samples after step {step}:"
        for sample in result.samples[step][:SHOWN_SAMPLES]:
            yield from _sample(sample)


def _sample(sample: dict[str, Any]) -> Iterator[str]:
    mark = {True: "right", False: "wrong", None: ""}[sample.get("correct")]
    yield f"  prompt   {one_line(sample['prompt'], 200)}"
    yield f"  wrote    {one_line(sample['completion'], 200)}  {mark}".rstrip()
    if sample.get("correct") is False and sample.get("expected"):
        yield f"  expected {one_line(sample['expected'], 200)}"


def _figure(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def catalogue(result: Catalogue) -> Iterator[str]:
    """One line a version; ``>`` marks what a restart would take."""
    rows: list[tuple[str, ...]] = [("", "step", "attempt", "tier", "age", "size", "layout", "whole", "where")]
    for each in result.versions:
        where = ", ".join(each.hosts) or each.uri
        rest = (output.age(result.age_s(each)), f"{each.bytes / 2**20:.1f} MiB", each.layout, _whole(each), where)
        rows.append((">" if each.used else "", str(each.step), f"a{each.attempt}", each.tier, *rest))
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
