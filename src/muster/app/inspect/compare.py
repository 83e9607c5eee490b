"""Several runs against each other: what differs in their run files, and what came of it at equal steps and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from muster.app.inspect import sweeps
from muster.app.inspect.report import report
from muster.core import resolved_file
from muster.core.errors import MusterError, UsageError
from muster.core.typed_json import Json, JsonObject, parse_object
from muster.report import api
from muster.report.api import Report
from muster.report.render.compare import Comparison
from muster.storage import run_registry

MEAN_OF_STEPS = 10
"""A loss is the mean over the last so many steps: one step's own goes up and down with its batch."""
MOST_OF_SWEEP = 6
"""Trials of a sweep that are put side by side: more do not fit a terminal. ``muster status SWEEP`` lists all."""
NOT_COMPARED = ("run_dir", "name")


@dataclass(frozen=True, kw_only=True)
class AtEqual:
    """Losses of all runs where each had come equally far; None where one logs no loss."""

    at: int
    """Steps or tokens."""
    loss: Sequence[float | None]
    heldout_step: int | None = None
    """The last step after which all were evaluated."""
    heldout_loss: Sequence[float | None] = ()


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What is known of all of them; None where one has taken no step."""

    run_ids: Sequence[str]
    differences: Mapping[str, Sequence[Json]]
    """Key of the run file -> each run's value."""
    at_step: AtEqual | None
    at_tokens: AtEqual | None
    figures: Comparison

    def to_json(self) -> JsonObject:
        return {
            "runs": list(self.run_ids),
            "differences": {key: list(values) for key, values in self.differences.items()},
            "at_equal_step": None if self.at_step is None else asdict(self.at_step),
            "at_equal_tokens": None if self.at_tokens is None else asdict(self.at_tokens),
            "figures": self.figures.to_json(),
        }


def compare(references: Sequence[str]) -> Compared:
    """Compare these runs. Works while they run, too.

    Raises:
        UsageError: fewer than two, no such run, or one without events.
        MusterError: the resolved file of one cannot be read.
    """
    references = [run for each in references for run in _runs_of(each)]
    if len(references) < 2:
        raise UsageError("compare takes two runs or more", hint="muster compare RUN RUN; muster status lists them")
    runs = [run_registry.find(reference) for reference in references]
    files = []
    for run in runs:
        try:
            files.append(dict(flat(parse_object(resolved_file.read(run.path).encode()))))
        except (OSError, ValueError) as error:
            raise MusterError(f"the run file of {run.run_id} cannot be read: {error}") from error
    reports = [report(str(run.path)) for run in runs]
    return Compared(
        run_ids=[run.run_id for run in runs],
        differences=differences(files),
        at_step=at_equal_step(reports),
        at_tokens=at_equal_tokens(reports),
        figures=api.compare(*reports),
    )


def _runs_of(reference: str) -> list[str]:
    """A sweep is compared by its best trials."""
    found = sweeps.best_runs(reference, MOST_OF_SWEEP)
    return [reference] if found is None else found


def differences(files: Sequence[Mapping[str, Json]]) -> dict[str, list[Json]]:
    """Keys whose values are not the same in all, in the order of the first file that has them."""
    keys = dict.fromkeys(key for file in files for key in file if key not in NOT_COMPARED)
    found = {key: [file.get(key) for file in files] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def at_equal_step(reports: Sequence[Report]) -> AtEqual | None:
    """Where the shortest of them is."""
    lengths = [each.document.final_step or 0 for each in reports]
    if not min(lengths):
        return None
    evals = [{row["step"]: row.get("loss") for row in each.document.evals} for each in reports]
    common = [step for step in evals[0] if isinstance(step, int) and step > 0 and all(step in row for row in evals[1:])]
    last = max(common, default=None)
    heldout = [] if last is None else [_number(row[last]) for row in evals]
    return AtEqual(
        at=min(lengths), loss=[_loss(each, min(lengths)) for each in reports], heldout_step=last, heldout_loss=heldout
    )


def at_equal_tokens(reports: Sequence[Report]) -> AtEqual | None:
    """Where the one with the fewest tokens is: of each, the last step that is within as many."""
    totals = [each.document.tokens for each in reports]
    if not min(totals):
        return None
    reached = [each.ledger.lineage.steps.step_at_tokens(min(totals)) for each in reports]
    losses = [None if last is None else _loss(each, last) for each, last in zip(reports, reached, strict=True)]
    return AtEqual(at=min(totals), loss=losses)


def _loss(of: Report, upto: int) -> float | None:
    steps = of.ledger.lineage.steps
    known = [loss for loss in steps.numbers("loss")[steps.upto(upto)[-MEAN_OF_STEPS:]].tolist() if loss == loss]
    return sum(known) / len(known) if known else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def flat(value: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """``training.optimizer.name`` -> its value; a list counts as one value unless it holds sections."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from flat(item, f"{path}.{index}")
    else:
        yield path, value
