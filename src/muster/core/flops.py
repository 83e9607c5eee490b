"""How many floating-point operations a token costs, by three named conventions, and the model's shape.

Forward and backward, without recompute. P = parameters in matrix multiplications (output head in, input
embedding out), N = all parameters, L = layers, a = heads x head_dim (equal to the hidden size in Llama),
s = sequence or document length:

* CAUSAL: 6 P + 6 L a s. What this project reports: a causal mask halves attention (Megatron-Bridge >= 25.09).
* FULL:   6 P + 12 L a s. As if every token saw every other (torchtitan, nanochat, NeMo up to 24.12).
* N6:     6 N. Parameters alone (Kaplan et al. 2020).

MFUs of different conventions do not compare: 8B at 8k reads 12.5 % higher by FULL than by CAUSAL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from muster.core.errors import UsageError
from muster.core.layout import cut_layers, part_of
from muster.core.typed_json import JsonObject, child


class Convention(StrEnum):
    """Which operations are counted."""

    CAUSAL = "causal"
    FULL = "full"
    N6 = "n6"


@dataclass(frozen=True)
class Linear:
    """One matrix of a decoder layer. ``split``: how tensor parallelism cuts it."""

    name: str
    inputs: int
    outputs: int
    split: str
    """column (outputs are shared out) or row (inputs are)."""
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What arithmetic needs to know of a dense decoder-only transformer."""

    family: str
    """transformers' ``model_type``."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    """Input embedding and output head are one matrix."""
    gated_mlp: bool = True
    attention_bias: bool = False
    """Biases on the q, k and v projections."""
    norms_per_layer: int = 2
    """Vectors of ``hidden``."""
    qk_norm: bool = False
    positions: int = 0
    """Rows of a learned position embedding (GPT-2); 0 with rotary positions."""
    window: int | None = None
    """Tokens that a sliding-window layer sees."""
    windowed_layers: int = 0
    has_embedding: bool = True
    has_head: bool = True
    """With ``has_embedding``: False on the stages of a pipeline that lack it (``stages``)."""

    @classmethod
    def from_config(cls, config: JsonObject) -> ModelShape:
        """The shape behind a transformers ``config.json``.

        Raises:
            UsageError: a needed key is missing, or the architecture is not a dense decoder.
        """
        config = child(config, "text_config") or config  # of a multimodal wrapper the language model counts
        family = str(config.get("model_type", "llama"))
        if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise UsageError(
                f"{family} is a mixture of experts, which is not modelled", hint="dense decoder models can be planned"
            )
        if family not in _KNOWN:
            raise UsageError(f"model_type {family!r} is not modelled", hint="known: " + ", ".join(sorted(_KNOWN)))

        def need(key: str) -> int:
            value = _count(config, key if key in config else _GPT2_NAMES.get(key, key))
            if value is None:
                raise UsageError(f"the model's config needs {key}")
            return value

        hidden, heads, layers = need("hidden_size"), need("num_attention_heads"), need("num_hidden_layers")
        gpt2 = family == "gpt2"
        window, windowed = _windows(config, family, layers)
        return cls(
            family=family,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=_count(config, "num_key_value_heads") or heads,
            head_dim=_count(config, "head_dim") or _HEAD_DIM_BY_DEFAULT.get(family, hidden // heads),
            intermediate=(_count(config, "n_inner") or 4 * hidden) if gpt2 else need("intermediate_size"),
            vocab=need("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family in TIED_BY_DEFAULT)),
            gated_mlp=not gpt2,
            attention_bias=gpt2 or family == "qwen2" or bool(config.get("attention_bias", False)),
            norms_per_layer=_NORMS.get(family, 2),
            qk_norm=family in _QK_NORM,
            positions=need("max_position_embeddings") if gpt2 else 0,
            window=window,
            windowed_layers=windowed,
        )

    @property
    def attention_width(self) -> int:
        """heads x head_dim."""
        return self.heads * self.head_dim

    def linears(self) -> tuple[Linear, ...]:
        """The matrices of one decoder layer, by their Llama names."""
        width, kv, inner = self.attention_width, self.kv_heads * self.head_dim, self.intermediate
        gpt2 = self.family == "gpt2"
        table = (
            ("q_proj", self.hidden, width, "column", self.attention_bias),
            ("k_proj", self.hidden, kv, "column", self.attention_bias),
            ("v_proj", self.hidden, kv, "column", self.attention_bias),
            ("o_proj", width, self.hidden, "row", gpt2),
            *([("gate_proj", self.hidden, inner, "column", False)] if self.gated_mlp else []),
            ("up_proj", self.hidden, inner, "column", gpt2),
            ("down_proj", inner, self.hidden, "row", gpt2),
        )
        return tuple(Linear(*row) for row in table)

    @cached_property
    def layer_matmul_parameters(self) -> int:
        return sum(linear.inputs * linear.outputs for linear in self.linears())

    @cached_property
    def layer_parameters(self) -> int:
        """One decoder layer with its norms and biases."""
        biases = sum(linear.outputs for linear in self.linears() if linear.bias)
        norms = self.norms_per_layer * self.hidden * (2 if self.family == "gpt2" else 1)
        return self.layer_matmul_parameters + biases + norms + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def head_parameters(self) -> int:
        """The output head (shared with the embedding where tied)."""
        return self.vocab * self.hidden if self.has_head else 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters that are looked up and not multiplied: 0 where the head is tied to them."""
        if not self.has_embedding:
            return 0
        return (0 if self.tied and self.has_head else self.vocab * self.hidden) + self.positions * self.hidden

    @cached_property
    def matmul_parameters(self) -> int:
        """P."""
        return self.layers * self.layer_matmul_parameters + self.head_parameters

    @cached_property
    def parameters(self) -> int:
        """N."""
        final_norm = self.hidden * (2 if self.family == "gpt2" else 1) if self.has_head else 0
        return self.layers * self.layer_parameters + self.head_parameters + self.embedding_parameters + final_norm

    def stages(self, number: int, chunks: int = 1, *, v: bool = False) -> list[ModelShape]:
        """What each stage of a pipeline holds, as the trainer cuts it, in ``chunks`` (``v``: placed in a V). A matrix
        that is tied is held twice where its two ends are on two stages.

        Raises:
            UsageError: there are fewer layers than stages.
        """
        ranges = self.parts(number, chunks)
        held = [{part_of(place, chunk, number, v=v) for chunk in range(chunks)} for place in range(number)]
        return [
            replace(
                self,
                layers=sum(len(ranges[part]) for part in parts),
                has_embedding=0 in parts,
                has_head=number * chunks - 1 in parts,
            )
            for parts in held
        ]

    def parts(self, stages: int, chunks: int = 1) -> list[range]:
        """The layers of each part that the trainer cuts for a pipeline, in order. Raises UsageError."""
        try:
            return cut_layers(self.layers, stages * chunks, last=self.head_parameters / self.layer_matmul_parameters)
        except ValueError as error:
            raise UsageError(
                f"parallelism.pp {stages}: {error}", hint=f"pp: at most {self.layers // chunks}"
            ) from error

    def with_vocab(self, vocab: int) -> ModelShape:
        """The same model with another vocabulary (a tokenizer trained on the run's data)."""
        return replace(self, vocab=vocab)

    def lora_parameters(self, rank: int, targets: Iterable[str] | str = "all-linear") -> int:
        """Adapter parameters of rank ``rank`` on ``targets`` (names of ``linears()``; the head gets none)."""
        requested = None if targets == "all-linear" else set(targets)
        return self.layers * sum(
            rank * (linear.inputs + linear.outputs)
            for linear in self.linears()
            if requested is None or linear.name in requested
        )


