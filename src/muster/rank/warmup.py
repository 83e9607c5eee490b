"""A standby's warm-up: the one-time cost of a process's first model and first step, paid before it gets a rank.

Lazy imports, dispatch tables, custom operators, the first process group: training a tiny model of the run's family in a
world of one initializes them and leaves nothing else in the process. On a GPU also the context, cuBLAS and the kernels
that are loaded on first use. The run's own model is built and cut too, on the meta device, where it takes no memory.
Otherwise all this would be part of the time from a failure to the next step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from muster.config.spec import RunSpec
from muster.core.layout import layout_for
from muster.core.types import Layout
from muster.rank import heap, worker
from muster.train.data_feed.batch import make_batch
from muster.train.distributed.device_mesh import make_meshes
from muster.train.distributed.fixed_point import FixedPointReducer
from muster.train.distributed.process_setup import fix_libraries
from muster.train.distributed.reduce import FloatReducer, GradientReducer, ReduceGroups
from muster.train.model.causal_lm import build_ahead, build_model, cut_ahead, read_config
from muster.train.model.compile import compiles, load_compiler
from muster.train.model.loss import loss_sum
from muster.train.optim.optimizer import clip_scale, make_optimizer
from muster.train.state.snapshot import chunks_of
from muster.train.state.training_state import TrainingState, named_without_wrappers

#: Keys that transformers' decoders share; a family with other names keeps its own size and is not warmed up.
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
#: Side of the square matrices of the first cuBLAS call.
SQUARE = 256
#: Free GPU memory required besides a standby's context (718 MiB on an H100): the ranks' use grows with longer
#: sequences and fragmentation, and must not run out of memory because of a standby.
SPARE_BYTES = 2 << 30
CPU = torch.device("cpu")


def applies(spec: RunSpec, *, context: bool = False) -> bool:
    """Whether a standby of this run warms up: Muster's own trainer, on the CPU or with a CUDA ``context``."""
    if spec.model is None or spec.command or spec.recovery.warm_standby == "imports":
        return False
    return context or spec.resources.on_cpu


