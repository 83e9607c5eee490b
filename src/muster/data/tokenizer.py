"""Tokenizers: a folder's ``tokenizer.json`` opened directly, or a small one trained on the run's own text.

transformers is imported only for folders without a ``tokenizer.json``.
The tokenizer is saved as a Hugging Face folder in the run's folder, so that readers need no hub.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.config.spec import Model, TrainedTokenizer
from muster.core.errors import UsageError, install_command
from muster.core.typed_json import Json, JsonObject, at
from muster.data import hub
from muster.data.chat.engine import ChatEngine, ChatRules
from muster.data.text.templates import ChatTemplate, shipped_or_file
from muster.data.text.vocabularies import SPECIAL, train_bpe, train_words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
#: What both files say of an added token.
_TOKEN_KEYS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


@dataclass(frozen=True)
class Encoder:
    """A tokenizer in a folder, opened."""

    folder: Path

    @cached_property
    def fast(self) -> Tokenizer:
        """With the folder's special tokens added, no padding, no truncation."""
        from tokenizers import AddedToken, Tokenizer

        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return self._through_transformers()
        try:
            result = Tokenizer.from_file(str(path))
        except Exception as error:
            raise UsageError(f"{path} is not a readable tokenizer: {error}") from error
        result.no_padding()
        result.no_truncation()
        missing = [name for name in self.special.values() if result.token_to_id(name) is None]
        result.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in missing])
        return result

    @cached_property
    def config(self) -> JsonObject:
        return _read_json(self.folder / "tokenizer_config.json")

    @cached_property
    def special(self) -> dict[str, str]:
        """Role (``bos``, ``eos``, ``pad``, ``unk``) -> token, where the folder names one."""
        result: dict[str, str] = {}
        for source in (_read_json(self.folder / "special_tokens_map.json"), self.config):
            for role in ("bos", "eos", "pad", "unk"):
                value = source.get(f"{role}_token")
                if isinstance(value, Mapping):
                    value = value.get("content")
                if isinstance(value, str):
                    result[role] = value
        return result

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that can come out."""
        vocabulary = self.fast.get_vocab(with_added_tokens=True)
        return int(max(vocabulary.values())) + 1 if vocabulary else 0

    @cached_property
    def eos_id(self) -> int | None:
        return self._id("eos")

    @cached_property
    def pad_id(self) -> int:
        """The padding token's id; without one the end token's, since padding is never supervised or attended."""
        known = (self._id(role) for role in ("pad", "eos", "unk"))
        return next((result for result in known if result is not None), 0)

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """What the tokenizer puts before every text (a beginning token), found by asking it."""
        plain = list(self.fast.encode("a", add_special_tokens=False).ids)
        full = list(self.fast.encode("a", add_special_tokens=True).ids)
        starts = range(len(full) - len(plain) + 1)
        result = next((tuple(full[:start]) for start in starts if full[start : start + len(plain)] == plain), ())
        begin = self._id("bos")
        if not result and begin is not None and self.config.get("add_bos_token"):
            return (begin,)
        return result

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, nothing added."""
        return [name.ids for name in self.fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids as a model reads a prompt: with the beginning token, where the tokenizer has one."""
        return self.begun(self.encode([text])[0])

    def begun(self, ids: list[int]) -> list[int]:
        """``ids`` of a text with the beginning token before them, unless the text begins with it."""
        prefix = list(self.prefix)
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self.fast.decode(list(ids), skip_special_tokens=skip_special))

    @cached_property
    def chat_template(self) -> str | None:
        """The folder's template; of several the one called ``default``."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        found = self.config.get("chat_template")
        if isinstance(found, list):
            named = {at(one, "name"): str(at(one, "template")).rstrip("\n") for one in found}
            found = named.get("default")
            if found and "tool_use" in named:  # as transformers chooses
                found = f"{{% if tools %}}{named['tool_use']}{{% else %}}{found}{{% endif %}}"
        return found if isinstance(found, str) and found else None

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """All of them, by id."""
        added = sorted(self.fast.get_added_tokens_decoder().items())
        return tuple(token.content for _, token in added if token.special)

    @cached_property
    def template_variables(self) -> dict[str, str]:
        """Special tokens by the names that chat templates use: ``bos_token`` and the like."""
        named = {f"{role}_token": token for role, token in self.special.items()}
        for source in (_read_json(self.folder / "special_tokens_map.json"), self.config):
            for name, value in source.items():
                value = value.get("content") if isinstance(value, Mapping) else value
                if name.endswith("_token") and isinstance(value, str):
                    named[name] = value
        return named

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end generation: the tokenizer's end token, and those of the model's configs in its folder."""
        ids = [self.eos_id]
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self.folder / name).get("eos_token_id")
            ids += value if isinstance(value, list) else [value]  # type: ignore[list-item]
        return tuple(dict.fromkeys(id for id in ids if isinstance(id, int) and id < self.vocab_size))

    def fingerprint(self) -> str:
        """SHA-256 over the folder's tokenizer files."""
        digest = hashlib.sha256()
        for name in FILES:
            path = self.folder / name
            if path.is_file():
                digest.update(f"{name}:{path.stat().st_size}:".encode() + path.read_bytes())
        return digest.hexdigest()

    def save(self, target: Path) -> None:
        """Copy the folder's tokenizer files; writes ``tokenizer.json`` where the folder had none."""
        target.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, target / name)
        if not (target / "tokenizer.json").is_file():
            self.fast.save(str(target / "tokenizer.json"))

    def _id(self, role: str) -> int | None:
        name = self.special.get(role)
        result = self.fast.token_to_id(name) if name is not None else None
        return None if result is None else int(result)

    @cached_property
    def _transformers(self) -> Any:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise UsageError("this tokenizer needs transformers", hint=install_command("train")) from error
        try:
            return AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise UsageError(f"the tokenizer in {self.folder} cannot be loaded: {str(error)[:200]}") from error

    def _through_transformers(self) -> Tokenizer:
        backend = getattr(self._transformers, "backend_tokenizer", None)
        if backend is None:
            raise UsageError(
                f"the tokenizer in {self.folder} has no fast form", hint="save it with a tokenizer.json first"
            )
        result: Tokenizer = backend
        return result


