"""Weights against the age of the data: the policy as it is against the one that the step began with.

Several optimizer steps are taken on one rollout. From the second on the policy has moved away from
`old_logprobs`, which were computed once, before the first. Not to be confused with
rl/corrections.py, which compares trainer and engine under the *same* parameters.

What surprises newcomers: PPO's token ratio already carries this weight, clipped; a second one would
count it twice. GSPO's does not: its ratio is a geometric mean, the |y|-th root of the true one, and
stays near 1 however far single tokens have moved. The weight here is for losses of that kind.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from axion_jax.rl.corrections import Metrics, truncate
from axion_jax.rl.fields import require
from axion_jax.rl.sequences import masked_mean
from axion_jax.types import Batch, Scores


def truncated_staleness(
    scores: Scores, batch: Batch, *, cap: float
) -> tuple[Float[Array, "B T"], Metrics]:
    """Returns token-level truncated weights of the current policy over the old one.

        w_t = stop_gradient( min( pi(y_t) / pi_old(y_t), cap ) )

    The Rufus-Air recipe corrects "across the two optimizer steps per rollout" with truncated
    importance sampling and gives neither formula, level nor cap; this reading of it is ours. Exactly
    1 in the first step on a rollout where the forward that trains gives the log-probs that the one
    that recomputes gave. Finite for any input, as in rl/corrections.py.

    Args:
      cap: largest weight.

    Returns:
      The weights, and over masked-in tokens `staleness_weight` and `staleness_clip_frac`.
    """
    (old_BT,) = require(batch, "old_logprobs", who="truncated_staleness")
    log_ratio_BT = jnp.where(batch.loss_mask, scores.logprobs - old_BT, 0.0)
    log_ratio_BT = jax.lax.stop_gradient(log_ratio_BT)
    undefined_BT = jnp.isnan(log_ratio_BT)
    log_ratio_BT = jnp.where(undefined_BT, 0.0, log_ratio_BT)
    weights_BT, clipped_BT = truncate(log_ratio_BT, undefined_BT, batch, cap=cap)
    return weights_BT, {
        "staleness_weight": masked_mean(weights_BT, batch.loss_mask),
        "staleness_clip_frac": masked_mean(clipped_BT, batch.loss_mask),
    }
