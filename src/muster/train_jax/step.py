"""One training step as one compiled program: forward and backward of every micro-batch, sums, clipping, AdamW.

The compiler divides it among the chips of a slice: it gathers a layer's weights before the layer and sums its gradients
after; those of several slices are summed besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from muster.config.spec import Optimizer
from muster.train_jax.layout import ROWS
from muster.train_jax.model import Model, Parameters, merged, row_losses


class State(NamedTuple):
    """What a step changes."""

    trained: Parameters
    exp_avg: Parameters
    exp_avg_sq: Parameters


class Scalars(NamedTuple):
    """What differs from step to step, as arrays: as Python numbers they would make each step compile again."""

    scale: Array
    """1 / the step's supervised tokens."""
    learning_rate: Array
    correction: Array
    """1 - beta1 ** step"""
    correction_sq: Array
    """sqrt(1 - beta2 ** step)"""

    @classmethod
    def of(cls, *, scale: float, learning_rate: float, step: int, settings: Optimizer) -> Scalars:
        beta1, beta2 = settings.betas
        given = (scale, learning_rate, 1.0 - beta1**step, (1.0 - beta2**step) ** 0.5)
        return cls(*(jnp.asarray(value, jnp.float32) for value in given))


#: Each row's part of the loss, float32[rounds, B]; the gradients' global norm before clipping.
Sums = tuple[Array, Array]
#: The state given is given up.
StepFunction = Callable[[State, Parameters, Mapping[str, Array], Scalars], tuple[State, Sums]]


def make_step(
    model: Model, settings: Optimizer, decays: Parameters, *, chunk_tokens: int, state: State
) -> StepFunction:
    """The compiled step over batches int32[rounds, B, S]; compiled at its first call, and for another shape again.

    ``state``: of which layout and types are taken; a call gives its ``state`` up. ``decays``: whether weight decay acts
    on each trained parameter (Python booleans). The update is left out, as a whole, where loss or norm is not finite.
    """
    layouts = jax.tree.map(lambda array: array.sharding, state)
    mesh = jax.tree.leaves(layouts)[0].mesh
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, ROWS))

    def loss(trained: Parameters, frozen: Parameters, batch: Mapping[str, Array], scale: Array) -> tuple[Array, Array]:
        losses = scale * row_losses(model, merged(trained, frozen), batch, chunk_tokens=chunk_tokens)
        return losses.sum(), losses

    def step(
        state: State, frozen: Parameters, batches: Mapping[str, Array], scalars: Scalars
    ) -> tuple[State, tuple[Array, Array]]:
        def micro_batch(total: Parameters, batch: Mapping[str, Array]) -> tuple[Parameters, Array]:
            gradients, losses = jax.grad(loss, has_aux=True)(state.trained, frozen, batch, scalars.scale)
            gradients = jax.tree.map(
                lambda gradient, layout: jax.lax.with_sharding_constraint(gradient.astype(jnp.float32), layout),
                gradients,
                layouts.trained,
            )
            return jax.tree.map(jnp.add, total, gradients), losses

        zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), state.trained)
        gradients, losses = jax.lax.scan(micro_batch, zeros, batches)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(gradient)) for gradient in jax.tree.leaves(gradients)))
        limit = settings.max_grad_norm
        clip = jnp.ones(()) if limit is None else jnp.minimum(1.0, limit / (norm + 1e-6))
        apply = jnp.isfinite(losses.sum()) & jnp.isfinite(norm)
        return adamw(state, gradients, clip, apply, decays, settings, scalars), (losses, norm)

    compiled: StepFunction = jax.jit(step, donate_argnums=0, out_shardings=(layouts, (rows, whole)))
    return compiled


def adamw(
    state: State, gradients: Parameters, clip: Array, apply: Array, decays: Parameters, settings: Optimizer,
    scalars: Scalars,
) -> State:  # fmt: skip
    """AdamW with decoupled decay as ``torch.optim.AdamW`` computes it (Loshchilov and Hutter 2019)."""
    beta1, beta2 = settings.betas

    def one(value: Array, gradient: Array, average: Array, square: Array, decay: bool) -> tuple[Array, Array, Array]:
        gradient = gradient * clip
        average_new = average + (1.0 - beta1) * (gradient - average)
        square_new = beta2 * square + (1.0 - beta2) * gradient * gradient
        denominator = jnp.sqrt(square_new) / scalars.correction_sq + settings.eps
        wide = value.astype(jnp.float32)
        kept = wide * (1.0 - scalars.learning_rate * (settings.weight_decay if decay else 0.0))
        new = kept - scalars.learning_rate / scalars.correction * average_new / denominator
        return (
            jnp.where(apply, new, wide).astype(value.dtype),
            jnp.where(apply, average_new, average),
            jnp.where(apply, square_new, square),
        )

    each = jax.tree.map(one, state.trained, gradients, state.exp_avg, state.exp_avg_sq, decays)
    return State(*jax.tree.transpose(jax.tree.structure(state.trained), jax.tree.structure((0, 0, 0)), each))
