"""Runs, one run, before and after, and a run's checkpoints, as plain text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from muster.app.inspect.event_format import eval_figures, sample_lines
from muster.cli import output

if TYPE_CHECKING:  # `train` prints one of these tables, and starts without what the others are made of
    from muster.app.api import RunDir, RunView
    from muster.app.inspect.checkpoints import Catalogue, Version
    from muster.app.inspect.compare import Compared
    from muster.app.inspect.status import RunStatus
    from muster.app.inspect.sweeps import SweepView, TrialView

SHOWN_SAMPLES = 5


def runs(found: Sequence[RunStatus], now_ns: int, width: int | None) -> Iterator[str]:
    """A line a run, in at most ``width`` columns: where it would be longer, its folder moves to a line of its own, then
    its id does. None: as long as it takes. A column that says nothing of any run is left out."""
    head = ("run", "state", "age", "step", "ETA", "loss", "cost")
    rows = [head, *((each.run.run_id, *_figures(each, now_ns)) for each in found)]
    shown = [
        column
        for column in range(len(head))
        if column < 4 or any(row[column] not in ("-", "$0.00") for row in rows[1:])
    ]
    rows = [tuple(row[column] for column in shown) for row in rows]
    folders = ["folder", *(_folder(each.run) for each in found)]
    whole = aligned([(*row, folder) for row, folder in zip(rows, folders, strict=True)], left=(0, 1, len(shown)))
    if width is None or max(map(len, whole)) <= width:
        yield from whole
        return
    short = aligned(rows, left=(0, 1))
    fits = max(map(len, short)) <= width
    if not fits:
        short = aligned([row[1:] for row in rows], left=(0,))
        yield f"  {short[0]}"
    else:
        yield short[0]
    for each, line, folder in zip(found, short[1:], folders[1:], strict=True):
        if not fits:
            yield each.run.run_id
        yield line if fits else f"  {line}"
        if folder != "-":
            yield f"  {folder}"


def _figures(found: RunStatus, now_ns: int) -> tuple[str, ...]:
    """State, age, step of total, ETA, loss, cost."""
    said, phase = found.summary, found.live.phase if found.live else "run"
    step = "-" if said.last_step is None else f"{said.last_step:,}"
    return (
        found.status.state.value + ("" if phase == "run" else f" ({phase})"),
        "-" if said.began_ns is None else output.age((now_ns - said.began_ns) / 1e9),
        f"{step}/{said.total_steps:,}" if said.total_steps else step,
        "-" if found.eta_s is None else output.age(found.eta_s),
        "-" if said.final_loss is None else f"{said.final_loss:.4f}",
        "-" if said.usd is None else money(said.usd),
    )


def _folder(run: RunDir) -> str:
    """Where it is, if that does not follow from its id."""
    return "-" if run.is_at_home else short_path(run.path)


def short_path(path: Path) -> str:
    """``path``, with ``~`` for the user's home."""
    home = os.path.expanduser("~").rstrip("/")
    return f"~{str(path)[len(home) :]}" if home and str(path).startswith(home + "/") else str(path)


def one_run(found: RunStatus, now_ns: int) -> Iterator[str]:
    """Where a run is, and why. What is unknown, and what says nothing, is left out."""
    said, live = found.summary, found.live
    yield f"{found.run.run_id}: {found.status.state.value}: {found.status.reason}"
    steps = None if said.last_step is None else f"{said.last_step:,}"
    eta = f", {output.age(found.eta_s)} to go" if found.eta_s is not None else ""
    began = f"{output.age((now_ns - said.began_ns) / 1e9)} ago" if said.began_ns is not None else None
    rows: list[tuple[str, str | None]] = [
        ("now", live.reason if live else None),
        ("step", (steps and said.total_steps and f"{steps} of {said.total_steps:,}{eta}") or steps),
        ("loss", None if said.final_loss is None else f"{said.final_loss:.4f}"),
        ("tokens/s", None if said.tokens_per_s is None else f"{said.tokens_per_s:,.0f}"),
        ("tokens", f"{said.tokens:,}" if said.tokens else None),
        ("cost so far", money(said.usd) if said.usd else None),
        ("incidents", str(said.incident_count) if said.incident_count else None),
        ("submitted", began),
        ("name", said.name),
        ("attempt", str(said.attempt) if said.attempt else None),
        ("phase", live.phase if live else None),
        ("back end", found.backend),
        ("folder", str(found.run.path)),
        ("snapshots", said.snapshots.removeprefix("snapshots ") if said.snapshots else None),
        *found.status.tasks.items(),
    ]
    width = max(13, *(len(name) for name, _ in rows))
    for name, value in rows:
        if value:
            yield f"  {name:<{width}} {value}"


def sweep_trials(found: SweepView, width: int | None = None) -> Iterator[str]:
    """A line a trial, the best first, then why others were ended; in at most ``width`` columns but for their names."""
    keys = list(dict.fromkeys(key for each in found.trials for key in each.trial.values))
    head = ("trial", *_short_names(keys), "state", "step", "held-out loss", "time", "cost", "run")
    rows = [head, *(_trial_row(each, keys) for each in found.trials)]
    costs = len(head) - 2
    free = all(row[costs] in ("-", "$0.00") for row in rows[1:])
    shown = [column for column in range(len(head)) if column != costs or not free]
    rows = [tuple(row[column] for column in shown) for row in rows]
    lines = aligned(rows, left=(len(keys) + 1, len(shown) - 1))
    if width is not None and max(map(len, lines)) > width:  # a run is found by its trial's number, too
        lines = aligned([row[:-1] for row in rows], left=(len(keys) + 1,))
    yield from lines
    for each in found.trials:
        if each.trial.state in ("pruned", "failed") and each.trial.reason:
            yield f"trial {each.trial.number}: {each.trial.reason}"


