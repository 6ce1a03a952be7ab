"""Means over tokens and over the packed sequences of a row, on the device.

A sequence is one packed segment: the positions of a row that share a `segment_ids` value. Every
function looks at `loss_mask` positions only and selects them with `jnp.where` *before* it adds
anything up. Multiplying by the mask is not the same: masked positions may hold NaN or inf (a tool
token that the engine never scored), and 0 * NaN is NaN, in the value and in the gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from axion_jax.types import Batch, Mean


def masked_mean(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Mean:
    """Returns the mean of `x` over the masked-in positions, each of them counting once."""
    return Mean(jnp.sum(jnp.where(mask, x, 0.0)), jnp.sum(mask, dtype=x.dtype))


def loss_mean(loss: Float[Array, "B T"], batch: Batch) -> Mean:
    """Returns the loss of an optimizer step, as `rl/reduce.py` weighed it on the host.

        total  = sum over masked-in t of weights_t * loss_t        weight = sum of denominator

    Masked positions of `loss` never enter the total, whatever they hold. Their *gradient* is the
    caller's: 0 flows back to them, so a loss masks its own inputs before the first exp or product.
    """
    weighted_BT = jnp.where(batch.loss_mask, batch.weights * loss, 0.0)
    return Mean(jnp.sum(weighted_BT), jnp.sum(batch.denominator))


def sum_by_id(x: Float[Array, "B T"], ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns, at each position, the sum of `x` over the positions of its row with the same id.

    Ids lie in 0..T (sequences are numbered from 1, none is empty, so T bounds their number): the
    segment sum has a static size without being told how many sequences a row holds. `x` is not
    masked here.
    """

    def of_row(x_T, ids_T):
        return jax.ops.segment_sum(x_T, ids_T, num_segments=x_T.shape[0] + 1)[ids_T]

    return jax.vmap(of_row)(x, ids)


def per_sequence_sum(x: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    """Returns, at each position, the sum of `x` over the masked-in positions of its sequence."""
    return sum_by_id(jnp.where(batch.loss_mask, x, 0.0), batch.segment_ids)


def per_sequence_mean(x: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    """Returns, at each position, the mean of `x` over the masked-in positions of its sequence.

    0 all over a sequence in which everything is masked. The gradient of a sequence's mean flows
    back to its masked-in positions, 1/|y| to each.
    """
    count_BT = per_sequence_sum(jnp.ones_like(x), batch)
    return per_sequence_sum(x, batch) / jnp.maximum(count_BT, 1.0)


def each_sequence_once(x: Float[Array, "B T"], batch: Batch) -> Mean:
    """Returns the mean over sequences of their per-sequence means: for metrics of sequences.

    Sequences in which everything is masked do not count. A loss takes `loss_mean` instead, whose
    denominator was counted over the whole optimizer step.
    """
    count_BT = per_sequence_sum(jnp.ones_like(x), batch)
    weight_BT = jnp.where(batch.loss_mask, 1.0 / jnp.maximum(count_BT, 1.0), 0.0)
    return Mean(jnp.sum(jnp.where(batch.loss_mask, x, 0.0) * weight_BT), jnp.sum(weight_BT))
