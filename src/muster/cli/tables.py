"""Before and after, as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from muster.app.lines import one_line
from muster.app.summary import Summary

SHOWN_SAMPLES = 5
#: Key of an ``eval`` event -> its words and format.
FIGURES = {
    "loss": ("held-out loss", "{:.4f}"),
    "execution_accuracy": ("execution accuracy", "{:.3f}"),
    "query_match": ("query match", "{:.3f}"),
    "baseline_accuracy": ("majority baseline", "{:.3f}"),
}


def before_and_after(found: Summary) -> Iterator[str]:
    """First and last evaluation side by side, then a few questions and what was written for them."""
    steps = sorted(found.evals)
    if steps:
        first, last = found.evals[steps[0]], found.evals[steps[-1]]
        yield ""
        yield f"{'':<20}  {f'after step {steps[0]}':>16}  {f'after step {steps[-1]}':>16}"
        for key, (words, form) in FIGURES.items():
            if first.get(key) is not None or last.get(key) is not None:
                yield f"{words:<20}  {_figure(first.get(key), form):>16}  {_figure(last.get(key), form):>16}"
    for step in sorted(found.samples)[-1:]:
        yield ""
        yield f"samples after step {step}:"
        for sample in found.samples[step][:SHOWN_SAMPLES]:
            yield from _sample(sample)


def _sample(sample: dict[str, Any]) -> Iterator[str]:
    mark = {True: "right", False: "wrong", None: ""}[sample.get("correct")]
    yield f"  prompt   {one_line(sample['prompt'], 200)}"
    yield f"  wrote    {one_line(sample['completion'], 200)}  {mark}".rstrip()
    if sample.get("correct") is False and sample.get("expected"):
        yield f"  expected {one_line(sample['expected'], 200)}"


def _figure(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
