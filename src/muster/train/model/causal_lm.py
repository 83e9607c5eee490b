"""Any causal language model of transformers, laid out over the ranks and ready to train.

Built on the meta device, split by tensor parallel and ``fully_shard``, and only then given memory and values, so
that no rank ever holds all of it. Order: adapters, tensor parallel, recomputation, compile, shards, values.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from muster.config.spec import Model, RunSpec
from muster.config.validation import combinations, model_features
from muster.core.errors import UsageError, first_line
from muster.core.flops import ModelShape
from muster.data.weights.model_types import untrained
from muster.train.distributed.device_mesh import Meshes
from muster.train.distributed.pipeline_order import Schedule
from muster.train.distributed.stage_link import StageLink
from muster.train.model import (
    context_parallel,
    float8,
    lora,
    pipeline_stage,
    pretrained,
    split_backward,
    tensor_parallel,
    weights,
)
from muster.train.model.activation_checkpointing import recompute
from muster.train.model.attention import Attention, choose_attention
from muster.train.model.attention_isolation_check import (
    Proof,
    border,
    draws,
    keep_proof,
    prove_isolation,
    proven_before,
)
from muster.train.model.attention_needs import needs_of
from muster.train.model.compile import compile_layers, compiles
from muster.train.model.loss import compiled_kernel
from muster.train.model.mixtures import experts
from muster.train.model.model_with_loss import ModelWithLoss
from muster.train.model.sharding import WHOLE_BELOW, check_sharded, decoder_layers, shard, stays_whole
from muster.train.objectives.base import make_objective

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class BuiltModel:
    """What the loop, evaluation and export need of a model."""

    module: ModelWithLoss
    """Root FSDP module, or a plain one (``sharding.stays_whole``); call it through ``loss.loss_sum``. On a stage of a
    pipeline a part of the model; the numbers below are the whole one's."""
    config: PreTrainedConfig
    """transformers config, as read: other models may be built from it."""
    attention: Attention
    proof: Proof | None
    """The result of the self-test that packed documents do not attend to each other; None: it was not made."""
    num_parameters: int
    num_trainable: int
    num_multiplied: int
    """Of the trained ones, those that matrix products use: all but an embedding that is no head."""
    lora_config: LoraConfig | None
    """Where adapters are trained."""
    shape: ModelShape | None
    """For FLOP arithmetic; None: not an architecture that it covers, and no MFU is reported."""
    reports: Sequence[str] = ()
    """What is said once of its experts and adapters."""

    def named_trainable(self) -> dict[str, nn.Parameter]:
        """transformers' (or peft's) name -> parameter, in the model's order."""
        return {name: p for name, p in self.module.model.named_parameters() if p.requires_grad}


def build_model(
    spec: RunSpec,
    *,
    device: torch.device,
    vocab_size: int,
    mesh: Meshes,
    seed: int,
    whole_below: int = WHOLE_BELOW,
    proof: Path | None = None,
    restored: bool = False,
) -> BuiltModel:
    """The model of ``spec``, sharded, with initial values, its attention tested. Collective.

    ``proof``: the run's file for the test's result. ``restored``: a state is loaded next, so trained values are left
    undefined, and the test is not repeated if ``proof`` has its result.

    Raises:
        UsageError: the model does not fit the tokenizer, the layout or the requested attention.
        RunFailed: the chosen kernel computes something else than the model's own attention.
        CheckpointError: its files are missing, corrupt or of another architecture.
        BackendError: the hub cannot be reached.
    """
    assert spec.model is not None
    folder = pretrained.open_source(spec.model)
    config = read_config(spec, folder.path if folder else None, vocab_size)
    module, lora_config, counted = laid_out(spec, config, mesh, device, whole_below)
    model, stage = module.model, module.stage
    module.to_empty(device=device)
    if stage is None or (stage.tied is not None and stage.has_head):
        model.tie_weights()
    isolation = proven_before(module, device, proof) if restored and proof is not None else None
    if isolation is not None and all_in_state(model):
        weights.recompute_buffers(model, persistent=False)
    else:
        elsewhere = stage.elsewhere if stage is not None else ()
        set_initial_values(model, folder, seed=seed, device=device, grows=grows(spec), elsewhere=elsewhere)
    if mesh.shard.size() > 1:
        check_sharded(model)
    isolation = isolation or prove(module, device, spec, proof)
    if mesh.context is not None:
        share_sequences(module, mesh.context, spec.training.sequence_length)
        if isolation.unpacked != module.unpacked or isolation.way != "positions":
            why = isolation.unpacked or f"documents are kept apart by {isolation.way}, not by attention alone"
            raise UsageError(f"parallelism.cp is not possible: {why}", hint="parallelism.cp: 1")
    # Not before: the test looks at cross-entropy.
    module.objective = make_objective(spec.training.preference, apart=isolation.alone or isolation.unpacked)
    module.train()
    return BuiltModel(
        module=module,
        config=config,
        attention=replace(module.attention, reason=f"{module.attention.reason}; {separation(isolation)}"),
        proof=isolation,
        num_parameters=counted.parameters,
        num_trainable=counted.trainable,
        num_multiplied=counted.multiplied,
        lora_config=lora_config,
        shape=shape_of(config),
        reports=(*experts.reports(model, module.mixture), *counted.adapted),
    )


