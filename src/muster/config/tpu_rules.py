"""What the trainer on TPUs does not do."""

from __future__ import annotations

from collections.abc import Iterator

from muster.config.backends import BACKENDS
from muster.config.spec import RunSpec
from muster.core.errors import Problem

HINT = "backend: gke, or local on a TPU machine of your own"


#: Dense decoders that ``muster.train_jax`` computes.
_ON_TPUS = ("llama", "mistral", "qwen2", "qwen3", "gemma")


def not_on_tpus(kind: object) -> tuple[str, str] | None:
    """Why TPUs do not train a model of this type, and what to do; None: they do."""
    if kind in _ON_TPUS:
        return None
    return f"model: device tpu trains {', '.join(_ON_TPUS)}; this is {kind}", "resources.device: cuda"


def not_submitted(spec: RunSpec) -> Problem | None:
    """Why ``spec`` may be rendered and no more; None: it may be submitted."""
    able = BACKENDS.get(spec.backend).capabilities
    if spec.resources.device != "tpu" or able.trains_on_tpus:
        return None
    message = f"tpu: on {spec.backend} rendered, not submitted, until hosts of a slice have found each other there once"
    return Problem("resources.device", message, hint=HINT)


def tpu_rules(spec: RunSpec) -> Iterator[Problem]:
    """Problems of a run file with ``resources.device: tpu``, each by its key."""
    if spec.resources.device != "tpu":
        return
    training, model = spec.training, spec.model
    able = BACKENDS.get(spec.backend).capabilities
    if not able.trains_on_tpus and not able.renders_tpus:
        message = f"tpu: backend {spec.backend} makes no TPU machines yet"
        yield Problem("resources.device", message, hint=HINT)
    if spec.command is not None:
        yield Problem("resources.device", "tpu is of Muster's own trainer, and `command` brings its own", hint="auto")
    if spec.resources.ranks_per_host not in (None, 1):
        yield Problem("resources.ranks_per_host", "one process drives all TPU chips of a host", hint="leave it out")
    if training.exact:
        yield Problem("training.exact", "TPUs have no 64-bit integers to take exact sums in", hint="exact: false")
    if training.local_steps:
        yield Problem("training.local_steps", "slices of TPUs sum their gradients in every step", hint="leave it out")
    if training.compile is True:
        yield Problem("training.compile", "a step on TPUs is always one compiled program", hint="compile: auto")
    if training.precision != "bf16":
        yield Problem("training.precision", f"{training.precision} is not computed on device tpu", hint="bf16")
    if training.optimizer.name != "adamw":
        yield Problem("training.optimizer.name", "device tpu trains with adamw", value=training.optimizer.name)
    if model is not None and model.attention != "auto":
        yield Problem("model.attention", f"{model.attention} is a kernel of the torch trainer", hint="auto")
    if model is not None and model.lora is not None and model.lora.dropout:
        yield Problem("model.lora.dropout", "is not computed on device tpu", hint="dropout: 0")
    if model is not None and model.lora is not None and model.lora.dora:
        yield Problem("model.lora.dora", "is not computed on device tpu", hint="dora: false")
    for axis, size in spec.parallelism.axes.items():
        if axis not in ("dp_shard", "dp_replicate", "tp") and size > 1:
            yield Problem(
                f"parallelism.{axis}", "device tpu has dp_replicate, dp_shard and tp alone", hint=f"{axis}: 1"
            )
