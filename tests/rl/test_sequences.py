"""Masked means over tokens and packed sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.rl.sequences import (
    each_sequence_once,
    loss_mean,
    masked_mean,
    per_sequence_mean,
    per_sequence_sum,
    sum_by_id,
)

pytestmark = pytest.mark.usefixtures("strict")
NAN = np.nan


@pytest.fixture
def packed(rows):
    # Row 0: a sequence with trained 1, 3 around a NaN, one with 5, then padding. Row 1: 7 alone.
    return rows(
        [
            [
                {"mask": [1, 0, 1], "logprobs": [1, NAN, 3]},
                {"mask": [1], "logprobs": [5]},
            ],
            [{"mask": [0, 1], "logprobs": [np.inf, 7]}],
        ],
        length=5,
        fill=NAN,
    )


def test_per_sequence_mean_and_sum_are_broadcast_over_their_own_sequence(packed):
    scores, batch = packed
    # means 2, 5, padding 0; 7, padding 0
    np.testing.assert_array_equal(
        per_sequence_mean(scores.logprobs, batch), [[2, 2, 2, 5, 0], [7, 7, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        per_sequence_sum(scores.logprobs, batch), [[4, 4, 4, 5, 0], [7, 7, 0, 0, 0]]
    )


def test_gradient_of_a_sequence_mean_is_one_over_its_trained_tokens_and_0_where_masked(packed):
    scores, batch = packed

    def first_of_each_sequence(x):
        mean_BT = per_sequence_mean(x, batch)
        return mean_BT[0, 0] + mean_BT[0, 3] + mean_BT[1, 0]

    grad = jax.grad(first_of_each_sequence)(scores.logprobs)
    np.testing.assert_array_equal(grad, [[0.5, 0, 0.5, 1, 0], [0, 1, 0, 0, 0]])


def test_a_fully_masked_sequence_has_mean_0_and_no_gradient(rows):
    scores, batch = rows([[{"mask": [0, 0], "logprobs": [NAN, NAN]}]])
    value, grad = jax.value_and_grad(lambda x: per_sequence_mean(x, batch).sum())(scores.logprobs)
    assert value == 0
    np.testing.assert_array_equal(grad, [[0, 0]])


def test_a_row_of_one_token_sequences_fits_the_segment_sum(rows):
    # As many sequences as positions: ids reach T, the largest the static size allows.
    scores, batch = rows([[{"mask": [1], "logprobs": [i]} for i in range(6)]])
    np.testing.assert_array_equal(per_sequence_sum(scores.logprobs, batch), [[0, 1, 2, 3, 4, 5]])


def test_sum_by_id_does_not_need_neighbouring_positions():
    sums = sum_by_id(jnp.array([[1.0, 2.0, 4.0, 8.0]]), jnp.array([[1, 2, 1, 0]]))
    np.testing.assert_array_equal(sums, [[5, 2, 5, 8]])


def test_each_sequence_once_weighs_short_and_long_alike(packed):
    scores, batch = packed
    mean = each_sequence_once(scores.logprobs, batch)
    # (2 + 5 + 7) / 3; by token it would be (1 + 3 + 5 + 7) / 4 = 4
    assert mean.weight == 3
    np.testing.assert_allclose(mean.value, 14 / 3, rtol=1e-6)
    np.testing.assert_allclose(masked_mean(scores.logprobs, batch.loss_mask).value, 4)


def test_loss_mean_divides_by_the_denominator_that_came_with_the_batch(rows):
    # The host counted 10 sequences in the step; this micro-batch holds 2 of them: (1 + 2.5) / 10.
    # A masked position's loss of NaN has no part in it.
    scores, batch = rows(
        [[{"mask": [1], "logprobs": [1]}, {"mask": [1, 0, 1], "logprobs": [2, NAN, 3]}]],
        denominator=10,
    )
    mean = loss_mean(scores.logprobs, batch)
    np.testing.assert_allclose([mean.total, mean.weight, mean.value], [3.5, 10, 0.35])