@dataclass(frozen=True)
class Counted:
    """Parameters of the whole model, as in ``BuiltModel``."""

    parameters: int
    trainable: int
    multiplied: int
    adapted: tuple[str, ...] = ()
    """Which share of the decoder layers' weights has adapters, in words; none: there are none."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Counted:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        lookup = looked_up(model)
        return cls(
            parameters=sum(p.numel() for name, p in model.named_parameters() if not lora.is_adapter_name(name)),
            trainable=sum(parameter.numel() for parameter in trained),
            multiplied=sum(parameter.numel() for parameter in trained if parameter is not lookup),
            adapted=lora.report(model),
        )


def laid_out(
    spec: RunSpec, config: PreTrainedConfig, mesh: Meshes, device: torch.device, whole_below: int = WHOLE_BELOW
) -> tuple[ModelWithLoss, LoraConfig | None, Counted]:
    """The model with its loss (this rank's stage of it), cut over ``mesh``, still on the meta device; peft's
    LoraConfig, if any; and what the whole model counts."""
    assert spec.model is not None
    compute_dtype = DTYPES[spec.model.dtype]
    # A copy: transformers writes the chosen attention into a model's config, and others build models from ours.
    model = on_meta(copy.deepcopy(config), dtype_on_meta(spec.model))
    mixture = experts.prepare(
        model,
        trains_all=spec.model.lora is None,
        from_random=spec.model.source is None,
        z=spec.training.router_z_loss,
    )
    needs = needs_of(model, spec.training.sequence_length)
    attention = choose_attention(spec.model.attention, needs, device, compute_dtype)
    model.set_attn_implementation(attention.implementation)
    lora_config = None
    if spec.model.lora:
        lora_config = lora.add_adapters(model, spec.model.lora, torch.float32, embeddings=spec.trains_embeddings)
    reshard_layers = spec.parallelism.reshard_after_forward
    layers = decoder_layers(model)
    counted = Counted.of(model)
    module = ModelWithLoss(model, attention, compute_dtype=compute_dtype, reshard_layers=reshard_layers)
    module.mixture = mixture
    module.needs, module.unpacked = needs, border(config.get_text_config(), spec.training.sequence_length)
    if spec.data is not None and not spec.data.packing and spec.training.objective is None:
        module.unpacked = "data.packing is false"
    for part, name, _ in draws(model) if spec.training.objective is not None else ():
        setattr(part, name, 0.0)  # a policy that draws at random differs from its reference before it has learned
    if mesh.stages is not None and mixture is not None and mixture.wants_logits:
        raise UsageError(
            "the auxiliary loss of experts is not summed over the stages of a pipeline",
            hint="parallelism.pp: 1, or model.config with router_aux_loss_coef: 0 and training.router_z_loss: 0",
        )
    if mesh.stages is not None:
        schedule = schedule_of(spec, mesh.stages.size())
        link = StageLink(mesh.stages.get_group(), device, compute_dtype, schedule.chunks)
        module.stage = pipeline_stage.cut(model, layers, link, schedule)
        # Gradients of chunks come at different times: together in one unit they could not be reduced apart.
        whole_below = 0 if schedule.chunks > 1 else whole_below
        layers = [layers[index] for index in module.stage.layers]
    if mesh.tp is not None:
        tensor_parallel.split(model, layers, mesh.tp)
    if spec.training.precision != "bf16":
        float8.convert_layers(layers, device, spec.training.precision)
    recompute(layers, spec.training.activation_checkpointing)
    if module.stage is not None and module.stage.schedule.split_backward:
        module.later = split_backward.split(layers)
    if compiles(spec.training, device) and mesh.layout.cp == 1 and not spec.parallelism.splits_backward:
        compile_layers(layers, device)
        module.compiled = True
        module.kernel = compiled_kernel() if device.type == "cuda" else None  # C++ takes longer than it saves
    shard(
        module, model, layers, mesh,
        compute_dtype=compute_dtype, reshard_layers=reshard_layers, whole_below=whole_below, mixture=mixture,
    )  # fmt: skip
    assert module.later is None or stays_whole(module, mesh, compute_dtype), "gradients that come late are not reduced"
    return module, lora_config, counted


def schedule_of(spec: RunSpec, stages: int) -> Schedule:
    """How the stages of this run's pipeline take turns."""
    axes = spec.parallelism
    return Schedule(stages, chunks=axes.chunks, split_backward=axes.splits_backward, v=axes.placed_in_v)


def share_sequences(module: ModelWithLoss, mesh: DeviceMesh, sequence_length: int) -> None:
    """Have the ranks of ``mesh`` share each sequence from here on. Raises UsageError: the model's attention cannot."""
    assert module.needs is not None
    context_parallel.check(module.needs, sequence_length, mesh.size())
    context_parallel.register()
    module.model.set_attn_implementation(context_parallel.IMPLEMENTATION)
    module.context = context_parallel.Context(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def all_in_state(model: PreTrainedModel) -> bool:
    """Whether a restored state has every value: nothing is frozen, and no buffer comes from files."""
    stored_buffers = {name for name, _ in model.named_buffers()} - weights.transient_buffers(model)
    return all(parameter.requires_grad for parameter in model.parameters()) and not stored_buffers


def separation(proof: Proof) -> str:
    """How documents are kept apart."""
    if proof.unpacked is not None:
        return "one document a row"
    return "tested to separate documents" + ("" if proof.way == "positions" else f" by {proof.way}")


def prove(module: ModelWithLoss, device: torch.device, spec: RunSpec, file: Path | None) -> Proof:
    """Run the self-test; rank 0 writes the result to ``file``."""
    length, gradients = spec.training.sequence_length, spec.training.precision == "bf16"
    proof = prove_isolation(module, device, sequence_length=length, gradients=gradients)
    if file is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        keep_proof(module, device, proof, file)
    return proof


def shape_of(config: PreTrainedConfig) -> ModelShape | None:
    """The model's shape for FLOP arithmetic; None if the formulas do not cover the architecture."""
    try:
        return ModelShape.from_config(config.to_dict())
    except UsageError:
        return None


def read_config(spec: RunSpec, folder: Path | None, vocab_size: int) -> PreTrainedConfig:
    """The transformers config of the run, checked against the tokenizer; its vocabulary grows by what a chat template
    added to the tokenizer."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    assert spec.model is not None
    given = spec.model.config
    try:
        if folder is not None:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)  # else it asks on a terminal
        elif isinstance(given, str):
            config = AutoConfig.from_pretrained(given, trust_remote_code=False)
        else:
            keys = {"vocab_size": vocab_size, **(given or {})}
            config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    except KeyError as error:
        raise UsageError(f"model.config: no model_type {error}", hint="for example model_type: llama") from error
    except (ValueError, OSError, TypeError, StrictDataclassError) as error:
        raise _unreadable(error) from error
    if grows(spec):
        section = config.get_text_config()
        section.vocab_size = max(section.vocab_size, vocab_size)
    model_vocab_size = config.get_text_config().vocab_size
    if vocab_size > model_vocab_size:
        raise UsageError(
            f"the tokenizer has {vocab_size} tokens, the model's vocabulary {model_vocab_size}",
            hint="use the model's own tokenizer, or raise vocab_size in model.config",
        )
    if (reason := untrained(json.loads(config.to_json_string(use_diff=False)))) is not None:
        raise UsageError(reason[0], hint=reason[1])
    for problem in combinations(spec, model_features(config.to_dict())):
        raise UsageError(f"{problem.key} {problem.message}", hint=problem.hint)
    if hasattr(config, "quantization_config"):  # of a folder that is dequantised as it is read
        del config.quantization_config
    result: PreTrainedConfig = config
    return result


def looked_up(model: PreTrainedModel) -> Tensor | None:
    """The input embedding's weight, where no head shares it."""
    embedding, *heads = pretrained.embeddings_of(model)
    shared = any(head.weight is embedding.weight for head in heads)
    return None if shared else embedding.weight  # type: ignore[return-value]


def grows(spec: RunSpec) -> bool:
    """Whether the model may have more tokens than its source: a chat template adds some."""
    return spec.data is not None and spec.data.chat_template is not None


def _unreadable(error: Exception) -> UsageError:
    """What is wrong with a config, in one line; for a model type that is not known the nearest one that is."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    # Its own words for an unknown type, of a dictionary and of a file; the first goes on with every name that it knows.
    unknown = re.search(r"Unrecognized model identifier: (\S+?)\.|has model type `([^`]+)` but", str(error))
    if unknown:
        name = unknown[1] or unknown[2]
        near = difflib.get_close_matches(name, list(CONFIG_MAPPING.keys()), n=3)
        wanted = f"did you mean {' or '.join(near)}?" if near else "for example model_type: llama"
        return UsageError(f"model: transformers knows no model_type {name!r}", hint=wanted)
    # transformers' validators put the reason in the last line, all others in the first.
    line = str(error).strip().splitlines()[-1 if isinstance(error, StrictDataclassError) else 0].strip()
    return UsageError(f"model: its config cannot be read: {line}", hint="see model.config or config.json")


def build_ahead(spec: RunSpec) -> bool:
    """Build the run's model on the meta device now, for this process's first ``build_model``; whether it was built.

    It takes no memory and no values yet. Not for one whose config would be asked of the hub.
    """
    config = _config_ahead(spec)
    if config is None or spec.model is None:
        return False
    dtype = dtype_on_meta(spec.model)
    key = _key(config, dtype)  # before transformers writes into the config
    _AHEAD[key] = on_meta(config, dtype)
    return True


def cut_ahead(spec: RunSpec, mesh: Meshes, device: torch.device) -> None:
    """Build the run's model on the meta device, cut it over ``mesh`` and discard it: what torch finds out once in a
    process of each operation on each shape takes half the time of a cut."""
    config = _config_ahead(spec)
    if config is not None:
        laid_out(spec, config, mesh, device)[0].to_empty(device="meta")


def _config_ahead(spec: RunSpec) -> PreTrainedConfig | None:
    """None: it would be asked of the hub. One without its own vocabulary is of no rank's model."""
    assert spec.model is not None
    source, given = spec.model.source, spec.model.config
    if any(isinstance(place, str) and not Path(place).exists() for place in (source, given)):
        return None
    return read_config(spec, Path(source) if source else None, 0)


#: What ``build_ahead`` built, until it is taken.
_AHEAD: dict[str, PreTrainedModel] = {}


def _key(config: PreTrainedConfig, dtype: torch.dtype) -> str:
    return f"{dtype} {type(config).__name__} {config.to_json_string(use_diff=False)}"


def dtype_on_meta(model: Model) -> torch.dtype:
    """Of what is built on the meta device: frozen weights of adapters are in the compute type."""
    return DTYPES[model.dtype if model.lora else model.master_dtype]


def on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device; attention is set afterwards."""
    from transformers import AutoModelForCausalLM

    ahead = _AHEAD.pop(_key(config, dtype), None) if _AHEAD else None
    if ahead is not None:
        return ahead
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
            )
            return model
    except (ValueError, ImportError) as error:
        wanted = "install what is missing" if isinstance(error, ImportError) else "it must be a causal language model"
        raise UsageError(f"model: {first_line(error)}", hint=wanted) from error


def set_initial_values(
    model: PreTrainedModel,
    folder: pretrained.Folder | None,
    *,
    seed: int,
    device: torch.device,
    grows: bool = False,
    elsewhere: Iterable[str] = (),
) -> None:
    """Set the initial values of parameters and buffers. ``grows``, ``elsewhere``: see ``pretrained.load``."""
    adapters = lora.adapter_names(model)
    if folder is None:
        weights.initialise(model, seed=seed, device=device)
    else:
        pretrained.load(model, folder, ignored=adapters, grows=grows, elsewhere=elsewhere)
    lora.initialise(model, adapters, seed=seed, device=device)
    weights.recompute_buffers(model, persistent=folder is None)
