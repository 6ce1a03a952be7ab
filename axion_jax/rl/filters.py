"""Which groups are worth training on, decided on the host from raw rewards.

What surprises newcomers is the order in which groups are taken. Keeping the first groups to
*finish* fills the batch with short rollouts; `select_groups` goes by group id, which says nothing
of length. Hand it every group of the round, not those that happen to be ready.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from axion_jax.rl.advantages import drop_unscored, reward_of_rollouts
from axion_jax.types import Trajectory

Keep = Callable[[Sequence[float]], bool]
"""Whether a group with these raw rewards is worth training on."""

TOLERANCE = 1e-9
"""Rounding of a mean: three rewards of 0.8 have the float64 mean 0.8000000000000002."""


def mean_reward_window(rewards: Sequence[float] | np.ndarray, *, low: float, high: float) -> bool:
    """Returns whether low < mean(rewards) <= high, in float64: neither hopeless nor solved.

    The Rufus-Air recipe keeps a group iff 0 < mean <= 0.8. The window is on the mean only: a group
    of identical rewards inside it stays, and its advantages are exactly 0.

    Raises:
      ValueError: no rewards, one that is NaN or infinite, or a window with low >= high.
    """
    if not low < high:
        raise ValueError(f"mean_reward_window: low={low} must be below high={high}.")
    return mean_above(rewards, low=low) and mean_at_most(rewards, high=high)


def mean_above(rewards: Sequence[float] | np.ndarray, *, low: float) -> bool:
    """Returns whether mean(rewards) > low: the lower end of the window."""
    return low + TOLERANCE < _mean(rewards)


def mean_at_most(rewards: Sequence[float] | np.ndarray, *, high: float) -> bool:
    """Returns whether mean(rewards) <= high: the upper end of the window."""
    return _mean(rewards) <= high + TOLERANCE


def rewards_differ(rewards: Sequence[float] | np.ndarray) -> bool:
    """Returns whether std(rewards) > 1e-6, in float64 with ddof=1: not all pass, not all fail.

    DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, Eq. 11). Identical rewards have
    advantages of 0, and their group would only fill the batch.
    """
    r = np.asarray(rewards, dtype=np.float64)
    return len(r) > 1 and float(r.std(ddof=1)) > 1e-6


def _mean(rewards: Sequence[float] | np.ndarray) -> float:
    r = np.asarray(rewards, dtype=np.float64)
    if r.size == 0:
        raise ValueError("mean_reward_window: a group without rewards has no mean.")
    for i in np.flatnonzero(~np.isfinite(r)):
        raise ValueError(f"mean_reward_window: rewards[{i}] is {r[i]}; a reward must be finite.")
    return math.fsum(r) / r.size


def select_groups(
    groups: Sequence[Sequence[Trajectory]],
    *,
    num_groups: int,
    keep: Keep | Mapping[str, Keep],
) -> tuple[list[list[Trajectory]], dict[str, int]]:
    """Returns up to `num_groups` groups that `keep` likes, in the order of their group id.

    Aborted and unscored rollouts leave a group before it is judged; a group with fewer than two
    rollouts left is dropped, having no baseline. A caller that gets fewer than `num_groups` samples
    another round and calls again with both.

    Args:
      groups: the rollouts of one prompt each, in any order.
      num_groups: how many an optimizer step, or a rollout, needs.
      keep: takes the raw rewards of a group's rollouts, one for each rollout however many samples
        it was split into; for example `partial(mean_reward_window, low=0.0, high=0.8)`. Several
        by name all have to like it, and the first that does not is counted: name them after what
        they take out, as in `{"too_hard": partial(mean_above, low=0.0)}`.

    Returns:
      The kept, without their aborted and unscored rollouts, and the number of groups: `kept`,
      `too_small`, `filtered` (by `keep`) and `surplus` (good, but not needed). They add up to
      `len(groups)`. With several filters, `filtered_<name>` of each adds up to `filtered`.

    Raises:
      ValueError: two of `groups` have the same group id, or one mixes several.
    """
    counts = {"kept": 0, "too_small": 0, "filtered": 0, "surplus": 0}
    named = keep if isinstance(keep, Mapping) else {}
    counts |= {f"filtered_{name}": 0 for name in named}
    by_id: dict[int, Sequence[Trajectory]] = {}
    for group in groups:
        ids = {trajectory.group_id for trajectory in group}
        if not ids:
            counts["too_small"] += 1
        elif len(ids) > 1:
            raise ValueError(f"select_groups: a group mixes the group ids {sorted(ids)}.")
        elif by_id.setdefault(min(ids), group) is not group:
            raise ValueError(f"select_groups: two groups have the group id {min(ids)}.")
    selected = []
    for _, group in sorted(by_id.items()):
        scored, _ = drop_unscored(group)
        rewards = list(reward_of_rollouts(scored).values())
        if len(rewards) < 2:
            counts["too_small"] += 1
        elif (reason := _first_to_refuse(rewards, keep)) is not None:
            counts["filtered"] += 1
            if reason in named:
                counts[f"filtered_{reason}"] += 1
        elif len(selected) == num_groups:
            counts["surplus"] += 1
        else:
            selected.append(scored)
            counts["kept"] += 1
    return selected, counts


def _first_to_refuse(rewards: Sequence[float], keep: Keep | Mapping[str, Keep]) -> str | None:
    """Returns the name of the first filter that takes the group out, or None; "" if it has none."""
    filters = keep if isinstance(keep, Mapping) else {"": keep}
    return next((name for name, likes in filters.items() if not likes(rewards)), None)
