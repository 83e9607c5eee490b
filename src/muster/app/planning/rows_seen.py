"""What a file or data set holds, for somebody who has no run file yet: the kind of its rows, how many, how long."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from muster.config.sections.sources import FILE_ENDINGS, FileSource, HubSource, PromptTemplate, Source
from muster.core.errors import UsageError

if TYPE_CHECKING:
    from muster.data.source_type import OpenedSource
    from muster.data.task import Row
    from muster.data.tokenizer import Encoder

#: Rows that are read, checked and measured; more are not counted.
ROWS = 200_000
_TOKENISED_ROWS = 400
#: Characters a token of the small vocabularies that runs from scratch train on their own text (measured on English
#: chats and SQL: 2.3 to 3.5), and what a template writes around a turn, in tokens.
_CHARACTERS_A_TOKEN, _TURN_TOKENS = 2.3, 6
#: Columns by which a pair of prompt and answer is known: (prompt, answer).
PAIRS = (
    ("instruction", "output"), ("instruction", "response"), ("question", "answer"), ("question", "response"),
    ("prompt", "response"), ("query", "response"), ("input", "output"), ("source", "target"),
)  # fmt: skip
QUESTIONS = ("question", "sql_prompt", "instruction", "prompt", "nl", "utterance", "input", "text")
QUERIES = ("sql", "SQL", "query", "gold_sql", "sql_query")
SCHEMAS = ("schema", "sql_context", "ddl", "context", "db_schema", "create_table")
TEXTS = ("content", "body", "document", "article")


@dataclass(frozen=True, kw_only=True)
class RowsSeen:
    """Rows of one source, every one of which was checked."""

    source: Source
    kind: str
    """chat, prompt and completion, question and SQL, text."""
    count: int
    complete: bool
    """Whether ``count`` rows are all of them."""
    columns: tuple[str, ...]
    tokens: float
    """Of all counted rows, by the base model's tokenizer or estimated."""
    longest: int
    """Tokens of the longest row."""
    tokens_measured: bool


