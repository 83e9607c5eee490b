"""One build of prepared data: tokenise, cut, hold out, mix, pack, write; called by `prepare` under its lock."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from muster.config.spec import Data, Objective, RunSpec
from muster.core.errors import UsageError
from muster.core.typed_json import Json, JsonObject
from muster.data import collect_questions, mixture
from muster.data.arrays import Int64s
from muster.data.cache import Progress
from muster.data.chat import preferences
from muster.data.chat.engine import ChatReport, ChatRules
from muster.data.chat.rows import RowError, spoken
from muster.data.collect_questions import located
from muster.data.formats import Format, choose_format, columns_of, prompt_and_completion, row_text
from muster.data.packing import pack
from muster.data.schedule import hashed_order
from muster.data.sequences import MISMATCHED, write_store
from muster.data.source_type import OpenedSource, TokenRows
from muster.data.spool import Spool
from muster.data.tokenise import Recipe, Tokens, tokenise
from muster.data.tokenizer import Encoder, check_vocabulary

#: Formats of which a row's documents do not begin alike.
_APART = ("text", "prompt_completion")
_CHAT_HINT = "see `muster data` for what a chat template gets, and data.chat_template for another one"


@dataclass(frozen=True)
class _Part:
    """One source's documents of one split, in the token array of all."""

    documents: mixture.Documents
    counts: dict[str, int]
    rows: int
    report: ChatReport = field(default_factory=ChatReport)
    stops: int = 0
    """Targets that end an answer."""


def build(
    spec: RunSpec,
    data: Data,
    sources: list[OpenedSource],
    encoder: Encoder | None,
    model_vocab: int | None,
    folder: Path,
    spooled: Path,
    progress: Progress,
    new_tokens: int = 0,
    *,
    chat: ChatRules,
) -> None:
    """Write a whole prepared folder: train/, heldout/, questions.jsonl, meta.json (tokenizer/ is there already).

    ``spooled``: where tokens are kept until then; what a killed build left there is taken up. ``new_tokens``: of the
    tokenizer, from the chat template; the model's embedding grows by those it has no rows for.

    Raises:
        UsageError: no usable row, every label masked, or a vocabulary the model lacks.
    """
    size = encoder.vocab_size if encoder else 0
    fitting = check_vocabulary(size - new_tokens, model_vocab, "the tokenizer")
    vocab_size = max(size, fitting)
    length, rows = spec.training.sequence_length, spec.training.preference_rows
    spool = Spool(spooled)
    try:
        formats = [_format(opened, data, spec.training.preference) for opened in sources]
        train, heldout, questions = [], [], []
        recipes: list[Recipe | None] = [None] * len(sources)
        for number, (opened, format) in enumerate(zip(sources, formats, strict=True)):
            if opened.token_rows is not None:
                parts = _token_parts(f"{number}", opened.token_rows(length, vocab_size), spool, data.heldout_fraction)
            else:
                assert encoder is not None and format is not None
                recipes[number] = recipe = Recipe(encoder.folder, format, opened.section.template, chat, rows)
                parts, held_rows = _source(number, opened, recipe, data, spool, length, progress)
                questions.append(collect_questions.collect(opened, recipe, number, held_rows))
            train.append(parts[0])
            heldout.append(parts[1])
        stats = _write(folder, data, sources, train, heldout, formats, rows, spool, encoder, length, progress)
    finally:
        spool.close()
    stats["unknown_tokens"] = spool.unknown
    asked = [each.entries for each in questions]
    stats["majority_template"] = collect_questions.add_majority_answers(sources, recipes, asked) if any(asked) else ""
    stats["questions"] = collect_questions.write(folder, asked)
    stats["questions_left_out"] = sum(each.left_out.total() for each in questions)
    stats["questions_left_out_why"] = collect_questions.left_out_why(questions)
    meta = {
        "vocab_size": vocab_size,
        "tokenizer_size": size,
        "pad_id": encoder.pad_id if encoder else 0,
        "eos_id": encoder.eos_id if encoder else None,
        "stop_ids": list(dict.fromkeys([*_learned_stops(train), *chat.stop_ids])),
        "today": chat.today,
        "formats": formats,
        "stats": stats,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True))


