"""Weights against the mismatch between the engine that sampled and the trainer that learns.

The same parameters give different log-probabilities in the engine (FP8, other kernels, other
experts) and in the trainer. A correction weighs each prediction by trainer over engine, both under
the *old* parameters:

    w_t = pi_old(y_t) / pi_sampler(y_t) = exp(old_logprobs - sampler_logprobs)

What surprises newcomers: this is not the ratio of the surrogate, exp(logprobs - old_logprobs),
which speaks of the steps taken since. A loss multiplies the weights into its per-token loss *after*
the clip, and no gradient flows through them. Under GSPO they still differ from token to token.

Every correction is a function `(Batch) -> (weights [B, T], metrics)`; bind options with
`functools.partial` and hand it to a loss as `correction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from axion_jax.rl.fields import require
from axion_jax.rl.sequences import masked_mean
from axion_jax.types import Batch, Mean

Metrics = dict[str, Mean]
Correction = Callable[[Batch], tuple[Float[Array, "B T"], Metrics]]

MAX_LOG_RATIO = 20.0
"""Bound on a log ratio before exp. e^20 is far beyond any cap, and float32 overflows at e^88.7."""


def no_correction(batch: Batch) -> tuple[Float[Array, "B T"], Metrics]:
    """Returns weights of 1: the engine is taken at its word."""
    return jnp.ones_like(batch.weights), {}


def truncated_importance_sampling(
    batch: Batch, *, cap: float
) -> tuple[Float[Array, "B T"], Metrics]:
    """Returns token-level truncated importance weights (TIS).

        w_t = stop_gradient( min( exp(old_logprobs_t - sampler_logprobs_t), cap ) )

    Truncated importance sampling (Ionides 2008), as used between engine and trainer by Yao et al.
    2025 ("Your efficient RL framework secretly brings you off-policy RL training") and slime.

    Finite for any input: masked positions get 1, whatever they hold; an unmasked position whose log
    ratio is undefined (NaN, inf - inf) gets 0 and is seen in `tis_weight`.

    Args:
      cap: largest weight; 2.0 is customary.

    Returns:
      The weights, and over masked-in tokens `tis_weight` (mean weight) and `tis_clip_frac` (share
      whose ratio was above the cap).
    """
    if not cap > 0:
        raise ValueError(f"truncated_importance_sampling: cap={cap} must be above 0.")
    old_BT, sampler_BT = require(
        batch, "old_logprobs", "sampler_logprobs", who="truncated_importance_sampling"
    )
    log_ratio_BT = jax.lax.stop_gradient(jnp.where(batch.loss_mask, old_BT - sampler_BT, 0.0))
    undefined_BT = jnp.isnan(log_ratio_BT)
    ratio_BT = jnp.exp(jnp.minimum(jnp.where(undefined_BT, 0.0, log_ratio_BT), MAX_LOG_RATIO))
    weights_BT = jnp.where(undefined_BT, 0.0, jnp.minimum(ratio_BT, cap))
    weights_BT = jnp.where(batch.loss_mask, weights_BT, 1.0)
    clipped_BT = (log_ratio_BT > math.log(cap)).astype(weights_BT.dtype)
    return weights_BT, {
        "tis_weight": masked_mean(weights_BT, batch.loss_mask),
        "tis_clip_frac": masked_mean(clipped_BT, batch.loss_mask),
    }


def mismatch_metrics(
    logprobs: Float[Array | np.ndarray, "*shape"],
    sampler_logprobs: Float[Array | np.ndarray, "*shape"],
    mask: Bool[Array | np.ndarray, "*shape"],
) -> Metrics:
    """Returns how far the trainer's log-probs are from the engine's, over masked-in tokens.

        logprob_abs_diff = mean |log r|        k3 = mean( r - 1 - log r )
        log r = logprobs - sampler_logprobs

    k3 is the low-variance, never negative estimator of KL(sampler || trainer) on the sampler's own
    tokens (Schulman 2020, "Approximating KL divergence"). Pass `old_logprobs`, recomputed under the
    parameters that sampled: later ones measure training, not mismatch.

    Any shape goes, so a whole step of `[M, B, T]` micro-batches is one call. Masked positions may
    hold anything; a NaN at an unmasked one shows as NaN.
    """
    mask = jnp.asarray(mask)
    log_ratio = jnp.where(mask, jnp.subtract(logprobs, sampler_logprobs), 0.0)
    bounded = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "logprob_abs_diff": masked_mean(jnp.abs(log_ratio), mask),
        # expm1: for the log ratios of 1e-3 that matter here, exp(x) - 1 loses half the digits.
        "k3": masked_mean(jnp.expm1(bounded) - bounded, mask),
    }
