"""Length penalties and truncation."""

import numpy as np
import pytest

from axion_jax.rl.reduce import each_sequence_alike
from axion_jax.rl.shaping import (
    length_penalty,
    linear_length_penalty,
    malformed_calls,
    mask_truncated,
    soft_overlong,
)
from axion_jax.types import StopReason


def penalised(rewards, lengths, correct=None, **changes):
    correct = [r > 0 for r in rewards] if correct is None else correct
    return length_penalty(
        rewards, lengths, correct, **{"max_length": 200, "coefficient": 0.2} | changes
    ).tolist()


def test_penalty_grows_from_the_shortest_correct_rollout_to_the_limit():
    # L0 = 100: (150 - 100)/100 * .2 = .1, (200 - 100)/100 * .2 = .2; the wrong one is left alone
    np.testing.assert_allclose(penalised([1, 1, 1, 0], [100, 150, 200, 50]), [1, 0.9, 0.8, 0])


def test_the_penalty_may_apply_to_all():
    # the wrong one is shorter than L0 and still keeps its 0; a long wrong one does not
    shaped = penalised([1, 1, 1, 0, 0], [100, 150, 200, 50, 200], apply_to="all")
    np.testing.assert_allclose(shaped, [1, 0.9, 0.8, 0, -0.2])
    with pytest.raises(ValueError, match="apply_to='wrong' must be 'correct' or 'all'"):
        penalised([1], [1], apply_to="wrong")


def test_soft_overlong_punishment_grows_over_the_buffer():
    # limit 200, buffer 50: (160 - 150)/50 = .2, (180 - 150)/50 = .6
    shaped = soft_overlong(
        [0.0] * 5, [100, 150, 160, 180, 200], max_length=200, buffer=50, factor=1.0
    )
    np.testing.assert_allclose(shaped, [0, 0, -0.2, -0.6, -1])
    with pytest.raises(ValueError, match="buffer=201 must lie in 1..max_length"):
        soft_overlong([0.0], [1], max_length=200, buffer=201, factor=1.0)


def test_malformed_calls_cost_up_to_half_of_a_reward():
    # shares 0, 1/4, 1, none called; a penalty is not halved
    shaped = malformed_calls([1, 1, 1, 1, -0.1], [4, 4, 4, 0, 4], [0, 1, 4, 0, 4])
    assert shaped.tolist() == [1, 0.875, 0.5, 1, -0.1]
    with pytest.raises(ValueError, match="must number 0 to the number of calls"):
        malformed_calls([1], [1], [2])


def test_a_group_without_a_correct_rollout_is_unchanged():
    assert penalised([0, 0], [100, 200]) == [0, 0]


def test_a_shortest_correct_rollout_at_the_limit_costs_nothing():
    assert penalised([1, 1, 0], [200, 200, 10]) == [1, 1, 0]


def test_beyond_the_limit_the_penalty_stays_at_its_cap():
    np.testing.assert_allclose(penalised([1, 1], [100, 900]), [1, 0.8])


def test_correct_is_what_the_caller_says_not_a_positive_reward():
    # partial credit .5 that is not "correct" neither sets L0 nor is penalised
    np.testing.assert_allclose(
        penalised([1, 1, 0.5], [100, 200, 10], [True, True, False]), [1, 0.8, 0.5]
    )


def test_a_long_correct_answer_stays_above_a_wrong_one():
    shaped = penalised([1, 1, 0], [1, 200, 1], coefficient=0.9)
    assert min(shaped[:2]) > shaped[2]


def test_positive_scores_fall_linearly_beyond_the_free_length():
    # free 100, limit 200, coefficient 2: at 150 half of it. 1 - 1 = 0 at 150, floor 0 beyond.
    scores, lengths = [3.0, 3.0, 3.0, 1.0, 0.5], [100, 150, 400, 150, 200]
    shaped = linear_length_penalty(scores, lengths, free_length=100, max_length=200, coefficient=2)
    assert shaped.tolist() == [3, 2, 1, 0, 0]


def test_scores_of_0_and_below_are_left_alone_however_long():
    shaped = linear_length_penalty(
        [-1.5, 0.0], [10_000, 10_000], free_length=100, max_length=200, coefficient=2
    )
    assert shaped.tolist() == [-1.5, 0.0]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="coefficient=-1 must not be negative"):
        penalised([1], [1], coefficient=-1)
    with pytest.raises(ValueError, match="free_length=200 must lie in 0..max_length - 1"):
        linear_length_penalty([1], [1], free_length=200, max_length=200, coefficient=1)
    with pytest.raises(ValueError, match=r"one entry for each rollout .*\(2,\), \(1,\)"):
        penalised([1, 0], [1], [True, False])


def test_mask_truncated_keeps_reward_and_place_in_the_denominator(trajectory):
    limits = [StopReason.GENERATION_LIMIT, StopReason.CONTEXT_LIMIT, StopReason.ANSWERED]
    before = [
        trajectory([0, 1, 1], reward=0.5, stop_reason=r, rollout_id=i) for i, r in enumerate(limits)
    ]
    after = mask_truncated(before)
    assert [t.num_trained for t in after] == [0, 0, 2]
    assert [t.num_trained for t in before] == [2, 2, 2]
    assert [t.reward for t in after] == [t.reward for t in before]
    assert each_sequence_alike(after)[1] == 3
