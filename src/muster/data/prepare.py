"""Data prepared once: sources to packed sequences in a cache, found again by fingerprint.

``prepare`` may be called any number of times: the first call builds, the others open. The fingerprint covers the
sources' content, tokenizer, template, mask, length, packing, over-long rule and the code that prepares.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from muster.config.spec import Data, Model, RunSpec, TrainedTokenizer
from muster.core.errors import MusterError, UsageError
from muster.core.typed_json import Json, JsonObject, text, whole
from muster.data import build
from muster.data.cache import (
    Progress,
    build_once,
    code_version,
    damage,
    discard,
    fingerprint,
    published,
    says_nothing,
    seal,
    translated,
)
from muster.data.chat.engine import ChatRules
from muster.data.sequences import MISMATCHED, SequenceStore
from muster.data.source_type import OpenedSource, open_source
from muster.data.task import TASKS
from muster.data.text.templates import ChatTemplate
from muster.data.tokenise import refuse_while_starting
from muster.data.tokenizer import Encoder, find_template, install_template, locate, model_vocab_size, train
from muster.storage import run_registry
from muster.storage.store.local import uri_of_mounted

_POINTER = "data.json"
_NEW_TOKENS = "new_tokens"
#: For templates that write none.
_NO_DATE = ChatRules.today
#: In a run's id (``run_registry.new_run_id``).
_DATE = re.compile(r"-(20\d\d)([01]\d)([0-3]\d)-\d{6}-")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Data that a run can train on."""

    fingerprint: str
    folder: Path
    vocab_size: int
    """Of the model: its config's where that has one, else the tokenizer's."""
    pad_id: int
    eos_id: int | None
    stop_ids: tuple[int, ...]
    """Ids that end generation: those that training learns as an end first, then those that configs name."""
    today: str
    """ISO date of preparation, which a chat template may write."""
    train: SequenceStore
    heldout: SequenceStore | None
    tokenizer_dir: Path | None
    """None: random tokens, which need none."""
    stats: JsonObject
    """rows, dropped, truncated, split, empty, empty_completions, masked_rows, documents, sequences, positions, tokens,
    supervised_tokens, context_tokens, padding_tokens, fill, unknown_tokens, questions, questions_left_out(_why),
    majority_template, rows_changed, rows_refused(_why), dropped_answers,
    heldout (its counts), sources (the same counts for each), cached, seconds."""


def prepare(spec: RunSpec, *, run_dir: Path, progress: Progress | None = None) -> Prepared:
    """Make sure the run's data is in the cache, save the tokenizer to ``run_dir/tokenizer`` and open both.

    Idempotent and safe among processes. Blocks while building. What is damaged in the cache is prepared again.

    Raises:
        UsageError: the data, the tokenizer or their fit to the model is wrong; evaluation asks questions and not one
            held-out row can be scored.
        AccessError, BackendError: the hub or a folder refuses.
        MusterError: no space.
    """
    refuse_while_starting()
    began = time.monotonic()
    data, model = _sections(spec)
    sources = [open_source(source) for source in data.sources]
    tokenizer_source = locate(model)
    if tokenizer_source is None and any(source.token_rows is None for source in sources):
        raise UsageError(
            "the model has no tokenizer", hint="set model.tokenizer: a hub id, a folder, or {vocab_size: 512}"
        )
    template = find_template(data.chat_template) if data.chat_template else None
    model_vocab = model_vocab_size(model)
    if tokenizer_source is None and model_vocab is None:
        raise UsageError("random tokens need a vocabulary size", hint="set model.config.vocab_size")
    stops = Encoder(tokenizer_source).stop_ids if isinstance(tokenizer_source, Path) else ()
    today = _today(run_dir, _chat_template(tokenizer_source, template))
    name = _fingerprint(spec, data, sources, tokenizer_source, template, [model_vocab, *stops, today])
    folder = cache_folder(data) / name
    report = progress or (lambda activity, done, total: None)

    def make(partial: Path, kept: Path) -> None:
        ready = kept / "tokenizer"
        if not (ready / _NEW_TOKENS).is_file() or damage(ready):
            shutil.rmtree(kept)
            ready.mkdir(parents=True, exist_ok=True)
            new = _tokenizer(spec, tokenizer_source, template, sources, ready / "tokenizer", report)
            (ready / _NEW_TOKENS).write_text(str(new))
            seal(ready)
        encoder = None
        if tokenizer_source is not None:
            encoder = Encoder(Path(shutil.copytree(ready / "tokenizer", partial / "tokenizer")))
        new_tokens = int((ready / _NEW_TOKENS).read_text())
        train_on = data.train_on if isinstance(data.train_on, str) else tuple(data.train_on)
        own = encoder.stop_ids if encoder is not None else ()
        chat = ChatRules(train_on, data.thinking, today, tuple(dict.fromkeys([*own, *stops])))
        build.build(spec, data, sources, encoder, model_vocab, partial, kept, report, new_tokens, chat=chat)

    scratch = run_dir / ".preparing" if uri_of_mounted(folder) else None
    built = build_once(folder, make, report, scratch=scratch)
    try:
        prepared = _open(folder, cached=not built, seconds=time.monotonic() - began)
    except _Damaged as error:  # it has been discarded
        report(f"{error}: prepared again", 0, 0)
        built = build_once(folder, make, report, scratch=scratch)
        prepared = _open(folder, cached=not built, seconds=time.monotonic() - began)
    _refuse_without_questions(spec, prepared.stats)
    _point(run_dir, folder, prepared, _request(spec))
    return prepared


