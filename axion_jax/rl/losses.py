"""What is optimised: one pure function of arrays for each way to train.

Every loss has the signature `(Scores, Batch) -> (Mean, {name: Mean})`. The `Mean` is the sum of
`Batch.weights` times the per-token loss, over the optimizer step's denominator; how tokens are
weighed is decided in `rl/reduce.py`, so GRPO, Dr. GRPO and DAPO's token mean are one loss here.
Log-probabilities are in nats, of the temperature-scaled distribution.

What surprises newcomers: masked positions (prompt, tool output, padding) may hold NaN or inf in any
input. They are replaced with `jnp.where` before the first nonlinearity, so neither the loss nor its
gradient can see them. Log ratios are clipped to +-20 before exp, since 0 * inf in the backward pass
of a clipped token would be NaN; a ratio of e^20 has left any clip range long before.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from axion_jax.rl.corrections import MAX_LOG_RATIO, Correction, Metrics, no_correction
from axion_jax.rl.fields import require
from axion_jax.rl.sequences import (
    each_sequence_once,
    loss_mean,
    masked_mean,
    per_sequence_mean,
    sum_by_id,
)
from axion_jax.types import Batch, Mean, Scores


def sft_loss(scores: Scores, batch: Batch) -> tuple[Mean, Metrics]:
    """Returns the cross-entropy of the supervised tokens, in nats.

        L_t = - log pi(y_t)

    Under `each_token_alike` the loss is nats per supervised token. Metric: `entropy`, where the
    model gives it.
    """
    logprobs_BT = jnp.where(batch.loss_mask, scores.logprobs, 0.0)
    return loss_mean(-logprobs_BT, batch), _entropy(scores, batch)


def grpo_loss(
    scores: Scores,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    correction: Correction = no_correction,
) -> tuple[Mean, Metrics]:
    """Returns PPO's clipped surrogate with one ratio per token.

        r_t = pi(y_t) / pi_old(y_t)
        L_t = - w_t * min( r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t )

    PPO (Schulman et al. 2017, arXiv:1707.06347, Eq. 7) with the group advantages of GRPO (Shao et
    al. 2024, arXiv:2402.03300, Eq. 3) and separate clip widths (DAPO, arXiv:2503.14476, Eq. 8).
    With dual clip (Ye et al. 2019, arXiv:1912.09729) the loss of a token with A_t < 0 is at
    most -dual_clip * A_t: without it, a token that became far likelier pushes without bound.

    Needs `advantages` and `old_logprobs`. Only `loss_mask` positions enter.

    Args:
      clip_low, clip_high: half-widths of the clip; 0.2 and 0.28 are customary.
      dual_clip: c > 1, or None for no such bound.
      correction: weights w_t (rl/corrections.py), multiplied in after the clip.

    Returns:
      The loss, and the means over tokens of `ratio`, `clip_frac` (tokens whose clip took hold and
      whose gradient is 0), `approx_kl`, `advantage_abs`, `entropy`, and the correction's metrics.
    """
    advantages_BT, log_ratio_BT = advantages_and_log_ratio(scores, batch, who="grpo")
    ratio_BT = bounded_exp(log_ratio_BT)
    loss_BT, clipped_BT = _clipped_surrogate(ratio_BT, advantages_BT, clip_low, clip_high)
    if dual_clip is not None:
        bound_BT = -dual_clip * advantages_BT
        loss_BT = jnp.where(advantages_BT < 0, jnp.minimum(bound_BT, loss_BT), loss_BT)
    weights_BT, correction_metrics = correction(scores, batch)
    return loss_mean(weights_BT * loss_BT, batch), {
        "ratio": masked_mean(ratio_BT, batch.loss_mask),
        "clip_frac": masked_mean(clipped_BT, batch.loss_mask),
        **_policy_metrics(advantages_BT, log_ratio_BT, scores, batch),
        **correction_metrics,
    }


def gspo_loss(
    scores: Scores,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    correction: Correction = no_correction,
) -> tuple[Mean, Metrics]:
    """Returns Group Sequence Policy Optimization: one ratio per sequence.

        s_i = exp( 1/|y_i| * sum over t of [log pi(y_t) - log pi_old(y_t)] )
        L_t = - w_t * min( s_i * A_i, clip(s_i, 1 - clip_low, 1 + clip_high) * A_i )

    Zheng et al. 2025, arXiv:2507.18071, Eq. 5-7. The gradient flows through the mean, 1/|y_i| to
    each token. A sequence is one packed segment; prompt, tool and padding tokens enter neither s_i
    nor |y_i|; samples split from one rollout each have their own s_i. The paper's objective is a
    mean over sequences: weigh with `each_sequence_alike`, any other makes it a different method.

    Needs `advantages`, constant over a sequence, and `old_logprobs`.

    Args:
      clip_low, clip_high: half-widths of the clip; far smaller than PPO's, since s_i is a
        geometric mean (the paper uses 3e-4 and 4e-4).
      correction: weights w_t (rl/corrections.py), token by token, multiplied in after the clip.

    Returns:
      The loss; `ratio` and `clip_frac` as means over sequences; `approx_kl`, `advantage_abs`,
      `entropy` as means over tokens; and the correction's metrics.
    """
    advantages_BT, log_ratio_BT = advantages_and_log_ratio(scores, batch, who="gspo")
    ratio_BT = bounded_exp(per_sequence_mean(log_ratio_BT, batch))
    loss_BT, clipped_BT = _clipped_surrogate(ratio_BT, advantages_BT, clip_low, clip_high)
    weights_BT, correction_metrics = correction(scores, batch)
    return loss_mean(weights_BT * loss_BT, batch), {
        "ratio": each_sequence_once(ratio_BT, batch),
        "clip_frac": each_sequence_once(clipped_BT, batch),
        **_policy_metrics(advantages_BT, log_ratio_BT, scores, batch),
        **correction_metrics,
    }


def gspo_token_loss(
    scores: Scores,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    correction: Correction = no_correction,
) -> tuple[Mean, Metrics]:
    """Returns GSPO with an advantage for each token.

        s_t = sg(s_i) * pi(y_t) / sg(pi(y_t))             s_i as in `gspo_loss`, sg: no gradient
        L_t = - w_t * min( s_t * A_t, clip(s_t, 1 - clip_low, 1 + clip_high) * A_t )

    Zheng et al. 2025, arXiv:2507.18071, Eq. 13-14. The value of every s_t is s_i, and each token's
    gradient is its own: with A_t constant over a sequence, value and gradient are those of GSPO.
    For advantages that differ within a sequence (turns, process rewards).

    Needs and returns what `gspo_loss` does.
    """
    advantages_BT, log_ratio_BT = advantages_and_log_ratio(scores, batch, who="gspo_token")
    fixed_BT = jax.lax.stop_gradient(per_sequence_mean(log_ratio_BT, batch))
    ratio_BT = bounded_exp(fixed_BT + (log_ratio_BT - jax.lax.stop_gradient(log_ratio_BT)))
    loss_BT, clipped_BT = _clipped_surrogate(ratio_BT, advantages_BT, clip_low, clip_high)
    weights_BT, correction_metrics = correction(scores, batch)
    return loss_mean(weights_BT * loss_BT, batch), {
        "ratio": each_sequence_once(ratio_BT, batch),
        "clip_frac": each_sequence_once(clipped_BT, batch),
        **_policy_metrics(advantages_BT, log_ratio_BT, scores, batch),
        **correction_metrics,
    }


def cispo_loss(
    scores: Scores,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    correction: Correction = no_correction,
) -> tuple[Mean, Metrics]:
    """Returns REINFORCE under clipped importance weights: no token ever loses its gradient.

        L_t = - w_t * sg( clip(r_t, 1 - clip_low, 1 + clip_high) ) * A_t * log pi(y_t)

    CISPO (MiniMax-M1, arXiv:2506.13585, Eq. 4), r_t as in `grpo_loss`. The clip bounds a token's
    weight, and the gradient flows through the log-prob alone. The paper leaves the lower side open:
    clip_low=1.

    Needs `advantages` and `old_logprobs`.

    Returns:
      The loss, and over tokens `ratio`, `clip_frac` (tokens whose ratio was outside), `approx_kl`,
      `advantage_abs`, `entropy`; and the correction's metrics.
    """
    advantages_BT, log_ratio_BT = advantages_and_log_ratio(scores, batch, who="cispo")
    logprobs_BT = jnp.where(batch.loss_mask, scores.logprobs, 0.0)
    ratio_BT = bounded_exp(jax.lax.stop_gradient(log_ratio_BT))
    bounded_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
    loss_BT = -bounded_BT * advantages_BT * logprobs_BT
    weights_BT, correction_metrics = correction(scores, batch)
    return loss_mean(weights_BT * loss_BT, batch), {
        "ratio": masked_mean(ratio_BT, batch.loss_mask),
        "clip_frac": masked_mean((bounded_BT != ratio_BT).astype(ratio_BT.dtype), batch.loss_mask),
        **_policy_metrics(advantages_BT, log_ratio_BT, scores, batch),
        **correction_metrics,
    }


def preference_loss(scores: Scores, batch: Batch) -> tuple[Mean, Metrics]:
    """Returns the Bradley-Terry loss of a reward model on pairs of responses.

        margin = value(chosen) - value(rejected)        L = - log sigmoid(margin)

    Bradley & Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, Eq. 1. Segments 2k-1 and 2k of a row
    (k >= 1), in either order, are the two responses of one pair. `loss_mask` is True only at the
    last prediction of each, where `advantages` is +1 for the chosen and -1 for the rejected one.
    The pair's loss stands at the chosen's position and is weighed by `weights` there: see
    `each_pair_alike` in rl/reduce.py.

    Needs `Scores.values` and `advantages`.

    Returns:
      The loss, and the means over pairs of `accuracy` (margin above 0; a tie is wrong) and
      `margin`.
    """
    (advantages_BT,) = require(batch, "advantages", who="preference")
    (values_BT,) = require(scores, "values", who="preference")
    sign_BT = jnp.where(batch.loss_mask, advantages_BT, 0.0)
    values_BT = jnp.where(batch.loss_mask, values_BT, 0.0)
    pair_BT = (batch.segment_ids + 1) // 2
    margin_BT = sum_by_id(sign_BT * values_BT, pair_BT)
    chosen_BT = batch.loss_mask & (sign_BT > 0)
    loss_BT = jnp.where(chosen_BT, jax.nn.softplus(-margin_BT), 0.0)
    return loss_mean(loss_BT, batch), {
        "accuracy": masked_mean((margin_BT > 0).astype(margin_BT.dtype), chosen_BT),
        "margin": masked_mean(margin_BT, chosen_BT),
    }


def advantages_and_log_ratio(
    scores: Scores, batch: Batch, *, who: str
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns A and log pi - log pi_old, both 0 at masked positions."""
    advantages_BT, old_BT = require(batch, "advantages", "old_logprobs", who=who)
    return (
        jnp.where(batch.loss_mask, advantages_BT, 0.0),
        jnp.where(batch.loss_mask, scores.logprobs - old_BT, 0.0),
    )


def _clipped_surrogate(
    ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], clip_low: float, clip_high: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns max(-r A, -clip(r) A), and 1 where the clipped branch is strictly the larger."""
    free_BT = -ratio * advantages
    clipped_BT = -jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    return jnp.maximum(free_BT, clipped_BT), (clipped_BT > free_BT).astype(ratio.dtype)


def _policy_metrics(
    advantages: Float[Array, "B T"], log_ratio: Float[Array, "B T"], scores: Scores, batch: Batch
) -> Metrics:
    """Returns means over tokens; `approx_kl` is k1 of old against new, -mean(log pi/pi_old)."""
    return {
        "approx_kl": masked_mean(-log_ratio, batch.loss_mask),
        "advantage_abs": masked_mean(jnp.abs(advantages), batch.loss_mask),
        **_entropy(scores, batch),
    }


def _entropy(scores: Scores, batch: Batch) -> Metrics:
    if scores.entropy is None:
        return {}
    return {"entropy": masked_mean(jax.lax.stop_gradient(scores.entropy), batch.loss_mask)}


def bounded_exp(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns exp of log ratios clipped to +-20."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