def locate(model: Model) -> Path | TrainedTokenizer | None:
    """Where the model's tokenizer is: a local folder (fetched from the hub where need be), or one to train.

    None: the model names none (a config alone), which only random tokens can do without.

    Raises:
        UsageError: a folder without a tokenizer.
        AccessError, BackendError: the hub refuses or cannot be reached.
    """
    chosen = model.tokenizer if model.tokenizer is not None else model.source
    if chosen is None or isinstance(chosen, TrainedTokenizer):
        return chosen
    folder = Path(chosen).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise UsageError(f"{chosen} has no tokenizer", hint="set model.tokenizer")
        return folder
    if chosen.startswith((".", "/", "~")) or chosen.count("/") > 1:
        raise UsageError(f"tokenizer folder {chosen!r} does not exist", hint="check model.source and model.tokenizer")
    files = hub.fetch_model_files(chosen, model.revision, (*FILES, "config.json", "generation_config.json"))
    if not {*files} & {*FILES}:
        raise UsageError(f"{chosen!r} has no tokenizer on the hub", hint="set model.tokenizer")
    return next(iter(files.values())).parent


def find_template(value: str) -> ChatTemplate:
    """The template that ``data.chat_template`` names: a shipped one, a file, or ``from MODEL`` (a folder or hub id),
    whose own special tokens count.

    Raises:
        UsageError: no such file, an unreadable one, or a model without a template.
        AccessError, BackendError: the hub refuses or cannot be reached.
    """
    if not value.startswith("from "):
        return shipped_or_file(value)
    name = value.removeprefix("from ").strip()
    folder = locate(Model(source=name))
    assert isinstance(folder, Path)
    encoder = Encoder(folder)
    text = encoder.chat_template
    if text is None:
        raise UsageError(
            f"data.chat_template: {name} has no chat template", hint="name an instruct model, or use chatml"
        )
    return ChatTemplate(text, tuple(token for token in encoder.special_tokens if token in text))


