"""Text-to-SQL as a task: answers are queries, scored by running them where there is a database.

Without one (rows of the hub, a file without ``database``) the normalised queries are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from muster.core.typed_json import JsonObject, text, whole
from muster.data.task import Entry, MajorityAnswer, Row, Scorer
from muster.tasks.text2sql import baseline, sql_execution
from muster.tasks.text2sql.judge import Ask
from muster.tasks.text2sql.judge_process import JUDGE

_FENCE = re.compile(r"```(?:sql|sqlite)?\s*\n?(.*?)```", re.DOTALL | re.IGNORECASE)


class Text2Sql:
    """Questions with a gold query."""

    def question(self, row: Row, completion: str, context: JsonObject) -> JsonObject | None:
        """Where the source has a database, rows whose gold query fails or returns nothing are left out: the first
        cannot be scored, and any empty result would pass the second."""
        gold = _gold(row) or completion
        if "database" in context and JUDGE.unusable(Ask(golds=(gold,), path=text(context, "database"))) != (None,):
            return None
        generated = {name: row[f"_{name}"] for name in ("index", "shape") if f"_{name}" in row}
        return {"gold": gold, "schema": row.get("schema") or row.get("ddl"), **generated}

    def scorer(self, entry: Entry, context: JsonObject, *, timeout_s: float) -> Scorer:
        gold = text(entry, "gold")
        if "level" in context:
            numbers = whole(context, "level"), whole(context, "seed"), whole(entry, "index")
            ask = Ask(golds=(gold,), timeout_s=timeout_s, generated=numbers)
        elif "database" in context:
            ask = Ask(golds=(gold,), timeout_s=timeout_s, path=text(context, "database"))
        else:
            return Scorer(metric="query_match", score=lambda said: sql_execution.match(answer(said), (gold,)))
        return Scorer(metric="execution_accuracy", score=lambda said: JUDGE.judge(replace(ask, predicted=answer(said))))

    def majority_answer(self, rows: Iterable[Row]) -> MajorityAnswer | None:
        pairs = ((str(row.get("schema") or row.get("ddl") or ""), _gold(row)) for row in rows)
        template = baseline.majority_template((schema, gold) for schema, gold in pairs if gold is not None)
        if not template:
            return None
        return MajorityAnswer(template, lambda entry: baseline.fill(template, text(entry, "schema")))


def answer(said: str) -> str:
    """The query in a model's answer: the content of its first code fence, or all of it."""
    fenced = _FENCE.search(said)
    query = (fenced[1] if fenced else said).strip()
    return query.encode("utf-8", "replace").decode()  # a model's bytes may decode to half a character


def _gold(row: Row) -> str | None:
    for name in ("sql", "query"):
        if isinstance(row.get(name), str):
            return str(row[name])
    return None


TASK = Text2Sql()
