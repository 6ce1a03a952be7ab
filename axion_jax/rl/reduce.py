"""How the predictions of an optimizer step are weighed against each other, on the host.

A reduction takes all trajectories of one optimizer step and returns a weight for each prediction
and one denominator:

    loss = sum over predictions of weight * loss_of_prediction / denominator

Both are fixed here, over the whole step, before it is cut into rows, micro-batches and devices
(`Batch.weights`, `Batch.denominator`), so every cut adds up to the same loss. A denominator counted
per micro-batch does not: sequences of 1, 1, 2, 4 tokens in two micro-batches have a token mean of
3.125 and a mean of token means of 2.583 (losses 1, 2, 3, 4 per token).

What surprises newcomers: a rollout in which everything is masked (a truncated one) still takes its
place in the denominator, and samples split from one rollout (same `rollout_id`) share one place.
So `rollout_id` must be unique within the step; examples for supervised training included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32

from axion_jax.types import Trajectory

Weights = list[Float32[np.ndarray, " _"]]
"""One [N-1] float32 array for each trajectory; 0 where masked."""
Reduction = Callable[[Sequence[Trajectory]], tuple[Weights, float]]


def each_sequence_alike(trajectories: Sequence[Trajectory]) -> tuple[Weights, float]:
    """Returns weights under which every rollout counts once, whatever its length.

        loss = 1/R * sum over rollouts i of ( 1/|y_i| * sum over its trained tokens of loss_t )

    as in GRPO (Shao et al. 2024, arXiv:2402.03300, Eq. 3) and GSPO. |y_i| is the number of trained
    tokens over *all* samples of rollout i; R counts the distinct rollout ids, fully masked ones
    included.
    """
    tokens = Counter[int]()
    for trajectory in trajectories:
        tokens[trajectory.rollout_id] += trajectory.num_trained
    weights = [
        _on_mask(trajectory, 1.0 / max(tokens[trajectory.rollout_id], 1))
        for trajectory in trajectories
    ]
    return weights, float(len(tokens))


def each_token_alike(trajectories: Sequence[Trajectory]) -> tuple[Weights, float]:
    """Returns weights under which every trained token counts once: the mean over tokens.

        loss = sum over trained tokens of loss_t / number of trained tokens

    Supervised training, and DAPO (Yu et al. 2025, arXiv:2503.14476, Eq. 8). Long sequences weigh
    more. Fully masked trajectories add nothing to the count.
    """
    weights = [_on_mask(trajectory, 1.0) for trajectory in trajectories]
    return weights, float(sum(trajectory.num_trained for trajectory in trajectories))


def constant_length(
    trajectories: Sequence[Trajectory], length: int | float
) -> tuple[Weights, float]:
    """Returns weights under which every trained token counts 1/length, whatever its sequence.

        loss = 1/R * sum over rollouts of ( 1/length * sum over trained tokens of loss_t )

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): dividing by a constant takes out the bias that
    makes wrong answers grow longer under 1/|y_i|. R as in `each_sequence_alike`.

    Args:
      length: in tokens; the paper takes the most new tokens allowed.
    """
    if not length > 0:
        raise ValueError(f"constant_length: length={length} must be above 0 tokens.")
    weights = [_on_mask(trajectory, 1.0 / length) for trajectory in trajectories]
    return weights, float(len({trajectory.rollout_id for trajectory in trajectories}))


def each_pair_alike(trajectories: Sequence[Trajectory]) -> tuple[Weights, float]:
    """Returns weights under which every preference pair counts once.

    Weight 1 on the chosen response's prediction (`advantage` above 0), where `preference_loss`
    puts the pair's loss, 0 on the rejected one's. The denominator is the number of chosen
    responses, which is that of pairs.
    """
    chosen = [(trajectory.advantage or 0.0) > 0 for trajectory in trajectories]
    weights = [
        _on_mask(trajectory, float(is_chosen))
        for trajectory, is_chosen in zip(trajectories, chosen, strict=True)
    ]
    return weights, float(sum(chosen))


def _on_mask(trajectory: Trajectory, weight: float) -> np.ndarray:
    return np.where(trajectory.loss_mask, weight, 0.0).astype(np.float32)