def warm_up(spec: RunSpec, *, gpu: int | None = None) -> bool:
    """Train a tiny model for two steps and discard it; whether that succeeded. Never raises.

    Leaves torch without a process group, no open socket, and one thread (a rank sets its own number).
    ``gpu``: warm up there, which leaves a context, cuBLAS and the first kernels. False then means that this process
    should not become a rank: it has no context (an exclusive-process GPU, too little memory), or a broken one.
    """
    torch.set_num_threads(1)
    device = CPU if gpu is None else device_of(gpu)
    try:
        if gpu is not None:
            open_context(spec, gpu)
        small = small_spec(spec)
        if small is None:
            return gpu is not None
        if gpu is not None and small.training.compile:  # slow, and no rank uses this model's code
            if compiles(spec.training, device):
                load_compiler(device)
            small = small.model_copy(update={"training": small.training.model_copy(update={"compile": False})})
        with _alone():
            _train(small, device)
        if gpu is not None:
            torch.cuda.synchronize(gpu)
            torch.cuda.empty_cache()
        elif heap.keep_freed():
            heap.reserve()
        _build_ahead(spec, device)
    except Exception as error:  # noqa: BLE001 (an optimization only: the rank's own build reports what is wrong)
        print(f"note: a standby could not warm up: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _build_ahead(spec: RunSpec, device: torch.device) -> None:
    """With the cut over the ranks that a replica is to have; where another attempt has others it costs what it did."""
    ranks = (spec.resources.ranks_per_host or 1) * spec.resources.hosts
    layout = layout_for(spec.rank_axes, ranks)
    try:
        if layout is not None and layout.ranks_per_replica > 1:
            with _alone(layout.ranks_per_replica):
                mesh = make_meshes(layout, device.type)
                cut_ahead(spec, mesh, device)
        build_ahead(spec)
    except Exception as error:  # noqa: BLE001 (as above; nothing is wrong with this process)
        print(f"note: a standby could not build the model: {error}", file=sys.stderr, flush=True)


def open_context(spec: RunSpec, gpu: int) -> None:
    """A CUDA context on this GPU and a matmul in it, as a rank would make them. Raises RuntimeError.

    Ran on one H100; tests replace ``torch.cuda``.
    """
    assert spec.model is not None
    fix_libraries(spec)  # cuBLAS reads the variable once
    torch.cuda.set_device(gpu)
    square = torch.ones(SQUARE, SQUARE, device=device_of(gpu), dtype=getattr(torch, spec.model.dtype))
    (square @ square).sum().item()
    free, _ = torch.cuda.mem_get_info(gpu)
    if free < SPARE_BYTES:
        raise RuntimeError(f"GPU {gpu} has {free / 1e9:.1f} GB free, which the ranks may need")


def context_lives(gpu: int) -> bool:
    """Whether this process's CUDA context still runs a kernel: after an error of the GPU it never does again.

    Ran on one H100 whose context lived; tests replace the device.
    """
    try:
        return torch.ones(1, device=device_of(gpu)).add_(1).item() == 2.0
    except RuntimeError as error:
        print(f"note: the CUDA context of a standby is dead: {error}", file=sys.stderr, flush=True)
        return False


def device_of(gpu: int) -> torch.device:
    return torch.device("cuda", gpu)


def small_spec(spec: RunSpec) -> RunSpec | None:
    """The run with a tiny model of the same family; None if these keys do not set the family's size."""
    assert spec.model is not None
    family = worker.model_type_of(spec.model.source, spec.model.config)
    if family is None:
        return None
    model = spec.model.model_copy(update={"source": None, "config": {"model_type": family, **SMALL}})
    training = spec.training.model_copy(update={"precision": "bf16"})  # its matrices are too small for float8
    small = spec.model_copy(update={"model": model, "training": training})
    try:
        config = read_config(small, None, SMALL["vocab_size"]).get_text_config()
    except Exception as error:  # noqa: BLE001 (as above)
        print(f"note: no small {family} to warm up with: {error}", file=sys.stderr, flush=True)
        return None
    fits = config.hidden_size == SMALL["hidden_size"] and config.num_hidden_layers == SMALL["num_hidden_layers"]
    return small if fits else None


@contextlib.contextmanager
def _alone(size: int = 1) -> Iterator[None]:
    """Rank 0 of a world without sockets (gloo's device would keep listening after its group is destroyed) and without
    other ranks: a collective returns this rank's own value.

    DTensor forgets what it has found out there. It remembers a result with its mesh, which equals that of a real world
    and is another one: in another place of it, with other groups. A rank would save its shard as rank 0's.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _train(spec: RunSpec, device: torch.device) -> None:
    mesh = make_meshes(Layout(dp_replicate=1, dp_shard=1, tp=1), device.type)
    mesh = replace(mesh, always_cut=spec.parallelism.dp_shard != 1)
    built = build_model(spec, device=device, vocab_size=SMALL["vocab_size"], mesh=mesh, seed=0)
    exact = spec.training.exact
    reducer: GradientReducer
    if exact:
        reducer = FixedPointReducer(built.module, ReduceGroups())
    else:
        reducer = FloatReducer(built.module, ReduceGroups(), accumulate_locally=True)
    named = named_without_wrappers(built.named_trainable())
    optimizer = make_optimizer(named, spec.training.optimizer, elementwise=exact)
    tokens = torch.arange(TOKENS).unsqueeze(0)
    batch = make_batch(tokens, tokens, tokens % 8, (8, 8), device)
    for step in (1, 2):
        reducer.begin(micro_batches=1)
        reducer.before_forward(last=True)
        loss = loss_sum(built.module, batch, chunk_tokens=TOKENS, scale=1.0 / TOKENS)
        loss.backward()  # type: ignore[no-untyped-call]
        reducer.add_loss(loss)
        _, norm, fault = reducer.finish()
        scale = clip_scale(norm, spec.training.optimizer.max_grad_norm)
        optimizer.step(step=step, learning_rate=0.0, scale=scale, skip=fault)
    chunks_of(TrainingState(named, optimizer).sharded())
