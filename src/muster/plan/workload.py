"""What a run file asks of hardware, in numbers: the planner's view of a ``RunSpec``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.core.flops import Convention, ModelShape, flops_per_token, lora_factor, step_flops
from muster.core.optimizers import ADAMW, OptimizerTraits
from muster.core.types import Layout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training job without its hardware. Sizes in tokens, sequences and bytes an element."""

    shape: ModelShape
    sequence_length: int
    global_batch_size: int
    """Sequences a step."""
    steps: int
    document_length: int | None = None
    """Typical length of a packed document; None: documents fill their sequences."""
    fill: float = 1.0
    """Share of the tokens that are no padding."""
    supervised: float = 1.0
    """Share of the tokens that have a target."""
    compute_bytes: int = 2
    master_bytes: int = 4
    lora_rank: int = 0
    """0: every parameter is trained."""
    lora_targets: tuple[str, ...] | str = "all-linear"
    dora: bool = False
    lora_embeddings: bool = False
    """Embedding and head are trained as a whole in addition to the adapters."""
    optimizer: OptimizerTraits = ADAMW
    loss_chunk_tokens: int = 1024
    """0: logits of the whole micro-batch at once."""
    compile: bool = False
    attention: str = "flash2"
    """Kernel, by its name in ``accelerators.yaml``. torch's varlen attention is Flash Attention 2's code; that a newer
    one is installed on the machines (``model.attention`` aside) no plan can know."""
    local_steps: int = 0
    """Steps of replicas between two meetings; 0: they sum gradients in each."""
    exact: bool = False
    float8: bool = False
    """Matrix products in 8 bits; of the layout alone: their time and memory are taken for bfloat16's."""
    reshard_after_forward: bool = True
    once_a_step: bool = False
    """Parameters are gathered and gradients reduced once a step, for any number of rounds (Megatron's distributed
    optimizer); the trainer gathers each round."""
    pipeline_chunks: int = 1
    """Pieces of a pipeline stage that are interleaved."""
    weights_apart: bool = False
    """Stages of a pipeline compute gradients of weights where they would wait."""
    pipeline_v: bool = False
    """The pieces of a pipeline's stages are placed in a V."""
    hidden_tensor_parallel: float = 0.0
    """Share of tensor parallel's collectives that other stacks hide behind arithmetic."""
    whole_below: int = 16_000_000
    """Smaller models are one FSDP unit (the trainer's rule)."""
    snapshot_every: int | None = 1
    """Steps between in-memory snapshots; None: chosen by cost, 0: none."""
    replicate_snapshots: bool | None = None
    """None: where there are several hosts."""
    checkpoint_every: int | None = None
    """Steps; None: chosen by the plan, 0: only at the end."""
    asynchronous: bool = True
    warm_standby: bool = True
    """Each rank has a standby, with a context on its GPU."""
    evaluation_every: int = 0
    evaluation_tokens: int = 0

    @property
    def used_features(self) -> set[str]:
        """What of it restricts the layout: names of ``config.compatibility``."""
        used = {
            "lora": self.lora_rank, "exact": self.exact, "float8": self.float8, "local_steps": self.local_steps,
            "split_backward": self.weights_apart, "experts": self.shape.experts, "dora": self.dora,
        }  # fmt: skip
        return {name for name, value in used.items() if value}

    @property
    def tokens_per_step(self) -> int:
        """Positions, padding included: what hardware works through."""
        return self.global_batch_size * self.sequence_length

    @cached_property
    def trained_parameters(self) -> int:
        """Parameters with gradients and optimizer state."""
        if not self.lora_rank:
            return self.shape.parameters
        return self.adapter_parameters + self.trained_vocabulary

    @property
    def adapter_parameters(self) -> int:
        if not self.lora_rank:
            return 0
        return self.shape.lora_parameters(self.lora_rank, self.lora_targets, dora=self.dora)

    @property
    def active_adapters(self) -> int:
        """Of the adapters' parameters those that a token is multiplied with."""
        return self.shape.lora_parameters(self.lora_rank, self.lora_targets, active=True) if self.lora_rank else 0

    @property
    def trained_vocabulary(self) -> int:
        """Parameters of embedding and head where they are trained, positions not among them."""
        shape = self.shape
        positions = shape.positions * shape.hidden if shape.has_embedding else 0
        return shape.head_parameters + shape.embedding_parameters - positions if self.trains_head else 0

    @property
    def trains_all(self) -> bool:
        return self.lora_rank == 0

    @property
    def trains_head(self) -> bool:
        return self.trains_all or self.lora_embeddings

    @property
    def title(self) -> str:
        """``70B full AdamW``."""
        how = f"LoRA r{self.lora_rank}" if self.lora_rank else "full"
        how += " with embeddings" if self.lora_rank and self.lora_embeddings else ""
        return f"{billions(self.shape.parameters)} {how} {self.optimizer.title}"

    def useful_flops_per_token(self, convention: Convention = Convention.CAUSAL) -> float:
        """Operations a token counts for in MFU: no recompute, documents at their length, LoRA's share."""
        length = self.document_length or self.sequence_length
        whole = flops_per_token(self.shape, min(length, self.sequence_length), convention)
        if self.trains_all:
            return whole
        multiplied = self.active_adapters + (self.shape.head_parameters if self.trains_head else 0)
        return whole * lora_factor(self.shape, multiplied)

    def attention_flops_per_token(self) -> float:
        """The part of a full CAUSAL count that attention is."""
        length = min(self.document_length or self.sequence_length, self.sequence_length)
        return step_flops(self.shape, [length]) / length - 6.0 * self.shape.matmul_parameters


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan may choose."""

    layout: Layout
    micro_batch_size: int
    activation_checkpointing: str

    def rounds(self, work: Workload) -> int:
        """Micro-batches that each rank works through in a step, zero-weight padding included."""
        micro_batches = -(-work.global_batch_size // self.micro_batch_size)
        return -(-micro_batches // self.layout.data_ranks)

    def padding(self, work: Workload) -> float:
        """Share of the computed micro-batches that are zero-weight padding."""
        micro_batches = -(-work.global_batch_size // self.micro_batch_size)
        return 1.0 - micro_batches / (self.rounds(work) * self.layout.data_ranks)


def workload(spec: RunSpec, shape: ModelShape, *, steps: int | None = None) -> Workload:
    """The job that ``spec`` describes, for a model of ``shape``.

    ``steps``: where the file counts in epochs and the data's size is known.

    Raises:
        UsageError: the run's length is unknown, or it runs a command of the user's.
    """
    if spec.model is None:
        raise UsageError("a run with `command` cannot be planned: what it computes is not known")
    steps = steps or spec.training.steps
    if steps is None:
        raise UsageError(
            "training.epochs alone does not say how many steps: the data has not been prepared",
            hint="give training.steps=N for the plan",
        )
    training, lora = spec.training, spec.model.lora
    every, held = spec.checkpoint.every_steps, spec.checkpoint.snapshot_every_steps
    sources = spec.data.sources if spec.data else []
    document = sources[0].document_tokens if len(sources) == 1 else None
    return Workload(
        shape=shape,
        sequence_length=training.sequence_length,
        global_batch_size=training.global_batch_size,
        steps=steps,
        document_length=document,
        compute_bytes=DTYPE_BYTES[spec.model.dtype],
        master_bytes=DTYPE_BYTES[spec.model.trained_dtype],
        lora_rank=lora.rank if lora else 0,
        lora_targets="all-linear" if lora is None or isinstance(lora.targets, str) else tuple(lora.targets),
        dora=lora is not None and lora.dora,
        lora_embeddings=spec.trains_embeddings,
        optimizer=training.optimizer.traits,
        loss_chunk_tokens=training.loss_chunk_tokens,
        compile=training.compiles_on("cpu" if spec.resources.device == "cpu" else "cuda")
        and spec.parallelism.cp == 1
        and not spec.parallelism.splits_backward,
        attention="flash3" if spec.model.attention == "flash_attention_3" else "flash2",
        exact=training.exact,
        float8=training.precision != "bf16",
        local_steps=training.local_steps,
        pipeline_chunks=spec.parallelism.chunks,
        weights_apart=spec.parallelism.splits_backward,
        pipeline_v=spec.parallelism.placed_in_v,
        reshard_after_forward=spec.parallelism.reshard_after_forward,
        snapshot_every=None if held == "auto" else held,
        replicate_snapshots=spec.checkpoint.replicate_snapshots,
        checkpoint_every=None if every == "auto" else every,
        asynchronous=spec.checkpoint.asynchronous,
        warm_standby=spec.recovery.warm_standby is True,
        evaluation_every=spec.evaluation.every_steps,
        evaluation_tokens=spec.evaluation.num_sequences * training.sequence_length,
    )


def with_lora(work: Workload, rank: int = 16) -> Workload:
    """The same job with adapters instead of a full fine-tune."""
    return replace(work, lora_rank=rank, lora_targets="all-linear")


def billions(parameters: float) -> str:
    """``70B``, ``1.2B``, ``135M``."""
    if parameters >= 9.5e9:
        return f"{parameters / 1e9:.0f}B"
    if parameters >= 1e9:
        return f"{parameters / 1e9:.1f}B".replace(".0B", "B")
    return f"{parameters / 1e6:.3g}M"
