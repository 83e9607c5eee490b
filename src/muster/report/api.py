"""Reports of runs: the one module of this package that reads files; the rest folds what it is given."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path

from muster.core.errors import MusterError, UsageError
from muster.core.event_details.run import HashHeads, SupervisorStarted
from muster.core.event_log import Damage, EventReader, Verdict, check_directory, genesis, in_words
from muster.core.events import Event
from muster.core.processes import open_plain
from muster.core.typed_json import JsonObject
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
    location = Path(run_dir_or_log)
    directory = location / "events" if (location / "events").is_dir() else location
    single = location.suffix == ".jsonl" and location.is_file()
    paths = [location] if single else sorted(directory.glob("*.jsonl"))
    if not paths:
        raise UsageError(f"no event log in {location}", hint="give a run id, a run's folder or its events folder")
    files: dict[str, list[Event]] = {}
    reader = EventReader(directory)
    for path in paths:
        files[path.name] = list(reader.read_file(path))
    run_id = next((events[0].run_id for events in files.values() if events), "")
    folder = location.parent if single else directory
    verdicts = {name: verdict for name, verdict in check_directory(folder, run_id=run_id).items() if name in files}
    if not single:
        verdicts = _check_cited_heads(directory, files, run_id, verdicts)
    try:
        result = fold(files, reference_tokens_per_s=reference_tokens_per_s)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise MusterError(
            f"{directory}: an event holds a value that no version of Muster writes: {error}",
            hint="; ".join(f"{name}: {v.problem}" for name, v in verdicts.items() if v.problem) or None,
        ) from error
    result.notes += in_words(reader.damaged)
    return Report(ledger=result, verdicts=verdicts, damaged=tuple(reader.damaged))


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


def _check_cited_heads(
    directory: Path, files: dict[str, list[Event]], run_id: str, verdicts: dict[str, Verdict]
) -> dict[str, Verdict]:
    """A file cut short still has a whole chain: what the supervisor cited of it must be in it."""
    result = dict(verdicts)
    hashes: dict[str, set[str]] = {}
    for event in (event for events in files.values() for event in events):
        for name, head in _cited_heads(event).items():
            path = directory / name
            if name not in hashes:
                data = b""
                with contextlib.suppress(OSError), open_plain(path) as file:
                    data = file.read()
                lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
                hashes[name] = {genesis(run_id, name), *(hashlib.sha256(line).hexdigest() for line in lines)}
            known = result.get(name, Verdict(events=0, head=""))
            if head not in hashes[name] and known.problem is None:
                result[name] = replace(
                    known, problem="a line that the supervisor cited is missing: cut short or changed"
                )
    return result


def _cited_heads(event: Event) -> Mapping[str, str]:
    if event.kind == HashHeads.kind:
        return event.read(HashHeads).heads
    return event.read(SupervisorStarted).heads or {} if event.kind == SupervisorStarted.kind else {}