def flops_per_token(shape: ModelShape, sequence_length: int, convention: Convention | str = Convention.CAUSAL) -> float:
    """Operations of one token in a full sequence (one document) of ``sequence_length``."""
    return step_flops(shape, [sequence_length], convention) / sequence_length


def step_flops(
    shape: ModelShape,
    document_lengths: Iterable[int],
    convention: Convention | str = Convention.CAUSAL,
) -> float:
    """Operations of all tokens of documents that do not see each other (packing: their actual lengths).

    Callers leave padding out of ``document_lengths``: padding is work, but no useful work.
    """
    convention = Convention(convention)
    tokens = pairs = windowed_pairs = 0
    for length in document_lengths:
        tokens += length
        pairs += length * length
        if shape.windowed_layers and shape.window is not None:
            unseen = max(0, length - shape.window)
            windowed_pairs += length * length - unseen * unseen
    if convention is Convention.N6:
        return 6.0 * shape.parameters * tokens
    factor = 6.0 if convention is Convention.CAUSAL else 12.0
    open_layers = shape.layers - shape.windowed_layers
    attention = open_layers * pairs + shape.windowed_layers * windowed_pairs
    return 6.0 * shape.matmul_parameters * tokens + factor * shape.attention_width * attention


def lora_factor(shape: ModelShape | None = None, lora_parameters: int = 0) -> float:
    """Share of the full count that a LoRA run does: frozen matrices need no weight gradient.

    2/3 where the adapters' own work is left out (DGXC); (2 + lora/frozen)/3 with it (NeMo Automodel).
    """
    if shape is None or not lora_parameters:
        return 2.0 / 3.0
    return (2.0 + lora_parameters / shape.matmul_parameters) / 3.0


# transformers' defaults that decide a shape and that a config.json may leave out.
#: Families whose head is their embedding where a config does not say.
TIED_BY_DEFAULT = {"gemma", "gemma2", "gemma3_text", "gpt2", "cohere"}
_HEAD_DIM_BY_DEFAULT = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}
_NORMS = {"gemma2": 4, "gemma3_text": 4}
_QK_NORM = {"qwen3", "gemma3_text"}
_KNOWN = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "gpt2", "granite", "smollm3",
}  # fmt: skip
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def _count(config: JsonObject, key: str) -> int | None:
    """A number from 1 on; None where there is none, or 0."""
    value = config.get(key) or None
    if value is not None and (not isinstance(value, int) or value < 1):
        raise UsageError(f"the model's config needs {key} from 1 on, got {value!r}")
    return value


def _windows(config: JsonObject, family: str, layers: int) -> tuple[int | None, int]:
    """Window and number of windowed layers, by the rules of each family's configuration class."""
    window = _count(config, "sliding_window")
    if not window or (family.startswith("qwen") and not config.get("use_sliding_window", False)):
        return None, 0
    types = config.get("layer_types")
    if types and isinstance(types, Sequence):
        return window, sum(1 for kind in types if kind == "sliding_attention")
    if family == "gemma2":  # every other layer, starting with the first
        return window, (layers + 1) // 2
    if family == "gemma3_text":  # every sixth layer sees all
        return window, layers - layers // (_count(config, "sliding_window_pattern") or 6)
    return window, layers
