"""The model in JAX: a function of flat parameters under transformers' names. No state, no modules.

Legend: B sequences, S positions, T keys (cache included), E hidden size, H query heads, K key and value heads, D head
size, L layers, V vocabulary. Parameters are two flat dicts: ``top`` (embedding, last norm, head) and ``layers``, where
every array has a leading axis of L, so that one compiled layer serves all (``lax.scan``) and compile time does not grow
with depth. Weights are as transformers stores them, [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from muster.core.layout import chunk_length
from muster.train_jax.architecture import Architecture
from muster.train_jax.splash import splash

EMBEDDING, LAST_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
#: Score of a key that a query may not see: finite, because a row of -inf has no softmax.
HIDDEN = -1e30
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}


class Parameters(NamedTuple):
    """A pytree of arrays by name."""

    top: dict[str, Array]
    layers: dict[str, Array]
    """Name within a layer -> [L, ...]."""


@dataclass(frozen=True)
class Model:
    """What is fixed while the program runs."""

    architecture: Architecture
    inverse_frequencies: tuple[float, ...]
    """Of the rotary embedding, D / 2 of them, as transformers computes them (scaled ones too)."""
    rotary_factor: float
    """Applied to cosine and sine (transformers' ``attention_scaling``)."""
    dtype: jnp.dtype
    """Of matrix products; sums and norms are float32."""
    lora_scale: float = 1.0
    recompute: str = "none"
    """``none``, ``selective`` (all but matrix products) or ``full``, in the backward pass."""
    logit_factor: float = 1.0
    logit_cap: float | None = None
    devices: int = 1
    """To which the rows of a batch are shared out; with tensor parallel, groups of ``tp`` devices."""
    tp: int = 1
    splash_over: Mesh | None = None
    """Attention by the TPU's kernel, on each device of this mesh for its own rows; None: the dense one."""
    constrain: Callable[[Array], Array] = field(default=lambda hidden_BSE: hidden_BSE)
    """Keeps the residual stream laid out over the batch."""
    gather: Callable[[Array], Array] = field(default=lambda weight_VE: weight_VE)
    """Makes a weight whole on every device (on every group of ``tp``): embedding and head, whose split the compiler
    would carry into the batch."""
    split: Callable[[Array], Array] = field(default=lambda inside_BSX: inside_BSX)
    """Keeps heads, and the inside of an MLP, laid out over the devices of a group."""


def merged(trained: Parameters, frozen: Parameters) -> Parameters:
    """All parameters, of a model of which some are trained."""
    return Parameters({**frozen.top, **trained.top}, {**frozen.layers, **trained.layers})


def row_losses(model: Model, parameters: Parameters, batch: Mapping[str, Array], *, chunk_tokens: int) -> Array:
    """The sum of cross-entropies of each row's supervised positions; float32[B].

    ``batch``: int32[B, S] each: ``ids``, ``labels`` (-100: not supervised), ``positions``, ``documents`` (the number of
    a position's document in its row). Each device computes the logits of ``chunk_tokens`` of its own at a time (0:
    all at once) and again in the backward pass, so that those of a whole batch never exist.
    """
    hidden = hidden_states(model, parameters, batch["ids"], batch["positions"], batch["documents"])
    weight = head(model, parameters)
    rows, length, _ = hidden.shape
    # Cut along S, so that the batch axis stays laid out over the devices. By the rows of one device: shapes here are of
    # all devices together, and cut by them a chip's products would become smaller and more as the slice grows.
    size = chunk_length(-(-rows // model.devices), length, chunk_tokens)

    @jax.checkpoint
    def part(hidden_BSE: Array, labels_BS: Array) -> Array:
        logits = _logits(model, hidden_BSE, weight)
        counted = labels_BS >= 0
        chosen = _at(model, logits, jnp.where(counted, labels_BS, 0))
        return jnp.where(counted, jax.nn.logsumexp(logits, -1) - chosen, 0.0).sum(-1)

    if size == length:
        whole: Array = part(hidden, batch["labels"])
        return whole

    def cut(array: Array) -> Array:
        return jnp.moveaxis(array.reshape(rows, length // size, size, *array.shape[2:]), 1, 0)

    def add(total: Array, given: tuple[Array, Array]) -> tuple[Array, None]:
        return total + part(*given), None

    total, _ = jax.lax.scan(add, jnp.zeros(rows, jnp.float32), (cut(hidden), cut(batch["labels"])))
    return total


def _at(model: Model, logits: Array, labels: Array) -> Array:
    """The logit of each label."""
    if model.tp == 1:
        return jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    # Logits are split along the vocabulary: looked up, they would be gathered; in a sum each device adds its own.
    return jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0.0).sum(-1)


def hidden_states(model: Model, parameters: Parameters, ids: Array, positions: Array, documents: Array) -> Array:
    """The last norm's output; [B, S, E] of ``model.dtype``."""
    cosine, sine = rotary(model, positions)
    if model.splash_over is None:
        attend = _dense(model, documents)
    else:
        attend = splash(model.architecture, documents, model.splash_over)

    def body(hidden: Array, weights: dict[str, Array]) -> tuple[Array, None]:
        return model.constrain(layer(model, weights, hidden, cosine, sine, attend)), None

    if model.recompute != "none":
        kept = {"full": None, "selective": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}[model.recompute]
        body = jax.checkpoint(body, policy=kept)
    hidden = model.constrain(embedded(model, parameters, ids))
    hidden, _ = jax.lax.scan(body, hidden, parameters.layers)
    return norm(model, hidden, parameters.top[LAST_NORM])


def embedded(model: Model, parameters: Parameters, ids: Array) -> Array:
    """[B, S, E]"""
    found = model.gather(parameters.top[EMBEDDING].astype(model.dtype))[ids]
    factor = model.architecture.embedding_factor
    return found if factor == 1.0 else found * jnp.asarray(factor, model.dtype)


def head(model: Model, parameters: Parameters) -> Array:
    """[V, E] of ``model.dtype``, whole."""
    return model.gather(parameters.top[EMBEDDING if model.architecture.tied else HEAD].astype(model.dtype))


def last_logits(model: Model, parameters: Parameters, hidden_BE: Array) -> Array:
    """float32[B, V]"""
    return _logits(model, hidden_BE, head(model, parameters))


def _logits(model: Model, hidden: Array, weight_VE: Array) -> Array:
    logits = (hidden @ weight_VE.T).astype(jnp.float32) * model.logit_factor
    cap = model.logit_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def layer(
    model: Model,
    weights: Mapping[str, Array],
    hidden_BSE: Array,
    cosine: Array,
    sine: Array,
    attend: Callable[[Array, Array, Array], Array],
) -> Array:
    """One decoder layer; ``attend(q_BSHD, k_BSKD, v_BSKD)`` gives [B, S, H * D]."""
    shape = model.architecture
    project = partial(linear, model, weights)

    def inside(name: str, given: Array) -> Array:
        return model.split(project(name, given))

    given = norm(model, hidden_BSE, weights["input_layernorm.weight"])
    rows, length, _ = given.shape
    query = inside("self_attn.q_proj", given).reshape(rows, length, shape.heads, shape.head_dim)
    key = inside("self_attn.k_proj", given).reshape(rows, length, shape.kv_heads, shape.head_dim)
    value = inside("self_attn.v_proj", given).reshape(rows, length, shape.kv_heads, shape.head_dim)
    if "self_attn.q_norm.weight" in weights:
        query = norm(model, query, weights["self_attn.q_norm.weight"])
        key = norm(model, key, weights["self_attn.k_norm.weight"])
    mixed = attend(rotated(query, cosine, sine), rotated(key, cosine, sine), value)
    hidden = model.constrain(hidden_BSE + project("self_attn.o_proj", mixed))
    given = norm(model, hidden, weights["post_attention_layernorm.weight"])
    gate = ACTIVATIONS[shape.activation](inside("mlp.gate_proj", given))
    return hidden + project("mlp.down_proj", gate * inside("mlp.up_proj", given))


def linear(model: Model, weights: Mapping[str, Array], name: str, given: Array) -> Array:
    """A linear module by its name, with its adapter if it has one (peft's names)."""
    base = f"{name}.base_layer" if f"{name}.base_layer.weight" in weights else name
    result = given @ weights[f"{base}.weight"].astype(model.dtype).T
    if f"{base}.bias" in weights:
        result = result + weights[f"{base}.bias"].astype(model.dtype)
    down = weights.get(f"{name}.lora_A.default.weight")
    if down is not None:
        up = weights[f"{name}.lora_B.default.weight"].astype(model.dtype)
        result = result + (given @ down.astype(model.dtype).T @ up.T) * model.lora_scale
    return result


def norm(model: Model, hidden: Array, weight: Array) -> Array:
    """Root mean square norm over the last axis, rounded where transformers' modules round."""
    wide = hidden.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + model.architecture.norm_eps)
    offset = model.architecture.norm_offset
    if offset:  # Gemma multiplies before it rounds
        return (scaled * (offset + weight.astype(jnp.float32))).astype(hidden.dtype)
    return weight.astype(hidden.dtype) * scaled.astype(hidden.dtype)


def rotary(model: Model, positions_BS: Array) -> tuple[Array, Array]:
    """Cosine and sine; [B, S, D] each."""
    frequencies = jnp.asarray(model.inverse_frequencies, jnp.float32)
    angles = positions_BS[..., None].astype(jnp.float32) * frequencies
    both = jnp.concatenate([angles, angles], -1)
    cosine, sine = jnp.cos(both) * model.rotary_factor, jnp.sin(both) * model.rotary_factor
    return cosine.astype(model.dtype), sine.astype(model.dtype)


def rotated(states_BSHD: Array, cosine: Array, sine: Array) -> Array:
    """Rotary embedding of queries or keys, in transformers' order of halves."""
    first, second = jnp.split(states_BSHD, 2, -1)
    turned = jnp.concatenate([-second, first], -1)
    return states_BSHD * cosine[:, :, None] + turned * sine[:, :, None]


# ---------------------------------------------------------------- attention


def attention(query_BSHD: Array, key_BTKD: Array, value_BTKD: Array, visible_BST: Array) -> Array:
    """Dense attention of a query head to its group's keys; [B, S, H * D]."""
    rows, length, heads, size = query_BSHD.shape
    groups = key_BTKD.shape[2]
    query = query_BSHD.reshape(rows, length, groups, heads // groups, size)
    scores = jnp.einsum("bskgd,btkd->bkgst", query, key_BTKD, preferred_element_type=jnp.float32) * size**-0.5
    weights = jax.nn.softmax(jnp.where(visible_BST[:, None, None], scores, HIDDEN), -1).astype(value_BTKD.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights, value_BTKD).reshape(rows, length, heads * size)


def _dense(model: Model, documents_BS: Array) -> Callable[[Array, Array, Array], Array]:
    """Within a document, and not to what comes later."""
    places = jnp.arange(documents_BS.shape[1])
    visible = causal(places, places, model.architecture.window)[None]
    visible &= documents_BS[:, :, None] == documents_BS[:, None, :]
    return partial(attention, visible_BST=visible)


def causal(queries: Array, keys: Array, window: int | None) -> Array:
    """bool[S, T]: whether a query sees a key, by their places."""
    seen = queries[:, None] >= keys[None, :]
    return seen if window is None else seen & (queries[:, None] - keys[None, :] < window)