def open_prepared(spec: RunSpec, run_dir: Path) -> Prepared:
    """Open what ``prepare`` made for this run; prepares nothing.

    Raises:
        MusterError: nothing was prepared, or for another run file, or the cache has been cleared.
    """
    path = run_dir / _POINTER
    try:
        result = json.loads(path.read_text())
        folder, request = Path(result["folder"]), result["request"]
    except (OSError, ValueError, KeyError) as error:
        raise MusterError(f"no data was prepared for the run in {run_dir}", hint="`muster data RUN.yaml`") from error
    if request != _request(spec):
        raise MusterError(f"{path} names data of another run file", hint="`muster data RUN.yaml` prepares this one's")
    return _open(folder, cached=True, seconds=0.0)


def stop_ids_of(run_dir: Path) -> tuple[int, ...]:
    """``Prepared.stop_ids`` of the run's data, which may be gone; empty where none were written down."""
    try:
        held = json.loads((run_dir / _POINTER).read_text()).get("stop_ids", ())
    except (OSError, ValueError, AttributeError):
        return ()
    return tuple(id for id in held if isinstance(id, int)) if isinstance(held, list) else ()


def cache_folder(data: Data) -> Path:
    """Where prepared data is kept."""
    return Path(data.cache_dir).expanduser() if data.cache_dir else Path.home() / ".cache" / "muster" / "data"


def _refuse_without_questions(spec: RunSpec, stats: JsonObject) -> None:
    """Raises UsageError where evaluation asks questions and every one has been left out."""
    evaluation = spec.evaluation
    is_asking = evaluation.num_questions or evaluation.final_num_questions or evaluation.samples
    if not is_asking or whole(stats, "questions") or not whole(stats, "questions_left_out"):
        return
    raise UsageError(
        f"no held-out row can be asked and scored; {text(stats, 'questions_left_out_why')}",
        hint="correct the rows or `database`; without evaluation.num_questions and samples: 0 nothing is asked",
    )


def _request(spec: RunSpec) -> str:
    """Identifies what the run file requests, without reading any data file."""
    data, model = _sections(spec)
    held: list[Json] = [data.model_dump(mode="json"), model.model_dump(mode="json"), spec.training.sequence_length]
    rows = spec.training.preference_rows
    return fingerprint(held if rows is None else [*held, rows])


def _sections(spec: RunSpec) -> tuple[Data, Model]:
    if spec.data is None or spec.model is None:
        raise UsageError("the run file has no data or no model section", hint="data is prepared for a model")
    return spec.data, spec.model


def _fingerprint(
    spec: RunSpec,
    data: Data,
    sources: list[OpenedSource],
    tokenizer_source: Path | TrainedTokenizer | None,
    template: ChatTemplate | None,
    model: list[Json],
) -> str:
    """``model``: what is known of it besides, and the day where a template writes it."""
    import tokenizers

    if isinstance(tokenizer_source, TrainedTokenizer):
        tokenizer: JsonObject | str | None = tokenizer_source.model_dump()
    else:
        tokenizer = None if tokenizer_source is None else Encoder(tokenizer_source).fingerprint()
    return fingerprint(
        {
            "code": code_version(_modules(sources)),
            "tokenizers": tokenizers.__version__,
            "sources": [source.identity for source in sources],
            "tokenizer": tokenizer,
            "model": model,
            "sequence_length": spec.training.sequence_length,
            "data": data.model_dump(mode="json", exclude={"sources", "workers", "cache_dir", "chat_template"}),
            "chat_template": [template.text, *template.tokens] if template else None,
            "rows": spec.training.preference_rows,
        }
    )


def _chat_template(tokenizer_source: Path | TrainedTokenizer | None, template: ChatTemplate | None) -> str:
    if template is not None:
        return template.text
    return (Encoder(tokenizer_source).chat_template or "") if isinstance(tokenizer_source, Path) else ""