def source_of(given: str) -> Source:
    """The ``data.sources`` member for a file, a glob, a folder of data files or a hub data set.

    Raises:
        UsageError: it is of a kind that cannot be read.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        given = f"{given.rstrip('/')}/"
    looks_like_hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", given) and not given.endswith(FILE_ENDINGS)
    if looks_like_hub and not path.exists() and not any(mark in given for mark in "*?["):
        return HubSource(type="hub", name=given)
    section = FileSource(type="file", path=given)
    for problem in section.problems():
        raise UsageError(f"--from {problem.message}", hint=problem.hint)
    return section


def look(given: str, encoder: Encoder | None = None) -> RowsSeen:
    """Read the rows of ``given``, find their kind, check each. ``encoder``: of the base model, to measure lengths.

    Raises:
        UsageError: no rows, columns that fit no kind, or a row that does not fit; with its file and line.
        AccessError, BackendError: the file or the hub cannot be read.
    """
    from muster.data.source_type import open_source

    opened = open_source(source_of(given))
    first = next(opened.rows(), None)
    if first is None:
        raise UsageError(f"{given} has no rows")
    kind, format, template = _kind(first, opened)
    section = opened.section.model_copy(update={"template": template, "format": format})
    seen = _measured(replace(opened, section=section), kind, encoder)
    return replace(seen, columns=tuple(name for name in first if not name.startswith("_")))


def _kind(row: Row, opened: OpenedSource) -> tuple[str, str | None, PromptTemplate | None]:
    """(kind, ``format`` and ``template`` of the source) by the columns of its first row."""
    from muster.data.chat.rows import CHAT_COLUMNS

    columns = [name for name in row if not name.startswith("_")]
    if any(name in columns for name in CHAT_COLUMNS):
        return "chat", None, None
    query = _first(QUERIES, columns)
    question = _first([name for name in QUESTIONS if name != query], columns)
    if query and question and _is_sql(row[query]):
        schema = _first(SCHEMAS, columns)
        before = f"{{{schema}}}\n\n" if schema else ""
        return "question and SQL", None, _template(f"{before}{{{question}}}\nSQL:", query)
    if "prompt" in columns and "completion" in columns:
        return "prompt and completion", None, None
    for prompt, answer in PAIRS:
        if prompt in columns and answer in columns:
            more = "\n{input}" if prompt == "instruction" and "input" in columns else ""
            is_sql = _is_sql(row[answer])
            text = _template(f"{{{prompt}}}{more}\n", answer)
            return "question and SQL" if is_sql else "prompt and completion", None, text
    if "text" in columns:
        return "text", None, None
    if alone := _first(TEXTS, columns):
        return "text", "prompt_completion", PromptTemplate(prompt="", completion=f"{{{alone}}}")
    why = ""
    if {"chosen", "rejected"} <= {*columns}:
        why = " (pairs of a preferred and a rejected answer are not trained on)"
    raise UsageError(
        f"{opened.locate(0, False)}: columns {', '.join(map(repr, columns[:12])) or 'none'} are none of the kinds that "
        f"are known{why}",
        hint="chat: messages; prompt and completion; text; question and sql. For others write data.sources[].template",
    )


def _template(prompt: str, answer: str) -> PromptTemplate:
    return PromptTemplate(prompt=prompt, completion=f" {{{answer}}}" if not prompt.endswith("\n") else f"{{{answer}}}")


def _first(wanted: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in columns), None)


def _is_sql(value: object) -> bool:
    return isinstance(value, str) and bool(
        re.match(r"\s*\(?\s*(select|with|insert|update|delete|create)\b", value, re.I)
    )


def _measured(opened: OpenedSource, kind: str, encoder: Encoder | None) -> RowsSeen:
    """Every row checked; lengths by the encoder over the first rows, then by characters."""
    from muster.data.chat.engine import ChatEngine, ChatRules
    from muster.data.collect_questions import located

    engine = None
    if kind == "chat" and encoder is not None and encoder.chat_template is not None:
        engine = ChatEngine(encoder, ChatRules(stop_ids=encoder.stop_ids))
    characters = turns = count = answers = longest = most_turns = sampled = sampled_tokens = 0
    complete = True
    for index, row in enumerate(opened.rows()):
        if index == ROWS:
            complete = False
            break
        try:
            text, row_turns, answered = _text(row, kind, opened.section.template)
            if encoder is not None and index < _TOKENISED_ROWS:
                # A template that rewrites history makes several documents of a chat.
                documents = engine.documents([row])[0][0] if engine is not None else [(encoder.encode([text])[0], None)]
                sampled += len(text) if documents else 0
                sampled_tokens += sum(len(ids) for ids, _ in documents)
        except UsageError as error:
            raise located(opened, error, index) from error
        if engine is not None:  # what the template writes around turns is measured
            row_turns = 0
        count, characters, turns, answers = count + 1, characters + len(text), turns + row_turns, answers + answered
        longest, most_turns = max(longest, len(text)), max(most_turns, row_turns)
    if not answers:
        raise UsageError(
            f"{opened.label}: none of its {count} rows has {'an assistant turn' if kind == 'chat' else 'an answer'}",
            hint="there is nothing to learn; check the columns",
        )
    rate = sampled / sampled_tokens if sampled_tokens else _CHARACTERS_A_TOKEN
    return RowsSeen(
        source=opened.section, kind=kind, count=count, complete=complete, columns=(),
        tokens=characters / rate + turns * _TURN_TOKENS, longest=round(longest / rate) + most_turns * _TURN_TOKENS,
        tokens_measured=bool(sampled_tokens),
    )  # fmt: skip


def _text(row: Row, kind: str, template: PromptTemplate | None) -> tuple[str, int, bool]:
    """(a row's text, its turns, whether there is something to learn in it). Raises UsageError."""
    from muster.data.chat.rows import spoken
    from muster.data.formats import prompt_and_completion, row_text

    if kind == "chat":
        turns = spoken(row)
        answered = any(role == "assistant" and text for role, text in turns)
        return "\n".join([str(row.get("tools") or ""), *(text for _, text in turns)]), len(turns), answered
    if kind == "text" and template is None:
        text = row_text(row)
        return text, 1, bool(text.strip())
    prompt, completion = prompt_and_completion(row, template)
    return prompt + completion, 1, bool(completion.strip())
