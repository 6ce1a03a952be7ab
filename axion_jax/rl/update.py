"""One update step for every loss.

A step takes the micro-batches of one optimizer step stacked in storage of static size,
`[M, B, T, ...]`, and how many of them hold data, a traced number. One compilation thus serves every
count; the rest of the storage is never computed, and may hold anything.

Micro-batches add up the *undivided* loss and its gradient and divide once by the total weight, so
their number changes memory use only. What surprises newcomers: dividing each micro-batch by its own
weight and averaging is a different loss as soon as micro-batches hold different amounts of data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from axion_jax.types import Batch, Mean, Scores, TrainState

Params = Any
ScoreFn = Callable[[Params, Batch], Scores]
LossFn = Callable[[Scores, Batch], tuple[Mean, dict[str, Mean]]]
AfterUpdate = Callable[[Params, Array], Params]
UpdateStep = Callable[[TrainState, Batch, Any], tuple[TrainState, dict[str, Array]]]
ScoreStep = Callable[[Params, Batch, Any], dict[str, Array]]


def make_update_step(
    score_fn: ScoreFn,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    after_update: AfterUpdate | None = None,
) -> UpdateStep:
    """Returns `step(state, batch, num_microbatches) -> (state, metrics)`: pure, not yet jitted.

        gradient = grad( sum over micro-batches of loss.total ) / sum of loss.weight

    Jit it once with the state donated. Gradients are added up in float32 whatever the parameters'
    type, and the optimizer sees them so; its state keeps the types it was initialised with.

    A loss or gradient that is not finite skips the update: parameters and optimizer state (with its
    learning-rate schedule) stay bit for bit what they were, `state.step`, which counts updates
    *applied*, stays too, and `state.skipped` goes up by one. Clipping belongs to the optimizer
    (`optax.clip_by_global_norm` in its chain).

    Args:
      score_fn: what the model says of one micro-batch, `(params, Batch [B, T]) -> Scores`.
      loss_fn: one of rl/losses.py, with its options bound.
      optimizer: what `state.opt_state` was initialised with.
      after_update: `(params, expert_load [L, E]) -> params`, applied to the new parameters with the
        load of all micro-batches together; for the balancing of router biases, which no gradient
        reaches. Not applied when the update is skipped.

    Returns:
      The step. Its batch has a leading axis of micro-batches on every leaf; `num_microbatches` is
      an int32 in 1..M. Its metrics are float32 scalars: `loss`, `grad_norm` (before clipping),
      `update_skipped` (0 or 1), and the value of each of the loss's own.
    """

    def objective(params, microbatch):
        scores = score_fn(params, microbatch)
        loss, metrics = loss_fn(scores, microbatch)
        assert not {"loss", "grad_norm", "update_skipped"} & metrics.keys(), metrics.keys()
        load_LE = None
        if after_update is not None:
            load_LE = scores.expert_load
            if load_LE is None:
                raise ValueError(
                    "after_update needs Scores.expert_load, which this model does not return. "
                    "Leave after_update out for a model without experts."
                )
        return loss.total, ({"loss": loss, **metrics}, load_LE)

    grad_fn = jax.grad(objective, has_aux=True)

    def step(state: TrainState, batch: Batch, num_microbatches: int | Int[Array, ""]):
        def add_microbatch(i, accumulated):
            contribution = grad_fn(state.params, _microbatch(batch, i))
            return jax.tree.map(lambda a, x: a + x.astype(a.dtype), accumulated, contribution)

        _, aux = jax.eval_shape(objective, state.params, _first_microbatch(batch))
        nothing = (jax.tree.map(_float32_zeros, state.params), jax.tree.map(_zeros, aux))
        grads, (means, load_LE) = jax.lax.fori_loop(0, num_microbatches, add_microbatch, nothing)

        loss = means["loss"]
        grads = jax.tree.map(loss.divide, grads)
        grad_norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if after_update is not None:
            params = after_update(params, load_LE)

        finite = jnp.isfinite(loss.value) & jnp.isfinite(grad_norm)

        def if_finite(new, old):
            return jnp.where(finite, new.astype(old.dtype), old)

        applied = finite.astype(jnp.int32)
        state = TrainState(
            step=state.step + applied,
            params=jax.tree.map(if_finite, params, state.params),
            opt_state=jax.tree.map(if_finite, opt_state, state.opt_state),
            skipped=state.skipped + (1 - applied),
        )
        metrics = {name: mean.value for name, mean in means.items()} | {
            "grad_norm": grad_norm,
            "update_skipped": 1.0 - finite.astype(jnp.float32),
        }
        return state, metrics

    return step


def make_score_step(score_fn: ScoreFn) -> ScoreStep:
    """Returns `score(params, batch, num_microbatches) -> {"logprobs", "entropy"}`, not yet jitted.

    For `Batch.old_logprobs`, once before the first update on a rollout, and for `ref_logprobs` with
    the reference's parameters. Takes the same stacked storage as the update step. Results are
    `[M, B, T]`, 0 in unused storage; `entropy` is there if the model gives it.
    """

    def outputs(params, microbatch):
        scores = score_fn(params, microbatch)
        found = {"logprobs": scores.logprobs, "entropy": scores.entropy}
        return {name: array for name, array in found.items() if array is not None}

    def score(
        params: Params, batch: Batch, num_microbatches: int | Int[Array, ""]
    ) -> dict[str, Float[Array, "M B T"]]:
        def write_microbatch(i, written):
            found = outputs(params, _microbatch(batch, i))
            return jax.tree.map(
                lambda storage, x: jax.lax.dynamic_update_index_in_dim(storage, x, i, 0),
                written,
                found,
            )

        shapes = jax.eval_shape(outputs, params, _first_microbatch(batch))
        num_stored = batch.tokens.shape[0]
        storage = jax.tree.map(lambda x: jnp.zeros((num_stored, *x.shape), x.dtype), shapes)
        return jax.lax.fori_loop(0, num_microbatches, write_microbatch, storage)

    return score


def _microbatch(batch: Batch, i) -> Batch:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batch)


def _first_microbatch(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)


def _zeros(like) -> Array:
    return jnp.zeros(like.shape, like.dtype)


def _float32_zeros(like) -> Array:
    return jnp.zeros(like.shape, jnp.promote_types(like.dtype, jnp.float32))
