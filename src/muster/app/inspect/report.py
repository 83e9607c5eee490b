"""Report: from a run's event log to its ledger and figures. Works offline, years later."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from pathlib import Path

from muster.app.inspect.home_view import bring
from muster.app.inspect.status import spec_of
from muster.core.errors import MusterError, UsageError
from muster.core.typed_json import JsonObject
from muster.report import api
from muster.report.api import Report
from muster.report.render import page
from muster.storage import run_registry


def report(reference: str, *, reference_tokens_per_s: float | None = None, brought: bool = False) -> Report:
    """The report of the run that ``reference`` names, or of a folder or file of events. ``brought``: its events are
    here as they are now, wherever the run lives.

    Raises:
        UsageError: no such run, or it has no events; or a reference that is not a rate.
    """
    given = reference_tokens_per_s
    if given is not None and not (math.isfinite(given) and given > 0):
        raise UsageError(f"--reference-tokens-per-s must be above 0, got {given:g}")
    if not brought:
        _bring(reference)
    return api.load(_place(reference), reference_tokens_per_s=reference_tokens_per_s)


def _bring(reference: str) -> None:
    with contextlib.suppress(MusterError):
        run = run_registry.find(reference)
        bring(run, spec_of(run).backend, "events")


def _place(reference: str) -> Path:
    try:
        return run_registry.find(reference).path
    except UsageError:
        place = Path(os.path.expanduser(reference))
        if not os.path.exists(place):
            raise
        return place


def table(result: list[Report]) -> str:
    """The report for a terminal; of several runs side by side, each against the first."""
    width = max(60, min(160, shutil.get_terminal_size((100, 24)).columns))
    if len(result) == 1:
        return api.render_table(result[0], width=width)
    return api.render_comparison(api.compare(*result), width=width)


def to_json(result: list[Report]) -> JsonObject:
    """The same for programs."""
    return result[0].to_json() if len(result) == 1 else api.compare(*result).to_json()


def write_page(result: Report, reference: str, target: str | None) -> Path:
    """Write the page to ``target``, or as ``report.html`` into the run's folder; return its path.

    Raises:
        UsageError: the file cannot be written.
    """
    place = _place(reference)
    path = target or (place if place.is_dir() else place.parent) / "report.html"
    return page.write(api.render_html(result), path, hint="choose another place with --output")
