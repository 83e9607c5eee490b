"""What ``muster report`` knows of a run: its ledger and the figures made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path

from muster.core.errors import MusterError, UsageError
from muster.core.event_log import Damage, Verdict, in_words
from muster.core.typed_json import JsonObject
from muster.report import log_folder
from muster.report.ledger.fold import Ledger, fold
from muster.report.render import compare as comparing
from muster.report.render import page, table
from muster.report.render.compare import Comparison
from muster.report.render.document import Document, document


@dataclass(frozen=True)
class Report:
    """One run's ledger and what the check of its log found."""

    ledger: Ledger
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    damaged: tuple[Damage, ...] = ()
    """Places of the log that were left out."""

    @cached_property
    def document(self) -> Document:
        """Its figures, rows and words."""
        return document(self.ledger, self.verdicts, self.damaged)

    def __repr__(self) -> str:
        return render_table(self)

    def _repr_html_(self) -> str:
        """What a notebook's cell shows."""
        return f"<pre>{escape(render_table(self))}</pre>"

    def to_json(self) -> JsonObject:
        """The document as ``docs/report.schema.json`` describes it."""
        return self.document.to_json()


def load(run_dir_or_log: str | Path, *, reference_tokens_per_s: float | None = None) -> Report:
    """Read a run's folder, its ``events`` folder, or a single ``.jsonl`` file; while it runs or years later.

    An edited file does not stop the report: its lines that are whole are read, ``damaged`` lists the others, and
    ``log.problems`` what is wrong with a file.

    Raises:
        UsageError: there is no event log at that path.
        MusterError: an edited value makes the log unreadable (the message names it).
    """
    folder = log_folder.read(run_dir_or_log)
    if not folder.files:
        hint = "give a run id, a run's folder or its events folder"
        raise UsageError(f"no event log in {run_dir_or_log}", hint=hint)
    try:
        result = fold(folder.files, reference_tokens_per_s=reference_tokens_per_s)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise MusterError(
            f"{run_dir_or_log}: an event holds a value that no version of Muster writes: {error}",
            hint="; ".join(f"{name}: {v.problem}" for name, v in folder.verdicts.items() if v.problem) or None,
        ) from error
    result.notes += in_words(folder.damaged)
    return Report(ledger=result, verdicts=folder.verdicts, damaged=folder.damaged)


def render_table(result: Report, *, width: int = 100, color: bool = False) -> str:
    """The report for a terminal."""
    return table.render(result.document, width=width, color=color)


def render_html(result: Report) -> str:
    """One self-contained page: opens from a file, loads nothing from anywhere."""
    return page.render(result.ledger, result.document)


def compare(*reports: Report) -> Comparison:
    """Two or more runs side by side: figures, category shares, and the change against the first."""
    return comparing.compare([result.document for result in reports])


def render_comparison(result: Comparison, *, width: int = 100, color: bool = False) -> str:
    """What ``compare`` found, for a terminal."""
    return table.printed(comparing.table(result), width=width, color=color)
