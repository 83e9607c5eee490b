"""The JSON files of an exported folder, in the form that programs of several versions read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from muster.core.typed_json import Json, JsonObject, at, child
from muster.data.tokenizer import Encoder, list_added_tokens
from muster.data.weights.model_files import LICENCES, licence_of
from muster.train.export.sources import ExportSources
from muster.train.export.verification import different_ids, training_ids
from muster.train.model.causal_lm import grows


def end_tokens(sources: ExportSources) -> int | list[int] | None:
    """Where generation ends: at what the data taught, and at what the base names; of data that do not say, at the
    tokenizer's end token, which a chat template has set. None: the base's own matter."""
    if sources.stop_ids:
        return list(sources.stop_ids) if len(sources.stop_ids) > 1 else sources.stop_ids[0]
    if sources.folder is not None and not grows(sources.spec):
        return None
    end = Encoder(sources.tokenizer).eos_id if (sources.tokenizer / "tokenizer.json").is_file() else None
    before = _base_json(sources, "generation_config.json").get("eos_token_id")
    before = before or _base_json(sources, "config.json").get("eos_token_id")
    several = before if isinstance(before, list) and len(before) > 1 else []
    return end if end is None or not several else [end, *(each for each in several if each != end)]


def write_config(folder: Path, sources: ExportSources, dtype: torch.dtype) -> None:
    """config.json, as transformers 5 saves it, with what transformers 4 reads."""
    sources.config.architectures = [type(sources.model).__name__]
    sources.config.dtype = dtype
    end = end_tokens(sources)
    if end is not None:
        sources.config.eos_token_id = sources.config.get_text_config().eos_token_id = end
    sources.config.save_pretrained(folder)
    path = folder / "config.json"
    written = with_old_names(json.loads(path.read_bytes()), _base_json(sources, path.name))
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def write_generation_config(folder: Path, sources: ExportSources) -> None:
    """The base's, with the tokenizer's special tokens where a chat template has changed them; or a new one."""
    from transformers import GenerationConfig

    given, path = _base_json(sources, "generation_config.json"), folder / "generation_config.json"
    changed: JsonObject = {}
    if (not given or grows(sources.spec)) and (sources.tokenizer / "tokenizer.json").is_file():
        encoder = Encoder(sources.tokenizer)
        roles = [role for role in encoder.special if role in ("bos", "eos", "pad")]
        changed = {f"{role}_token_id": encoder.fast.token_to_id(encoder.special[role]) for role in roles}
    end = end_tokens(sources)
    if end is not None:
        changed = {**changed, "eos_token_id": end}
    if given:  # as it is: transformers refuses to save what it reads (a temperature without sampling)
        path.write_text(json.dumps({**given, **changed}, indent=2, sort_keys=True) + "\n")
        return
    config = GenerationConfig() if sources.folder is None else GenerationConfig.from_model_config(sources.config)
    config.update(**changed)
    config.save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer's files from the run's folder; none if the run had no tokenizer."""
    for path in sorted(source.iterdir()) if source.is_dir() else []:
        if path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    list_added_tokens(folder)  # data prepared by an older version, or a base that lacks some
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_bytes())
    # transformers 4 has no TokenizersBackend. transformers 5 builds some classes by its own rules, LlamaTokenizer
    # among them; where these give other ids, the class that reads tokenizer.json is named.
    try:
        ids = training_ids(source, None)
        wrong = different_ids(folder, ids) if ids is not None else None
    except Exception:  # noqa: BLE001 (a class that cannot be opened may raise anything)
        wrong = "it cannot be opened"
    if wrong or config.get("tokenizer_class") == "TokenizersBackend":
        path.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


def write_card(folder: Path, sources: ExportSources, *, adapter: bool) -> str:
    """The base's licence files, and a README.md of its licence's name and the note that is returned: how an adapter is
    loaded that does not simply load on its base. Empty for others."""
    base = sources.folder.path if sources.folder is not None else folder
    for path in sorted(path for pattern in LICENCES for path in base.glob(pattern) if base != folder):
        if path.is_file():  # LICENSES/ of REUSE is a folder
            shutil.copyfile(path, folder / path.name)
    fields = [f"{key}: {json.dumps(value)}" for key, value in licence_of(base).items()]
    note = _adapter_note(sources) if adapter else ""
    parts = ["\n".join(["---", *fields, "---\n"])] if fields else []
    parts += [f"{note[0].upper()}{note[1:]}.\n"] if note else []
    if parts:
        (folder / "README.md").write_text("\n".join(parts))
    return note


def _adapter_note(sources: ExportSources) -> str:
    tokens = sources.config.get_text_config().vocab_size
    base = _base_json(sources, "config.json")
    before = at(base, "vocab_size") or at(base, "text_config", "vocab_size")
    if isinstance(before, int) and before < tokens:
        return (
            f"the adapter has {tokens} tokens, its base {before}: load it by peft's AutoPeftModelForCausalLM, or after "
            f"the base's resize_token_embeddings({tokens}); llama.cpp and vLLM take the merged export"
        )
    if sources.spec.trains_embeddings:
        return "the adapter holds the embedding as a whole: peft loads it, llama.cpp and vLLM take the merged export"
    return ""


def _base_json(sources: ExportSources, name: str) -> JsonObject:
    path = sources.folder.path / name if sources.folder is not None else None
    return json.loads(path.read_bytes()) if path is not None and path.is_file() else {}


def with_old_names(config: JsonObject, base: JsonObject) -> dict[str, Json]:
    """``config``, as transformers 5 saves it, with the keys of transformers 4 in addition; ``base``: the source's.

    Without them transformers 4 (and ctranslate2 and optimum-onnx, which use it) takes its defaults, without a warning.
    Rope parameters that differ by kind of layer (Gemma 3, OLMo 3) stay as they are: the top has room for one set.
    """
    result: dict[str, Json] = {
        key: with_old_names(value, child(base, key)) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
    }
    if "dtype" in config:
        result["torch_dtype"] = config["dtype"]
    rope = child(config, "rope_parameters")
    if "rope_type" in rope:
        theta, share = at(rope, "rope_theta"), at(rope, "partial_rotary_factor")
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        result["rope_theta"] = theta
        # Phi 3 and OLMo in transformers 4 refuse any other spelling than the base's.
        result["rope_scaling"] = None if scaling == {"rope_type": "default"} else base.get("rope_scaling") or scaling
        if share is not None:
            result["partial_rotary_factor"] = share
        if str(config.get("model_type")).startswith("gpt_neox"):
            result |= {"rotary_emb_base": theta, "rotary_pct": share}
    return result