def sweep_line(found: SweepView) -> str:
    """``sweep tune: 12 trials (8 complete, 3 pruned, 1 running), best 2.3141 (trial 4)  ~/tune``."""
    counts = ", ".join(f"{count} {state}" for state, count in found.counts.items())
    best = f", best {found.best.trial.loss:.4f} (trial {found.best.trial.number})" if found.best else ""
    cost = f", {money(found.usd)}" if found.usd else ""
    trials = "1 trial" if len(found.trials) == 1 else f"{len(found.trials)} trials"
    return f"sweep {found.record.name}: {trials} ({counts}){best}{cost}  {short_path(found.folder)}"


def _trial_row(each: TrialView, keys: Sequence[str]) -> tuple[str, ...]:
    values = (each.trial.values.get(key) for key in keys)
    said = each.run.summary if each.run is not None else None
    ended = said.ended_ns if said is not None else None
    took = (ended - said.began_ns) / 1e9 if said is not None and ended and said.began_ns else None
    return (
        str(each.trial.number),
        *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values),
        each.state,
        "-" if said is None or said.last_step is None else f"{said.last_step:,}",
        "-" if each.trial.loss is None else f"{each.trial.loss:.4f}",
        output.age(took),
        "-" if said is None or said.usd is None else money(said.usd),
        each.trial.run_id or "-",
    )


def _short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each, or the whole key where two end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]


COMPARED = {
    "steps": ("steps", "{:,.0f}"), "tokens": ("tokens", "{:,.0f}"), "execution_accuracy": ("accuracy", "{:.1%}"),
    "heldout_loss": ("held-out loss, last", "{:.4f}"), "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"), "wall_s": ("wall time, s", "{:,.0f}"), "cost.usd": ("cost, $", "{:,.2f}"),
}  # fmt: skip
"""Figures of a comparison for a terminal; the others are in ``muster report A B``."""


def comparison(found: Compared) -> Iterator[str]:
    """A letter for each run, what differs in the run files, then what came of it."""
    letters = [chr(ord("A") + index % 26) for index in range(len(found.run_ids))]
    for letter, run_id in zip(letters, found.run_ids, strict=True):
        yield f"{letter}  {run_id}"
    yield ""
    rows: list[list[str]] = [["", *letters]]
    rows += [[key, *(_short_value(value) for value in values)] for key, values in found.differences.items()]
    if not found.differences:
        rows.append(["the run files are the same", *[""] * len(letters)])
    for what, equal in (("step", found.at_step), ("tokens", found.at_tokens)):
        if equal is not None:
            place = f"step {equal.at:,}" if what == "step" else f"{equal.at:,} tokens"
            rows.append([f"loss at {place} (mean of 10 steps)", *_figures_of(equal.loss, "{:.4f}")])
            if equal.heldout_step is not None and any(value is not None for value in equal.heldout_loss):
                label = f"held-out loss after step {equal.heldout_step:,}"
                rows.append([label, *_figures_of(equal.heldout_loss, "{:.4f}")])
    for path, (label, form) in COMPARED.items():
        values = found.figures.figures[path].values
        if any(values):
            rows.append([label, *_figures_of(values, form)])
    yield from aligned(rows, left=(0,))


def _figures_of(values: Sequence[float | None], form: str) -> list[str]:
    return ["-" if value is None else form.format(value) for value in values]


def _short_value(value: object) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 32 else f"{text[:29]}..."


def money(usd: float) -> str:
    """``$0.42``, ``$1,204.10``."""
    return f"${usd:,.2f}" if usd >= 0.005 or not usd else "<$0.01"


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """The rows as lines with columns two spaces apart, the columns of ``left`` to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            word.ljust(width) if column in left else word.rjust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
    rows: list[tuple[str, ...]] = [
        ("", "step", "attempt", "tier", "age", "held-out loss", "size", "layout", "whole", "where")
    ]
    for version in result.versions:
        where = ", ".join(version.hosts) or version.uri
        rest = (
            output.age(result.age_s(version)),
            "-" if version.heldout_loss is None else f"{version.heldout_loss:.4f}",
            f"{version.bytes / 2**20:.1f} MiB",
            version.layout,
            _whole(version),
            where,
        )
        rows.append((">" if version.used else "", str(version.step), f"a{version.attempt}", version.tier, *rest))
    if len(rows) == 1:
        return
    yield from aligned(rows, left=(0, 2, 3, 7, 8, 9))


def _whole(version: Version) -> str:
    if version.problem is not None:
        return f"no: {version.problem}"
    if not version.missing:
        return "yes"
    ranks = ", ".join(str(rank) for rank in version.missing[:6]) + (" ..." if len(version.missing) > 6 else "")
    lacking = f"without {'rank' if len(version.missing) == 1 else 'ranks'} {ranks}"
    return f"with the other memory tier; {lacking}" if version.used else f"no: {lacking}"
