"""A plan as one self-contained page: cost against finish time, the plans that nothing beats, and why not the others."""

from __future__ import annotations

from pathlib import Path

from muster.app.planning.plan import Planned
from muster.core.typed_json import Json, JsonObject
from muster.report.render import page

#: Of a plan's document: the run file's own text has no place on a page that is passed on.
_LEFT_OUT = ("run_text", "spec", "spec_digest", "settings")


def render(result: Planned) -> str:
    """The page. It loads nothing from anywhere."""
    plan = {key: value for key, value in result.plan.to_json().items() if key not in _LEFT_OUT}
    taken = {way.title for way in result.plan.frontier}
    others = [point for point in _points(result) if point["title"] not in taken]
    data: dict[str, Json] = {"plan": plan, "others": others, "limits": result.limits}
    return page.fill(data, title=f"{result.plan.job} · Muster plan", scripts=("plan.js",), plain="muster plan RUN.yaml")


def write(result: Planned, target: str) -> Path:
    """Write the page and return its path.

    Raises:
        UsageError: the file cannot be written.
    """
    return page.write(render(result), target, hint="choose another place with --html")


def _points(result: Planned) -> list[JsonObject]:
    """Everything else that fits, at its best setting."""
    return [
        {
            "title": candidate.title,
            "accelerator": candidate.option.offer.accelerator,
            "gpus": candidate.gpus,
            "hours": {"p50": candidate.cost.hours_p50, "p90": candidate.cost.hours_p90},
            "usd": {"p50": candidate.cost.usd_p50, "p90": candidate.cost.usd_p90},
        }
        for candidate in result.outcome.candidates
    ]
