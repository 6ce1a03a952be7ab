"""Advantages from a value head, token by token, on the host in float64.

For PPO, where a critic and not the group gives the baseline. Steps are the policy's own tokens:
prompt and tool tokens in between are part of the environment, and a value before them is followed
by the value at the policy's next token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from axion_jax.types import Trajectory


def generalized_advantages(
    trajectories: Sequence[Trajectory],
    values: Sequence[Float[np.ndarray, " _"]],
    *,
    discount: float = 1.0,
    smoothing: float,
) -> list[Trajectory]:
    """Returns the trajectories with `advantage`, `returns` and `values` of every prediction.

        delta_t = r_t + discount * V_{t+1} - V_t
        A_t = delta_t + discount * smoothing * A_{t+1}          R_t = A_t + V_t

    Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438, Eq. 16). The
    trajectory's reward falls on its last trained token, after which the value is 0; a truncated one
    ends there too, so its reward must say what truncation is worth. 0 at masked predictions.

    Args:
      trajectories: scored ones; `drop_unscored` goes first.
      values: [N-1] for each trajectory, of the value head at each prediction, as `unpack` gives
        them. Masked entries may hold anything.
      discount: 1 for language: an answer is worth the same however many tokens it took.
      smoothing: lambda; 1 for returns without bootstrapping.

    Raises:
      ValueError: discount or smoothing outside [0, 1], values of another length, or a reward or an
        unmasked value that is not finite.
    """
    for name, x in (("discount", discount), ("smoothing", smoothing)):
        if not 0 <= x <= 1:
            raise ValueError(f"generalized_advantages: {name}={x} must lie in [0, 1].")
    return [
        _with_advantages(t, v, discount, smoothing)
        for t, v in zip(trajectories, values, strict=True)
    ]


def _with_advantages(
    trajectory: Trajectory, values: np.ndarray, discount: float, smoothing: float
) -> Trajectory:
    assert trajectory.reward is not None, "drop_unscored goes first"
    mask = trajectory.loss_mask
    if len(values) != len(mask):
        raise ValueError(
            f"Trajectory {trajectory.task_id!r} makes {len(mask)} predictions, but has "
            f"{len(values)} values."
        )
    v = np.append(np.asarray(values, np.float64)[mask], 0.0)
    reward = float(trajectory.reward.value)
    if not (np.isfinite(reward) and np.isfinite(v).all()):
        raise ValueError(
            f"Trajectory {trajectory.task_id!r} has a reward or a value that is not finite."
        )
    delta = discount * v[1:] - v[:-1]
    delta[-1:] += reward
    advantages = np.zeros_like(delta)
    following = 0.0
    for t in reversed(range(len(delta))):
        advantages[t] = following = delta[t] + discount * smoothing * following

    def spread(x):
        out = np.zeros(len(mask), np.float32)
        out[mask] = x
        return out

    return trajectory.replace(
        advantage=spread(advantages), returns=spread(advantages + v[:-1]), values=spread(v[:-1])
    )
