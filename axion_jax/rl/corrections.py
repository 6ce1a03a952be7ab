"""Weights against the mismatch between the engine that sampled and the trainer that learns.

The same parameters give different log-probabilities in the engine (FP8, other kernels, other
experts) and in the trainer. A correction weighs each prediction by trainer over engine, both under
the *old* parameters:

    r_t = pi_old(y_t) / pi_sampler(y_t) = exp(old_logprobs - sampler_logprobs)

What surprises newcomers: this is not the ratio of the surrogate, exp(logprobs - old_logprobs),
which speaks of the steps taken since (rl/staleness.py). A loss multiplies the weights into its
per-token loss *after* the clip, and no gradient flows through them. Under GSPO they still differ
from token to token. A rejection is a correction whose weights are 0 or 1: it takes terms out of the
numerator of the loss and leaves the denominator, which was counted before, as it is.

Every correction is a function `(Scores, Batch) -> (weights [B, T], metrics)`; bind options with
`functools.partial` and hand it to a loss as `correction`. Each is finite for any input: masked
positions get 1, whatever they hold, and an unmasked one whose log ratio is undefined (NaN,
inf - inf) gets 0, with its whole sequence where the weight is a sequence's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from axion_jax.rl.fields import require
from axion_jax.rl.sequences import each_sequence_once, masked_mean, per_sequence_sum
from axion_jax.types import Batch, Mean, Scores

Metrics = dict[str, Mean]
Correction = Callable[[Scores, Batch], tuple[Float[Array, "B T"], Metrics]]

MAX_LOG_RATIO = 20.0
"""Bound on a log ratio before exp. e^20 is far beyond any cap, and float32 overflows at e^88.7."""


def no_correction(scores: Scores, batch: Batch) -> tuple[Float[Array, "B T"], Metrics]:
    """Returns weights of 1: the engine is taken at its word."""
    return jnp.ones_like(batch.weights), {}


def truncated_importance_sampling(
    scores: Scores, batch: Batch, *, cap: float
) -> tuple[Float[Array, "B T"], Metrics]:
    """Returns token-level truncated importance weights (TIS).

        w_t = stop_gradient( min( r_t, cap ) )

    Truncated importance sampling (Ionides 2008), as used between engine and trainer by Yao et al.
    2025 ("Your efficient RL framework secretly brings you off-policy RL training") and slime.

    Args:
      cap: largest weight; 2.0 is customary.

    Returns:
      The weights, and over masked-in tokens `tis_weight` (mean weight) and `tis_clip_frac` (share
      whose ratio was above the cap).
    """
    log_ratio_BT, undefined_BT = _log_ratio(batch, who="truncated_importance_sampling")
    weights_BT, clipped_BT = truncate(log_ratio_BT, undefined_BT, batch, cap=cap)
    return weights_BT, {
        "tis_weight": masked_mean(weights_BT, batch.loss_mask),
        "tis_clip_frac": masked_mean(clipped_BT, batch.loss_mask),
    }


def sequence_truncated_importance_sampling(
    scores: Scores, batch: Batch, *, cap: float
) -> tuple[Float[Array, "B T"], Metrics]:
    """Returns one truncated importance weight for each sequence: unbiased up to the cap.

        w = stop_gradient( min( product over t of r_t, cap ) )

    The product, not the geometric mean: the true ratio of two sequences' probabilities. Its
    logarithm grows with the length, so long sequences sit at the cap or at 0.

    Returns:
      The weights, and `tis_weight` and `tis_clip_frac` as means over sequences.
    """
    total_BT, _, broken_BT = _sequence_log_ratios(batch, who="sequence_tis")
    weights_BT, clipped_BT = truncate(total_BT, broken_BT, batch, cap=cap)
    return weights_BT, {
        "tis_weight": each_sequence_once(weights_BT, batch),
        "tis_clip_frac": each_sequence_once(clipped_BT, batch),
    }


def icepop(
    scores: Scores, batch: Batch, *, low: float, high: float
) -> tuple[Float[Array, "B T"], Metrics]:
    """Returns importance weights that drop a token whose ratio leaves a band, both ends included.

        w_t = stop_gradient( r_t  if low <= r_t <= high else 0 )

    IcePop (Ling team 2025, "Every Step Evolves", arXiv:2510.18855). The band is tested on log
    ratios, so a dropped token's ratio is never computed and 0 * inf cannot arise.

    Returns:
      The weights, and over masked-in tokens `icepop_weight` and `icepop_masked_frac`.
    """
    log_ratio_BT, undefined_BT = _log_ratio(batch, who="icepop")
    kept_BT = ~undefined_BT & _in_band(log_ratio_BT, low, high)
    ratio_BT = jnp.exp(jnp.where(kept_BT, log_ratio_BT, 0.0))
    weights_BT = jnp.where(batch.loss_mask, jnp.where(kept_BT, ratio_BT, 0.0), 1.0)
    return weights_BT, {
        "icepop_weight": masked_mean(weights_BT, batch.loss_mask),
        "icepop_masked_frac": masked_mean(_float(~kept_BT, batch), batch.loss_mask),
    }


def sequence_mask(
    scores: Scores, batch: Batch, *, low: float, high: float
) -> tuple[Float[Array, "B T"], Metrics]:
    """Rejects sequences whose ratio, the product over their tokens, leaves [low, high].

    Returns:
      Weights of 0 and 1; `sequence_masked_frac`, a mean over sequences.
    """
    total_BT, _, broken_BT = _sequence_log_ratios(batch, who="sequence_mask")
    return _rejected("sequence", broken_BT | ~_in_band(total_BT, low, high), batch)


def geometric_mask(
    scores: Scores, batch: Batch, *, low: float, high: float
) -> tuple[Float[Array, "B T"], Metrics]:
    """Rejects sequences whose geometric mean ratio, exp(mean of log r_t), leaves [low, high].

    Independent of the length, and near 1 always: 0.999 and 1.002 are in use.

    Returns:
      Weights of 0 and 1; `geometric_masked_frac` and `geometric_ratio`, means over sequences.
    """
    _, mean_BT, broken_BT = _sequence_log_ratios(batch, who="geometric_mask")
    weights_BT, metrics = _rejected("geometric", broken_BT | ~_in_band(mean_BT, low, high), batch)
    ratio_BT = jnp.exp(jnp.clip(mean_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return weights_BT, metrics | {"geometric_ratio": each_sequence_once(ratio_BT, batch)}


def veto(scores: Scores, batch: Batch, *, threshold: float) -> tuple[Float[Array, "B T"], Metrics]:
    """Rejects sequences in which the trainer all but rules out a token that the engine sampled.

    A single r_t below `threshold` (1e-4 is customary) is no noise: something is broken there.

    Returns:
      Weights of 0 and 1; `veto_masked_frac`, a mean over sequences.
    """
    log_ratio_BT, undefined_BT = _log_ratio(batch, who="veto")
    vetoes_BT = _float(undefined_BT | (log_ratio_BT < math.log(threshold)), batch)
    return _rejected("veto", per_sequence_sum(vetoes_BT, batch) > 0, batch)


def product(*corrections: Correction) -> Correction:
    """Returns the correction whose weights are the product of those of all of these."""
    if len(corrections) == 1:
        return corrections[0]

    def of_all(scores: Scores, batch: Batch):
        weights_BT, metrics = no_correction(scores, batch)
        for correction in corrections:
            more_BT, found = correction(scores, batch)
            weights_BT, metrics = weights_BT * more_BT, metrics | found
        return weights_BT, metrics

    return of_all


def truncate(
    log_ratio: Float[Array, "B T"], undefined: Bool[Array, "B T"], batch: Batch, *, cap: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns min(exp(log_ratio), cap), 0 where undefined and 1 where masked; and 1 where above."""
    if not cap > 0:
        raise ValueError(f"The largest weight, cap={cap}, must be above 0.")
    ratio_BT = jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))
    weights_BT = jnp.where(undefined, 0.0, jnp.minimum(ratio_BT, cap))
    weights_BT = jnp.where(batch.loss_mask, weights_BT, 1.0)
    return weights_BT, _float(log_ratio > math.log(cap), batch)


