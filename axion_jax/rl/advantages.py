"""How much better than its group a rollout did, on the host in float64.

A group is the rollouts of one prompt, named by an explicit id: groups may be uneven (samples were
aborted) and arrive interleaved, so nothing is ever reshaped to `[groups, samples]`.

Two things surprise newcomers. Identical rewards must give exactly 0, which a float32 mean does not:
eight rewards of 0.35 leave a residue of 3e-8, and dividing it by (std + 1e-6) pushes all eight the
same way with +0.0298. And a sample that *we* failed (aborted, not scorable) leaves its group before
the baseline is taken; kept with a reward of 0 it would make its siblings look better than they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from axion_jax.types import StopReason, Trajectory

STD_FLOOR = 1e-6
RESIDUE = 1e-6
"""Rewards of a group closer together than this (relative to the largest, at least 1) are equal:
what sets them apart is the rounding of a float32 score, and a standard deviation would blow it up."""


def group_std(r: Float64[np.ndarray, " G"]) -> Float64[np.ndarray, " G"]:
    """Returns (r - mean(r)) / (std(r) + 1e-6), std with ddof=1.

    GRPO (Shao et al. 2024, arXiv:2402.03300, Sec. 4.1.2). A lone success among G rollouts gets
    (G - 1)/sqrt(G), 3.75 at G=16; with ddof=0 it would be 3.87.
    """
    return group_mean(r) / (r.std(ddof=1) + STD_FLOOR)


def group_mean(r: Float64[np.ndarray, " G"]) -> Float64[np.ndarray, " G"]:
    """Returns r - mean(r): rewards of different groups keep their scale.

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) is this with `constant_length` (rl/reduce.py); the
    Rufus-Air search stage is this with `each_sequence_alike`.
    """
    return r - r.mean()


def leave_one_out(r: Float64[np.ndarray, " G"]) -> Float64[np.ndarray, " G"]:
    """Returns r_i - mean of the others' rewards = G/(G - 1) * (r_i - mean(r)).

    RLOO (Ahmadian et al. 2024, arXiv:2402.14740). A baseline that does not depend on the sample
    leaves the gradient unbiased.
    """
    return group_mean(r) * (len(r) / (len(r) - 1))


BASELINES = {"group_std": group_std, "group_mean": group_mean, "leave_one_out": leave_one_out}


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[int] | np.ndarray,
    *,
    baseline: str,
) -> Float64[np.ndarray, " N"]:
    """Returns the advantage of each rollout over its group, in the order given.

    A group of identical rewards, or of one rollout, gets exactly 0 whatever the baseline.

    Args:
      rewards: one for each rollout.
      group_ids: the group of each rollout, in any order.
      baseline: a name in `BASELINES`.

    Raises:
      ValueError: an unknown baseline, or a reward that is NaN or infinite; names it.
    """
    if baseline not in BASELINES:
        raise ValueError(f"There is no baseline {baseline!r}; known: {', '.join(BASELINES)}.")
    r = np.asarray(rewards, dtype=np.float64)
    ids = np.asarray(group_ids)
    if r.ndim != 1 or r.shape != ids.shape:
        raise ValueError(
            f"{r.shape} rewards need as many group ids in one dimension, got {ids.shape}."
        )
    for i in np.flatnonzero(~np.isfinite(r)):
        raise ValueError(
            f"rewards[{i}], of group {ids[i]}, is {r[i]}. A reward must be finite; a sample that "
            "could not be scored is Unscorable (reward None) and leaves its group."
        )
    advantages = np.zeros_like(r)
    for group in np.unique(ids):
        members = ids == group
        of_group = r[members]
        if np.ptp(of_group) > RESIDUE * max(1.0, np.abs(of_group).max()):
            advantages[members] = BASELINES[baseline](of_group)
    return advantages


def drop_unscored(
    trajectories: Sequence[Trajectory],
) -> tuple[list[Trajectory], dict[str, int]]:
    """Returns the trajectories of rollouts that ran to an end and were scored, and counts.

    A rollout leaves as a whole: one aborted or unscored sample takes along the other samples split
    from the same rollout. Order is kept.

    Returns:
      The kept, and the number of trajectories dropped as `aborted` and as `unscored`.
    """
    counts = {"aborted": 0, "unscored": 0}
    aborted = {_key(t) for t in trajectories if t.stop_reason is StopReason.ABORTED}
    unscored = {_key(t) for t in trajectories if t.reward is None}
    kept = []
    for trajectory in trajectories:
        if _key(trajectory) in aborted:
            counts["aborted"] += 1
        elif _key(trajectory) in unscored:
            counts["unscored"] += 1
        else:
            kept.append(trajectory)
    return kept, counts


def reward_of_rollouts(trajectories: Sequence[Trajectory]) -> dict[tuple[int, int], float]:
    """Returns the reward of each rollout, keyed by (group id, rollout id), in first-seen order.

    Samples split from one rollout share its reward and count once, or a rollout would weigh more
    in its group's baseline for having been split.

    Raises:
      ValueError: two samples of one rollout have different rewards.
    """
    rewards: dict[tuple[int, int], float] = {}
    for trajectory in trajectories:
        assert trajectory.reward is not None, "drop_unscored goes first"
        value = float(trajectory.reward.value)
        first = rewards.setdefault(_key(trajectory), value)
        if not (value == first or (np.isnan(value) and np.isnan(first))):
            raise ValueError(
                f"Rollout {trajectory.rollout_id} of group {trajectory.group_id} has samples with "
                f"rewards {first} and {value}, but samples split from one rollout share its "
                "reward. Give each rollout its own rollout_id."
            )
    return rewards


def assign_advantages(
    trajectories: Sequence[Trajectory], *, baseline: str
) -> tuple[list[Trajectory], dict[str, int]]:
    """Returns the trajectories that can be trained on, with `advantage` set, and what was dropped.

    Aborted and unscored rollouts leave first, then groups with fewer than two rollouts left, then
    the baseline is taken (`group_advantages`) over rollouts, not samples. Truncated rollouts stay:
    their reward counts in the baseline even where `mask_truncated` keeps them out of the gradient.
    Order is kept.

    Returns:
      The kept, and the number of trajectories dropped as `aborted`, `unscored` and
      `group_too_small`.
    """
    scored, counts = drop_unscored(trajectories)
    rewards = reward_of_rollouts(scored)
    groups = [group for group, _ in rewards]
    advantages = dict(
        zip(
            rewards,
            group_advantages(list(rewards.values()), groups, baseline=baseline),
            strict=True,
        )
    )
    size = Counter(groups)
    kept = [
        t.replace(advantage=float(advantages[_key(t)])) for t in scored if size[t.group_id] >= 2
    ]
    return kept, counts | {"group_too_small": len(scored) - len(kept)}


def _key(trajectory: Trajectory) -> tuple[int, int]:
    return trajectory.group_id, trajectory.rollout_id
