"""A first run file for a user's rows: what is chosen for them, each choice printed and commented."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from muster import backends
from muster.config import load
from muster.config.sections.sources import FILE_ENDINGS, FileSource, HubSource, PromptTemplate, Source
from muster.config.spec import Model
from muster.core.errors import AccessError, UsageError
from muster.core.flops import ModelShape
from muster.core.typed_json import Json

if TYPE_CHECKING:
    from muster.data.source_type import OpenedSource
    from muster.data.task import Row
    from muster.data.tokenizer import Encoder


#: A small decoder that a laptop trains in minutes; its vocabulary comes from the rows.
_SMALL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
#: From so many parameters on, adapters are proposed.
LORA_FROM = 1_000_000_000
_LONGEST = {"scratch": 512, "base": 4096}
_PASSES, _FEWEST_STEPS, _MOST_STEPS_CPU = 3, 40, 1000


@dataclass(frozen=True, kw_only=True)
class Base:
    """What is known of the model that training starts from."""

    source: str
    parameters: int | None
    has_template: bool
    positions: int | None


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A run file's text and what was assumed in it."""

    text: str
    assumed: tuple[str, ...]


def data_here(folder: Path) -> str:
    """The one data file of a folder.

    Raises:
        UsageError: there is none, or several.
    """
    found = _data_files(folder)
    if len(found) == 1:
        return found[0]
    what = f"several data files here: {', '.join(found[:5])}" if found else "no data file here"
    raise UsageError(what, hint="muster init --from FILE, or --from OWNER/DATASET on the Hugging Face hub")


def one_data_file(folder: Path) -> str | None:
    """The one data file of a folder; None: there is none, or several."""
    found = _data_files(folder)
    return found[0] if len(found) == 1 else None


def _data_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(FILE_ENDINGS) and path.is_file())


def free(out: Path) -> None:
    """Raises UsageError where ``out`` exists: nothing is overwritten."""
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists and is not overwritten", hint="muster init --out OTHER.yaml")


def base_of(source: str) -> Base:
    """Look at a base model: a folder or a hub id.

    Raises:
        UsageError: no model there, or one without tokenizer.
        AccessError, BackendError: the hub refuses or cannot be reached.
    """
    from muster.data import hub
    from muster.data.tokenizer import Encoder, locate

    folder = Path(source).expanduser()
    if folder.is_dir():
        file: Path | None = folder / "config.json"
    else:
        if source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise UsageError(f"model folder {source!r} does not exist")
        file = hub.fetch_model_files(source, None, ("config.json",)).get("config.json")
    if file is None or not file.is_file():
        raise UsageError(f"{source} has no config.json", hint="a folder with weights and tokenizer, or a hub id")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    tokenizer = locate(Model(source=source))
    assert isinstance(tokenizer, Path)
    try:
        parameters: int | None = ModelShape.from_config(config).parameters
    except UsageError:
        parameters = None
    positions = config.get("max_position_embeddings")
    return Base(
        source=source,
        parameters=parameters,
        has_template=Encoder(tokenizer).chat_template is not None,
        positions=positions if isinstance(positions, int) else None,
    )


def gpus_here() -> int:
    spec = load.loads("name: here\nmodel: {source: x}\ndata: {sources: [{type: random}]}\ntraining: {steps: 1}\n").spec
    [offer] = backends.load(spec.backend).offers(spec)
    return offer.gpus_per_node


def draft(given: str, base: Base | None, *, lora: bool, gpus: int) -> Draft:
    """A run file for the rows of ``given``, which are read and checked. ``lora``: adapters instead of all weights.

    Raises: as ``look``.
    """
    from muster.data.tokenizer import Encoder, locate

    encoder = None
    if base is not None:
        folder = locate(Model(source=base.source))
        assert isinstance(folder, Path)
        encoder = Encoder(folder)
    rows = look(given, encoder)
    assumed = [_of_rows(rows)]
    parts = [
        f"# {rows.kind.capitalize()} of {given}: written by `muster init`; every key: docs/reference/run-file.md.",
        f"name: {_name(given)}",
        _model(base, lora, gpus, rows, assumed),
        _data(base, rows, assumed),
        _training(base, lora, gpus, rows, assumed),
        _evaluation(rows),
        _resources(gpus, assumed),
    ]
    text = "\n\n".join(parts) + "\n"
    load.loads(text)  # what we write must be accepted: anything else is our own bug
    return Draft(text=text, assumed=tuple(assumed))


def write(out: Path, text: str) -> None:
    """Raises UsageError where the file exists, AccessError where it cannot be written."""
    free(out)
    try:
        with open(out, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise AccessError(f"{out} cannot be written: {error.strerror}") from error


def _of_rows(rows: RowsSeen) -> str:
    count = f"{rows.count:,} rows" if rows.complete else f"the first {rows.count:,} rows (there are more)"
    how = "" if rows.tokens_measured else "about "
    mean = rows.tokens / rows.count
    return f"{count} of {rows.kind}, {how}{mean:,.0f} tokens each, {rows.longest:,} the longest; every one was checked"


def _name(given: str) -> str:
    stem = given.rstrip("/").rpartition("/")[2].split(".", 1)[0]
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:50] or "first"


def _length(base: Base | None, rows: RowsSeen) -> int:
    """Tokens of a sequence: a power of two that holds the longest row, as far as memory and model allow."""
    most = _LONGEST["scratch" if base is None else "base"]
    if base is not None and base.positions:
        most = min(most, base.positions)
    fitting = 1 << math.ceil(math.log2(max(128, rows.longest + 8)))
    return int(min(most, max(512, fitting) if rows.kind == "text" else fitting))