def _log_ratio(batch: Batch, *, who: str) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Returns log r without gradient, 0 where masked or undefined, and where it is undefined."""
    old_BT, sampler_BT = require(batch, "old_logprobs", "sampler_logprobs", who=who)
    log_ratio_BT = jax.lax.stop_gradient(jnp.where(batch.loss_mask, old_BT - sampler_BT, 0.0))
    undefined_BT = jnp.isnan(log_ratio_BT)
    return jnp.where(undefined_BT, 0.0, log_ratio_BT), undefined_BT


def _sequence_log_ratios(
    batch: Batch, *, who: str
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]]:
    """Returns sum and mean of log r over each sequence, and where a token of it is undefined.

    Bounded token by token, or an inf and a -inf of one sequence would add up to NaN.
    """
    log_ratio_BT, undefined_BT = _log_ratio(batch, who=who)
    bounded_BT = jnp.clip(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    total_BT = per_sequence_sum(bounded_BT, batch)
    count_BT = per_sequence_sum(jnp.ones_like(bounded_BT), batch)
    broken_BT = per_sequence_sum(_float(undefined_BT, batch), batch) > 0
    return total_BT, total_BT / jnp.maximum(count_BT, 1.0), broken_BT


def _in_band(log_ratio: Float[Array, "B T"], low: float, high: float) -> Bool[Array, "B T"]:
    if not 0 < low < high:
        raise ValueError(f"The band of ratios needs 0 < low={low} < high={high}.")
    return (log_ratio >= math.log(low)) & (log_ratio <= math.log(high))


def _rejected(
    name: str, rejected: Bool[Array, "B T"], batch: Batch
) -> tuple[Float[Array, "B T"], Metrics]:
    weights_BT = _float(~(rejected & batch.loss_mask), batch)
    return weights_BT, {f"{name}_masked_frac": each_sequence_once(_float(rejected, batch), batch)}


def _float(x: Bool[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    return x.astype(batch.weights.dtype)


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
