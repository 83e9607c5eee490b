"""What a run's events say so far, for people: status, the end of ``train``, the short report."""

from __future__ import annotations

from muster.report.run_view import RunView as Summary
from muster.report.run_view import run_view as summarise

__all__ = ["Summary", "summarise"]
