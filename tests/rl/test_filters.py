"""Which groups are kept, and in what order."""

from functools import partial

import numpy as np
import pytest

from axion_jax.rl.filters import (
    mean_above,
    mean_at_most,
    mean_reward_window,
    rewards_differ,
    select_groups,
)
from axion_jax.types import StopReason

window = partial(mean_reward_window, low=0.0, high=0.8)


def test_window_is_open_below_and_closed_above():
    assert not window([0, 0, 0, 0])
    assert window([0, 0, 0, 1])
    assert window([1, 1, 1, 1, 0])  # mean exactly .8
    assert not window([1] * 9 + [0])
    assert not window([1, 1])


def test_rounding_of_the_mean_does_not_decide():
    # float64: mean of three .8 is .8000000000000002, of three .1 is .10000000000000002
    assert window([0.8] * 3)
    assert not mean_reward_window([0.1] * 3, low=0.1, high=0.8)


def test_identical_rewards_inside_the_window_stay():
    assert window([0.35] * 8)


def test_identical_rewards_teach_nothing():
    # a float32 mean would give the 8 x .35 a spread
    assert not rewards_differ([0.35] * 8)
    assert not rewards_differ([1, 1, 1]) and not rewards_differ([0, 0])
    assert not rewards_differ([1.0])  # n = 1 has no spread
    assert rewards_differ([1, 0, 0])


def test_several_filters_are_counted_by_what_they_took_out(trajectory):
    def group(group_id, *rewards):
        return [
            trajectory([1], reward=r, group_id=group_id, rollout_id=i)
            for i, r in enumerate(rewards)
        ]

    keep = {
        "too_hard": partial(mean_above, low=0.0),
        "too_easy": partial(mean_at_most, high=0.8),
        "all_alike": rewards_differ,
    }
    # the group of two zeros is refused by the first filter and counted there alone
    groups = [group(0, 0, 0), group(1, 1, 1), group(2, 0.5, 0.5), group(3, 0, 1), group(4, 0, 0)]
    kept, counts = select_groups(groups, num_groups=8, keep=keep)
    assert [g[0].group_id for g in kept] == [3]
    assert counts == {
        "kept": 1,
        "too_small": 0,
        "filtered": 4,
        "surplus": 0,
        "filtered_too_hard": 2,
        "filtered_too_easy": 1,
        "filtered_all_alike": 1,
    }
    assert len(select_groups(groups, num_groups=8, keep={})[0]) == 5


@pytest.mark.parametrize(
    ("rewards", "low", "high", "message"),
    [
        ([0.5, np.nan], 0, 0.8, r"rewards\[1\] is nan"),
        ([], 0, 0.8, "without rewards"),
        ([0.5], 0.8, 0, "low=0.8 must be below high=0"),
    ],
)
def test_what_has_no_mean_is_refused(rewards, low, high, message):
    with pytest.raises(ValueError, match=message):
        mean_reward_window(rewards, low=low, high=high)


def test_groups_are_taken_by_id_and_not_as_they_finished(trajectory):
    def group(group_id, *rewards):
        return [
            trajectory([1], reward=r, group_id=group_id, rollout_id=i)
            for i, r in enumerate(rewards)
        ]

    finished = [group(7, 0, 1), group(2, 1, 1), group(9, 0, 1), group(1, 0, 1), group(5, 0, 0, 1)]
    kept, counts = select_groups(finished, num_groups=3, keep=window)
    assert [g[0].group_id for g in kept] == [1, 5, 7]
    assert counts == {"kept": 3, "too_small": 0, "filtered": 1, "surplus": 1}


def test_failed_samples_leave_before_a_group_is_judged(trajectory):
    good = [
        trajectory([1], reward=r, group_id=0, rollout_id=i)
        for i, r in enumerate([1.0, 1.0, 0.0, 0.0])
    ]
    # with the aborted 0 the mean of the last group would be 2/3, inside the window; without it is 1
    solved = [t.replace(group_id=1) for t in good[:3]]
    solved[2] = solved[2].replace(stop_reason=StopReason.ABORTED)
    lone = [good[0].replace(group_id=2), good[2].replace(group_id=2, reward=None)]
    kept, counts = select_groups([good, solved, lone, []], num_groups=8, keep=window)
    assert kept == [good]
    assert counts == {"kept": 1, "too_small": 2, "filtered": 1, "surplus": 0}


def test_a_rollout_split_into_samples_is_judged_once(trajectory):
    # nine samples of a success and one failure: mean 1/2 over rollouts, 9/10 over samples
    samples = [trajectory([1], reward=1.0, rollout_id=0)] * 9
    samples.append(trajectory([1], reward=0.0, rollout_id=1))
    kept, _ = select_groups([samples], num_groups=1, keep=window)
    assert len(kept[0]) == 10


def test_groups_that_share_or_mix_ids_are_refused(trajectory):
    a, b = (trajectory([1], reward=1.0, group_id=i) for i in (0, 1))
    with pytest.raises(ValueError, match="two groups have the group id 0"):
        select_groups([[a], [a]], num_groups=1, keep=window)
    with pytest.raises(ValueError, match=r"mixes the group ids \[0, 1\]"):
        select_groups([[a, b]], num_groups=1, keep=window)
