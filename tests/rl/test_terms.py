"""What is added to a policy loss, by hand."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from axion_jax.rl.losses import grpo_loss
from axion_jax.rl.terms import add, entropy_bonus, k1, k2, k3, kl_to_reference, value_loss

pytestmark = pytest.mark.usefixtures("strict")
NAN = np.nan


def reference(logprobs, ref, **more):
    n = len(logprobs)
    return {"mask": np.ones(n), "logprobs": logprobs, "ref_logprobs": ref, **more}


def per_token(loss_fn, scores, batch):
    """Per-token losses: the gradient in the weights, in which the total is linear."""

    def total(weights):
        return loss_fn(scores, dataclasses.replace(batch, weights=weights))[0].total

    return jax.grad(total)(batch.weights)


def grad_of(field, loss_fn, scores, batch):
    def total(x):
        return loss_fn(dataclasses.replace(scores, **{field: x}), batch)[0].total

    return jax.grad(total)(getattr(scores, field))


class TestKl:
    # log pi/pi_ref = [.2, -.5, 0]
    LOGPROBS, REF = [-1.0, -2.0, -0.5], [-1.2, -1.5, -0.5]

    @pytest.mark.parametrize(
        ("estimator", "expected", "slope"),
        [
            # d/dx: 1, x, 1 - e^-x
            (k1, [0.2, -0.5, 0], [1, 1, 1]),
            (k2, [0.02, 0.125, 0], [0.2, -0.5, 0]),
            (k3, [0.01873076, 0.14872122, 0], [0.1812692, -0.6487213, 0]),
        ],
    )
    def test_estimators_and_their_gradients(self, rows, estimator, expected, slope):
        scores, batch = rows([[reference(self.LOGPROBS, self.REF)]])
        loss_fn = partial(kl_to_reference, estimator=estimator, coefficient=1.0)
        np.testing.assert_allclose(per_token(loss_fn, scores, batch), [expected], atol=1e-7)
        # weights are 1/3
        grad = grad_of("logprobs", loss_fn, scores, batch)
        np.testing.assert_allclose(3 * grad, [slope], atol=1e-6)
        np.testing.assert_allclose(
            loss_fn(scores, batch)[1]["kl_loss"].value, np.mean(expected), atol=1e-7
        )

    def test_the_unbiased_one_is_times_the_importance_ratio_with_its_gradient(self, rows):
        # pi/pi_old = [1.1, .9, 1]; d(r k)/dx = r (k + k')
        old = np.array(self.LOGPROBS) - np.log([1.1, 0.9, 1.0])
        scores, batch = rows([[reference(self.LOGPROBS, self.REF, old_logprobs=old)]])
        loss_fn = partial(kl_to_reference, estimator=k3, coefficient=1.0, unbiased=True)
        np.testing.assert_allclose(
            per_token(loss_fn, scores, batch), [[0.02060384, 0.1338491, 0]], atol=1e-7
        )
        expected = [1.1 * (0.01873076 + 0.1812692), 0.9 * (0.14872122 - 0.6487213), 0]
        grad = grad_of("logprobs", loss_fn, scores, batch)
        np.testing.assert_allclose(3 * grad, [expected], atol=1e-6)

    def test_k3_is_bounded_by_10_and_finite_beyond(self, rows):
        # e^5 - 1 - 5 = 142.4
        scores, batch = rows([[reference([-5.0, -900.0, 0.0], [0.0, 0.0, -900.0])]])
        loss_fn = partial(kl_to_reference, estimator=k3, coefficient=1.0)
        assert per_token(loss_fn, scores, batch)[0, :2].tolist() == [10, 10]
        assert np.isfinite(grad_of("logprobs", loss_fn, scores, batch)).all()

    def test_the_coefficient_scales_the_loss_and_not_the_metric(self, rows):
        scores, batch = rows([[reference(self.LOGPROBS, self.REF)]])
        loss, metrics = kl_to_reference(scores, batch, estimator=k2, coefficient=0.01)
        np.testing.assert_allclose(loss.value, 0.01 * 0.145 / 3, rtol=1e-6)
        np.testing.assert_allclose(metrics["kl_loss"].value, 0.145 / 3, rtol=1e-6)

    def test_missing_reference_logprobs_are_named(self, rows):
        scores, batch = rows([[{"mask": [1], "logprobs": [-1.0]}]])
        with pytest.raises(
            ValueError, match=r"needs Batch\.ref_logprobs, .* the reference's param"
        ):
            kl_to_reference(scores, batch, estimator=k3, coefficient=1.0)


class TestEntropyBonus:
    def test_more_entropy_is_less_loss(self, rows):
        sequence = {"mask": [1, 0, 1], "entropy": [1.0, NAN, 2.0]}
        scores, batch = rows([[sequence]])
        loss_fn = partial(entropy_bonus, coefficient=0.1)
        np.testing.assert_allclose(loss_fn(scores, batch)[0].value, -0.15, rtol=1e-6)
        np.testing.assert_allclose(
            grad_of("entropy", loss_fn, scores, batch), [[-0.05, 0, -0.05]], rtol=1e-6
        )

    def test_a_model_without_entropy_is_refused(self, rows):
        with pytest.raises(ValueError, match=r"needs Scores\.entropy, .* entropy=True"):
            entropy_bonus(*rows([[{"mask": [1]}]]), coefficient=0.1)


class TestValueLoss:
    def test_the_clip_takes_hold_where_the_value_ran_towards_its_target(self, rows):
        # V_old 0, R 1, clip .2. V=.5: errors .5 and .2 - 1 = .8 -> .32, no gradient.
        # V=-.5: error 1.5, clipped 1.2 -> 1.125, gradient -1.5. V=.1: inside, .405, gradient -.9.
        sequence = {
            "mask": [1, 1, 1, 0],
            "values": [0.5, -0.5, 0.1, NAN],
            "returns": [1, 1, 1, NAN],
            "old_values": [0, 0, 0, NAN],
        }
        scores, batch = rows([[sequence]])
        loss_fn = partial(value_loss, clip=0.2, coefficient=1.0)
        np.testing.assert_allclose(
            per_token(loss_fn, scores, batch), [[0.32, 1.125, 0.405, 0]], rtol=1e-6
        )
        grad = grad_of("values", loss_fn, scores, batch)
        np.testing.assert_allclose(3 * grad, [[0, -1.5, -0.9, 0]], rtol=1e-6)
        metrics = loss_fn(scores, batch)[1]
        np.testing.assert_allclose(metrics["vf_loss"].value, (0.32 + 1.125 + 0.405) / 3, rtol=1e-6)
        np.testing.assert_allclose(metrics["vf_clip_frac"].value, 1 / 3, rtol=1e-6)

    def test_missing_returns_are_named(self, rows):
        with pytest.raises(ValueError, match=r"Batch\.returns and Batch\.old_values"):
            value_loss(*rows([[{"mask": [1], "values": [0.0]}]]), clip=0.2, coefficient=1.0)


def test_terms_add_up_over_one_denominator_and_corrections_weigh_the_policy_alone(rows):
    # ratio 1, A 1, correction 2: -2. KL k2: .5 * .04 = .02, times .5 = .01. Entropy -.1 * 3 = -.3.
    sequence = reference(
        [-1.0],
        [-1.2],
        old_logprobs=[-1.0],
        advantages=[1.0],
        sampler_logprobs=[-9.0],
        entropy=[3.0],
    )
    scores, batch = rows([[sequence]], denominator=4)

    def twice(scores, batch):
        return 2 * batch.loss_mask.astype(batch.weights.dtype), {}

    policy = partial(grpo_loss, clip_low=0.2, clip_high=0.28, correction=twice)
    loss, metrics = add(
        policy,
        partial(kl_to_reference, estimator=k2, coefficient=0.5),
        partial(entropy_bonus, coefficient=0.1),
    )(scores, batch)
    np.testing.assert_allclose(loss.value, (-2 + 0.01 - 0.3) / 4, rtol=1e-6)
    np.testing.assert_allclose(metrics["pg_loss"].value, -0.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["kl_loss"].value, 0.02, rtol=1e-5)
    assert add(policy) is policy


def test_ppo_is_the_clipped_surrogate_with_a_value_loss_added(rows):
    # the vector of the clip (A per token, from a critic) and an error of 1 at every value
    ratio, advantages = [1.35, 1.35, 0.7, 0.7, 1.1], [1, -1, 1, -1, 1]
    sequence = {
        "mask": np.ones(5),
        "logprobs": np.log(ratio),
        "old_logprobs": np.zeros(5),
        "advantages": advantages,
        "values": np.zeros(5),
        "old_values": np.zeros(5),
        "returns": np.ones(5),
    }
    loss_fn = add(
        partial(grpo_loss, clip_low=0.2, clip_high=0.28),
        partial(value_loss, clip=0.2, coefficient=0.1),
    )
    loss, _ = loss_fn(*rows([[sequence]]))
    np.testing.assert_allclose(loss.value, (-1.28 + 1.35 - 0.7 + 0.8 - 1.1) / 5 + 0.05, rtol=1e-5)
