"""A first run file for somebody's rows: what is chosen for them, each choice said and commented."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from muster import backends
from muster.app.planning.rows_seen import RowsSeen, look
from muster.config import load
from muster.config.sections.sources import FILE_ENDINGS, FileSource, HubSource
from muster.config.spec import Model
from muster.core.errors import AccessError, UsageError
from muster.core.flops import ModelShape
from muster.core.typed_json import Json

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
    """GPUs of this machine."""
    spec = load.loads("name: here\nmodel: {source: x}\ndata: {sources: [{type: random}]}\ntraining: {steps: 1}\n").spec
    [offer] = backends.load(spec.backend).offers(spec)
    return offer.gpus_per_node


def draft(given: str, base: Base | None, *, lora: bool, gpus: int) -> Draft:
    """A run file for the rows of ``given``, which are read and checked. ``lora``: adapters instead of all weights.

    Raises: as ``rows_seen.look``.
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
        f"# {rows.kind.capitalize()} of {given}: written by `muster init`; every key: docs/run-file.md.",
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
