"""The sources of an export: the checkpoint's tensors, the base's, and the training state as a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muster.checkpoint.load import newest_valid
from muster.checkpoint.shards import ShardReader, read_tensor
from muster.checkpoint_format.manifest import Manifest, best, committed, damage, missing
from muster.config.spec import RunSpec
from muster.core import resolved_file
from muster.core.errors import CheckpointError, UsageError
from muster.core.protocols import Store
from muster.core.resolved_file import DamagedRunFile
from muster.data.prepare import stop_ids_of
from muster.data.weights.model_files import pinned
from muster.storage import uris
from muster.storage.store import open_store
from muster.train.model import lora, pretrained, weights
from muster.train.model.causal_lm import grows, on_meta, read_config
from muster.train.model.conversion import View
from muster.train.model.mixtures import experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Make = Callable[[], Tensor]
#: More tokens than any tokenizer has: a placeholder on the meta device until the checkpoint's shape is known.
ANY_VOCABULARY = 1 << 20


@dataclass(frozen=True)
class ExportSources:
    """Everything that the tensors are computed from."""

    spec: RunSpec
    config: PreTrainedConfig
    model: PreTrainedModel
    """On the meta device, without adapters."""
    folder: pretrained.Folder | None
    reader: ShardReader
    tokenizer: Path
    stop_ids: tuple[int, ...] = ()
    """What ends generation in the run's data."""

    @cached_property
    def drawn(self) -> dict[str, Tensor]:
        """The random base of an adapter: a function of (seed, name), so it can be recomputed."""
        model = on_meta(self.config, torch.float32)
        model.to_empty(device="cpu")
        model.tie_weights()
        weights.initialise(model, seed=self.spec.training.seed, device=torch.device("cpu"))
        weights.recompute_buffers(model, persistent=True)
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    @cached_property
    def base(self) -> dict[str, View]:
        """The tensors of ``folder`` by the model's names."""
        assert self.folder is not None
        return pretrained.found_views(self.model, self.folder)

    @cached_property
    def trained(self) -> set[str]:
        return {name.removeprefix("model.") for name in self.reader.shapes() if name.startswith("model.")}


def read_spec(run_dir: Path) -> RunSpec:
    path = run_dir / "resolved.json"
    try:
        spec = RunSpec.model_validate_json(resolved_file.read(run_dir))
    except DamagedRunFile:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="give a run's folder") from error
    if spec.model is None:
        raise UsageError(f"{run_dir} is a run of `command`; it has no model to export")
    return spec


def choose_checkpoint(spec: RunSpec, run_dir: Path, step: int | None, *, lowest_loss: bool = False) -> Manifest:
    """The checkpoint to export, with verified checksums: of ``step``, the one with the lowest held-out loss, or the
    newest."""
    store: Store = open_store()
    directory = spec.checkpoint_uri(run_dir)
    rejected: list[str] = []
    if lowest_loss:
        for manifest in best(committed(store, directory)):
            if (missing(manifest) or damage(manifest)) is None:
                return manifest
        hint = "evaluation.every_steps and checkpoint.every_steps at the same steps, and checkpoint.keep_best: 1"
        raise CheckpointError(f"no usable checkpoint in {directory} has a held-out loss", hint=hint)
    if step is None:
        newest = newest_valid(store, directory, lambda uri, reason: rejected.append(f"{uris.name(uri)}: {reason}"))
        if newest is None:
            reasons = f" ({'; '.join(rejected)})" if rejected else ""
            raise CheckpointError(f"no usable checkpoint in {directory}{reasons}", hint="let the run save one first")
        return newest
    manifests = committed(store, directory)
    for manifest in manifests:
        if manifest.step == step:
            problem = missing(manifest) or damage(manifest)
            if problem:
                raise CheckpointError(f"{manifest.uri}: {problem}")
            return manifest
    steps = ", ".join(str(manifest.step) for manifest in manifests) or "none"
    raise CheckpointError(f"no committed checkpoint of step {step} in {directory}", hint=f"there are: {steps}")


