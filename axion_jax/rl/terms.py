"""What is added to a policy loss: distance to a reference, an entropy bonus, a value head's loss.

Each term is a loss like those of rl/losses.py, weighed over tokens and divided by the same
denominator, and times its own coefficient. `add` puts them together:

    loss = surrogate * correction  +  coefficient * KL  -  coefficient * entropy

What surprises newcomers: corrections against the engine do not weigh these terms. They correct an
expectation over sampled tokens that the surrogate takes; a distance and an entropy are asked of the
policy at the places where it stands.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from axion_jax.rl.corrections import MAX_LOG_RATIO, Metrics
from axion_jax.rl.fields import require
from axion_jax.rl.sequences import loss_mean, masked_mean
from axion_jax.types import Batch, Mean, Scores

Estimator = Callable[[Float[Array, "B T"]], Float[Array, "B T"]]
Loss = Callable[[Scores, Batch], tuple[Mean, Metrics]]

MAX_K3 = 10.0
"""Bound on k3, which grows like pi_ref/pi: one token that the policy gave up must not be the whole
loss. Beyond it (log pi_ref/pi about 2.6) the term has no gradient."""


def k1(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """log pi/pi_ref. Its mean is the KL, but its gradient has mean 0: log it, or make it unbiased."""
    return log_ratio


def k2(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """1/2 (log pi/pi_ref)^2. Biased; its gradient is that of KL(pi || ref) where pi sampled."""
    return 0.5 * jnp.square(log_ratio)


def k3(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """pi_ref/pi - 1 + log pi/pi_ref, at most 10. Never negative, of low variance."""
    # expm1: for log ratios of 1e-3, exp(x) - 1 loses half the digits.
    return jnp.minimum(jnp.expm1(-log_ratio) + log_ratio, MAX_K3)


def kl_to_reference(
    scores: Scores,
    batch: Batch,
    *,
    estimator: Estimator,
    coefficient: float,
    unbiased: bool = False,
) -> tuple[Mean, Metrics]:
    """Returns the distance to a frozen reference policy, estimated on the sampled tokens.

        L_t = coefficient * k( log pi(y_t) - log pi_ref(y_t) )            k: k1, k2 or k3 above
        L_t = coefficient * pi(y_t)/pi_old(y_t) * k( ... )                where unbiased

    Schulman 2020 ("Approximating KL divergence"); the importance ratio, through which the gradient
    flows too, makes value and gradient those under the current policy (DeepSeek-V3.2,
    arXiv:2512.02556, Sec. 3.1). Log ratios are clipped to +-20 before exp.

    Needs `ref_logprobs`, and `old_logprobs` where unbiased.

    Returns:
      The loss, and `kl_loss`, the mean estimate over tokens without the coefficient.
    """
    (ref_BT,) = require(batch, "ref_logprobs", who="kl_to_reference")
    kl_BT = estimator(_log_ratio(scores, ref_BT, batch))
    if unbiased:
        (old_BT,) = require(batch, "old_logprobs", who="unbiased kl_to_reference")
        kl_BT = jnp.exp(_log_ratio(scores, old_BT, batch)) * kl_BT
    return loss_mean(coefficient * kl_BT, batch), {"kl_loss": masked_mean(kl_BT, batch.loss_mask)}


def entropy_bonus(scores: Scores, batch: Batch, *, coefficient: float) -> tuple[Mean, Metrics]:
    """Returns -coefficient * H(pi) at the policy's tokens: less loss for a policy less certain."""
    (entropy_BT,) = require(scores, "entropy", who="entropy_bonus")
    entropy_BT = jnp.where(batch.loss_mask, entropy_BT, 0.0)
    return loss_mean(-coefficient * entropy_BT, batch), {}


def value_loss(
    scores: Scores, batch: Batch, *, clip: float, coefficient: float
) -> tuple[Mean, Metrics]:
    """Returns PPO's clipped squared error of the value head.

        V' = V_old + clip( V - V_old, -clip, clip )
        L_t = coefficient * 1/2 * max( (V - R_t)^2, (V' - R_t)^2 )

    Schulman et al. 2016 (arXiv:1506.02438) for R_t, see rl/gae.py; the clip is that of PPO's public
    implementation. A value that moved further than `clip` *towards* its target has no gradient.

    Needs `Scores.values`, `returns` and `old_values`.

    Returns:
      The loss, and over tokens `vf_loss` (without the coefficient) and `vf_clip_frac`.
    """
    (values_BT,) = require(scores, "values", who="value_loss")
    returns_BT, old_BT = require(batch, "returns", "old_values", who="value_loss")
    error_BT = jnp.where(batch.loss_mask, values_BT - returns_BT, 0.0)
    moved_BT = jnp.where(batch.loss_mask, values_BT - old_BT, 0.0)
    clipped_BT = error_BT - moved_BT + jnp.clip(moved_BT, -clip, clip)
    loss_BT = 0.5 * jnp.maximum(jnp.square(error_BT), jnp.square(clipped_BT))
    took_hold_BT = (jnp.square(clipped_BT) > jnp.square(error_BT)).astype(loss_BT.dtype)
    return loss_mean(coefficient * loss_BT, batch), {
        "vf_loss": masked_mean(loss_BT, batch.loss_mask),
        "vf_clip_frac": masked_mean(took_hold_BT, batch.loss_mask),
    }


def add(policy: Loss, *terms: Loss) -> Loss:
    """Returns the sum of a policy loss and terms; `policy` itself where there are none.

    Totals add up and the denominator, the step's, stays. `pg_loss` is the policy's part.
    """
    if not terms:
        return policy

    def total(scores: Scores, batch: Batch):
        loss, metrics = policy(scores, batch)
        metrics = metrics | {"pg_loss": loss}
        for term in terms:
            more, found = term(scores, batch)
            loss, metrics = Mean(loss.total + more.total, loss.weight), metrics | found
        return loss, metrics

    return total


def _log_ratio(scores: Scores, other: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    """Returns log pi - other, 0 where masked, within +-20."""
    log_ratio_BT = jnp.where(batch.loss_mask, scores.logprobs - other, 0.0)
    return jnp.clip(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
