"""How predictions are weighed: the vectors of the peers, and their quirks done right."""

import numpy as np
import pytest

from axion_jax.rl.reduce import (
    constant_length,
    each_pair_alike,
    each_sequence_alike,
    each_token_alike,
)


def total(weights, x):
    return sum(float(np.dot(w, np.asarray(v, np.float64))) for w, v in zip(weights, x, strict=True))


@pytest.fixture
def three(trajectory):
    # x = [1, 2, 3 | 4 | 5, 6]; the last rollout is fully masked
    masks = [[1, 1, 1], [1], [0, 0]]
    return [trajectory(m, rollout_id=i) for i, m in enumerate(masks)], [[1, 2, 3], [4], [5, 6]]


def test_each_sequence_alike_keeps_fully_masked_rollouts_in_the_denominator(three):
    trajectories, x = three
    weights, denominator = each_sequence_alike(trajectories)
    # mean(1, 2, 3) + 4 = 6, over 3 rollouts
    np.testing.assert_allclose(total(weights, x), 6.0, rtol=1e-6)
    assert denominator == 3
    np.testing.assert_array_equal(weights[2], [0, 0])


def test_each_token_alike_counts_no_phantom_token_for_a_fully_masked_rollout(three):
    trajectories, x = three
    weights, denominator = each_token_alike(trajectories)
    # 10 / 4 = 2.5; with a phantom token it would be 10 / 5 = 2
    assert total(weights, x) / denominator == 2.5


def test_constant_length_divides_every_token_by_the_same_number(three):
    trajectories, x = three
    weights, denominator = constant_length(trajectories, 4)
    # (1 + 2 + 3 + 4) / 4 = 2.5, over 3 rollouts
    assert (total(weights, x), denominator) == (2.5, 3)
    with pytest.raises(ValueError, match="length=0 must be above 0"):
        constant_length(trajectories, 0)


def test_samples_split_from_one_rollout_share_its_tokens_and_its_place(trajectory):
    # Rollout A = samples of 3 and 1 trained tokens, rollout B of 2:
    # (1 + 2 + 3 + 4) / 4 + (5 + 6) / 2 = 8, over 2 rollouts = 4
    trajectories = [
        trajectory([1, 1, 1], rollout_id=0),
        trajectory([1], rollout_id=0),
        trajectory([1, 1], rollout_id=1),
    ]
    weights, denominator = each_sequence_alike(trajectories)
    np.testing.assert_allclose(total(weights, [[1, 2, 3], [4], [5, 6]]), 8.0, rtol=1e-6)
    assert denominator == 2
    assert constant_length(trajectories, 4)[1] == 2


@pytest.mark.parametrize(
    "split",
    [[[0, 1, 2, 3]], [[0, 1, 2], [3]], [[0], [1], [2], [3]], [[3, 0], [2, 1]]],
    ids=str,
)
def test_token_mean_is_the_same_for_every_split_into_micro_batches(trajectory, split):
    # (1 + 2 + 2*3 + 4*4) / 8 = 3.125; the mean of token means of two halves is 2.58333.
    # Every sequence alike: (1 + 2 + 3 + 4) / 4 = 2.5.
    x = [[1], [2], [3, 3], [4, 4, 4, 4]]
    trajectories = [trajectory(np.ones(len(v)), rollout_id=i) for i, v in enumerate(x)]
    for reduce, expected in ((each_token_alike, 3.125), (each_sequence_alike, 2.5)):
        weights, denominator = reduce(trajectories)
        parts = [total([weights[i] for i in part], [x[i] for i in part]) for part in split]
        np.testing.assert_allclose(sum(parts) / denominator, expected, rtol=1e-6)


def test_each_pair_alike_counts_the_chosen_responses(trajectory):
    chosen, rejected = trajectory([0, 1], advantage=1.0), trajectory([0, 0, 1], advantage=-1.0)
    weights, denominator = each_pair_alike([chosen, rejected, rejected, chosen])
    assert denominator == 2
    assert [w.tolist() for w in weights] == [[0, 1], [0, 0, 0], [0, 0, 0], [0, 1]]


def test_no_trajectories_give_no_weights_and_denominator_0():
    assert each_sequence_alike([]) == ([], 0.0)
    assert each_token_alike([]) == ([], 0.0)


def test_weights_of_every_reduction_are_float32(three):
    trajectories, _ = three
    for reduce in (each_sequence_alike, each_token_alike, each_pair_alike):
        assert {w.dtype for w in reduce(trajectories)[0]} == {np.dtype(np.float32)}