def open_sources(spec: RunSpec, run_dir: Path, reader: ShardReader) -> ExportSources:
    assert spec.model is not None
    folder = pretrained.open_source(pinned(spec.model, run_dir))  # the weights that were trained on
    given = spec.model.config
    unknown = folder is None and isinstance(given, dict) and "vocab_size" not in given
    if grows(spec) or (unknown and spec.model.lora is not None):
        from muster.data.tokenizer import Encoder

        vocabulary = Encoder(run_dir / "tokenizer").vocab_size
    else:
        vocabulary = ANY_VOCABULARY if unknown else 1
    config = read_config(spec, folder.path if folder else None, vocabulary)
    model = on_meta(config, torch.float32)
    if folder is None and spec.model.lora is None and not grows(spec):
        # The vocabulary size came from the tokenizer when the run started; the checkpoint's shape has it.
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        name = names[id(model.get_input_embeddings().weight)]
        shape = reader.shapes().get(f"model.{name}")
        if shape is not None and shape[0] != config.get_text_config().vocab_size:
            config.get_text_config().vocab_size = shape[0]
            model = on_meta(config, torch.float32)
    return ExportSources(spec, config, model, folder, reader, run_dir / "tokenizer", stop_ids_of(run_dir))


def maker_of(name: str, sources: ExportSources) -> Make:
    """How a parameter of the plain model is computed: trained, merged, or from its base."""
    if name in sources.trained:
        return lambda: read_tensor(sources.reader, f"model.{name}")
    assert sources.spec.model is not None
    if sources.spec.model.lora is None:
        raise CheckpointError(f"the checkpoint lacks {name}", hint="check that it is of the same model")
    owner, _, leaf = name.rpartition(".")
    part = "default.weight" if leaf == "weight" else leaf
    a, b = f"model.{owner}.lora_A.{part}", f"model.{owner}.lora_B.{part}"
    if a in sources.reader.shapes():
        return lambda: merged(owner, stored(name, sources)(), a, b, sources)
    return stored(name, sources)


def merged(owner: str, base: Tensor, a: str, b: str, sources: ExportSources) -> Tensor:
    """``W + scale * B A``, in float32; with DoRA each row in its trained length."""
    settings = sources.spec.model.lora if sources.spec.model else None
    assert settings is not None
    scale, module = lora.scale_of(settings), sources.model.get_submodule(owner)
    first, second = read_tensor(sources.reader, a), read_tensor(sources.reader, b)
    if base.ndim == 3:
        return experts.merged(base, first, second, scale, is_transposed=bool(module.is_transposed))
    delta = second.float() @ first.float()
    if not isinstance(module, torch.nn.Linear):
        if type(module).__name__ != "Conv1D":
            raise UsageError(f"cannot merge into {owner}, a {type(module).__name__}", hint="export it with --adapter")
        delta = delta.T
    result = base.float() + delta * scale
    if settings.dora:
        length = read_tensor(sources.reader, f"model.{owner}.lora_magnitude_vector.default.weight")
        result *= (length.float() / result.norm(dim=1))[:, None]
    return result


def stored(name: str, sources: ExportSources) -> Make:
    """From the base's files, or recomputed if it was random."""

    def read() -> Tensor:
        if name in sources.trained:  # a buffer that follows the experts' load
            return read_tensor(sources.reader, f"model.{name}")
        if sources.folder is None:
            return sources.drawn[name].detach()
        shaped = sources.model.state_dict(keep_vars=True)[name]
        embedding = grows(sources.spec) and pretrained.is_embedding(shaped, sources.model)
        return pretrained.fitted(sources.base[name], name, shaped, grows=embedding).whole(shaped.dtype)

    return read


def reference_model(sources: ExportSources) -> PreTrainedModel:
    """The training state as a model on the CPU in float32: the base and its adapters, unmerged.

    Independent of the export: nothing is merged, and values are loaded by the trainer's own functions.
    """
    assert sources.spec.model is not None
    model = on_meta(sources.config, torch.float32)
    if sources.spec.model.lora is not None:
        lora.add_adapters(model, sources.spec.model.lora, torch.float32, embeddings=sources.spec.trains_embeddings)
    model.to_empty(device="cpu")
    model.tie_weights()
    adapters = lora.adapter_names(model)
    if sources.folder is not None:
        pretrained.load(model, sources.folder, ignored=adapters, grows=grows(sources.spec))
    else:
        weights.initialise(model, seed=sources.spec.training.seed, device=torch.device("cpu"))
    weights.recompute_buffers(model, persistent=sources.folder is None)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # one follows the experts' load
    for name in sorted(sources.trained):
        if name not in named:
            raise CheckpointError(f"the checkpoint holds {name!r}, which the run's model does not")
        weights.fill(named[name], read_tensor(sources.reader, f"model.{name}"))
    model.eval()
    return model
