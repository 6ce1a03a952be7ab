"""Group baselines: uneven, interleaved and failing groups."""

import numpy as np
import pytest

from axion_jax.rl.advantages import assign_advantages, group_advantages
from axion_jax.types import StopReason


def normalized(rewards, groups=None):
    groups = [0] * len(rewards) if groups is None else groups
    return group_advantages(rewards, groups, baseline="group_std")


def centred(rewards, groups=None):
    groups = [0] * len(rewards) if groups is None else groups
    return group_advantages(rewards, groups, baseline="group_mean")


def test_advantages_of_small_groups():
    # mean .25, std(ddof=1) .5: .75 / .500001 = 1.499997 and -.25 / .500001 = -.4999990
    np.testing.assert_allclose(centred([1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(
        normalized([1, 0, 0, 0]), [1.499997, -0.499999, -0.499999, -0.499999], atol=1e-6
    )
    # mean .5, std sqrt(1/3) = .5773503
    np.testing.assert_allclose(
        normalized([1, 1, 0, 0]), np.array([1, 1, -1, -1]) * 0.8660239, atol=1e-7
    )
    # the scale of rewards drops out, up to the floor of 1e-6: .075 / (.05 + 1e-6)
    np.testing.assert_allclose(normalized([0.1, 0, 0, 0])[0], 1.49997, atol=1e-6)


def test_a_lone_success_among_16_gets_3_75():
    # (G - 1) / sqrt(G) = 3.75 with ddof=1, less the floor; ddof=0 would give 3.873
    np.testing.assert_allclose(normalized([1] + [0] * 15)[0], 3.7499847, atol=1e-6)
    np.testing.assert_allclose(normalized([1, 1] + [0] * 14)[0], 2.5617301, atol=1e-6)


def leave_one_out(rewards, groups=None):
    groups = [0] * len(rewards) if groups is None else groups
    return group_advantages(rewards, groups, baseline="leave_one_out")


def test_leave_one_out_compares_with_the_others_alone():
    # 1 - mean(0, 0, 0) = 1; 0 - mean(1, 0, 0) = -1/3
    np.testing.assert_allclose(leave_one_out([1, 0, 0, 0]), [1, -1 / 3, -1 / 3, -1 / 3])
    # uneven, interleaved: {1, 3} -> -2, 2; {5} -> 0
    assert leave_one_out([1, 5, 3], [0, 1, 0]).tolist() == [-2, 0, 2]


def test_an_odd_reward_among_equal_ones_is_not_amplified_by_leaving_it_out():
    # 1 - .35; the spread of the others, a residue of rounding, is divided by nowhere
    np.testing.assert_allclose(leave_one_out([0.35] * 7 + [1.0])[7], 0.65)


def test_rewards_apart_by_the_rounding_of_float32_are_equal():
    # a float32 score of the same answer in two batches: 3e-8 apart, which std-normalisation would
    # turn into +-.02, and a spread of 1e-5 is no rounding
    rewards = [0.35, 0.35 + 3e-8, 0.35, 0.35]
    for advantages in (normalized, centred, leave_one_out):
        assert not advantages(rewards).any()
        assert advantages([0.35, 0.35 + 1e-5]).any()


@pytest.mark.parametrize("rewards", [[0.35] * 8, [0.1] * 7, [1.0] * 4, [5.0] * 3, [0.0] * 2])
def test_identical_rewards_give_exactly_0(rewards):
    # in float32 8 x .35 gives +.0298023 each, 7 x .1 gives -.0074506 each
    assert not normalized(rewards).any()
    assert not centred(rewards).any()
    assert not leave_one_out(rewards).any()


def test_an_odd_reward_among_equal_ones_is_not_amplified():
    # 7 x .35 and one 1: mean .43125, std .65 * sqrt(1/8) = .2298097; .56875 / .2298107 = 2.474863
    np.testing.assert_allclose(normalized([0.35] * 7 + [1.0])[7], 2.474863, atol=2e-6)


def test_a_group_of_one_gets_0():
    assert normalized([3.0]).tolist() == [0.0]
    # {1, 3}, {5}: one group over the whole batch would give [-2, 0, 2]
    assert centred([1, 3, 5], [0, 0, 1]).tolist() == [-1, 1, 0]


def test_uneven_groups_have_their_own_mean():
    # sizes 4, 2, 3; means 2.5, 11, 6
    advantages = centred([1, 2, 3, 4, 10, 12, 5, 6, 7], [0] * 4 + [1] * 2 + [2] * 3)
    np.testing.assert_allclose(advantages, [-1.5, -0.5, 0.5, 1.5, -1, 1, -1, 0, 1])


def test_an_all_equal_group_among_uneven_ones_gives_exactly_0():
    # sizes 4, 3, 4; normalising over the whole batch gives the middle group -1.09
    rewards = [9, 8, 7, 9, 5, 5, 5, 10, 12, 11, 10]
    advantages = normalized(rewards, [0] * 4 + [1] * 3 + [2] * 4)
    assert advantages[4:7].tolist() == [0, 0, 0]
    np.testing.assert_allclose([advantages[:4].sum(), advantages[7:].sum()], 0, atol=1e-12)


def test_an_unknown_baseline_is_named():
    with pytest.raises(ValueError, match="no baseline 'batch'; known: group_std, group_mean, leav"):
        group_advantages([0, 1], [0, 0], baseline="batch")


def test_the_order_of_samples_does_not_matter():
    rewards, groups = np.arange(9.0) ** 2, np.array([7, 3, 7, 7, 3, 5, 5, 3, 7])
    order = np.array([4, 0, 8, 2, 6, 1, 5, 7, 3])
    np.testing.assert_array_equal(
        normalized(rewards, groups)[order], normalized(rewards[order], groups[order])
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match=rf"rewards\[2\], of group 9, is {bad}"):
        normalized([0, 1, bad], [4, 4, 9])


def test_rewards_and_groups_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"\(2,\) rewards .* got \(3,\)"):
        normalized([0, 1], [0, 0, 0])


def test_aborted_samples_leave_before_the_baseline(trajectory):
    # [1, 0, aborted, 0]: over [1, 0, 0] mean 1/3, std .57735. With the aborted one as a 0 the lone
    # success would get 1.5.
    group = [trajectory([1], reward=r, rollout_id=i) for i, r in enumerate([1.0, 0.0, 0.0, 0.0])]
    group[2] = group[2].replace(stop_reason=StopReason.ABORTED)
    kept, counts = assign_advantages(group, baseline="group_std")
    assert [t.rollout_id for t in kept] == [0, 1, 3]
    np.testing.assert_allclose(
        [t.advantage for t in kept], [1.154699, -0.577349, -0.577349], atol=1e-6
    )
    assert counts == {"aborted": 1, "unscored": 0, "group_too_small": 0}


def test_samples_that_could_not_be_scored_leave_too(trajectory):
    # rewards [1, 3, 2, unscored]: baseline 2; with the last as a 0 it would be 1.5
    group = [trajectory([1], reward=r, rollout_id=i) for i, r in enumerate([1.0, 3.0, 2.0, None])]
    kept, counts = assign_advantages(group, baseline="group_mean")
    assert [t.advantage for t in kept] == [-1, 1, 0]
    assert counts == {"aborted": 0, "unscored": 1, "group_too_small": 0}


def test_a_group_with_fewer_than_two_left_is_dropped(trajectory):
    lone = [
        trajectory([1], reward=1.0, group_id=0, rollout_id=0),
        trajectory([1], group_id=0, rollout_id=1, stop_reason=StopReason.ABORTED),
    ]
    pair = [trajectory([1], reward=r, group_id=1, rollout_id=2 + i) for i, r in enumerate([0, 1])]
    kept, counts = assign_advantages([lone[0], pair[0], lone[1], pair[1]], baseline="group_mean")
    assert [(t.group_id, t.advantage) for t in kept] == [(1, -0.5), (1, 0.5)]
    assert counts == {"aborted": 1, "unscored": 0, "group_too_small": 1}


def test_a_truncated_rollout_stays_in_the_baseline(trajectory):
    cut = trajectory([0], reward=0.0, rollout_id=0, stop_reason=StopReason.GENERATION_LIMIT)
    kept, _ = assign_advantages(
        [cut, trajectory([1], reward=1.0, rollout_id=1)], baseline="group_mean"
    )
    assert [t.advantage for t in kept] == [-0.5, 0.5]


def test_a_rollout_split_into_samples_counts_once_in_its_baseline(trajectory):
    # rollout 0 (reward 1) in three samples, rollout 1 (reward 0): mean 1/2, not 3/4
    rollout_ids, rewards = [0, 0, 1, 0], [1.0, 1.0, 0.0, 1.0]
    samples = [
        trajectory([1], reward=r, rollout_id=i) for i, r in zip(rollout_ids, rewards, strict=True)
    ]
    kept, _ = assign_advantages(samples, baseline="group_mean")
    assert [t.advantage for t in kept] == [0.5, 0.5, -0.5, 0.5]


def test_a_rollout_with_one_aborted_sample_leaves_as_a_whole(trajectory):
    samples = [trajectory([1], reward=float(i == 0), rollout_id=i) for i in (0, 0, 1, 2)]
    samples[1] = samples[1].replace(stop_reason=StopReason.ABORTED)
    kept, counts = assign_advantages(samples, baseline="group_mean")
    assert [t.rollout_id for t in kept] == [1, 2]
    assert counts["aborted"] == 2


def test_samples_of_one_rollout_with_different_rewards_are_refused(trajectory):
    # what forgetting to number the rollouts looks like
    with pytest.raises(ValueError, match="Give each rollout its own rollout_id"):
        assign_advantages([trajectory([1], reward=r) for r in (0.0, 1.0)], baseline="group_std")


def test_no_trajectories_are_no_error():
    assert assign_advantages([], baseline="group_std")[0] == []