def _learned_stops(parts: list[_Part]) -> list[int]:
    return sorted({stop for part in parts for stop in part.report.stops})


def training_texts(opened: OpenedSource, objective: Objective | None = None) -> Iterator[str]:
    """A source's text for training a tokenizer. Prompts and completions come apart, as they will be tokenised."""
    format: Format | None = None
    for index, row in enumerate(opened.rows()):
        try:
            format = format or choose_format(opened.section, columns_of(row), objective)
            if format == "preference":
                texts = preferences.texts_of(row)
            elif format == "text":
                texts = [row_text(row)]
            elif format == "chat":  # with what chat templates write around the turns: role and line ends
                texts = [part for role, text in spoken(row) for part in (f"{role}\n", text, "\n\n")]
            else:
                texts = [*prompt_and_completion(row, opened.section.template)]
        except UsageError as error:
            raise located(opened, error, index) from error
        yield from texts


def _format(opened: OpenedSource, data: Data, objective: Objective | None) -> Format | None:
    """The source's format by its first row; None for rows of token ids."""
    if opened.token_rows is not None:
        return None
    first = next(opened.rows(), None)
    if first is None:
        raise UsageError(f"data source {opened.label} has no rows", hint="check its path, split and limit")
    try:
        format = choose_format(opened.section, columns_of(first), objective)
    except UsageError as error:
        raise located(opened, error, 0) from error
    if data.on_overlong == "split" and format != "text":
        raise UsageError(
            f"data.on_overlong: split is for plain text, but {opened.label} is {format}", hint="use drop or truncate"
        )
    return format


def _source(
    number: int, opened: OpenedSource, recipe: Recipe, data: Data, spool: Spool, length: int, progress: Progress
) -> tuple[tuple[_Part, _Part], Int64s | None]:
    """Tokenise one source: (train, held out) and the numbers of training rows held out (None: it has its own)."""
    train = _part(number, opened, False, recipe, data, spool, length, progress)
    if not len(train.documents):
        _refuse_empty(opened, train, length)
    if recipe.format != "text" and "assistant" in recipe.chat.roles and not train.stops:
        _refuse_endless(opened, recipe)
    if opened.heldout_rows is not None:
        held = _part(number, opened, True, recipe, data, spool, length, progress)
        return (train, held), None
    kept, out, rows = mixture.hold_out(train.documents, data.heldout_fraction, parts_are_apart=recipe.format in _APART)
    return (replace(train, documents=kept), _Part(documents=out, counts={}, rows=len(np.unique(out.rows)))), rows


def _part(
    number: int,
    opened: OpenedSource,
    heldout: bool,
    recipe: Recipe,
    data: Data,
    spool: Spool,
    length: int,
    progress: Progress,
) -> _Part:
    """One split's documents: chunks that are in the spool already, then the others."""
    name = f"{number}-heldout" if heldout else f"{number}"
    documents: list[mixture.Documents] = []
    counts = dict.fromkeys(mixture.COUNTS, 0)
    done = stops = 0
    report = ChatReport()
    whole = recipe.format in ("chat", "preference")  # the tail holds the answer
    rule: mixture.Overlong = "drop" if whole else data.on_overlong

    def take(tokens: Tokens, first_token: int) -> int:
        nonlocal stops
        found, more = mixture.cut(
            tokens.lengths, tokens.supervised, length=length, on_overlong=rule, first_token=first_token,
            of_rows=np.repeat(np.arange(len(tokens.documents)), tokens.documents), seconds=tokens.seconds,
            grades=tokens.grades, shares_room=recipe.rows == "labelled",
        )  # fmt: skip
        documents.append(replace(found, rows=found.rows + done))
        report.add(tokens.report)
        ends = tokens.supervised * np.isin(tokens.ids, [*recipe.chat.stop_ids, *report.stops])
        stops += mixture.targets(replace(found, starts=found.starts - first_token), ends).sum()
        more["empty_completions"] = tokens.report.empty
        for count in counts:
            counts[count] += more[count]
        progress("tokenise", *opened.how_far(done + len(tokens.documents), heldout))
        return done + len(tokens.documents)

    for tokens in spool.resume(name):
        done = take(tokens, spool.tokens - len(tokens.ids))
    rows = opened.heldout_rows() if heldout and opened.heldout_rows is not None else opened.rows()
    try:
        for tokens in tokenise(itertools.islice(rows, done, None), recipe, workers=data.workers, first_row=done):
            spool.add(name, tokens)
            done = take(tokens, spool.tokens - len(tokens.ids))
    except RowError as error:
        raise located(opened, error, error.index, heldout) from error
    return _Part(documents=mixture.joined(documents), counts=counts, rows=done, report=report, stops=int(stops))


