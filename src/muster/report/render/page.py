"""One self-contained HTML page: data, style, script and the plotting library in one file. The report is one such.

Plotting: uPlot 1.6.32 (npm ``uplot``, MIT, ``assets/LICENSE.uplot``), bundled unchanged. The page loads nothing
from anywhere: its content security policy forbids it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from muster.core.errors import UsageError
from muster.core.redact import printable
from muster.core.typed_json import JsonObject
from muster.report.ledger.fold import Ledger
from muster.report.render.document import Document, next_steps
from muster.report.render.series import series

#: What draws a run's report.
REPORT = ("words.js", "charts.js", "page.js")

#: What draws a study of rehearsals above the report of one.
STUDY = (*REPORT, "study.js")


def render(
    ledger: Ledger, document: Document, *, more: JsonObject | None = None, scripts: Sequence[str] = REPORT
) -> str:
    """The page of one run. ``document``: that of the same ledger; ``more``: what further ``scripts`` draw."""
    title = f"{document.name or document.run_id} · Muster"
    data: JsonObject = {"report": document.to_json(), "series": series(ledger), "next": next_steps(document)}
    return fill({**data, **(more or {})}, title=title, scripts=scripts)


def fill(
    data: JsonObject,
    *,
    title: str,
    scripts: Sequence[str] = REPORT,
    plain: str = "muster report RUN",
    connects: bool = False,
) -> str:
    """The page around ``data``, drawn by ``scripts``; ``plain``: the command that prints the same without JavaScript;
    ``connects``: it is served, and may ask its server.

    Text from a run never becomes markup: the script writes it as text alone.
    """
    texts = {
        "/*STYLE*/": _asset("uplot.min.css") + _asset("page.css"),
        "/*LIBRARY*/": _asset("uplot.iife.min.js"),
        "/*SCRIPT*/": "\n".join(map(_asset, scripts)),
        "; connect-src 'self'": "; connect-src 'self'" if connects else "",
        "<!--TITLE-->": _text(title),
        "<!--PLAIN-->": _text(plain),
        "/*DATA*/": _embedded(data),
    }
    marks = "|".join(map(re.escape, texts))  # all at once: a run may be named like a mark
    return re.sub(marks, lambda found: texts[found[0]], _asset("page.html"))


def write(text: str, target: str | Path, *, hint: str | None = None) -> Path:
    """Write a page; return its absolute path. Raises UsageError where that fails, with ``hint``."""
    path = Path(os.path.expanduser(target))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    return path.absolute()


def _asset(name: str) -> str:
    return resources.files("muster.report").joinpath("assets", name).read_text(encoding="utf-8")


def _text(text: str) -> str:
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _embedded(data: JsonObject) -> str:
    """JSON that cannot end its own script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return printable(text).replace("<", "\\u003c")