def install_template(folder: Path, template: ChatTemplate) -> int:
    """Give the tokenizer in ``folder`` the template and its tokens; the token that ends the assistant's turn becomes
    its end token, so that generation stops there. Returns how many tokens are new.

    Raises:
        UsageError: the template cannot be rendered.
        OSError: the folder cannot be written.
    """
    from tokenizers import AddedToken

    encoder = Encoder(folder)
    before, config = encoder.vocab_size, dict(encoder.config)
    encoder.fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in template.tokens])
    encoder.fast.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template.text, encoding="utf-8")
    config.pop("chat_template", None)
    _write_json(folder / "tokenizer_config.json", config)
    ending = ChatEngine(Encoder(folder), ChatRules()).plain_stop()
    if ending is not None:
        _write_json(folder / "tokenizer_config.json", {**config, "eos_token": ending})
        roles = {f"{role}_token": name for role, name in encoder.special.items()}
        _write_json(folder / "special_tokens_map.json", {**roles, "eos_token": ending})
    list_added_tokens(folder)
    return Encoder(folder).vocab_size - before


def list_added_tokens(folder: Path) -> None:
    """Write every added token of the folder's ``tokenizer.json`` to its ``tokenizer_config.json``.

    transformers 5 builds some classes (Qwen2, GPT-2, GPT-NeoX, CodeGen, Llama) from the vocabulary and this list alone,
    and llama.cpp finds the added tokens of sentencepiece models in it; a token that it lacks is split into pieces.
    """
    config = _read_json(folder / "tokenizer_config.json")
    added = _read_json(folder / "tokenizer.json").get("added_tokens")
    if not isinstance(added, list):
        return
    tokens = {str(at(token, "id")): {key: at(token, key) for key in _TOKEN_KEYS} for token in added}
    if config.get("added_tokens_decoder") != tokens:
        # Where there is a list, no reader opens special_tokens_map.json.
        config = {**_read_json(folder / "special_tokens_map.json"), **config, "added_tokens_decoder": tokens}
        _write_json(folder / "tokenizer_config.json", config)


def model_vocab_size(model: Model) -> int | None:
    """The vocabulary size of the model's config; None where it has none.

    Raises:
        UsageError: the config file is missing or unreadable.
    """
    config: Json = model.config
    if model.source is not None:
        folder = Path(model.source).expanduser()
        if folder.is_dir():
            config = _read_json(folder / "config.json")
        else:
            files = hub.fetch_model_files(model.source, model.revision, ("config.json",))
            config = _read_json(files["config.json"]) if files else {}
    elif isinstance(config, str):
        path = Path(config).expanduser()
        if not path.is_file():
            raise UsageError(f"model config {config!r} does not exist", hint="check model.config")
        config = _read_json(path)
    result = at(config, "vocab_size") or at(config, "text_config", "vocab_size")
    return int(result) if isinstance(result, int) else None


def check_vocabulary(tokenizer_size: int, model_size: int | None, name: str) -> int:
    """The vocabulary size the model gets. A model may have spare rows; a tokenizer may have no spare ids.

    Raises:
        UsageError: the tokenizer has ids that the model's embedding lacks.
    """
    if model_size is not None and tokenizer_size > model_size:
        raise UsageError(
            f"vocabulary mismatch: {name} has {tokenizer_size} tokens, the model's config {model_size}",
            hint=f"use the model's own tokenizer, or a config with vocab_size {tokenizer_size} or more",
        )
    return model_size or tokenizer_size


def train(
    texts: Callable[[], Iterable[str]], requested: TrainedTokenizer, target: Path, marks: Sequence[str] = ()
) -> Encoder:
    """Train a tokenizer on ``texts`` and write it as a Hugging Face folder. Same texts, same file.

    ``marks``: special tokens of a chat template, which count in ``vocab_size``.

    Raises:
        UsageError: ``vocab_size`` is too small for the kind.
        OSError: ``target`` cannot be written.
    """
    by_word = requested.kind == "word"
    special = [*SPECIAL, *marks]
    make = train_words if by_word else train_bpe
    tokenizer = make(texts(), requested.vocab_size, special)
    target.mkdir(parents=True, exist_ok=True)
    pad, begin, end, unknown = SPECIAL
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": begin,
        "eos_token": end,
        "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
        "padding_side": "right",
    }
    (target / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokens = {key: config[key] for key in config if key.endswith("_token")}
    (target / "special_tokens_map.json").write_text(json.dumps(tokens, indent=2, sort_keys=True) + "\n")
    return Encoder(target)


def _write_json(path: Path, value: JsonObject) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_json(path: Path) -> JsonObject:
    if not path.is_file():
        return {}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is not readable JSON: {error}") from error
    return result if isinstance(result, dict) else {}
