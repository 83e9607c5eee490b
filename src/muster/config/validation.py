"""Rules across several keys of the run file, with reasons. Pure: ``host_checks`` looks at the machine.

A rule yields ``Problem``s that name the key to change; ``load`` adds the key's line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from muster.config.compatibility import refusals_of, splits_adapters
from muster.config.sections import notify
from muster.config.sections.section import Section
from muster.config.spec import Data, RunSpec, TrainedTokenizer
from muster.config.tpu_rules import tpu_rules
from muster.core.errors import Problem
from muster.core.flops import TIED_BY_DEFAULT, experts_key
from muster.core.layout import FAMILIES, ranks_of
from muster.core.redact import secret_word
from muster.core.typed_json import JsonObject, at

#: ``recovery.baseline_steps`` begin after REFERENCE_AFTER steps of the run; the first of them are not counted.
REFERENCE_AFTER, REFERENCE_SETTLE = 10, 3
REFERENCE_LEAST = 20
SCHEMES = ("gs", "s3", "memory", "file")


def problems(spec: RunSpec) -> list[Problem]:
    """What cannot work together, on any machine."""
    result: list[Problem] = []
    for rule in (
        _whole, _model, _data, _training, _objective, _numerics, tpu_rules, _parallelism, _evaluation, _places,
        _recovery, _limits,
    ):  # fmt: skip
        result += rule(spec)
    return [*result, *notify.problems(spec.notify, spec.secrets)]


def world_size(spec: RunSpec) -> int | None:
    """Ranks of the run, where the file gives them (or device is cpu)."""
    per_host = spec.resources.ranks_per_host or (1 if spec.resources.device in ("cpu", "tpu") else None)
    return per_host * spec.resources.hosts if per_host else None


def is_remote(path: str) -> bool:
    """Whether it is a URI of a store and not a path on this machine."""
    return "://" in path and not path.startswith("file://")


def looks_local(name: str) -> bool:
    """Whether this is a local folder and not a hub id."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or os.path.exists(name)


# ---------------------------------------------------------------- pure rules


def _whole(spec: RunSpec) -> Iterator[Problem]:
    if spec.command is not None:
        if not spec.command:
            yield Problem("command", "is empty", hint='for example ["train.py", "--flag"]')
        elif spec.command == ["-m"]:
            yield Problem("command", "names no module", hint='for example ["-m", "package.train"]')
        elif (index := secret_word(spec.command)) is not None:
            message = "looks like a secret, and would stand in clear in run.yaml, resolved.json and every `ps`"
            hint = "secrets: {NAME: env}, and let the script read the variable NAME"
            yield Problem(f"command.{index}", message, hint=hint)
        for key in ("model", "data"):
            if getattr(spec, key) is not None:
                yield Problem(key, "cannot be combined with `command`", hint="remove one")
        return
    for key in ("model", "data"):
        if getattr(spec, key) is None:
            yield Problem(key, "is missing: a section", hint="give `model` and `data`, or a `command`")


