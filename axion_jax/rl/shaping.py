"""Rewards and masks that discourage length, on the host.

Shape *after* filtering: dynamic sampling (rl/filters.py) looks at raw rewards, or a length penalty
would decide which prompts are trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from axion_jax.types import Trajectory


def length_penalty(
    rewards: Sequence[float] | np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    correct: Sequence[bool] | np.ndarray,
    *,
    max_length: int,
    coefficient: float,
    apply_to: str = "correct",
) -> Float64[np.ndarray, " G"]:
    """Returns the rewards of one group, lower for rollouts longer than the shortest correct one.

        L0  = min over correct i of len_i
        r_i - coefficient * clip( (len_i - L0) / (max_length - L0), 0, 1 )

    The group-wise penalty of the Rufus-Air recipe: zero at the shortest correct rollout, linear up
    to its cap at the most tokens allowed. The paper leaves open what becomes of wrong rollouts.
    Here they keep their reward by default: penalising them too rewards failing briefly. A group
    without a correct rollout, or with L0 >= max_length, is unchanged.

    Args:
      rewards, lengths, correct: one for each rollout of the group; lengths in sampled tokens.
      max_length: most tokens allowed.
      coefficient: the cap. Keep it below the gap between right and wrong, or a long correct answer
        scores no better than a wrong one.
      apply_to: "correct" rollouts, or "all" of the group.
    """
    if apply_to not in ("correct", "all"):
        raise ValueError(f"length_penalty: apply_to={apply_to!r} must be 'correct' or 'all'.")
    if coefficient < 0:
        raise ValueError(f"length_penalty: coefficient={coefficient} must not be negative.")
    r, n, is_correct = _columns(rewards, lengths, np.asarray(correct, dtype=bool))
    if not is_correct.any():
        return r
    shortest = n[is_correct].min()
    if shortest >= max_length:
        return r
    excess = np.clip((n - shortest) / (max_length - shortest), 0.0, 1.0)
    return np.where(is_correct | (apply_to == "all"), r - coefficient * excess, r)


def linear_length_penalty(
    scores: Sequence[float] | np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    *,
    free_length: int,
    max_length: int,
    coefficient: float,
) -> Float64[np.ndarray, " N"]:
    """Returns reward-model scores, the positive ones lowered linearly beyond `free_length`.

        s > 0:   max( 0, s - coefficient * clip( (len - free) / (max - free), 0, 1 ) )
        s <= 0:  s

    The RLHF stage of the Rufus-Air recipe penalises length only where the raw score is positive:
    below 0 a penalty would teach brevity from answers that are bad anyway. A positive score never
    falls below 0, so no good long answer ranks under a bad one.

    Args:
      scores, lengths: one for each rollout; lengths in sampled tokens.
      free_length: tokens up to which nothing is taken off.
      max_length: tokens from which the whole coefficient is taken off; above `free_length`.
      coefficient: the most that is taken off, in units of the score.
    """
    if coefficient < 0:
        raise ValueError(f"linear_length_penalty: coefficient={coefficient} must not be negative.")
    if not 0 <= free_length < max_length:
        raise ValueError(
            f"linear_length_penalty: free_length={free_length} must lie in 0..max_length - 1, "
            f"and max_length={max_length}."
        )
    s, n = _columns(scores, lengths)
    excess = np.clip((n - free_length) / (max_length - free_length), 0.0, 1.0)
    return np.where(s > 0, np.maximum(s - coefficient * excess, 0.0), s)


def soft_overlong(
    rewards: Sequence[float] | np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    *,
    max_length: int,
    buffer: int,
    factor: float,
) -> Float64[np.ndarray, " N"]:
    """Returns rewards with DAPO's soft overlong punishment.

        r + min( 0, - factor * (len - (max_length - buffer)) / buffer )

    Yu et al. 2025, arXiv:2503.14476, Eq. 13: nothing up to `buffer` tokens before the limit, then
    linear down to -factor at it. Right and wrong answers alike.

    Args:
      rewards, lengths: one for each rollout; lengths in sampled tokens.
      max_length: most tokens allowed.
      buffer: tokens before the limit over which the punishment grows; in 1..max_length.
      factor: the punishment at the limit.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"soft_overlong: buffer={buffer} must lie in 1..max_length, and max_length={max_length}."
        )
    if factor < 0:
        raise ValueError(f"soft_overlong: factor={factor} must not be negative.")
    r, n = _columns(rewards, lengths)
    return r - factor * np.maximum(n - (max_length - buffer), 0.0) / buffer


def malformed_calls(
    rewards: Sequence[float] | np.ndarray,
    num_calls: Sequence[int] | np.ndarray,
    num_malformed: Sequence[int] | np.ndarray,
) -> Float64[np.ndarray, " N"]:
    """Returns rewards scaled down by the share of malformed tool calls, at worst to half.

        r * (1 - 1/2 * malformed / calls)       for r > 0

    The Search Agent's reward in the Rufus-Air recipe. A reward of 0 or below is left alone: halving
    a penalty would pay for malformed calls. A rollout without calls keeps its reward.
    """
    r, calls, malformed = _columns(rewards, num_calls, np.asarray(num_malformed, np.float64))
    if np.any(malformed > calls) or np.any(malformed < 0):
        raise ValueError("malformed_calls: malformed calls must number 0 to the number of calls.")
    share = malformed / np.maximum(calls, 1.0)
    return np.where(r > 0, r * (1 - 0.5 * share), r)


def mask_truncated(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Returns the trajectories, the truncated ones with nothing left to train on.

    Truncated: cut at the generation or the context limit (`StopReason.truncated`). Such a rollout
    says how hard its prompt is but little about which token was wrong, so its reward stays in the
    group's baseline and its place in the denominator, and only `loss_mask` becomes False.
    """
    return [
        t.replace(loss_mask=np.zeros_like(t.loss_mask)) if t.stop_reason.truncated else t
        for t in trajectories
    ]


def _columns(rewards, lengths, *more: np.ndarray) -> tuple[np.ndarray, ...]:
    columns = (np.asarray(rewards, np.float64), np.asarray(lengths, np.float64), *more)
    shapes = [column.shape for column in columns]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(f"Expected one entry for each rollout in every argument, got {shapes}.")
    return columns
