"""How many floating-point operations a token costs, by three named conventions, and the model's shape.

Forward and backward, without recompute. P = parameters that a token is multiplied with (output head in, input embedding
out; of a mixture's experts those that it is sent to), N = all parameters, L = layers, a = heads x head_dim (equal to
the hidden size in Llama), s = sequence or document length:

* CAUSAL: 6 P + 6 L a s. What this project reports: a causal mask halves attention (Megatron-Bridge >= 25.09).
* FULL:   6 P + 12 L a s. As if every token saw every other (torchtitan, nanochat, NeMo up to 24.12).
* N6:     6 N. Parameters alone (Kaplan et al. 2020).

MFUs of different conventions do not compare: 8B at 8k reads 12.5 % higher by FULL than by CAUSAL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
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
class Experts:
    """The experts of a mixture, whose MLPs are gated."""

    count: int
    active: int
    """That each token is sent to."""
    width: int
    """Intermediate size of each."""
    shared: int = 0
    """Of what every token passes besides."""
    shared_gate: bool = False
    share: float = 1.0
    """Of the layers, those with experts."""
    dense: int = 0
    """Intermediate size of the other layers."""

    @property
    def active_width(self) -> float:
        """Mean intermediate size that a token passes in a layer."""
        return self.share * (self.active * self.width + self.shared) + (1 - self.share) * self.dense

    def routing(self, hidden: int) -> float:
        """Parameters of routers, a layer."""
        return self.share * hidden * (self.count + self.shared_gate)

    def adapted(self, sizes: Callable[[int], int], fused: int, *, active: bool) -> float:
        """Inputs and outputs of adapted matrices of a layer: ``sizes`` by intermediate size, less ``fused`` in experts,
        where two matrices are one tensor."""
        experts = (self.active if active else self.count) * (sizes(self.width) - fused)
        shared = sizes(self.shared) if self.shared else 0
        return self.share * (experts + shared) + (1 - self.share) * sizes(self.dense)

    def idle(self, hidden: int) -> float:
        """Parameters of experts that a token is not sent to, a layer."""
        return self.share * 3 * hidden * self.width * (self.count - self.active)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention over a compressed cache (DeepSeek's MLA)."""

    queries: int
    """Rank of the queries; 0: they are not compressed."""
    cache: int
    plain: int
    """Head dimension without positions, and with."""
    rotary: int
    values: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What arithmetic needs to know of a decoder-only transformer."""

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
    experts: Experts | None = None
    """Of a mixture; ``intermediate`` is then what a token passes on the mean, rounded."""
    latent: Latent | None = None
    vectors: float = 0.0
    """Other parameters of a layer that are no matrices: sinks, biases of experts, norms of latent attention."""
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
        is_mixture = experts_key(config) is not None
        if is_mixture and family not in _MIXTURES:
            raise UsageError(
                f"{family} is a mixture of experts that is not modelled", hint="known: " + ", ".join(sorted(_MIXTURES))
            )
        if family not in _KNOWN | _MIXTURES.keys():
            raise UsageError(f"model_type {family!r} is not modelled", hint="known: " + ", ".join(sorted(_KNOWN)))

        def need(key: str) -> int:
            value = _count(config, key if key in config else _GPT2_NAMES.get(key, key))
            if value is None:
                raise UsageError(f"the model's config needs {key}")
            return value

        hidden, heads, layers = need("hidden_size"), need("num_attention_heads"), need("num_hidden_layers")
        gpt2 = family == "gpt2"
        window, windowed = _windows(config, family, layers)
        experts = _experts(config, _MIXTURES[family], layers) if family in _MIXTURES else None
        latent = _latent(config) if family in _LATENT else None
        kv_heads = _count(config, "num_key_value_heads") or heads
        head_dim = _count(config, "head_dim") or _HEAD_DIM_BY_DEFAULT.get(family, hidden // heads)
        if latent is not None:
            head_dim = latent.plain + latent.rotary
        return cls(
            family=family,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=round(experts.active_width)
            if experts
            else (_count(config, "n_inner") or 4 * hidden)
            if gpt2
            else need("intermediate_size"),
            vocab=need("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family in TIED_BY_DEFAULT)),
            gated_mlp=not gpt2,
            attention_bias=gpt2 or family in _BIASED or bool(config.get("attention_bias", False)),
            norms_per_layer=_NORMS.get(family, 2),
            qk_norm=family in _QK_NORM,
            positions=need("max_position_embeddings") if gpt2 else 0,
            window=window,
            windowed_layers=windowed,
            experts=experts,
            latent=latent,
            vectors=_vectors(family, hidden, heads, kv_heads * head_dim, experts, latent),
        )

    @property
    def layer_norm(self) -> bool:
        """Its norms are LayerNorms, its positions learned: no float32 norm, no rotation."""
        return self.family == "gpt2"

    @property
    def attention_width(self) -> int:
        """heads x head_dim."""
        return self.heads * self.head_dim

    def linears(self) -> tuple[Linear, ...]:
        """The matrices of one decoder layer, by their Llama names."""
        inner = self.intermediate
        gpt2 = self.family == "gpt2"
        table = (
            *self._attention(),
            *([("gate_proj", self.hidden, inner, "column", False)] if self.gated_mlp else []),
            ("up_proj", self.hidden, inner, "column", gpt2),
            ("down_proj", inner, self.hidden, "row", gpt2),
        )
        return tuple(Linear(*row) for row in table)

    def _attention(self) -> list[tuple[str, int, int, str, bool]]:
        width, kv, gpt2 = self.attention_width, self.kv_heads * self.head_dim, self.family == "gpt2"
        if self.latent is None:
            return [
                ("q_proj", self.hidden, width, "column", self.attention_bias),
                ("k_proj", self.hidden, kv, "column", self.attention_bias),
                ("v_proj", self.hidden, kv, "column", self.attention_bias),
                ("o_proj", width, self.hidden, "row", gpt2),
            ]
        each, rank = self.latent, self.latent.queries
        queries = [
            ("q_a_proj", self.hidden, rank, "column", False),
            ("q_b_proj", rank, width, "column", False),
        ]
        return [
            *(queries if rank else [("q_proj", self.hidden, width, "column", False)]),
            ("kv_a_proj_with_mqa", self.hidden, each.cache + each.rotary, "column", False),
            ("kv_b_proj", each.cache, self.heads * (each.plain + each.values), "column", False),
            ("o_proj", self.heads * each.values, self.hidden, "row", False),
        ]

    @cached_property
    def layer_active_parameters(self) -> float:
        """Of one decoder layer, those that a token is multiplied with; the mean of layers."""
        if self.experts is None:
            return sum(linear.inputs * linear.outputs for linear in self.linears())
        attention = sum(inputs * outputs for _, inputs, outputs, _, _ in self._attention())
        return attention + 3 * self.hidden * self.experts.active_width + self.experts.routing(self.hidden)

    @cached_property
    def layer_matmul_parameters(self) -> float:
        """All matrices of one decoder layer, experts included; the mean of layers."""
        return self.layer_active_parameters + (self.experts.idle(self.hidden) if self.experts else 0)

    @cached_property
    def layer_parameters(self) -> float:
        """One decoder layer with its norms and biases."""
        biases = sum(linear.outputs for linear in self.linears() if linear.bias)
        norms = self.norms_per_layer * self.hidden * (2 if self.family == "gpt2" else 1)
        return self.layer_matmul_parameters + biases + norms + (2 * self.head_dim if self.qk_norm else 0) + self.vectors

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
    def matmul_parameters(self) -> float:
        """P: those that a token is multiplied with."""
        return self.layers * self.layer_active_parameters + self.head_parameters

    @property
    def pair_width(self) -> float:
        """What scores and weighted values of a pair of tokens cost, as an equal width of both."""
        latent = self.latent
        return self.attention_width if latent is None else self.heads * (self.head_dim + latent.values) / 2

    @cached_property
    def parameters(self) -> int:
        """N."""
        final_norm = self.hidden * (2 if self.family == "gpt2" else 1) if self.has_head else 0
        layers = round(self.layers * self.layer_parameters)
        return layers + self.head_parameters + self.embedding_parameters + final_norm

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

    def lora_parameters(
        self, rank: int, targets: Iterable[str] | str = "all-linear", *, active: bool = False, dora: bool = False
    ) -> int:
        """Adapter parameters of rank ``rank`` on ``targets`` (names of ``linears()``; the head and routers get none).
        ``active``: those that a token is multiplied with. ``dora``: with a length for each row."""
        requested = None if targets == "all-linear" else set(targets)
        names = [linear for linear in self.linears() if requested is None or linear.name in requested]
        if self.experts is None:
            return self.layers * sum(rank * (each.inputs + each.outputs) + dora * each.outputs for each in names)
        attention = {name for name, *_ in self._attention()}
        adapted: float = sum(linear.inputs + linear.outputs for linear in names if linear.name in attention)
        mlp = {linear.name for linear in names} - attention
        if mlp - {"down_proj"}:
            adapted += self.experts.adapted(lambda width: 2 * (self.hidden + width), self.hidden, active=active)
        if "down_proj" in mlp:
            adapted += self.experts.adapted(lambda width: self.hidden + width, 0, active=active)
        return round(self.layers * rank * adapted)


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
    return 6.0 * shape.matmul_parameters * tokens + factor * shape.pair_width * attention


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
_QK_NORM = {"qwen3", "gemma3_text", "qwen3_moe"}
_BIASED = {"qwen2", "qwen2_moe", "gpt_oss"}
_LATENT = {"deepseek_v2", "deepseek_v3"}
_KNOWN = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "gpt2", "granite", "smollm3",
}  # fmt: skip
#: Mixtures, with what their configs call the intermediate size of an expert.
_MIXTURES = {
    **dict.fromkeys(("mixtral", "gpt_oss", "olmoe"), "intermediate_size"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"), "moe_intermediate_size"),
}
#: What configs call the number of experts; transformers writes some under another name than the published one.
_EXPERTS = re.compile(r"(n|num)_(routed_|local_)?experts|moe_num_experts")
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


def experts_key(config: JsonObject) -> str | None:
    """What a transformers config, or that of its text model, counts experts by; None: it is of no mixture."""
    text = config.get("text_config")
    keys = {**config, **(text if isinstance(text, dict) else {})}
    return next((key for key, n in keys.items() if _EXPERTS.fullmatch(key) and isinstance(n, int) and n > 1), None)


def _experts(config: JsonObject, width_name: str, layers: int) -> Experts:
    count = _needed(config, experts_key(config) or "num_experts")
    width = _needed(config, width_name)
    shared = _count(config, "shared_expert_intermediate_size") or 0
    dense = set(range(_whole(config, "first_k_dense_replace")))
    plain = config.get("mlp_only_layers")
    dense |= set(plain) if isinstance(plain, Sequence) and not isinstance(plain, str) else set()  # type: ignore[arg-type]
    every = _count(config, "decoder_sparse_step") or 1
    sparse = sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % every == 0)
    return Experts(
        count=count,
        active=_needed(config, "num_experts_per_tok"),
        width=width,
        shared=shared + _whole(config, "n_shared_experts") * width,
        shared_gate=bool(shared),
        share=sparse / layers,
        dense=_needed(config, "intermediate_size"),
    )


def _latent(config: JsonObject) -> Latent:
    return Latent(
        queries=_count(config, "q_lora_rank") or 0,
        cache=_needed(config, "kv_lora_rank"),
        plain=_needed(config, "qk_nope_head_dim"),
        rotary=_needed(config, "qk_rope_head_dim"),
        values=_needed(config, "v_head_dim"),
    )


def _vectors(
    family: str, hidden: int, heads: int, kv_width: int, experts: Experts | None, latent: Latent | None
) -> float:
    """``ModelShape.vectors``."""
    if latent is not None:
        return latent.queries + latent.cache
    if family == "gpt_oss" and experts is not None:  # o_proj's bias, sinks, biases of routers and experts
        return hidden + heads + experts.count * (1 + 2 * experts.width + hidden)
    return hidden + kv_width if family == "olmoe" else 0  # norms over all heads of queries, of keys


def _needed(config: JsonObject, key: str) -> int:
    value = _count(config, key)
    if value is None:
        raise UsageError(f"the model's config needs {key}")
    return value


def _whole(config: JsonObject, key: str) -> int:
    """A number from 0 on; 0 where there is none."""
    return _count(config, key) or 0


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