def _refuse_endless(opened: OpenedSource, recipe: Recipe) -> NoReturn:
    """Say that generation would never stop."""
    tokens = [recipe.encoder.fast.id_to_token(id) for id in recipe.chat.stop_ids]
    if not tokens:
        raise UsageError(
            f"nothing ends an answer of data source {opened.label}: the tokenizer names no end token",
            hint='name one of its tokens as "eos_token" in tokenizer_config.json, or set data.chat_template for chats',
        )
    raise UsageError(
        f"no answer of data source {opened.label} ends: none of {', '.join(map(repr, tokens))} is ever learned",
        hint="check data.train_on; if rows are longer than training.sequence_length, data.on_overlong: drop",
    )


def _refuse_empty(opened: OpenedSource, part: _Part, length: int) -> NoReturn:
    """Say why a source yields no document."""
    name = opened.label
    if part.report.first is not None and not part.counts["masked"] and not part.counts["dropped"]:
        index, reason = part.report.first
        every = f" ({refused_why(part.report, opened)})" if part.rows > 1 else ""
        raise UsageError(f"{opened.locate(index, False)}: {reason}; no row can be used{every}", hint=_CHAT_HINT)
    if part.rows == 0:
        raise UsageError(f"data source {name} has no rows", hint="check its path, split and limit")
    if part.counts["masked"]:
        raise UsageError(
            f"every label of data source {name} is masked: nothing would be learned from its {part.rows} rows",
            hint="check data.train_on, and that completions (assistant turns) are not empty",
        )
    if part.counts["dropped"]:
        raise UsageError(
            f"all {part.counts['dropped']} rows of data source {name} are longer than "
            f"training.sequence_length {length}",
            hint="raise it, or set data.on_overlong to truncate (or split, for plain text)",
        )
    if part.counts["empty_completions"]:
        raise UsageError(
            f"{part.counts['empty_completions']} of the {part.rows} rows of data source {name} have an empty answer "
            "and no other row can be used",
            hint="check the columns that the completion is taken from",
        )
    raise UsageError(f"all {part.rows} rows of data source {name} are empty")


def refused_why(report: ChatReport, opened: OpenedSource) -> str:
    """Reasons with counts, and where the first row is that was left out."""
    if report.first is None:
        return ""
    reasons = "; ".join(f"{count:,}: {reason}" for reason, count in report.refused.most_common())
    return f"{reasons}; first: {opened.locate(report.first[0], False)}"


def _token_parts(name: str, token_rows: TokenRows, spool: Spool, fraction: float) -> tuple[_Part, _Part]:
    """Rows of token ids as (train, held out)."""
    start, none = spool.tokens, np.zeros(0, dtype=np.int64)
    for ids in token_rows.blocks:
        spool.add(name, Tokens(ids=ids, supervised=np.ones(len(ids), dtype=np.uint8), lengths=none, documents=none))
    rows = np.arange(token_rows.count, dtype=np.int64)
    lengths = np.full(token_rows.count, token_rows.tokens - 1, dtype=np.int64)
    documents = mixture.Documents(rows=rows, starts=start + rows * token_rows.tokens, lengths=lengths)
    kept, out, held = mixture.hold_out(documents, fraction)
    return _Part(documents=kept, counts={}, rows=token_rows.count), _Part(documents=out, counts={}, rows=len(held))