def _model(base: Base | None, lora: bool, gpus: int, rows: RowsSeen, assumed: list[str]) -> str:
    dtype = "bfloat16" if gpus else "float32"
    if base is None:
        vocab = 512 if rows.tokens < 100_000 else 2048 if rows.tokens < 2_000_000 else 8192
        config = {**_SMALL, "max_position_embeddings": _length(None, rows)}
        assumed.append("no base model: a small one is trained from scratch, which learns these rows and nothing else")
        return (
            "model:\n"
            "  # To fine-tune instead: replace config and tokenizer by `source: FOLDER_OR_HUB_ID`.\n"
            f"  config: {json.dumps(config)}\n"
            f"  tokenizer: {{kind: bpe, vocab_size: {vocab}}}  # trained on the rows\n"
            f"  dtype: {dtype}"
        )
    text = f"model:\n  source: {json.dumps(base.source)}\n  dtype: {dtype}"
    if not lora:
        return text
    assumed.append("adapters of rank 16 are trained, the base stays as it is (without `model.lora`: all weights)")
    return text + "\n  lora: {rank: 16, alpha: 32}"


def _data(base: Base | None, rows: RowsSeen, assumed: list[str]) -> str:
    entry: dict[str, Json] = {"type": rows.source.type}
    if isinstance(rows.source, HubSource):
        entry["name"] = rows.source.name
    elif isinstance(rows.source, FileSource):
        entry["path"] = rows.source.path
    if rows.source.format is not None:
        entry["format"] = rows.source.format
    if rows.source.template is not None:
        entry["template"] = rows.source.template.model_dump(mode="json")
        assumed.append(f"columns make up prompt and answer by {json.dumps(entry['template'])}")
    lines = ["data:", "  sources:", f"    - {json.dumps(entry, ensure_ascii=False)}"]
    if rows.kind == "chat" and (base is None or not base.has_template):
        why = "a tokenizer of its own" if base is None else f"{base.source}"
        assumed.append(
            f"chat template: chatml, since {why} has none; its tokens are added and their embeddings trained"
        )
        lines.append("  chat_template: chatml  # or llama3, a Jinja file, `from MODEL`")
    if rows.kind == "text":
        lines.append("  on_overlong: split  # texts longer than a sequence continue in the next one")
    else:
        lines.append("  train_on: completions  # only answers (assistant turns) are learned; or all")
        length = _length(base, rows)
        if rows.longest > length:
            assumed.append(f"rows longer than {length:,} tokens are left out, and counted (data.on_overlong)")
    share = 0.1 if rows.count < 2000 else 0.01
    lines.append(f"  heldout_fraction: {share}  # of the rows: not trained on, they measure what was learned")
    return "\n".join(lines)


def _training(base: Base | None, lora: bool, gpus: int, rows: RowsSeen, assumed: list[str]) -> str:
    length = _length(base, rows)
    sequences = max(1, math.ceil(rows.tokens / length))
    batch = 4 if sequences < 64 else 8 if sequences < 1000 else 16
    passes = _PASSES if rows.complete else 1
    wanted = math.ceil(passes * sequences / batch)
    steps = max(_FEWEST_STEPS, wanted)
    if not gpus:
        steps = min(steps, _MOST_STEPS_CPU)
    real = steps * batch / sequences
    times = f"{real:.2g} times" if real < 9.5 else f"{real:.0f} times"
    assumed.append(f"{steps:,} steps of {batch} x {length:,} tokens: every row is seen about {times}")
    if base is None:
        rate, why = 2e-3, "high: a small model that knows nothing yet"
    elif lora:
        rate, why = 2e-4, "usual for adapters"
    else:
        rate, why = (5e-5 if (base.parameters or 0) < LORA_FROM else 2e-5), "usual for all weights of a trained model"
    return (
        "training:\n"
        f"  steps: {steps}  # every row about {times}\n"
        f"  sequence_length: {length}  # the longest row has {rows.longest:,} tokens\n"
        f"  global_batch_size: {batch}  # sequences a step, however many GPUs\n"
        f"  micro_batch_size: {1 if base is not None else min(4, batch)}  # at once on a GPU\n"
        "  optimizer:\n"
        f"    learning_rate: {_number(rate)}  # {why}\n"
        "    warmup_steps: 0.1  # a share of the steps"
    )


def _evaluation(rows: RowsSeen) -> str:
    text = "evaluation:\n  samples: 3  # answers to held-out rows, shown at the end"
    if rows.kind == "question and SQL":
        text += "\n  num_questions: 20  # held-out questions answered at the end; data.sources[].database runs them"
    return text + "\n  max_new_tokens: 64"


def _resources(gpus: int, assumed: list[str]) -> str:
    if gpus:
        assumed.append(f"this machine's {gpus} GPU{'s' * (gpus > 1)}; `muster plan` says where else, and what it costs")
        return "resources:\n  device: cuda"
    assumed.append("this machine's CPU: no GPU was found; `muster plan` says what it takes")
    return "resources:\n  device: cpu  # no GPU was found where this was written; else delete this line"


def _number(value: float) -> str:
    """YAML 1.1 reads ``2e-4`` as text; ``2.0e-4`` is a number."""
    digits, power = f"{value:e}".split("e")
    return f"{float(digits):.1f}e{int(power)}"


# ----------------
# What a file or data set holds, for a user without a run file: the kind of its rows, how many, how long


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
