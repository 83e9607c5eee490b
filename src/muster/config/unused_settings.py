"""Settings that have no effect in this combination: reported with the reason, never dropped silently."""

from __future__ import annotations

from collections.abc import Iterator, Set

from muster.config.backends import BACKENDS
from muster.config.sections.outer import Outer
from muster.config.spec import COMPILE_PAYS_AFTER_STEPS, RunSpec
from muster.core.errors import Problem


def no_effect(spec: RunSpec, given: Set[str]) -> list[Problem]:
    """A problem per key among ``given`` (dotted paths set by the user) that has no effect, here or on its back end; and
    one per setting that has an effect which hardly anyone wants."""
    rules = (_training, _parallelism, _model, _data, _evaluation, _checkpoint, _resources, _recovery, _check)
    unused = [result for rule in (*rules, BACKENDS.get(spec.backend).checks.unused) for result in rule(spec)]
    return [*(Problem(key, f"has no effect: {reason}") for key, reason in unused if key in given), *_doubtful(spec)]


def _doubtful(spec: RunSpec) -> list[Problem]:
    model = spec.model
    if model is None or model.trained_dtype == "float32":
        return []
    text = (
        "bfloat16 rounds away most updates of weights: after 100 steps at a learning rate of 1e-5 only 15.6 % of them "
        "had moved"
    )
    return [Problem("model.master_dtype", text, hint="float32, unless memory forbids it; or model.lora")]


def _training(spec: RunSpec) -> Iterator[tuple[str, str]]:
    training, optimizer = spec.training, spec.training.optimizer
    if optimizer.schedule == "constant":
        yield "training.optimizer.min_lr_fraction", "the schedule is constant"
    if training.exact and not training.deterministic:
        yield "training.deterministic", "`exact: true` includes it"
    if training.compile is True and training.steps is not None and training.steps < COMPILE_PAYS_AFTER_STEPS:
        yield "training.compile", f"compiling costs more than it saves in {training.steps} steps"
    if not training.local_steps:
        yield from ((f"training.outer.{key}", "local_steps is 0") for key in Outer.model_fields)
    if spec.resources.device == "cpu":
        yield "training.profile.memory_step", "memory snapshots are of CUDA memory, and device is cpu"
    if optimizer.traits.compact and spec.model is not None and spec.model.lora is not None:
        yield "training.optimizer.name", "its smaller state saves next to nothing on adapters alone"


def _parallelism(spec: RunSpec) -> Iterator[tuple[str, str]]:
    shape = spec.parallelism
    if shape.pp == 1:
        yield "parallelism.pp_schedule", "there is one stage (pp is 1)"
    if shape.pp == 1 or shape.pp_schedule != "interleaved":
        yield "parallelism.pp_chunks", "pp_schedule is not interleaved" if shape.pp > 1 else "pp is 1"
    ranks = (spec.resources.ranks_per_host or 1) * spec.resources.hosts
    shards = ranks // (shape.dp_replicate * shape.tp * shape.pp)
    if ((shape.dp_shard == 1 or shards <= 1) and spec.resources.device == "cpu") or shape.dp_shard == 1:
        yield "parallelism.reshard_after_forward", "nothing is sharded (dp_shard is 1)"


def _model(spec: RunSpec) -> Iterator[tuple[str, str]]:
    model = spec.model
    if model is None:
        return
    if model.config is not None:
        yield "model.revision", "it names a version of `source`, and the model starts from `config`"
    if spec.command is not None:
        yield "model.lora", "`command` trains, not Muster's trainer"
    if model.lora is not None:
        yield "model.master_dtype", "adapters and their moments are float32, and the frozen base is in `dtype`"
    elif model.dtype == "float32" and model.master_dtype == "float32":
        yield "model.master_dtype", "everything is float32 already"


def _data(spec: RunSpec) -> Iterator[tuple[str, str]]:
    data = spec.data
    if data is None:
        return
    if len(data.sources) == 1:
        yield "data.sources.0.weight", "there is only one source"
    if all(source.has_heldout for source in data.sources):
        yield "data.heldout_fraction", "every source has a held-out part of its own, or needs none"
    if all(source.is_tokenized for source in data.sources):
        yield "data.workers", "random tokens are not tokenised"
        yield "data.train_on", "random tokens are all supervised"
    for index, source in enumerate(data.sources):
        for name, reason in source.unused():
            yield f"data.sources.{index}.{name}", reason


def _evaluation(spec: RunSpec) -> Iterator[tuple[str, str]]:
    evaluation, steps = spec.evaluation, spec.training.steps
    sources = spec.data.sources if spec.data else []
    if spec.data is not None and not any(source.has_questions for source in sources):
        for name in ("num_questions", "final_num_questions", "query_timeout_s"):
            yield f"evaluation.{name}", "no source has questions with gold queries"
    elif evaluation.num_questions == 0 and not evaluation.final_num_questions:
        yield "evaluation.query_timeout_s", "no questions are asked (`num_questions: 0`)"
        if evaluation.samples == 0:
            yield "evaluation.max_new_tokens", "nothing is generated"
    if steps is not None and evaluation.every_steps > steps:
        yield "evaluation.every_steps", f"the run has only {steps} steps"


def _checkpoint(spec: RunSpec) -> Iterator[tuple[str, str]]:
    checkpoint, steps = spec.checkpoint, spec.training.steps
    if isinstance(checkpoint.every_steps, int) and steps is not None and checkpoint.every_steps > steps:
        yield "checkpoint.every_steps", f"the run has only {steps} steps; one is written at the end"
    if checkpoint.replicate_snapshots and spec.resources.hosts + spec.resources.spare_hosts < 2:
        yield "checkpoint.replicate_snapshots", "there is no second host"


def _resources(spec: RunSpec) -> Iterator[tuple[str, str]]:
    for name in set(BACKENDS.shipped) & set(RunSpec.model_fields) - {spec.backend}:  # sections of one back end
        yield name, f"backend is {spec.backend}"
    if spec.resources.device == "cuda":
        yield "resources.threads_per_rank", "it sets CPU threads, and device is cuda"
    if spec.resources.provisioning_model in ("spot", "on_demand", "flex_start", "flex_start_queued", "calendar"):
        yield "resources.reservation", f"mode is {spec.resources.provisioning_model}"


def _recovery(spec: RunSpec) -> Iterator[tuple[str, str]]:
    if spec.recovery.policy == "none":
        for name in ("max_restarts_without_progress", "warm_standby", "on_nonfinite_step"):
            yield f"recovery.{name}", "policy is none: a failure ends the run"
    if spec.command is not None:
        yield "recovery.baseline_steps", "`command` trains, not Muster's trainer"
        yield "recovery.on_nonfinite_step", "`command` trains, not Muster's trainer"
        for section in ("evaluation", "training", "parallelism"):
            yield section, "`command` trains, not Muster's trainer"


def _check(spec: RunSpec) -> Iterator[tuple[str, str]]:
    if spec.check.network and spec.unmeasured_network:
        yield "check.network", spec.unmeasured_network
