"""The reward model: its score is the value head at the last token, and calls are batched."""

import dataclasses

import jax
import numpy as np
import pytest

from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_value_fn
from axion_jax.rewards.base import score_all
from axion_jax.rewards.reward_model import RewardModel, RewardModelScorer, judged
from axion_jax.types import Batch, Trajectory, Unscorable

END = 47


class CountingModel:
    """Scores a trajectory by its first token, and remembers how many came at once."""

    def __init__(self, error=None):
        self.sizes, self.error = [], error

    def score_trajectories(self, trajectories):
        self.sizes.append(len(trajectories))
        if self.error:
            raise self.error
        return np.array([t.token_ids[0] / 10 for t in trajectories], np.float32)


def test_what_arrives_together_is_scored_as_one_batch_in_its_order(sample):
    model = CountingModel()
    scorer = RewardModelScorer(model)
    samples = [sample("hello", token_ids=(n, 1)) for n in (5, 3, 9, 3)]
    verdicts = score_all(scorer, samples, timeout=5)
    assert model.sizes == [4]
    assert [v.value for v in verdicts] == pytest.approx([0.5, 0.3, 0.9, 0.3])
    assert verdicts[0].parts == {"reward_model": verdicts[0].value}
    score_all(scorer, samples[:1], timeout=5)  # another event loop
    assert model.sizes == [4, 1]


def test_a_failure_of_the_model_makes_the_whole_batch_unscorable_and_the_next_one_goes_on(sample):
    model = CountingModel(error=RuntimeError("out of memory"))
    scorer = RewardModelScorer(model)
    verdicts = score_all(scorer, [sample("a")] * 3, timeout=5)
    assert verdicts == [Unscorable("scorer failed: RuntimeError: out of memory")] * 3
    model.error = None
    (verdict,) = score_all(scorer, [sample("a", token_ids=(4, 1))], timeout=5)
    assert verdict.value == pytest.approx(0.4)


def test_the_judged_sequence_has_every_token_as_input_and_only_the_last_prediction_counts():
    t = Trajectory(token_ids=np.array([5, 6, 7], np.int32), loss_mask=np.array([False, True]))
    seen = judged(t, end_id=END, advantage=-1.0)
    assert seen.token_ids.tolist() == [5, 6, 7, END]
    assert seen.loss_mask.tolist() == [False, False, True]
    assert seen.advantage == -1.0


@pytest.fixture(scope="module")
def scored(tiny, random_params):
    """A reward model of packed rows, some sequences, and the value head's outputs one by one."""
    decoder = Decoder(dataclasses.replace(tiny, value_head=True))
    params = random_params(decoder)
    model = RewardModel(
        decoder,
        params,
        offset=0.0,
        end_id=END,
        row_length=16,
        rows=2,
        sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    rng = np.random.default_rng(0)
    sequences = [
        Trajectory(
            token_ids=rng.integers(0, 40, n).astype(np.int32), loss_mask=np.ones(n - 1, bool)
        )
        for n in (3, 12, 7, 2, 16, 9)
    ]
    values = jax.jit(make_value_fn(decoder))
    alone = []
    for sequence in sequences:
        n = len(sequence.token_ids)
        row = np.zeros((1, 16), np.int32)
        row[0, :n] = sequence.token_ids
        batch = Batch(
            tokens=row,
            targets=row,
            loss_mask=row > 0,
            segment_ids=(np.arange(16) < n).astype(np.int32)[None],
            positions=np.arange(16, dtype=np.int32)[None],
            weights=np.zeros((1, 16), np.float32),
            denominator=np.ones(1, np.float32),
        )
        alone.append(values(params, batch)[0, n - 1])
    return model, sequences, np.array(alone)


def test_a_score_is_the_value_head_at_the_last_token_whatever_it_is_packed_with(scored):
    model, sequences, alone = scored
    np.testing.assert_allclose(model.score_trajectories(sequences), alone, atol=1e-5)
    np.testing.assert_allclose(model.score_trajectories(sequences[::-1])[::-1], alone, atol=1e-5)
    assert np.ptp(alone) > 0.1


def test_scores_are_taken_off_the_offset(scored):
    model, sequences, alone = scored
    model.offset = 0.5
    try:
        np.testing.assert_allclose(model.score_trajectories(sequences), alone - 0.5, atol=1e-5)
    finally:
        model.offset = 0.0


def test_a_sequence_longer_than_a_row_is_refused_by_name(scored):
    model, _, _ = scored
    long = Trajectory(
        token_ids=np.zeros(17, np.int32), loss_mask=np.ones(16, bool), task_id="chat-1"
    )
    with pytest.raises(ValueError, match="'chat-1' makes 17 predictions, .* row_length=16"):
        model.score_trajectories([long])
