"""Engine against trainer: weights and mismatch."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.rl.corrections import (
    geometric_mask,
    icepop,
    mismatch_metrics,
    no_correction,
    product,
    sequence_mask,
    sequence_truncated_importance_sampling,
    truncated_importance_sampling,
    veto,
)
from axion_jax.rl.staleness import truncated_staleness

pytestmark = pytest.mark.usefixtures("strict")
NAN, INF = np.nan, np.inf
CORRECTIONS = [
    partial(truncated_importance_sampling, cap=2.0),
    partial(sequence_truncated_importance_sampling, cap=2.0),
    partial(icepop, low=0.5, high=2.0),
    partial(sequence_mask, low=0.5, high=2.0),
    partial(geometric_mask, low=0.5, high=2.0),
    partial(veto, threshold=1e-4),
    partial(truncated_staleness, cap=2.0),
]


def sequence(old, sampler, mask=None):
    mask = np.ones(len(old)) if mask is None else mask
    return {"mask": mask, "old_logprobs": old, "sampler_logprobs": sampler}


def test_tis_weights_are_trainer_over_engine_up_to_the_cap(rows):
    # ratios e^.5 = 1.648721, 1, e^1 = 2.718282
    scores, batch = rows([[sequence([-1, -2, -3], [-1.5, -2, -4])]])
    weights, metrics = truncated_importance_sampling(scores, batch, cap=2.0)
    np.testing.assert_allclose(weights, [[1.648721, 1, 2]], atol=1e-6)
    np.testing.assert_allclose(metrics["tis_weight"].value, (1.648721 + 1 + 2) / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["tis_clip_frac"].value, 1 / 3, rtol=1e-6)


def test_tis_is_1_at_masked_positions_whatever_they_hold(rows):
    scores, batch = rows(
        [[sequence([NAN, -1, INF], [-1, -1, NAN], mask=[0, 1, 0])]], length=5, fill=NAN
    )
    weights, metrics = truncated_importance_sampling(scores, batch, cap=2.0)
    np.testing.assert_array_equal(weights, np.ones((1, 5)))
    assert metrics["tis_weight"].weight == 1


def test_tis_is_finite_for_any_input(rows):
    # e^900 -> the cap; e^-900 -> 0; undefined (inf - inf, NaN) -> 0, seen in the mean weight
    old, sampler = [0, -900, -INF, -INF, NAN], [-900, 0, 0, -INF, -1]
    scores, batch = rows([[sequence(old, sampler)]])
    weights, metrics = truncated_importance_sampling(scores, batch, cap=2.0)
    np.testing.assert_allclose(weights, [[2, 0, 0, 0, 0]], atol=1e-30)
    np.testing.assert_allclose(metrics["tis_weight"].value, 2 / 5)


def test_no_gradient_flows_through_tis_weights(rows):
    scores, batch = rows([[sequence([-1, -2], [-1.5, -1.5])]])

    def total(old):
        corrected = truncated_importance_sampling(scores, batch_with(batch, old), cap=2.0)
        return corrected[0].sum()

    np.testing.assert_array_equal(jax.grad(total)(batch.old_logprobs), [[0, 0]])


def batch_with(batch, old):
    return dataclasses.replace(batch, old_logprobs=old)


def test_corrections_share_one_signature(rows):
    scores, batch = rows([[sequence([-1, -2], [-1.5, -1.5])]])
    for correction in (no_correction, partial(truncated_importance_sampling, cap=2.0)):
        weights, metrics = correction(scores, batch)
        assert weights.shape == batch.tokens.shape
        assert isinstance(metrics, dict)
    np.testing.assert_array_equal(no_correction(scores, batch)[0], [[1, 1]])


def test_a_missing_field_and_a_senseless_cap_are_named(rows):
    scores, batch = rows([[{"mask": [1], "old_logprobs": [-1]}]])
    with pytest.raises(ValueError, match=r"needs Batch\.sampler_logprobs, which this batch lacks"):
        truncated_importance_sampling(scores, batch, cap=2.0)
    scores, batch = rows([[sequence([-1], [-1])]])
    with pytest.raises(ValueError, match="cap=0, must be above 0"):
        truncated_importance_sampling(scores, batch, cap=0)


def test_mismatch_metrics_by_hand():
    # log r = [-.2, .5, 0]; k3 = e^-.2 - 1 + .2 = .01873075, e^.5 - 1 - .5 = .14872127, 0
    trainer = jnp.array([[-1.2, -1.5, -0.5, NAN]])
    sampler = jnp.array([[-1.0, -2.0, -0.5, 0.0]])
    metrics = mismatch_metrics(trainer, sampler, jnp.array([[True, True, True, False]]))
    np.testing.assert_allclose(metrics["k3"].value, (0.01873076 + 0.14872122) / 3, rtol=1e-5)
    np.testing.assert_allclose(metrics["logprob_abs_diff"].value, 0.7 / 3, rtol=1e-6)
    assert metrics["k3"].weight == 3


def test_k3_keeps_its_digits_for_small_differences():
    # x^2/2 = 1.25e-7 at x = 5e-4; exp(x) - 1 - x in float32 would be off by a third or more
    x = jnp.full((2, 1, 4), 5e-4, jnp.float32)
    metrics = mismatch_metrics(x, jnp.zeros_like(x), jnp.ones_like(x, bool))
    np.testing.assert_allclose(metrics["k3"].value, 1.25e-7, rtol=1e-3)


def test_mismatch_is_finite_for_huge_differences():
    huge = jnp.array([[200.0, -200.0]])
    metrics = mismatch_metrics(huge, jnp.zeros_like(huge), jnp.ones_like(huge, bool))
    assert np.isfinite(metrics["k3"].value)


class TestOthers:
    """[-1, -2, -3] of the trainer on [-1.5, -2, -4] of the engine: ratios 1.648721, 1, 2.718282."""

    OLD, SAMPLER = [-1.0, -2.0, -3.0], [-1.5, -2.0, -4.0]

    @pytest.mark.parametrize(
        ("correction", "expected"),
        [
            # e^1 is outside [.5, 2]
            (partial(icepop, low=0.5, high=2.0), [1.648721, 1, 0]),
            # e^1.5 = 4.48, capped; at the cap of 5 it shows
            (partial(sequence_truncated_importance_sampling, cap=2.0), [2, 2, 2]),
            (partial(sequence_truncated_importance_sampling, cap=5.0), [4.481689] * 3),
            # e^1.5 = 4.48 and e^.5 = 1.648721
            (partial(sequence_mask, low=0.5, high=5.0), [1, 1, 1]),
            (partial(sequence_mask, low=0.5, high=4.0), [0, 0, 0]),
            (partial(geometric_mask, low=0.5, high=2.0), [1, 1, 1]),
            (partial(geometric_mask, low=0.999, high=1.002), [0, 0, 0]),
            (partial(veto, threshold=1e-4), [1, 1, 1]),
        ],
    )
    def test_weights_by_hand(self, rows, correction, expected):
        weights, _ = correction(*rows([[sequence(self.OLD, self.SAMPLER)]]))
        np.testing.assert_allclose(weights, [expected], atol=1e-6)

    def test_the_geometric_ratio_is_that_of_the_mean(self, rows):
        _, metrics = geometric_mask(*rows([[sequence(self.OLD, self.SAMPLER)]]), low=0.5, high=2.0)
        np.testing.assert_allclose(metrics["geometric_ratio"].value, 1.648721, atol=1e-6)

    def test_the_band_of_icepop_includes_its_ends(self, rows):
        # log ratios exactly log of the ends, as float32 holds them
        ends = np.log(np.array([0.5, 2.0, 0.25, 4.0]))
        weights, metrics = icepop(*rows([[sequence(ends, [0] * 4)]]), low=0.5, high=2.0)
        np.testing.assert_allclose(weights, [[0.5, 2, 0, 0]], rtol=1e-6)
        assert metrics["icepop_masked_frac"].value == 0.5

    def test_a_veto_takes_out_the_whole_sequence_and_no_other(self, rows):
        # [-1, -20] on [-1, -1]: ratios 1 and e^-19 = 5.6028e-9
        vetoed, fine = sequence([-1, -20], [-1, -1]), sequence([-1, -2], [-1, -2])
        scores, batch = rows([[vetoed, fine]])
        plain, _ = truncated_importance_sampling(scores, batch, cap=2.0)
        np.testing.assert_allclose(plain[0, :2], [1, 5.6028e-9], rtol=1e-4)
        weights, metrics = veto(scores, batch, threshold=1e-4)
        np.testing.assert_array_equal(weights, [[0, 0, 1, 1]])
        assert metrics["veto_masked_frac"].value == 0.5

    def test_a_masked_tool_token_cannot_veto(self, rows):
        weights, _ = veto(*rows([[sequence([-1, -99], [-1, -1], mask=[1, 0])]]), threshold=1e-4)
        np.testing.assert_array_equal(weights, [[1, 1]])

    def test_a_product_multiplies_weights_and_keeps_every_metric(self, rows):
        both = product(partial(icepop, low=0.5, high=2.0), partial(geometric_mask, low=0.1, high=9))
        weights, metrics = both(*rows([[sequence(self.OLD, self.SAMPLER)]]))
        np.testing.assert_allclose(weights, [[1.648721, 1, 0]], atol=1e-6)
        assert metrics.keys() >= {"icepop_masked_frac", "geometric_masked_frac"}

    @pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.func.__name__)
    def test_every_correction_is_finite_for_any_input_and_1_where_masked(self, rows, correction):
        old = [0, -900, -INF, INF, -INF, NAN, -1, NAN]
        sampler = [-900, 0, 0, 0, -INF, -1, NAN, NAN]
        broken = sequence(old, sampler, mask=[1] * 7 + [0])
        for layout in ([[broken]], [[sequence([-1], [-1]), broken]]):
            scores, batch = rows(layout, length=12, fill=NAN)
            scores = dataclasses.replace(scores, logprobs=batch.sampler_logprobs)
            weights, metrics = correction(scores, batch)
            assert np.isfinite(weights).all()
            np.testing.assert_array_equal(weights[~np.asarray(batch.loss_mask)], 1)
            assert all(np.isfinite(m.value) for m in metrics.values())
        assert weights[0, 0] == 1  # the sequence beside a broken one

    @pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.func.__name__)
    def test_no_gradient_flows_through_any_weight(self, rows, correction):
        scores, batch = rows([[sequence(self.OLD, self.SAMPLER)]])

        def total(old, logprobs):
            changed = dataclasses.replace(scores, logprobs=logprobs)
            return correction(changed, batch_with(batch, old))[0].sum()

        for grad in jax.grad(total, (0, 1))(batch.old_logprobs, batch.sampler_logprobs):
            np.testing.assert_array_equal(grad, [[0, 0, 0]])

    def test_bands_out_of_order_are_named(self, rows):
        scores, batch = rows([[sequence(self.OLD, self.SAMPLER)]])
        for low, high in ((2.0, 0.5), (0.0, 2.0)):
            with pytest.raises(ValueError, match=f"0 < low={low} < high={high}"):
                icepop(scores, batch, low=low, high=high)


class TestStaleness:
    def test_it_compares_the_current_policy_with_the_old_one_and_not_with_the_engine(self, rows):
        # log pi/pi_old = [.5, -.5, 2]: e^.5, e^-.5, the cap
        scores, batch = rows([[sequence([-1, -2, -3], [NAN] * 3) | {"logprobs": [-0.5, -2.5, -1]}]])
        weights, metrics = truncated_staleness(scores, batch, cap=2.0)
        np.testing.assert_allclose(weights, [[1.648721, 0.606531, 2]], atol=1e-6)
        np.testing.assert_allclose(metrics["staleness_clip_frac"].value, 1 / 3, rtol=1e-6)

    def test_it_is_exactly_1_in_the_first_step_on_a_rollout(self, rows):
        scores, batch = rows([[sequence([-1.7, -2.3], [-1, -1]) | {"logprobs": [-1.7, -2.3]}]])
        np.testing.assert_array_equal(truncated_staleness(scores, batch, cap=2.0)[0], [[1, 1]])
