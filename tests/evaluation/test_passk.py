import math

import numpy as np
import pytest

from axion_jax.evaluation import passk


def test_pass_at_k_counts_the_draws_that_miss():
    # n=10, c=3, k=5: C(7,5)/C(10,5) = 21/252, so 1 - 1/12.
    assert passk.pass_at_k(10, 3, 5) == pytest.approx(11 / 12)
    assert passk.pass_at_k(4, 0, 2) == 0.0
    assert passk.pass_at_k(4, 3, 2) == 1.0  # every pair holds a correct one


def test_pass_at_k_with_fewer_samples_than_k_is_an_error():
    with pytest.raises(ValueError, match="at least 5 samples"):
        passk.pass_at_k(2, 0, 5)
    with pytest.raises(ValueError, match="at least 5 samples"):
        passk.mean_pass_at_k(np.zeros((3, 2), bool), 5)


def test_impossible_counts_are_an_error():
    with pytest.raises(ValueError, match="5 correct of 4"):
        passk.pass_at_k(4, 5, 1)
    with pytest.raises(ValueError, match="k >= 1"):
        passk.pass_at_k(4, 2, 0)
    with pytest.raises(ValueError, match="prompts, samples a prompt"):
        passk.mean_pass_at_k(np.zeros(4, bool), 1)


def test_mean_pass_at_k_averages_over_prompts():
    samples = np.array([[1, 0, 0, 0], [1, 1, 0, 0]], dtype=bool)
    # @1: (1/4 + 2/4) / 2.  @2: ((1 - 3/6) + (1 - 1/6)) / 2.  @4: both prompts have a correct sample.
    assert passk.mean_pass_at_k(samples, 1) == pytest.approx(0.375)
    assert passk.mean_pass_at_k(samples, 2) == pytest.approx(2 / 3)
    assert passk.mean_pass_at_k(samples, 4) == 1.0


def test_pass_at_k_is_the_average_over_all_subsets():
    samples = np.array([True, False, True, False, False])
    pairs = [samples[i] or samples[j] for i in range(5) for j in range(i)]
    assert passk.mean_pass_at_k(samples[None], 2) == pytest.approx(np.mean(pairs))


def test_one_sample_a_prompt_gives_wilsons_interval():
    # Wilson 8/10: centre (.8 + z²/20) / (1 + z²/10) = .7167, half .2267.
    low, high = passk.confidence_interval(np.array([1.0] * 8 + [0.0] * 2))
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


@pytest.mark.parametrize("value, expected", [(0.0, (0.0, 0.2775)), (1.0, (0.7225, 1.0))])
def test_intervals_at_the_ends_keep_a_width_and_stay_inside(value, expected):
    # Wilson 0/10: high = z² / (10 + z²) = 3.8415 / 13.8415.
    low, high = passk.confidence_interval(np.full(10, value))
    assert (low, high) == pytest.approx(expected, abs=1e-4)
    assert 0.0 <= low <= value <= high <= 1.0


def test_samples_that_repeat_their_prompt_do_not_narrow_the_interval():
    once = np.array([1.0, 0.0] * 50)
    repeated = np.repeat(once[:, None], 8, axis=1).mean(axis=1)
    assert passk.confidence_interval(repeated) == passk.confidence_interval(once)


def test_independent_samples_narrow_the_interval_as_more_prompts_would():
    rng = np.random.default_rng(0)
    four_each = (rng.random((2000, 4)) < 0.6).mean(axis=1)
    low, high = passk.confidence_interval(four_each)
    # 8000 independent trials: 2 * 1.96 * sqrt(.6 * .4 / 8000).
    assert high - low == pytest.approx(0.02147, rel=0.05)


def test_interval_covers_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):
        difficulty = rng.beta(0.5, 2.0, size=64)  # mean 0.2
        samples = rng.random((64, 4)) < difficulty[:, None]
        low, high = passk.confidence_interval(samples.mean(axis=1))
        hits += low <= 0.2 <= high
    assert 920 <= hits <= 980


def test_confidence_interval_refuses_rewards():
    with pytest.raises(ValueError, match="mean_interval"):
        passk.confidence_interval(np.array([0.2, 1.5]))
    with pytest.raises(ValueError, match="not finite"):
        passk.confidence_interval(np.array([0.2, np.nan]))
    with pytest.raises(ValueError, match="one score for each prompt"):
        passk.confidence_interval(np.array([]))


def test_mean_interval_is_students_t():
    # Mean 2, s = 1, P = 3: half width t(2 df) / sqrt(3) = 4.3027 / 1.7321.
    low, high = passk.mean_interval(np.array([1.0, 2.0, 3.0]))
    assert (low, high) == (pytest.approx(2 - 2.4841, abs=1e-4), pytest.approx(2 + 2.4841, abs=1e-4))


def test_mean_interval_of_one_prompt_is_unknown():
    assert all(map(math.isnan, passk.mean_interval(np.array([0.7]))))
