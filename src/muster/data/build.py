"""One build of prepared data: tokenise, cut, hold out, mix, pack, write; called by `prepare` under its lock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from muster.config.spec import Data, RunSpec
from muster.core.errors import UsageError
from muster.core.typed_json import Json, JsonObject
from muster.data import collect_questions, mixture
from muster.data.arrays import Bytes, Int32s, Int64s
from muster.data.collect_questions import located
from muster.data.formats import Format, choose_format, prompt_and_completion, row_messages, row_text
from muster.data.packing import pack
from muster.data.schedule import hashed_order
from muster.data.sequences import write_store
from muster.data.source_type import OpenedSource, TokenRows
from muster.data.tokenise import Recipe, RowError, Tokens, tokenise
from muster.data.tokenizer import Encoder, check_vocabulary

Progress = Callable[[str, int, int], None]
"""(activity, done, total; total 0: not known)."""


@dataclass(frozen=True)
class _Part:
    """One source's documents of one split, in the token array of all."""

    documents: mixture.Documents
    counts: dict[str, int]
    rows: int


def build(
    spec: RunSpec,
    data: Data,
    sources: list[OpenedSource],
    encoder: Encoder | None,
    model_vocab: int | None,
    folder: Path,
    progress: Progress,
    new_tokens: int = 0,
) -> None:
    """Write a whole prepared folder: train/, heldout/, questions.jsonl, meta.json (tokenizer/ is there already).

    ``new_tokens``: of the tokenizer, from the chat template; the model's embedding grows by those it has no rows for.

    Raises:
        UsageError: no usable row, every label masked, or a vocabulary the model lacks.
    """
    size = encoder.vocab_size if encoder else 0
    fitting = check_vocabulary(size - new_tokens, model_vocab, "the tokenizer")
    vocab_size = max(size, fitting)
    length = spec.training.sequence_length
    spool = _Spool(folder)
    try:
        formats = [_format(opened, data) for opened in sources]
        train, heldout, questions = [], [], []
        for number, (opened, format) in enumerate(zip(sources, formats, strict=True)):
            if opened.token_rows is not None:
                parts = _token_parts(opened.token_rows(length, vocab_size), spool, data.heldout_fraction)
            else:
                assert encoder is not None and format is not None
                train_on = data.train_on if isinstance(data.train_on, str) else tuple(data.train_on)
                recipe = Recipe(encoder.folder, format, opened.section.template, train_on)
                parts, held_rows = _source(opened, recipe, data, spool, length, progress)
                questions.append(collect_questions.collect(opened, format, number, held_rows))
            train.append(parts[0])
            heldout.append(parts[1])
        stats = _write(folder, data, sources, train, heldout, spool, encoder, length, progress)
    finally:
        spool.remove()
    stats["unknown_tokens"] = spool.unknown
    asked = [each.entries for each in questions]
    stats["majority_template"] = collect_questions.add_majority_answers(sources, formats, asked) if any(asked) else ""
    stats["questions"] = collect_questions.write(folder, asked)
    stats["questions_left_out"] = sum(each.left_out.total() for each in questions)
    stats["questions_left_out_why"] = collect_questions.left_out_why(questions)
    meta = {
        "vocab_size": vocab_size,
        "tokenizer_size": size,
        "pad_id": encoder.pad_id if encoder else 0,
        "eos_id": encoder.eos_id if encoder else None,
        "formats": formats,
        "stats": stats,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True))


def training_texts(opened: OpenedSource) -> Iterator[str]:
    """A source's text for training a tokenizer. Prompts and completions come apart, as they will be tokenised."""
    format: Format | None = None
    for index, row in enumerate(opened.rows()):
        try:
            format = format or choose_format(opened.section, [name for name in row if not name.startswith("_")])
            if format == "text":
                texts = [row_text(row)]
            elif format == "chat":
                turns = row_messages(row)  # with what chat templates write around them: role and line ends
                texts = [part for turn in turns for part in (f"{turn['role']}\n", str(turn["content"] or ""), "\n\n")]
            else:
                texts = [*prompt_and_completion(row, opened.section.template)]
        except UsageError as error:
            raise located(opened, error, index) from error
        yield from texts


class _Spool:
    """All tokens of a build, appended to two files and read back by mapping: memory does not grow with the data."""

    def __init__(self, folder: Path) -> None:
        self.paths = (folder / "spool.ids", folder / "spool.mask")
        self.files = tuple(open(path, "wb") for path in self.paths)  # noqa: SIM115 (held for the build)
        self.tokens = 0
        self.unknown = 0

    def add(self, tokens: Tokens) -> None:
        self.files[0].write(tokens.ids.astype("<i4").tobytes())
        self.files[1].write(tokens.supervised.astype(np.uint8).tobytes())
        self.tokens += int(tokens.ids.shape[0])
        self.unknown += tokens.unknown

    def arrays(self) -> tuple[Int32s, Bytes]:
        for file in self.files:
            file.flush()
        if not self.tokens:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8)
        ids = np.memmap(self.paths[0], dtype="<i4", mode="r", shape=(self.tokens,))
        mask = np.memmap(self.paths[1], dtype=np.uint8, mode="r", shape=(self.tokens,))
        return ids, mask

    def remove(self) -> None:
        for file, path in zip(self.files, self.paths, strict=True):
            file.close()
            path.unlink(missing_ok=True)


