"""Amounts as people say them."""

from __future__ import annotations

#: Longer times are not shown.
AGES_H = 24 * 3650


def gigabytes(count: float) -> str:
    """``128 GB`` (decimal, as GPUs are sold)."""
    return f"{count / 1e9:.0f} GB" if count >= 10e9 else f"{count / 1e9:.1f} GB"


def dollars(amount: float | None) -> str:
    """``$1,234`` or ``$0.52``; ``-`` where it is not known."""
    if amount is None:
        return "-"
    if amount >= 100:
        return f"${amount:,.0f}"
    return f"${amount:.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.2g}"


def duration(hours: float) -> str:
    """``35 min``, ``14.5 h``, ``6.2 days``."""
    if hours > AGES_H:
        return "more than 10 years"
    if hours < 1:
        return f"{hours * 60:.0f} min" if hours * 60 >= 1 or hours <= 0 else f"{hours * 3600:.0f} s"
    return f"{hours:.1f} h" if hours < 72 else f"{hours / 24:.1f} days"
