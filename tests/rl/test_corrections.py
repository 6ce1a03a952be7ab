"""Engine against trainer: weights and mismatch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.rl.corrections import (
    mismatch_metrics,
    no_correction,
    truncated_importance_sampling,
)

pytestmark = pytest.mark.usefixtures("strict")
NAN, INF = np.nan, np.inf


def sequence(old, sampler, mask=None):
    mask = np.ones(len(old)) if mask is None else mask
    return {"mask": mask, "old_logprobs": old, "sampler_logprobs": sampler}


def test_tis_weights_are_trainer_over_engine_up_to_the_cap(rows):
    # ratios e^.5 = 1.648721, 1, e^1 = 2.718282
    _, batch = rows([[sequence([-1, -2, -3], [-1.5, -2, -4])]])
    weights, metrics = truncated_importance_sampling(batch, cap=2.0)
    np.testing.assert_allclose(weights, [[1.648721, 1, 2]], atol=1e-6)
    np.testing.assert_allclose(metrics["tis_weight"].value, (1.648721 + 1 + 2) / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["tis_clip_frac"].value, 1 / 3, rtol=1e-6)


def test_tis_is_1_at_masked_positions_whatever_they_hold(rows):
    _, batch = rows([[sequence([NAN, -1, INF], [-1, -1, NAN], mask=[0, 1, 0])]], length=5, fill=NAN)
    weights, metrics = truncated_importance_sampling(batch, cap=2.0)
    np.testing.assert_array_equal(weights, np.ones((1, 5)))
    assert metrics["tis_weight"].weight == 1


def test_tis_is_finite_for_any_input(rows):
    # e^900 -> the cap; e^-900 -> 0; undefined (inf - inf, NaN) -> 0, seen in the mean weight
    old, sampler = [0, -900, -INF, -INF, NAN], [-900, 0, 0, -INF, -1]
    _, batch = rows([[sequence(old, sampler)]])
    weights, metrics = truncated_importance_sampling(batch, cap=2.0)
    np.testing.assert_allclose(weights, [[2, 0, 0, 0, 0]], atol=1e-30)
    np.testing.assert_allclose(metrics["tis_weight"].value, 2 / 5)


def test_no_gradient_flows_through_tis_weights(rows):
    _, batch = rows([[sequence([-1, -2], [-1.5, -1.5])]])

    def total(old):
        corrected = truncated_importance_sampling(batch_with(batch, old), cap=2.0)
        return corrected[0].sum()

    np.testing.assert_array_equal(jax.grad(total)(batch.old_logprobs), [[0, 0]])


def batch_with(batch, old):
    leaves = {f: getattr(batch, f) for f in batch.__dataclass_fields__}
    return type(batch)(**leaves | {"old_logprobs": old})


def test_corrections_share_one_signature(rows):
    _, batch = rows([[sequence([-1, -2], [-1.5, -1.5])]])
    for correction in (no_correction, partial(truncated_importance_sampling, cap=2.0)):
        weights, metrics = correction(batch)
        assert weights.shape == batch.tokens.shape
        assert isinstance(metrics, dict)
    np.testing.assert_array_equal(no_correction(batch)[0], [[1, 1]])


def test_a_missing_field_and_a_senseless_cap_are_named(rows):
    _, batch = rows([[{"mask": [1], "old_logprobs": [-1]}]])
    with pytest.raises(ValueError, match=r"needs Batch\.sampler_logprobs, which this batch lacks"):
        truncated_importance_sampling(batch, cap=2.0)
    with pytest.raises(ValueError, match="cap=0 must be above 0"):
        truncated_importance_sampling(batch, cap=0)


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