def _today(run_dir: Path, chat_template: str) -> str:
    """The date that a chat template may write: the one in the run's id, which is the same on all hosts and at each
    resume; without a run that of the first preparation."""
    if "strftime_now" not in chat_template:
        return _NO_DATE
    if dated := _DATE.search(run_registry.existing_id(run_dir) or ""):
        return "-".join(dated.groups())
    try:
        return str(json.loads((run_dir / _POINTER).read_text())["today"])
    except (OSError, ValueError, KeyError):
        return datetime.datetime.now(datetime.UTC).date().isoformat()  # hosts may be in several time zones


def _modules(sources: list[OpenedSource]) -> set[str]:
    """The modules of the sources and their tasks."""
    tasks = {type(TASKS.get(source.type.task)).__module__ for source in sources if source.type.task}
    return tasks | {source.type.open.__module__ for source in sources}


def _tokenizer(
    spec: RunSpec,
    tokenizer_source: Path | TrainedTokenizer | None,
    template: ChatTemplate | None,
    sources: list[OpenedSource],
    target: Path,
    report: Progress,
) -> int:
    """Write the tokenizer to ``target``, trained where asked for; how many tokens the template added to it."""
    if tokenizer_source is None:
        return 0
    if isinstance(tokenizer_source, TrainedTokenizer):
        report("train tokenizer", 0, 0)
        texts = (text for source in sources for text in build.training_texts(source, spec.training.preference))
        train(lambda: texts, tokenizer_source, target, template.tokens if template else ())
    else:
        Encoder(tokenizer_source).save(target)
    return install_template(target, template) if template else 0


class _Damaged(MusterError):
    """Prepared data that is not whole; it has been removed from the cache."""


def _open(folder: Path, *, cached: bool, seconds: float) -> Prepared:
    """Raises _Damaged; MusterError where it cannot be read: it may be whole, and stays."""
    try:
        place = published(folder)
        if place is None:
            raise _Damaged(f"prepared data {folder} is gone", hint="it is prepared again at the next start")
        inode = place.stat().st_ino

        def on_damage() -> None:
            discard(folder, place, inode)

        try:
            found = damage(place)
            if found is not None:
                raise MusterError(f"{found} is not what was prepared")
            meta = json.loads((place / "meta.json").read_text())
            train = SequenceStore(place / "train", on_damage)
            heldout = SequenceStore(place / "heldout", on_damage) if (place / "heldout").is_dir() else None
            for store in (train, heldout):
                if store is not None and (store.folder / MISMATCHED).is_dir():
                    store.mismatched = SequenceStore(store.folder / MISMATCHED, on_damage)
        except (MusterError, OSError, ValueError) as error:
            if isinstance(error, OSError) and says_nothing(error):
                raise
            on_damage()
            raise _Damaged(
                f"prepared data in {folder} is damaged: {error}", hint="it is prepared again at the next start"
            ) from error
    except OSError as error:
        raise MusterError(
            f"prepared data in {folder} cannot be read: {error}", hint="it is not removed: see to its disk or network"
        ) from error
    tokenizer = place / "tokenizer"
    return Prepared(
        fingerprint=folder.name,
        folder=place,
        vocab_size=meta["vocab_size"],
        pad_id=meta["pad_id"],
        eos_id=meta["eos_id"],
        stop_ids=tuple(meta["stop_ids"]),
        today=meta["today"],
        train=train,
        heldout=heldout,
        tokenizer_dir=tokenizer if tokenizer.is_dir() else None,
        stats=MappingProxyType({**meta["stats"], "cached": cached, "seconds": seconds}),
    )


def _says(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False


def _point(run_dir: Path, folder: Path, prepared: Prepared, request: str) -> None:
    """Write the data's location and a copy of the tokenizer to the run's folder. Hosts do so at once.

    Their temporary names are random: a pod's process numbers are those of every other pod.
    """
    mine = secrets.token_hex(8)
    with translated(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        folder_text = str(folder.parent.resolve() / folder.name)
        held = {"folder": folder_text, "request": request, "today": prepared.today, "stop_ids": prepared.stop_ids}
        pointer = json.dumps(held)
        if not _says(run_dir / _POINTER, pointer):  # a restarted agent needs no room on a full disk
            temporary = run_dir / f".{_POINTER}.{mine}"
            temporary.write_text(pointer)
            os.replace(temporary, run_dir / _POINTER)
        target = run_dir / "tokenizer"
        if prepared.tokenizer_dir is None or target.is_dir():
            return
        temporary = run_dir / f".tokenizer.{mine}"
        shutil.copytree(prepared.tokenizer_dir, temporary)
        try:
            os.rename(temporary, target)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            if not target.is_dir():
                raise
