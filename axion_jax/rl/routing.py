"""Recorded routing, checked at the door before the trainer replays it (R3, arXiv:2510.11370).

A wrong row does not crash: a shifted layer, stale padding or a row of zeros trains experts that the
sampler never used, and shows as a slow divergence days later. So every trajectory is checked once,
on the host, before it is packed.

What surprises newcomers: a row can be well formed and still wrong. An engine that prefills a partial
rollout again after a weight update returns the experts that the *new* weights choose, and the
sampler used others. Such rows are set to -1, and the trainer's own router decides there.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from axion_jax.types import Trajectory

UNKNOWN = -1
"""In every slot of a row (one token, one layer): the trainer's own router decides."""


def smallest_dtype(num_experts: int) -> np.dtype:
    """The smallest signed integer type that holds the ids: int8 to 128 experts, int16 above."""
    return np.dtype(np.int8 if num_experts <= 128 else np.int16)


def prepare_routing(
    trajectories: Iterable[Trajectory], *, num_experts: int, routing_shape: tuple[int, int]
) -> list[Trajectory]:
    """Returns the trajectories with routing that may be replayed: checked, stale rows at -1.

    A trajectory without recorded routing stays as it is; packing fills it with -1.

    Args:
      num_experts: E; ids lie in 0..E-1.
      routing_shape: (L, K), MoE layers and experts per token.

    Raises:
      ValueError: names the trajectory, the place and what is wrong with it.
    """
    out = []
    for trajectory in trajectories:
        if trajectory.routing is not None:
            check_routing(trajectory, num_experts=num_experts, routing_shape=routing_shape)
            trajectory = forget_recomputed_rows(trajectory)
        out.append(trajectory)
    return out


def check_routing(
    trajectory: Trajectory, *, num_experts: int, routing_shape: tuple[int, int]
) -> None:
    """Raises unless each row of `trajectory.routing` is K distinct experts, or -1 in every slot.

    `Trajectory` itself refuses a number of rows other than tokens - 1.

    Raises:
      ValueError: wrong type or shape, an id out of range, a row partly -1, or one with an expert
        twice (what rows of zeros and stale padding look like).
    """
    routing, name = trajectory.routing, f"Trajectory {trajectory.task_id!r}"
    assert routing is not None
    if routing.dtype != smallest_dtype(num_experts):
        raise ValueError(
            f"{name} has routing of type {routing.dtype}; {num_experts} experts are stored as "
            f"{smallest_dtype(num_experts)}."
        )
    if routing.shape[1:] != tuple(routing_shape):
        raise ValueError(
            f"{name} has routing of {routing.shape[1:]} (layers, experts per token), but the model "
            f"has {tuple(routing_shape)}. Dense layers are not recorded."
        )
    ordered = np.sort(routing, axis=-1)
    unknown = np.all(routing == UNKNOWN, axis=-1)
    problems = {
        f"an id outside 0..{num_experts - 1}": (ordered[..., 0] < 0)
        | (ordered[..., -1] >= num_experts),
        "an expert twice": np.any(ordered[..., 1:] == ordered[..., :-1], axis=-1),
    }
    for problem, wrong in problems.items():
        for token, layer in np.argwhere(wrong & ~unknown)[:1]:
            raise ValueError(
                f"{name} has {problem} in the routing of token {token}, MoE layer {layer}: "
                f"{routing[token, layer].tolist()}. A row is {routing.shape[-1]} distinct experts, "
                "or -1 in every slot."
            )


def forget_recomputed_rows(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory with -1 in rows that other weights chose than those that sampled.

    Row t is the sampler's where `routing_version[t]` is the version that sampled the next token of
    the policy after input t: that forward was the first to attend to t. Rows after the last sampled
    token are compared with its version. Without `routing_version` every row is the sampler's.
    """
    routing, recorded, sampled = (
        trajectory.routing,
        trajectory.routing_version,
        trajectory.policy_version,
    )
    if routing is None or recorded is None:
        return trajectory
    if sampled is None:
        raise ValueError(
            f"Trajectory {trajectory.task_id!r} has routing_version but no policy_version to "
            "compare it with."
        )
    by_policy = np.flatnonzero(sampled >= 0)
    if not len(by_policy):
        return trajectory
    following = np.searchsorted(by_policy, np.arange(len(sampled)))
    expected = sampled[by_policy[np.minimum(following, len(by_policy) - 1)]]
    stale = (recorded != expected)[:, None, None]
    return trajectory.replace(routing=np.where(stale, routing.dtype.type(UNKNOWN), routing))
