"""Advantages from a critic, token by token."""

import numpy as np
import pytest

from axion_jax.data.pack import pack
from axion_jax.rl.gae import generalized_advantages
from axion_jax.rl.reduce import each_token_alike


def advantages(trajectory, mask, values, *, reward=1.0, **options):
    made = trajectory(mask, reward=reward)
    (done,) = generalized_advantages([made], [np.asarray(values, float)], **options)
    return done


def test_by_hand(trajectory):
    # V = [.5, .2, .4], reward 1 at the end, discount .9, lambda .5:
    # delta = [.9*.2 - .5, .9*.4 - .2, 1 - .4] = [-.32, .16, .6]
    # A_2 = .6; A_1 = .16 + .45*.6 = .43; A_0 = -.32 + .45*.43 = -.1265; R = A + V
    done = advantages(trajectory, [1, 1, 1], [0.5, 0.2, 0.4], discount=0.9, smoothing=0.5)
    np.testing.assert_allclose(done.advantage, [-0.1265, 0.43, 0.6], rtol=1e-6)
    np.testing.assert_allclose(done.returns, [0.3735, 0.63, 1.0], rtol=1e-6)
    np.testing.assert_allclose(done.values, [0.5, 0.2, 0.4], rtol=1e-6)


def test_with_smoothing_1_every_return_is_the_reward(trajectory):
    done = advantages(trajectory, [1, 1, 1], [0.3, -2.0, 7.0], reward=2.0, smoothing=1.0)
    np.testing.assert_allclose(done.returns, [2, 2, 2], rtol=1e-6)


def test_tool_tokens_are_stepped_over_whatever_they_hold(trajectory):
    apart = advantages(
        trajectory, [0, 1, 0, 0, 1, 1], [np.nan, 0.5, np.inf, 9, 0.2, 0.4], smoothing=0.5
    )
    together = advantages(trajectory, [1, 1, 1], [0.5, 0.2, 0.4], smoothing=0.5)
    mask = np.array([0, 1, 0, 0, 1, 1], bool)
    np.testing.assert_array_equal(apart.advantage[mask], together.advantage)
    assert not apart.advantage[~mask].any() and not apart.returns[~mask].any()


def test_a_fully_masked_trajectory_has_none(trajectory):
    assert not advantages(trajectory, [0, 0], [1, 1], smoothing=0.9).advantage.any()


def test_they_are_packed_prediction_by_prediction(trajectory):
    done = [advantages(trajectory, [1, 1, 0], [0.5, 0.2, 0.4], smoothing=0.5)]
    weights, denominator = each_token_alike(done)
    batch = pack(
        done,
        row_length=4,
        rows=1,
        pad_id=0,
        weights=weights,
        denominator=denominator,
        with_advantages=True,
        with_returns=True,
    ).batch
    np.testing.assert_array_equal(batch.advantages[0, 0, :3], done[0].advantage)
    np.testing.assert_array_equal(batch.returns[0, 0, :3], done[0].returns)
    np.testing.assert_array_equal(batch.old_values[0, 0, :3], done[0].values)


def test_bad_input_is_named(trajectory):
    with pytest.raises(ValueError, match=r"smoothing=1.5 must lie in \[0, 1\]"):
        advantages(trajectory, [1], [0], smoothing=1.5)
    with pytest.raises(ValueError, match="makes 1 predictions, but has 2 values"):
        advantages(trajectory, [1], [0, 0], smoothing=1)
    for reward, value in ((np.nan, 0), (1.0, np.inf)):
        with pytest.raises(ValueError, match="a reward or a value that is not finite"):
            advantages(trajectory, [1], [value], reward=reward, smoothing=1)