def _model(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if model is None:
        return
    if (model.source is None) == (model.config is None):
        problem = "both are given" if model.source else "neither is given"
        yield Problem(
            "model",
            f"needs either `source` or `config`: {problem}",
            hint="`source` loads weights, `config` starts from random ones",
        )
    if model.source is not None and isinstance(model.tokenizer, TrainedTokenizer):
        yield Problem(
            "model.tokenizer",
            "a newly trained vocabulary does not fit the weights of `model.source`",
            hint="remove `tokenizer`, or start from `model.config`",
        )
    has_text = spec.data is not None and not all(source.is_tokenized for source in spec.data.sources)
    if model.config is not None and model.tokenizer is None and has_text:
        yield Problem(
            "model",
            "`config` alone has no tokenizer",
            hint="add `tokenizer: {kind: word, vocab_size: 512}` or a hub id",
        )
    if model.lora is not None and model.lora.targets == []:
        yield Problem("model.lora.targets", "is empty: nothing would train", hint="all-linear")
    if model.lora is not None and spec.trains_embeddings and {"embed_tokens", "lm_head", "wte"} & {*model.lora.targets}:
        yield Problem(
            "model.lora.targets",
            "embedding and head are trained whole here (data.chat_template), not by adapters",
            hint="remove them there, or model.lora.train_embeddings: false",
        )
    if isinstance(model.config, Mapping):
        yield from config_problems(spec, model.config, key="model.config")


def heads_problems(tp: int, heads: object, kv_heads: object) -> Iterator[Problem]:
    """Of a model with so many heads and KV heads (anything but a number above 0: not known)."""
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if isinstance(count, int) and count > 0 and count % tp:
            yield Problem(
                "parallelism.tp", f"{name} = {count} does not divide into tp = {tp}", hint=f"tp must divide {count}"
            )


def config_problems(spec: RunSpec, config: JsonObject, *, key: str) -> Iterator[Problem]:
    """Contradictions between a transformers config and the rest of the file."""
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    hidden, context = config.get("hidden_size"), config.get("max_position_embeddings")
    if key == "model.config" and not isinstance(config.get("model_type"), str):
        yield Problem(key, "has no `model_type`", hint="for example model_type: llama")
    yield from heads_problems(spec.parallelism.tp, heads, kv_heads)
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden % heads and "head_dim" not in config:
        yield Problem(key, f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}")
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        yield Problem(key, f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    yield from combinations(spec, model_features(config))
    if experts_key(config) is None and spec.parallelism.pp > 1:
        yield from stage_problems(spec, config)
    longest = spec.training.sequence_length
    if isinstance(context, int) and longest > context:
        yield Problem(
            "training.sequence_length",
            f"{longest} is longer than the model's context of {context}",
            hint=f"at most {context}",
        )


def _data(spec: RunSpec) -> Iterator[Problem]:
    data = spec.data
    if data is None:
        return
    if data.on_overlong == "split" and not data.packing:
        yield Problem(
            "data.on_overlong",
            "`split` needs `packing: true`: each piece would be padded to a whole sequence",
            hint="drop or truncate",
        )
    if isinstance(data.train_on, list) and not data.train_on:
        yield Problem("data.train_on", "is an empty list: no token would be supervised", hint="completions")
    for index, source in enumerate(data.sources):
        key = f"data.sources.{index}"
        if data.on_overlong == "split" and not source.makes_rows and source.format in ("chat", "prompt_completion"):
            yield Problem(
                "data.on_overlong",
                f"`split` is for plain text: source {index} is {source.format}, whose "
                "later pieces would lose their prompt",
                hint="drop or truncate",
            )
        if source.template is not None and source.format in ("chat", "text"):
            yield Problem(f"{key}.template", f"does not go with format: {source.format}", hint="remove one")
        for problem in source.problems():
            yield replace(problem, key=f"{key}.{problem.key}")


def _training(spec: RunSpec) -> Iterator[Problem]:
    training = spec.training
    if training.steps is not None and training.epochs is not None:
        yield Problem("training.epochs", "cannot be combined with `steps`", hint="give one of them")
    if training.steps is None and training.epochs is None and spec.command is None:
        yield Problem("training", "does not say how long: give `steps` or `epochs`", hint="steps: 100")
    if training.global_batch_size % training.micro_batch_size:
        yield Problem(
            "training.micro_batch_size",
            f"{training.micro_batch_size} does not divide global_batch_size = {training.global_batch_size}",
            hint="a step is made of whole micro-batches",
        )
    warmup = training.optimizer.warmup_steps
    if training.steps is not None and warmup > training.steps:
        yield Problem(
            "training.optimizer.warmup_steps",
            f"{warmup} is more than steps = {training.steps}: the learning rate would never reach its peak",
            hint="as a share of the steps it fits any number of them: training.optimizer.warmup_steps=0.1",
        )
    for index, beta in enumerate(training.optimizer.betas):
        if not 0 <= beta < 1:
            yield Problem("training.optimizer.betas", f"item {index} must be in [0, 1), got {beta}")


def _objective(spec: RunSpec) -> Iterator[Problem]:
    objective, data, key = spec.training.preference, spec.data, "training.objective"
    if objective is None:
        return
    read = objective.traits.settings
    fields = type(objective).model_fields
    changed = {name for name in fields if name != "name" and getattr(objective, name) != fields[name].default}
    for name in sorted(changed - {*read}):
        text = f"is not read by {objective.name}"
        yield Problem(f"{key}.{name}", text, hint=f"{objective.name} reads {', '.join(read)}")
    if objective.label_smoothing and objective.loss not in ("sigmoid", "robust"):
        yield Problem(f"{key}.label_smoothing", f"is not read by loss: {objective.loss}", hint="sigmoid or robust")
    if spec.model is not None and spec.model.lora is not None and spec.model.lora.dropout:
        text = f"changes the log-probabilities that {objective.name} compares"
        yield Problem("model.lora.dropout", text, hint="dropout: 0")
    if spec.resources.device == "tpu":
        yield Problem(key, "device tpu learns the next token alone", hint="objective: null")
    if data is not None:
        yield from _preference_data(data, objective.name)


def _preference_data(data: Data, name: str) -> Iterator[Problem]:
    """What of ``data`` does not go with the objective ``name``."""
    for index, source in enumerate(data.sources):
        place = f"data.sources.{index}"
        if source.makes_rows or source.is_tokenized:
            yield Problem(f"{place}.type", f"{source.type} has no preferences, which {name} learns from")
        elif source.format is not None or source.template is not None:
            text = f"does not go with training.objective: {name}, whose rows are known by their columns"
            yield Problem(f"{place}.{'format' if source.format else 'template'}", text, hint="remove it")
    if data.train_on != "completions":
        yield Problem("data.train_on", f"{name} compares answers alone", hint="completions")
    if data.on_overlong != "drop":
        text = f"{name} drops pairs that are too long: a cut answer is not the one that was judged"
        yield Problem("data.on_overlong", text, hint="drop")


def _numerics(spec: RunSpec) -> Iterator[Problem]:
    training, model = spec.training, spec.model
    if model is not None and model.trained_dtype == "bfloat16" and model.dtype == "float32":
        yield Problem("model.master_dtype", "bfloat16 is coarser than dtype: float32", hint="float32")
    if model is not None and model.attention.startswith("flash") and spec.resources.device == "cpu":
        yield Problem("model.attention", f"{model.attention} needs CUDA, and device is cpu", hint="auto")
    if model is not None and model.attention.startswith("flash") and model.dtype == "float32":
        yield Problem("model.attention", f"{model.attention} cannot compute in float32", hint="auto")
    yield from float8_rules(spec)
    if training.local_steps and spec.parallelism.dp_replicate == 1 and not spec.parallelism.auto:
        yield Problem("training.local_steps", "is of replicas, and there is one", hint="parallelism.dp_replicate: 2")
    if not training.exact:
        return
    if model is not None and (model.dtype, model.trained_dtype) != ("float32", "float32"):
        yield Problem(
            "training.exact",
            "needs model.dtype: float32 (and master_dtype): sums are exact only then",
            hint="dtype: float32",
        )
    if not training.optimizer.traits.elementwise:
        name = training.optimizer.name
        yield Problem(
            "training.exact",
            f"cannot hold with {name}, whose rounding depends on how state is sharded",
            hint="name: adamw",
        )


def used_features(spec: RunSpec) -> dict[str, str]:
    """The axes and features of ``config.compatibility`` that the run file asks for, as a message names them.

    ``compile: auto`` asks for nothing; ``dp_shard: -1`` may be any number.
    """
    training, axes = spec.training, spec.parallelism
    lora = spec.model.lora if spec.model is not None else None
    settings = {
        "lora": "model.lora" if lora is not None else None,
        "dora": "model.lora.dora" if lora is not None and lora.dora else None,
        "float8": training.precision if training.precision in FLOAT8 else None,
        "compile": "training.compile" if training.compile is True else None,
        "packing": "data.packing" if spec.data is not None and spec.data.packing else None,
        "exact": "training.exact" if training.exact else None,
        "split_backward": axes.pp_schedule if axes.splits_backward else None,
        "local_steps": "training.local_steps" if training.local_steps else None,
        "objective": getattr(training.preference, "name", None),
    }
    sizes = {name: f"{name} = {size}" for name, size in axes.axes.items() if size != 1}
    return sizes | {name: text for name, text in settings.items() if text is not None}


def model_features(config: JsonObject) -> dict[str, str]:
    """As ``used_features``: those of a model with this ``config.json``."""
    method = at(config, "quantization_config", "quant_method")
    found = {
        "experts": "a mixture of experts" if experts_key(config) else "",
        "quantised": f"weights quantised by {method}" if method else "",
    }
    return {name: text for name, text in found.items() if text}


def combinations(spec: RunSpec, of_model: Mapping[str, str] | None = None) -> Iterator[Problem]:
    """What cannot be combined with any model; ``of_model``: with these features of it. Of a trainer on TPUs
    ``tpu_rules`` says it."""
    if spec.resources.device == "tpu" or spec.command is not None:
        return
    used = {**used_features(spec), **(of_model or {})}
    for refusal in refusals_of(used):
        if of_model is not None and not {refusal.refused, refusal.other} & of_model.keys():
            continue
        subject = "" if used[refusal.refused] == refusal.key else f"{used[refusal.refused]} "
        text = f"{subject}does not go with {used[refusal.other]}: {refusal.reason}"
        yield Problem(refusal.key, text, hint=refusal.hint)


def _parallelism(spec: RunSpec) -> Iterator[Problem]:
    shape, ranks = spec.parallelism, world_size(spec)
    if shape.auto and (also := [axis for axis, size in shape.axes.items() if size not in (1, -1)]):
        yield Problem("parallelism.auto", f"chooses the layout, and {also[0]} is given too", hint="one of the two")
    if shape.dp_shard == 0:
        yield Problem("parallelism.dp_shard", "must be -1 (what remains) or at least 1, got 0")
        return
    yield from combinations(spec)
    yield from _stages(spec)
    if spec.training.sequence_length % (2 * shape.cp) and shape.cp > 1:
        text = f"{spec.training.sequence_length} does not divide into the 2 x cp = {2 * shape.cp} chunks of context"
        yield Problem("training.sequence_length", f"{text} parallel", hint=f"a multiple of {2 * shape.cp}")
    if ranks is None:
        return
    lora = spec.model.lora if spec.model is not None and spec.resources.device != "tpu" else None
    shards = max(1, ranks // ranks_of({**spec.rank_axes, "dp_shard": 1, "cp": 1}))
    if lora is not None and not splits_adapters(lora.rank, tp=shape.tp, shards=shards):
        text = f"{lora.rank} does not divide among the {shards} ranks that cut an adapter with tp = {shape.tp}"
        yield Problem("model.lora.rank", text, hint=f"a multiple of {shards}, or tp: 1")
    fixed = ranks_of({axis: size for axis, size in spec.rank_axes.items() if size > 0})
    given = {axis: size for axis, size in spec.rank_axes.items() if size > 1 or (axis, size) == ("dp_shard", 1)}
    terms = " x ".join(f"{axis} {size}" for axis, size in given.items())
    where = f"{ranks} ranks ({spec.resources.hosts} hosts x {ranks // spec.resources.hosts})"
    if shape.dp_shard > 0 and fixed != ranks:
        yield Problem(
            "parallelism", f"{terms} = {fixed}, but there are {where}", hint="dp_shard: -1 takes what remains"
        )
    elif shape.dp_shard == -1 and ranks % fixed:
        yield Problem("parallelism", f"{terms} = {fixed} does not divide {where}")


def _evaluation(spec: RunSpec) -> Iterator[Problem]:
    steps, profile = spec.training.steps, spec.training.profile
    for name in ("trace_step", "memory_step"):
        at = getattr(profile, name)
        if steps is not None and at is not None and at > steps:
            yield Problem(f"training.profile.{name}", f"step {at} is after the last one, {steps}")


def _places(spec: RunSpec) -> Iterator[Problem]:
    for key, place in (("checkpoint.dir", spec.checkpoint.dir), ("run_dir", spec.run_dir)):
        scheme = place.partition("://")[0] if place and "://" in place else None
        if scheme is not None and scheme not in SCHEMES:
            yield Problem(key, f"the scheme {scheme}:// is not known", hint="gs, s3 or a path")
    receiver = spec.metrics.otlp
    if receiver is not None and not re.match(r"https?://[^/\s]+\S*$", receiver):
        yield Problem("metrics.otlp", f"{receiver!r} is no http:// or https:// address", hint="http://collector:4318")
    if spec.metrics.cloud_monitoring and not spec.resources.project:
        yield Problem("metrics.cloud_monitoring", "is of a project, and none is named", hint="resources.project")
    if spec.checkpoint.replicate_snapshots and spec.checkpoint.snapshot_every_steps == 0:
        message = "has nothing to copy: snapshot_every_steps is 0"
        yield Problem("checkpoint.replicate_snapshots", message, hint="1")
    if spec.command is not None and spec.checkpoint.every_steps == "auto":
        yield Problem(
            "checkpoint.every_steps", "auto is Muster's own loop's; a `command` saves at a number of steps", hint="100"
        )


def _recovery(spec: RunSpec) -> Iterator[Problem]:
    policy = spec.recovery.policy
    if policy not in ("default", "conservative", "none") and not policy.endswith(".py"):
        yield Problem(
            "recovery.policy", f"{policy!r} is not a policy", hint="default, conservative, none, or a Python file"
        )
    steps, requested = spec.training.steps, spec.recovery.baseline_steps
    if 0 < requested < REFERENCE_LEAST:
        yield Problem(
            "recovery.baseline_steps",
            f"{requested} are too few for a median",
            hint=f"at least {REFERENCE_LEAST}; 200 are enough",
        )
    elif requested and steps is not None and requested + REFERENCE_AFTER > steps:
        yield Problem(
            "recovery.baseline_steps",
            f"does not fit: the {requested} steps begin after {REFERENCE_AFTER}, and the run has {steps}",
            hint="fewer, or a longer run",
        )
    resources = spec.resources
    if resources.min_hosts is not None and resources.min_hosts > resources.hosts:
        yield Problem("resources.min_hosts", f"{resources.min_hosts} is more than hosts = {resources.hosts}")


def _limits(spec: RunSpec) -> Iterator[Problem]:
    text = spec.limits.deadline
    if text is None:
        return
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        yield Problem("limits.deadline", f"{text!r} is not an ISO 8601 time", hint="2030-01-31T18:00:00Z")
        return
    if moment.tzinfo is None:
        yield Problem("limits.deadline", f"{text!r} has no zone", hint=f"{text}Z or {text}+02:00")
    elif moment <= (now := datetime.now(UTC)):
        yield Problem(
            "limits.deadline", f"{text} is in the past", hint="it is now " + now.isoformat(timespec="seconds")
        )


# ---------------------------------------------------------------- paths


def within(workdir: str | None, path: str) -> str | None:
    """``path`` as it is named in the work folder, given from there or from here; None: no such file in it."""
    if workdir is None:
        return None
    root = os.path.realpath(os.path.expanduser(workdir))
    for found in (os.path.join(root, path), os.path.abspath(os.path.expanduser(path))):
        place = os.path.realpath(found)
        if os.path.isfile(place) and os.path.commonpath([root, place]) == root:
            return os.path.relpath(place, root)
    return None


def absolute(spec: RunSpec) -> RunSpec:
    """The same spec with local paths made absolute: other processes have other working directories."""

    def full(path: str | None) -> str | None:
        return path if path is None or is_remote(path) else os.path.abspath(os.path.expanduser(path))

    changes: dict[str, str | Section | list[str | None] | None] = {
        "run_dir": full(spec.run_dir),
        "checkpoint": spec.checkpoint.model_copy(update={"dir": full(spec.checkpoint.dir)}),
    }
    if spec.recovery.policy.endswith(".py"):
        changes["recovery"] = spec.recovery.model_copy(update={"policy": full(spec.recovery.policy)})
    if spec.model is not None:
        given = {name: getattr(spec.model, name) for name in ("source", "tokenizer", "config")}
        local = {
            name: full(value)
            for name, value in given.items()
            if isinstance(value, str) and (name == "config" or looks_local(value))
        }
        changes["model"] = spec.model.model_copy(update=local)
    if spec.data is not None:
        sources = [
            source.model_copy(update={key: full(path) for key, path in source.files.items()})
            for source in spec.data.sources
        ]
        own = spec.data.chat_template_file
        template = spec.data.chat_template if own is None else full(own)
        changes["data"] = spec.data.model_copy(
            update={"sources": sources, "cache_dir": full(spec.data.cache_dir), "chat_template": template}
        )
    if spec.command and spec.command[0] != "-m":
        changes["command"] = [within(spec.workdir, spec.command[0]) or full(spec.command[0]), *spec.command[1:]]
    changes["workdir"] = full(spec.workdir)
    if isinstance(spec.setup, str):
        changes["setup"] = within(spec.workdir, spec.setup) or full(spec.setup)
    return spec.model_copy(update=changes)


# ---------------- what does not go with float8 matrices


#: The first GPU that has it; and what the number of a rank's tokens must be a multiple of: the weights' gradients are
#: products along the tokens.
FLOAT8 = {"fp8": ("an H100", 16), "mxfp8": ("a B200", 32)}


def float8_rules(spec: RunSpec) -> Iterator[Problem]:
    """Problems of a run file with ``training.precision`` fp8 or mxfp8, one line at most."""
    key, model, length = "training.precision", spec.model, spec.training.sequence_length
    name, axes = spec.training.precision, spec.parallelism
    if name not in FLOAT8 or model is None:
        return
    since, tokens = FLOAT8[name]
    if spec.resources.device == "cpu":
        yield Problem(key, f"{name} needs {since} or newer, and device is cpu", hint="bf16")
    elif model.dtype != "bfloat16":
        yield Problem(key, f"{name} needs model.dtype: bfloat16, not {model.dtype}", hint="bf16, or dtype: bfloat16")
    elif length % (tokens * axes.cp):
        message = f"{name} needs a sequence_length that is a multiple of {tokens * axes.cp}, not {length}"
        yield Problem(key, message, hint="bf16")


# ---------------- what a pipeline (``parallelism.pp``) cannot cut


def _stages(spec: RunSpec) -> Iterator[Problem]:
    """What else does not go with stages, for any model."""
    axes, model = spec.parallelism, spec.model
    if axes.pp > 1 and spec.command is not None:
        yield Problem("parallelism.pp", "cannot be combined with `command`: it cuts no script", hint="pp: 1")
    if axes.splits_backward and model is not None and model.dtype != model.trained_dtype:
        text = f"{axes.pp_schedule} needs one type: FSDP casts {model.trained_dtype} weights to {model.dtype}"
        same = "dtype: float32" if model.lora else f"master_dtype: {model.dtype}"
        yield Problem("parallelism.pp_schedule", text, hint=f"{same}, or interleaved")


def stage_problems(spec: RunSpec, config: JsonObject) -> Iterator[Problem]:
    """What cannot be cut into stages."""
    key, pp, family = "parallelism.pp", spec.parallelism.pp, config.get("model_type")
    layers, chunks = config.get("num_hidden_layers"), spec.parallelism.chunks
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        yield Problem(key, f"{family} is not known to start in the middle of its layers", hint=f"pp: 1, or {known}")
    elif isinstance(layers, int) and pp * chunks > layers:
        each = f" of {chunks} chunks each" if chunks > 1 else ""
        less = "; or fewer pp_chunks" if chunks > 2 else "; or pp_schedule: 1f1b" if chunks > 1 else ""
        hint = f"pp: at most {max(1, layers // chunks)}{less}"
        yield Problem(key, f"{layers} layers do not make {pp} stages{each}", hint=hint)
    if not spec.training.exact:
        return
    if config.get("tie_word_embeddings", family in TIED_BY_DEFAULT):
        yield Problem(
            "training.exact",
            f"cannot hold with pp = {pp} and an embedding tied to the head: one process adds their gradients in float",
            hint="tie_word_embeddings: false, or pp: 1",
        )
    dropout = [name for name, value in config.items() if "dropout" in name and isinstance(value, float) and value > 0]
    dropout += ["model.lora.dropout"] if spec.model is not None and spec.model.lora and spec.model.lora.dropout else []
    if dropout:
        yield Problem(
            "training.exact",
            f"cannot hold with pp = {pp} and {dropout[0]}: the random numbers of a layer follow those of the layers "
            "before it in its process",
            hint="no dropout, or pp: 1",
        )
