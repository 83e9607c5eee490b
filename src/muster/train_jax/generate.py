"""Greedy completions with a cache of keys and values, as one compiled program a batch.

Legend: as ``model``; N prompts, W the width that they are padded to on the left, M new tokens.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from muster.train_jax.model import (
    LAST_NORM,
    Model,
    Parameters,
    attention,
    causal,
    embedded,
    last_logits,
    layer,
    norm,
    rotary,
)


class _Progress(NamedTuple):
    """What a step of the loop hands to the next."""

    made: Array
    """New tokens so far."""
    tokens: Array
    """int32[N, M]: those; -1 after the end."""
    latest: Array
    """int32[N]"""
    ended: Array
    """bool[N]"""
    keys: Array
    """[L, N, W + M, K, D]"""
    values: Array


@partial(jax.jit, static_argnames=("model", "new", "stops", "pad"))
def complete(
    model: Model,
    parameters: Parameters,
    prompts_NW: Array,
    real_NW: Array,
    *,
    new: int,
    stops: tuple[int, ...],
    pad: int,
) -> Array:
    """int32[N, M = ``new``]: the most likely continuation of each prompt, -1 from the first of ``stops`` on.

    ``real_NW``: bool, False at the padding on the left. Stops once all have ended.
    """
    count, width = prompts_NW.shape
    shape = model.architecture
    room = (shape.layers, count, width + new, shape.kv_heads, shape.head_dim)
    keys, values = jnp.zeros(room, model.dtype), jnp.zeros(room, model.dtype)
    lengths = real_NW.sum(1)
    real = jnp.concatenate([real_NW, jnp.ones((count, new), bool)], 1)
    positions = jnp.maximum(jnp.cumsum(real_NW, 1) - 1, 0)
    first, keys, values = _following(
        model, parameters, prompts_NW, positions, real, keys, values, at=jnp.zeros((), jnp.int32)
    )

    def more(progress: _Progress) -> Array:
        return (progress.made < new) & ~progress.ended.all()

    def one(progress: _Progress) -> _Progress:
        ended = progress.ended | jnp.isin(progress.latest, jnp.array(stops, jnp.int32))
        tokens = progress.tokens.at[:, progress.made].set(jnp.where(ended, -1, progress.latest))
        given = jnp.where(ended, pad, progress.latest)[:, None]
        position = (lengths + progress.made)[:, None]
        latest, keys, values = _following(
            model, parameters, given, position, real, progress.keys, progress.values, at=width + progress.made
        )
        return _Progress(progress.made + 1, tokens, latest, ended, keys, values)

    begun = _Progress(
        jnp.zeros((), jnp.int32), jnp.full((count, new), -1, jnp.int32), first, jnp.zeros(count, bool), keys, values
    )
    return jax.lax.while_loop(more, one, begun).tokens


def _following(
    model: Model, parameters: Parameters, tokens_NQ: Array, positions_NQ: Array, real_NT: Array, keys: Array,
    values: Array, *, at: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(the next token of each row, int32[N]; the caches with these tokens written from place ``at`` on)."""
    cosine, sine = rotary(model, positions_NQ)
    asked, places = at + jnp.arange(tokens_NQ.shape[1]), jnp.arange(real_NT.shape[1])
    visible = causal(asked, places, model.architecture.window)[None] & real_NT[:, None, :]

    def body(hidden: Array, given: tuple[dict[str, Array], Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        weights, old_keys, old_values = given
        written = {}

        def attend(query: Array, key: Array, value: Array) -> Array:
            written["keys"] = jax.lax.dynamic_update_slice_in_dim(old_keys, key, at, 1)
            written["values"] = jax.lax.dynamic_update_slice_in_dim(old_values, value, at, 1)
            return attention(query, written["keys"], written["values"], visible)

        hidden = layer(model, weights, hidden, cosine, sine, attend)
        return hidden, (written["keys"], written["values"])

    hidden, (keys, values) = jax.lax.scan(
        body, embedded(model, parameters, tokens_NQ), (parameters.layers, keys, values)
    )
    last = norm(model, hidden[:, -1], parameters.top[LAST_NORM])
    return last_logits(model, parameters, last).argmax(-1).astype(jnp.int32), keys, values
