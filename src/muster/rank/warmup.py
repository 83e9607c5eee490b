"""What a standby pays before it is a rank: everything that the first model and the first step of a process cost.

Lazy imports, dispatch tables, custom operators, the first group: a step of a tiny model of the run's own family, in a
world of one, leaves them behind in the process, and nothing else. On a GPU there is more: the context, cuBLAS, kernels
that are loaded when they are first used. Without it all that is paid between a failure and the first step after it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster.config.spec import RunSpec
from muster.core.types import Layout
from muster.rank import worker
from muster.train.data_feed.batch import make_batch
from muster.train.distributed.device_mesh import make_meshes
from muster.train.distributed.fixed_point import FixedPointReducer
from muster.train.distributed.process_setup import fix_workspace
from muster.train.distributed.reduce import FloatReducer, GradientReducer, ReduceGroups
from muster.train.model.causal_lm import build_model, read_config
from muster.train.model.loss import loss_sum
from muster.train.optim.optimizer import clip_scale, make_optimizer
from muster.train.state.snapshot import table_of
from muster.train.state.training_state import TrainingState, named_without_wrappers

#: Keys that transformers' decoders share; a family that knows other names keeps its own size, and is left out.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
TOKENS = 16


#: Side of the matrices that cuBLAS is opened with.
SQUARE = 256
#: What must be left free on a GPU beside a standby's context: the ranks' own need grows with longer sequences and
#: fragmentation, and a context (about 0.5 GB, an estimate) that makes them run out of memory is worth nothing.
SPARE_BYTES = 2 << 30
CPU = torch.device("cpu")


def wanted(spec: Mapping[str, Any], *, context: bool = False) -> bool:
    """Whether a standby of this run warms up: Muster's own trainer, on the CPU or with a CUDA ``context``."""
    if not spec.get("model") or spec.get("command"):
        return False
    if (spec.get("recovery") or {}).get("warm_standby") == "imports":
        return False
    device = (spec.get("resources") or {}).get("device", "auto")
    return context or device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())


def warm_up(spec: RunSpec, *, gpu: int | None = None) -> bool:
    """Train a tiny model for two steps and forget it; whether that could be done. Never raises.

    Leaves torch without a process group, no socket open, and its threads set to one (a rank sets its own number).
    ``gpu``: there, with a context, cuBLAS and the first kernels left behind. False then means that this process had
    better not become a rank: it has no context (a GPU that takes one process only, too little memory), or a broken one.
    """
    torch.set_num_threads(1)
    try:
        if gpu is not None:
            open_context(spec, gpu)
        small = smaller(spec)
        if small is None:
            return gpu is not None
        if gpu is not None and small.training.compile:  # it would be busy for long with code that no rank uses
            small = small.model_copy(update={"training": small.training.model_copy(update={"compile": False})})
        _join_alone()
        _train(small, CPU if gpu is None else device_of(gpu))
        if gpu is not None:
            torch.cuda.synchronize(gpu)
            torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001 (only a head start: the rank's own build says what is wrong)
        print(f"note: a standby could not warm up: {error}", file=sys.stderr, flush=True)
        return False
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return True


def open_context(spec: RunSpec, gpu: int) -> None:
    """A CUDA context on this GPU and a matmul in it, as a rank would make them. Raises RuntimeError.

    Never run on a GPU here; the tests put a stand-in in the place of ``torch.cuda``.
    """
    assert spec.model is not None
    fix_workspace(spec)  # cuBLAS reads it once
    torch.cuda.set_device(gpu)
    square = torch.ones(SQUARE, SQUARE, device=device_of(gpu), dtype=getattr(torch, spec.model.dtype))
    (square @ square).sum().item()
    free, _ = torch.cuda.mem_get_info(gpu)
    if free < SPARE_BYTES:
        raise RuntimeError(f"GPU {gpu} has {free / 1e9:.1f} GB left, which the ranks may need")


def device_of(gpu: int) -> torch.device:
    return torch.device("cuda", gpu)


def smaller(spec: RunSpec) -> RunSpec | None:
    """The run with a tiny model of the same family; None where the family's size cannot be set by these keys."""
    assert spec.model is not None
    config = spec.model.config
    family = config.get("model_type") if isinstance(config, dict) else None
    family = family or worker.model_type_of(spec.model.source or config)
    if family is None:
        return None
    model = spec.model.model_copy(update={"source": None, "config": {"model_type": family, **SMALL}})
    small = spec.model_copy(update={"model": model})
    try:
        held = read_config(small, None, SMALL["vocab_size"]).get_text_config()
    except Exception as error:  # noqa: BLE001 (as above)
        print(f"note: no small {family} to warm up with: {error}", file=sys.stderr, flush=True)
        return None
    fits = held.hidden_size == SMALL["hidden_size"] and held.num_hidden_layers == SMALL["num_hidden_layers"]
    return small if fits else None


def _join_alone() -> None:
    """A world of one that opens no socket: gloo's device keeps listening when its group is gone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def _train(spec: RunSpec, device: torch.device) -> None:
    layout = Layout(dp_replicate=1, dp_shard=1, tp=1)
    built = build_model(
        spec,
        layout=layout,
        device=device,
        vocab_size=SMALL["vocab_size"],
        mesh=make_meshes(layout, device.type),
        seed=0,
    )
    exact = spec.training.exact
    reducer: GradientReducer = (
        FixedPointReducer(built.module, ReduceGroups()) if exact else FloatReducer(built.module, ReduceGroups(), accumulate_locally=True)
    )
    named = named_without_wrappers(built.named_trainable())
    optimizer = make_optimizer(named, spec.training.optimizer, elementwise=exact)
    tokens = torch.arange(TOKENS).unsqueeze(0)
    batch = make_batch(tokens, tokens, tokens % 8, (8, 8), device)
    for step in (1, 2):
        reducer.begin(micro_batches=1)
        reducer.before_forward(last=True)
        loss = loss_sum(built.module, batch, chunk_tokens=TOKENS, scale=1.0 / TOKENS)
        loss.backward()
        reducer.add_loss(loss)
        _, norm, fault = reducer.finish()
        scale = clip_scale(norm, spec.training.optimizer.max_grad_norm)
        optimizer.step(step=step, learning_rate=0.0, scale=scale, skip=fault)
    table_of(TrainingState(named, optimizer).sharded())