def _format(opened: OpenedSource, data: Data) -> Format | None:
    """The source's format by its first row; None for rows of token ids."""
    if opened.token_rows is not None:
        return None
    first = next(opened.rows(), None)
    if first is None:
        raise UsageError(f"data source {opened.label} has no rows", hint="check its path, split and limit")
    try:
        format = choose_format(opened.section, [name for name in first if not name.startswith("_")])
    except UsageError as error:
        raise located(opened, error, 0) from error
    if data.on_overlong == "split" and format != "text":
        raise UsageError(
            f"data.on_overlong: split is for plain text, but {opened.label} is {format}", hint="use drop or truncate"
        )
    return format


def _source(
    opened: OpenedSource, recipe: Recipe, data: Data, spool: _Spool, length: int, progress: Progress
) -> tuple[tuple[_Part, _Part], Int64s | None]:
    """Tokenise one source: (train, held out) and the numbers of training rows held out (None: it has its own)."""
    train = _part(opened, False, recipe, data, spool, length, progress)
    if not len(train.documents):
        _refuse_empty(opened.label, train, length)
    if opened.heldout_rows is not None:
        held = _part(opened, True, recipe, data, spool, length, progress)
        return (train, held), None
    kept, out, rows = mixture.hold_out(train.documents, data.heldout_fraction)
    return (replace(train, documents=kept), _Part(documents=out, counts={}, rows=len(np.unique(out.rows)))), rows


def _part(
    opened: OpenedSource, heldout: bool, recipe: Recipe, data: Data, spool: _Spool, length: int, progress: Progress
) -> _Part:
    rows = opened.heldout_rows() if heldout and opened.heldout_rows is not None else opened.rows()
    total = 0 if heldout else opened.expected_rows or 0
    lengths: list[Int64s] = []
    first_token = spool.tokens
    done = empty_completions = 0
    try:
        for tokens in tokenise(rows, recipe, workers=data.workers):
            spool.add(tokens)
            lengths.append(tokens.lengths)
            done += len(tokens.lengths)
            empty_completions += tokens.empty_completions
            progress("tokenise", done, max(total, done) if total else 0)
    except RowError as error:
        raise located(opened, error, error.index, heldout) from error
    row_tokens = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
    _, mask = spool.arrays()
    documents, counts = mixture.cut(
        row_tokens, mask[first_token:], length=length, on_overlong=data.on_overlong, first_token=first_token
    )
    counts["empty_completions"] = empty_completions
    counts["empty"] -= empty_completions
    return _Part(documents=documents, counts=counts, rows=done)


def _refuse_empty(name: str, part: _Part, length: int) -> NoReturn:
    """Say why a source yields no document."""
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


def _token_parts(token_rows: TokenRows, spool: _Spool, fraction: float) -> tuple[_Part, _Part]:
    """Rows of token ids as (train, held out)."""
    start = spool.tokens
    for ids in token_rows.blocks:
        spool.add(Tokens(ids=ids, supervised=np.ones(len(ids), dtype=np.uint8), lengths=np.zeros(0, dtype=np.int64)))
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
    spool: _Spool,
    encoder: Encoder | None,
    length: int,
    progress: Progress,
) -> dict[str, Json]:
    """Mix, pack and write both splits; the statistics of the build."""
    ids, mask = spool.arrays()
    pad_id = encoder.pad_id if encoder else 0
    used = mixture.mix([len(part.documents) for part in train], [opened.section.weight for opened in sources])
    chosen = [
        part.documents.take(np.repeat(np.arange(len(uses)), uses)) for part, uses in zip(train, used, strict=True)
    ]
    written = {}
    for name, parts in (("train", chosen), ("heldout", [part.documents for part in heldout])):
        joined = mixture.Documents(
            *(np.concatenate([getattr(part, field) for part in parts]) for field in ("rows", "starts", "lengths"))
        )
        if not len(joined):
            continue
        joined = joined.take(hashed_order(len(joined), "documents"))
        progress("pack", 0, len(joined))
        lengths = joined.lengths.tolist()
        bins = pack(lengths, length) if data.packing else [[place] for place in range(len(lengths))]
        written[name] = write_store(
            folder / name, bins=bins, ids=ids, supervised=mask, starts=joined.starts, lengths=joined.lengths,
            pad_id=pad_id, length=length,
        )  # fmt: skip
        progress("pack", len(joined), len(joined))
    return _stats(sources, train, heldout, used, written)


def _stats(
    sources: list[OpenedSource],
    train: list[_Part],
    heldout: list[_Part],
    used: list[Int64s],
    written: Mapping[str, Mapping[str, int]],
) -> dict[str, Json]:
    """Statistics: rows and what became of them, and positions as supervised, context, padding."""
    counts = written["train"]
    by_source: list[JsonObject] = [
        {
            "name": opened.label,
            "rows": part.rows,
            "documents": len(part.documents),
            "documents_used": int(uses.sum()),
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
        "heldout": written.get("heldout"),
        "sources": by_source,
    }
