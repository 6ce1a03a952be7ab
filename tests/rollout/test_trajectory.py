"""From a prompt and its continuation to a trajectory: index t speaks of the token after token t."""

import dataclasses

import numpy as np
import pytest

from axion_jax.rollout.engine import FinishReason, Generation, to_trajectory
from axion_jax.types import StopReason

PROMPT = np.array([10, 11, 12], np.int32)


def generation(reason=FinishReason.STOP):
    # Three prompt tokens and two sampled ones: four predictions, four rows of experts.
    return Generation(
        token_ids=np.array([20, 21], np.int32),
        logprobs=np.array([-0.5, -1.5], np.float32),
        routed_experts=np.arange(4, dtype=np.int8).reshape(4, 1, 1),
        finish_reason=reason,
        weight_version=6,
    )


def with_experts(routed_experts):
    return dataclasses.replace(generation(), routed_experts=routed_experts)


def test_predictions_of_sampled_tokens_stand_one_before_them():
    trajectory = to_trajectory(PROMPT, generation(), group_id=4, task_id="sum")
    assert trajectory.token_ids.tolist() == [10, 11, 12, 20, 21]
    # Position 2 holds token 12 and predicts 20; position 3 holds 20 and predicts 21.
    assert trajectory.loss_mask.tolist() == [False, False, True, True]
    assert trajectory.sampler_logprobs.tolist() == [0, 0, -0.5, -1.5]
    assert trajectory.policy_version.tolist() == [-1, -1, 6, 6]
    assert trajectory.routing.ravel().tolist() == [0, 1, 2, 3]
    assert trajectory.num_trained == 2
    assert (trajectory.group_id, trajectory.task_id) == (4, "sum")


def test_a_prompt_of_one_token_has_no_prediction_of_its_own():
    trajectory = to_trajectory(PROMPT[:1], with_experts(np.zeros((2, 1, 1), np.int8)))
    assert trajectory.token_ids.tolist() == [10, 20, 21]
    assert trajectory.loss_mask.tolist() == [True, True]
    assert trajectory.sampler_logprobs.tolist() == [-0.5, -1.5]


def test_an_engine_without_recorded_experts_gives_a_trajectory_without():
    assert to_trajectory(PROMPT, with_experts(None)).routing is None


def test_experts_of_another_number_of_tokens_are_refused():
    with pytest.raises(ValueError, match="routing has 5 entries, but 5 tokens make 4 predictions"):
        to_trajectory(PROMPT, with_experts(np.zeros((5, 1, 1), np.int8)))


@pytest.mark.parametrize(
    "finish, stop, truncated",
    [
        (FinishReason.STOP, StopReason.ANSWERED, False),
        (FinishReason.LENGTH, StopReason.GENERATION_LIMIT, True),
        (FinishReason.ABORT, StopReason.ABORTED, False),
    ],
)
def test_every_end_has_its_reason(finish, stop, truncated):
    trajectory = to_trajectory(PROMPT, generation(finish))
    assert trajectory.stop_reason is stop
    assert trajectory.stop_reason.truncated == truncated
