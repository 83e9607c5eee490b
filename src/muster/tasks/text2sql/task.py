"""Text-to-SQL as a task: answers are queries, scored by running them where there is a database.

Without one (rows of the hub, a file without ``database``) the normalised queries are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from muster.core.typed_json import Json, JsonObject, child, text, texts, whole
from muster.data.formats import fields, fill
from muster.data.task import AnsweredRow, Entry, LeftOut, MajorityAnswer, Row, Scorer
from muster.tasks.text2sql import baseline, sql_execution
from muster.tasks.text2sql.judge import Ask
from muster.tasks.text2sql.judge_process import JUDGE
from muster.tasks.text2sql.sql_execution import GOLD_TIMEOUT_S

_FENCE = re.compile(r"```(?:sql|sqlite)?\s*\n?(.*?)```", re.DOTALL | re.IGNORECASE)


class Text2Sql:
    """Questions with a gold query."""

    def question(self, row: AnsweredRow, context: JsonObject) -> JsonObject | LeftOut:
        """Where the source has a database, gold queries that fail or return nothing are left out: the first cannot be
        scored, and any empty result would pass the second."""
        golds = tuple(dict.fromkeys(gold for gold in _golds(row) if gold))
        if not golds:
            return LeftOut(reason="no gold query", message="the answer is empty")
        entry: dict[str, Json] = {}
        if "database" in context:
            pattern = text(context, "database")
            columns = fields(pattern)
            path = fill(pattern, row.row)
            problems = dict(zip(golds, JUDGE.unusable(Ask(golds=golds, path=path)), strict=True))
            golds = tuple(gold for gold, problem in problems.items() if problem is None)
            if not golds:
                gold, problem = next(iter(problems.items()))
                return LeftOut(reason=_reason(str(problem)), message=f"{problem}: {gold}")
            entry["columns"] = {name: row.row[name] for name in columns}
        for name in ("index", "shape"):
            if f"_{name}" in row.row:
                entry[name] = row.row[f"_{name}"]
        return {"gold": golds[0], "golds": golds, "schema": _schema(row.row), **entry}

    def scorer(self, entry: Entry, context: JsonObject, *, timeout_s: float) -> Scorer:
        golds = tuple(texts(entry, "golds"))
        if "level" in context:
            numbers = whole(context, "level"), whole(context, "seed"), whole(entry, "index")
            ask = Ask(golds=golds, timeout_s=timeout_s, generated=numbers)
        elif "database" in context:
            path = fill(text(context, "database"), child(entry, "columns"))
            ask = Ask(golds=golds, timeout_s=timeout_s, path=path)
        else:
            return Scorer(metric="query_match", score=lambda said: sql_execution.match(answer(said), golds))
        return Scorer(metric="execution_accuracy", score=lambda said: JUDGE.judge(replace(ask, predicted=answer(said))))

    def majority_answer(self, rows: Iterable[AnsweredRow]) -> MajorityAnswer | None:
        golds = ((_schema(row.row) or "", _golds(row)) for row in rows if row.is_stated or _column(row.row))
        template = baseline.majority_template((schema, gold[0]) for schema, gold in golds if gold)
        if not template:
            return None
        return MajorityAnswer(template, lambda entry: baseline.fill(template, text(entry, "schema")))


def answer(said: str) -> str:
    """The query in a model's answer, after its reasoning: the content of its first code fence, or all of it."""
    said = said.rpartition("</think>")[2]
    fenced = _FENCE.search(said)
    query = (fenced[1] if fenced else said).strip()
    return query.encode("utf-8", "replace").decode()  # a model's bytes may decode to half a character


def _golds(row: AnsweredRow) -> tuple[str, ...]:
    """The acceptable queries: what the run file says is the answer, else a column that is named as one."""
    return tuple(map(answer, row.answers if row.is_stated else _column(row.row) or row.answers))


def _column(row: Row) -> tuple[str, ...]:
    for name in ("sql", "query"):
        if isinstance(row.get(name), str):
            return (text(row, name),)
        if found := texts(row, name):
            return tuple(found)
    return ()


def _schema(row: Row) -> str | None:
    return text(row, "schema") or text(row, "ddl") or None


def _reason(problem: str) -> str:
    """The kind of a problem that ``JudgeProcess.unusable`` found."""
    kind = problem.partition(":")[0]
    return {
        "no rows": "gold query returns no row",
        "error": "gold query fails",
        "timeout": f"gold query takes longer than {GOLD_TIMEOUT_S:g} s",
        "memory": "gold query takes too much memory",
    }.get(kind, f"gold query: {kind}")


TASK = Text2Sql()
