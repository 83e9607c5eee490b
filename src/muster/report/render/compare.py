"""Two or more runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from muster.report.ledger.categories import CATEGORIES

#: Path into the document -> (label, format, which direction is better: 1 more, -1 less, 0 neither).
FIGURES: dict[str, tuple[str, str, int]] = {
    "steps": ("steps", "{:,.0f}", 0),
    "tokens": ("tokens", "{:,.0f}", 0),
    "tokens_per_s": ("tokens/s", "{:,.0f}", 1),
    "mfu": ("MFU", "{:.2%}", 1),
    "final_loss": ("final loss", "{:.4f}", -1),
    "heldout_loss": ("held-out loss", "{:.4f}", -1),
    "execution_accuracy": ("execution accuracy", "{:.2%}", 1),
    "goodput.active": ("goodput, active hosts", "{:.3%}", 1),
    "goodput.purchased": ("goodput, purchased hosts", "{:.3%}", 1),
    "goodput.time": ("host-time productive", "{:.3%}", 1),
    "wall_s": ("wall time, s", "{:,.1f}", -1),
    "host_time.purchased_host_s": ("purchased host-s", "{:,.1f}", -1),
    "interruptions": ("interruptions", "{:,.0f}", 0),
    "incident_kinds.all.lost_s_p50": ("lost per interruption p50, s", "{:,.2f}", -1),
    "incident_kinds.all.lost_s_p95": ("lost per interruption p95, s", "{:,.2f}", -1),
    "cost.usd": ("cost, $", "{:,.2f}", -1),
    "cost.usd_per_million_tokens": ("$ per million tokens", "{:,.4f}", -1),
}


def compare(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures and category shares of each run, and each one's change against the first; null where unknown."""
    return {
        "schema": 1,
        "kind": "muster.report.compare",
        "runs": [doc["run_id"] for doc in documents],
        "figures": {path: _row([_at(doc, path) for doc in documents]) for path in FIGURES},
        "categories": {name: _row([doc["categories"][name]["share"] for doc in documents]) for name in CATEGORIES},
    }


def _at(document: Any, path: str) -> float | None:
    value = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def _row(values: list[float | None]) -> dict[str, Any]:
    first = values[0]
    return {
        "values": values,
        "change": [None if first is None or value is None else value - first for value in values],
        "ratio": [None if not first or value is None else value / first for value in values],
    }


def table(result: dict[str, Any]) -> Table:
    """The comparison for a terminal: a column a run, changes against the first."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("")
    for name in result["runs"]:
        drawn.add_column(name, justify="right", overflow="fold")
    for path, (label, form, better) in FIGURES.items():
        row = result["figures"][path]
        if any(value is not None for value in row["values"]):
            drawn.add_row(label, *_cells(row, form, better))
    drawn.add_section()
    for name, row in result["categories"].items():
        if any(row["values"]):
            drawn.add_row(f"  {name}", *_cells(row, "{:.2%}", 1 if name == "productive" else -1))
    return drawn


def _cells(row: dict[str, Any], form: str, better: int) -> list[str]:
    cells = []
    for position, (value, change, ratio) in enumerate(zip(row["values"], row["change"], row["ratio"], strict=True)):
        text = "unknown" if value is None else form.format(value)
        if position and change and "%" in form:
            text += _colored(f" {change * 100:+.2f} pt", change * better)
        elif position and ratio is not None and ratio != 1:
            text += _colored(f" {ratio - 1:+.1%}", (change or 0) * better)
        cells.append(text)
    return cells


def _colored(text: str, good: float) -> str:
    return f"[green]{text}[/]" if good > 0 else f"[red]{text}[/]" if good < 0 else f"[dim]{text}[/]"