def _write(
    folder: Path,
    data: Data,
    sources: list[OpenedSource],
    train: list[_Part],
    heldout: list[_Part],
    formats: list[Format | None],
    rows: preferences.Rows | None,
    spool: Spool,
    encoder: Encoder | None,
    length: int,
    progress: Progress,
) -> dict[str, Json]:
    """Mix, pack and write both splits; the statistics of the build."""
    ids, mask = spool.arrays()
    pad_id = encoder.pad_id if encoder else 0
    weights = [opened.section.weight for opened in sources]
    by_row = [format not in (None, *_APART) for format in formats]
    chosen = mixture.mix_rows([part.documents for part in train], weights, by_row)
    written: dict[str, dict[str, int]] = {}
    for name, parts in (("train", chosen), ("heldout", [part.documents for part in heldout])):
        joined = mixture.joined(parts)
        if not len(joined):
            continue
        joined = joined.take(hashed_order(len(joined), "documents"))
        count = len(joined)
        report = functools.partial(_packed, progress, count)
        report(0)
        sizes, lengths, seconds = joined.lengths, joined.lengths, joined.seconds
        if rows == "labelled":
            sizes, lengths, seconds = mixture.room(lengths, seconds), seconds - 1, np.zeros_like(seconds)
        stores = [(folder / name, joined.starts, lengths, seconds)]
        if rows == "labelled":
            other = joined.lengths - joined.seconds
            stores.append((folder / name / MISMATCHED, joined.starts + joined.seconds, other, seconds))
        for place, begins, positions, second in stores:
            windows = pack(sizes, length) if data.packing else iter([[[each] for each in range(count)]])
            counts = write_store(
                place, windows=windows, ids=ids, supervised=mask, starts=begins, lengths=positions, pad_id=pad_id,
                length=length, progress=report, seconds=second, grades=None if rows is None else joined.grades,
            )  # fmt: skip
            written.setdefault(name, counts)
    return _stats(sources, train, heldout, list(map(len, chosen)), written)


def _packed(progress: Progress, count: int, documents: int) -> None:
    progress("pack", documents, count)


def _changes(train: list[_Part]) -> str:
    """What was changed in rows, with counts."""
    changes = sum((part.report.changes for part in train), Counter[str]())
    return "; ".join(f"{count:,} {change}" for change, count in changes.most_common())


def _stats(
    sources: list[OpenedSource],
    train: list[_Part],
    heldout: list[_Part],
    used: list[int],
    written: Mapping[str, Mapping[str, int]],
) -> dict[str, Json]:
    """Statistics: rows and what became of them, and positions as supervised, context, padding."""
    counts = written["train"]
    by_source: list[JsonObject] = [
        {
            "name": opened.label,
            "rows": part.rows,
            "documents": len(part.documents),
            "documents_used": uses,
            "heldout_documents": len(held.documents),
            "weight": opened.section.weight,
            **part.counts,
        }
        for opened, part, held, uses in zip(sources, train, heldout, used, strict=True)
    ]
    return {
        "rows": sum(part.rows for part in train),
        **{name: sum(part.counts.get(name, 0) for part in train) for name in mixture.COUNTS},
        **counts,
        "context_tokens": counts["tokens"] - counts["supervised_tokens"],
        "padding_tokens": counts["positions"] - counts["tokens"],
        "fill": counts["tokens"] / counts["positions"],
        "rows_refused": sum(part.report.refused.total() for part in train),
        "rows_refused_why": "; ".join(
            refused_why(part.report, opened) for part, opened in zip(train, sources, strict=True) if part.report.first
        ),
        "rows_changed": _changes(train),
        "heldout": written.get("heldout"),
        "sources": by_source,
    }
