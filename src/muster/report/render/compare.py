"""Two or more runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from muster.core.typed_json import JsonObject, at
from muster.report.ledger.categories import CATEGORIES
from muster.report.render.document import Document

#: Path into the document -> (label, format, which direction is better: 1 more, -1 less, 0 neither).
FIGURES: dict[str, tuple[str, str, int]] = {
    "heldout_loss": ("held-out loss", "{:.4f}", -1),
    "final_loss": ("training loss", "{:.4f}", -1),
    "execution_accuracy": ("execution accuracy", "{:.2%}", 1),
    "wall_s": ("wall time, s", "{:,.1f}", -1),
    "cost.usd": ("cost, $", "{:,.2f}", -1),
    "cost.usd_per_million_tokens": ("$ per million tokens", "{:,.4f}", -1),
    "steps": ("steps", "{:,.0f}", 0),
    "tokens": ("tokens", "{:,.0f}", 0),
    "tokens_per_s": ("tokens/s", "{:,.0f}", 1),
    "mfu": ("MFU", "{:.2%}", 1),
    "goodput.active": ("goodput, active hosts", "{:.3%}", 1),
    "goodput.purchased": ("goodput, purchased hosts", "{:.3%}", 1),
    "goodput.time": ("host-time productive", "{:.3%}", 1),
    "host_time.purchased_host_s": ("purchased host-s", "{:,.1f}", -1),
    "interruptions": ("interruptions", "{:,.0f}", 0),
    "incident_kinds.all.lost_s_p50": ("lost per interruption p50, s", "{:,.2f}", -1),
    "incident_kinds.all.lost_s_p95": ("lost per interruption p95, s", "{:,.2f}", -1),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of every run, and each one's change against the first; None where unknown."""

    values: Sequence[float | None]
    change: Sequence[float | None]
    ratio: Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Figures and category shares of runs side by side. In the order of the JSON."""

    schema: int = 1
    kind: str = "muster.report.compare"
    runs: Sequence[str]
    figures: Mapping[str, Row]
    categories: Mapping[str, Row]

    def to_json(self) -> JsonObject:
        return asdict(self)


def compare(documents: Sequence[Document]) -> Comparison:
    """What differs between the runs that these documents describe."""
    plain = [document.to_json() for document in documents]
    return Comparison(
        runs=[document.run_id for document in documents],
        figures={path: _row([_figure(document, path) for document in plain]) for path in FIGURES},
        categories={name: _row([document.categories[name].share for document in documents]) for name in CATEGORIES},
    )


def _figure(document: JsonObject, path: str) -> float | None:
    value = at(document, *path.split("."))
    return value if isinstance(value, int | float) else None


def _row(values: list[float | None]) -> Row:
    first = values[0]
    return Row(
        values=values,
        change=[None if first is None or value is None else value - first for value in values],
        ratio=[None if not first or value is None else value / first for value in values],
    )


def table(result: Comparison) -> Table:
    """The comparison for a terminal: a column a run, changes against the first."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("")
    for name in result.runs:
        drawn.add_column(name, justify="right", overflow="fold")
    for path, (label, form, better) in FIGURES.items():
        row = result.figures[path]
        if any(value is not None for value in row.values) and not (path.startswith("cost.") and not any(row.values)):
            drawn.add_row(label, *_cells(row, form, better))
    drawn.add_section()
    for name, row in result.categories.items():
        if any(row.values):
            drawn.add_row(f"  {name}", *_cells(row, "{:.2%}", 1 if name == "productive" else -1))
    return drawn


def _cells(row: Row, form: str, better: int) -> list[str]:
    cells = []
    for position, (value, change, ratio) in enumerate(zip(row.values, row.change, row.ratio, strict=True)):
        text = "unknown" if value is None else form.format(value)
        if position and change and "%" in form:
            text += _colored(f" {change * 100:+.2f} pt", change * better)
        elif position and ratio is not None and ratio != 1:
            text += _colored(f" {ratio - 1:+.1%}", (change or 0) * better)
        cells.append(text)
    return cells


def _colored(text: str, good: float) -> str:
    return f"[green]{text}[/]" if good > 0 else f"[red]{text}[/]" if good < 0 else f"[dim]{text}[/]"
