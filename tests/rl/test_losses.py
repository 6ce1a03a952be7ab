"""Losses by hand: values, gradients, and where gradients must be exactly zero."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.rl.corrections import truncated_importance_sampling
from axion_jax.rl.losses import (
    cispo_loss,
    grpo_loss,
    gspo_loss,
    gspo_token_loss,
    preference_loss,
    sft_loss,
)

pytestmark = pytest.mark.usefixtures("strict")
NAN, INF = np.nan, np.inf
F64 = jnp.float64


def per_token(loss_fn, scores, batch):
    """The per-token losses: the total is linear in the weights, so its gradient in them."""

    def total(weights):
        return loss_fn(scores, dataclasses.replace(batch, weights=weights))[0].total

    return jax.jit(jax.grad(total))(batch.weights)


def grad_logprobs(loss_fn, scores, batch, *, divided=False):
    def objective(logprobs):
        loss, _ = loss_fn(dataclasses.replace(scores, logprobs=logprobs), batch)
        return loss.value if divided else loss.total

    return jax.jit(jax.grad(objective))(scores.logprobs)


def tokens(ratio, advantages, **more):
    """One sequence whose token ratios are these."""
    return {
        "mask": np.ones(len(ratio)),
        "logprobs": np.log(ratio),
        "old_logprobs": np.zeros(len(ratio)),
        "advantages": advantages,
        **more,
    }


# Third token of sequence 0 is a tool token.
G1 = [
    {
        "mask": [1, 1, 0, 1],
        "old_logprobs": [-1, -2, -0.5, -1.5],
        "logprobs": [-0.998, -1.999, -9.9, -1.501],
        "advantages": [1, 1, 1, 1],
    },
    {
        "mask": [1, 1],
        "old_logprobs": [-0.3, -0.7],
        "logprobs": [-0.304, -0.702],
        "advantages": [-1, -1],
    },
]
ONE_ROW, TWO_ROWS = [G1], [[G1[0]], [G1[1]]]


def flat(x, batch):
    """The entries of G1's six real positions, in order."""
    return np.asarray(x)[np.asarray(batch.segment_ids) > 0]


class TestGspo:
    @pytest.mark.parametrize("layout", [ONE_ROW, TWO_ROWS], ids=["one row", "two rows"])
    def test_losses_and_gradients_of_vector_g1(self, rows, double, layout):
        # mean log ratios (.002 + .001 - .001)/3 = 6.666667e-4 and (-.004 - .002)/2 = -.003:
        # s = 1.00066689, .99700450. Sequence 1 (A = -1) has s below 1 - 1e-3: its loss is the
        # clipped +.999, without gradient. Sequence 0: d(-s)/dl_t = -s/3.
        scores, batch = rows(layout, dtype=F64)
        loss_fn = partial(gspo_loss, clip_low=1e-3, clip_high=2e-3)
        loss, metrics = loss_fn(scores, batch)
        # to the printed digits, which were computed in float32: one part in 1e7
        np.testing.assert_allclose(
            flat(per_token(loss_fn, scores, batch), batch),
            [-1.00066686, -1.00066686, 0, -1.00066686, 0.999, 0.999],
            atol=3e-8,
        )
        np.testing.assert_allclose(loss.total, -0.00166684, atol=6e-8)
        np.testing.assert_allclose(loss.value, -0.00083342, atol=3e-8)
        np.testing.assert_allclose(
            flat(grad_logprobs(loss_fn, scores, batch), batch),
            [-0.33355561, -0.33355561, 0, -0.33355561, 0, 0],
            atol=1.5e-8,
        )
        np.testing.assert_allclose(
            flat(grad_logprobs(loss_fn, scores, batch, divided=True), batch),
            [-0.16677782, -0.16677782, 0, -0.16677782, 0, 0],
            atol=1.5e-8,
        )
        assert metrics["clip_frac"].value == 0.5
        np.testing.assert_allclose(metrics["ratio"].value, (1.00066686 + 0.99700451) / 2, atol=2e-8)
        # token mean of old - new: (-.002 - .001 + .001 + .004 + .002) / 5
        np.testing.assert_allclose(metrics["approx_kl"].value, 0.0008, atol=1e-9)

    def test_ratio_is_the_geometric_mean_over_the_sequence(self, rows):
        # token ratios 4 and 1: s = sqrt(4 * 1) = 2; A = -1 keeps the larger, unclipped loss
        scores, batch = rows([[tokens([4, 1], [-1, -1])]])
        loss, metrics = gspo_loss(scores, batch, clip_low=0.1, clip_high=0.1)
        np.testing.assert_allclose([loss.value, metrics["ratio"].value], 2.0, rtol=1e-6)

    @pytest.mark.parametrize("layout", [ONE_ROW, TWO_ROWS], ids=["one row", "two rows"])
    def test_both_sequences_clipped_have_no_gradient_at_all(self, rows, double, layout):
        scores, batch = rows(layout, dtype=F64)
        loss_fn = partial(gspo_loss, clip_low=2e-4, clip_high=4e-4)
        loss, metrics = loss_fn(scores, batch)
        # -(1 + 4e-4) + (1 - 2e-4) = -6e-4
        np.testing.assert_allclose(
            flat(per_token(loss_fn, scores, batch), batch),
            [-1.0004, -1.0004, 0, -1.0004, 0.9998, 0.9998],
            atol=1e-9,
        )
        np.testing.assert_allclose(loss.total, -6e-4, atol=1e-9)
        assert not grad_logprobs(loss_fn, scores, batch).any()
        assert metrics["clip_frac"].value == 1

    def test_float32_agrees_with_float64(self, rows):
        scores, batch = rows(ONE_ROW)
        loss, _ = gspo_loss(scores, batch, clip_low=1e-3, clip_high=2e-3)
        np.testing.assert_allclose(loss.value, -0.00083342, atol=3e-7)

    def test_the_tool_token_never_enters_the_ratio(self, rows):
        loss_fn = partial(gspo_loss, clip_low=1e-3, clip_high=2e-3)
        reference = None
        for value in (-9.9, 5.0, NAN, INF):
            changed = [G1[0] | {"logprobs": [-0.998, -1.999, value, -1.501]}, G1[1]]
            scores, batch = rows([changed])
            loss, _ = loss_fn(scores, batch)
            grad = grad_logprobs(loss_fn, scores, batch)
            reference = reference or (loss.value, grad.tolist())
            assert (loss.value, grad.tolist()) == reference

    def test_short_and_long_sequences_weigh_alike(self, rows):
        # lengths 1 and 9, ratio 1: -1 and -1, mean -1; gradients 1/2 in all for each
        scores, batch = rows([[tokens([1], [1]), tokens([1] * 9, [1] * 9)]])
        loss_fn = partial(gspo_loss, clip_low=3e-4, clip_high=4e-4)
        np.testing.assert_allclose(loss_fn(scores, batch)[0].value, -1, rtol=1e-6)
        grad = grad_logprobs(loss_fn, scores, batch, divided=True)
        np.testing.assert_allclose([grad[0, :1].sum(), grad[0, 1:].sum()], -0.5, rtol=1e-6)

    def test_correction_weights_multiply_the_clipped_loss_token_by_token(self, rows):
        # ratio 1, A 1: losses -w_t with w = [e^.5, 1], gradient d/dl_t of -mean(w) * s =
        # -(1.648721 + 1)/2 * 1/2 = -.662180 for both tokens
        scores, batch = rows(
            [[tokens([1, 1], [1, 1], sampler_logprobs=[-0.5, 0.0])]],
        )
        loss_fn = partial(
            gspo_loss,
            clip_low=3e-4,
            clip_high=4e-4,
            correction=partial(truncated_importance_sampling, cap=2.0),
        )
        np.testing.assert_allclose(per_token(loss_fn, scores, batch), [[-1.648721, -1]], atol=1e-6)
        np.testing.assert_allclose(
            grad_logprobs(loss_fn, scores, batch), [[-0.662180, -0.662180]], atol=1e-6
        )
        assert loss_fn(scores, batch)[1].keys() >= {"tis_weight", "tis_clip_frac"}


class TestGrpo:
    def test_clip_takes_hold_only_on_the_side_that_gains(self, rows):
        # min(rA, clip(r)A): 1.35 is clipped to 1.28 for A=1, not for A=-1; .7 to .8 for A=-1 only
        scores, batch = rows([[tokens([1.35, 1.35, 0.7, 0.7, 1.1], [1, -1, 1, -1, 1])]])
        loss_fn = partial(grpo_loss, clip_low=0.2, clip_high=0.28)
        np.testing.assert_allclose(
            per_token(loss_fn, scores, batch), [[-1.28, 1.35, -0.7, 0.8, -1.1]], rtol=1e-6
        )
        # weights are 1/5; gradient -rA/5 where not clipped, exactly 0 where clipped
        grad = grad_logprobs(loss_fn, scores, batch)
        np.testing.assert_allclose(grad, [[0, 1.35 / 5, -0.7 / 5, 0, -1.1 / 5]], rtol=1e-6)
        assert grad[0, 0] == grad[0, 3] == 0
        metrics = loss_fn(scores, batch)[1]
        np.testing.assert_allclose(metrics["clip_frac"].value, 2 / 5)
        np.testing.assert_allclose(metrics["ratio"].value, 5.2 / 5, rtol=1e-6)
        np.testing.assert_allclose(metrics["advantage_abs"].value, 1.0)

    def test_dual_clip_bounds_the_loss_of_negative_advantages(self, rows):
        # A=2: -clip(2)A = -2.4. A=-2: min(1.5 * 2, 4) = 3, no gradient. A=2, r=.5: -1
        scores, batch = rows([[tokens([2, 2, 0.5], [2, -2, 2])]])
        loss_fn = partial(grpo_loss, clip_low=0.2, clip_high=0.2, dual_clip=1.5)
        np.testing.assert_allclose(
            per_token(loss_fn, scores, batch), [[-2.4, 3.0, -1.0]], rtol=1e-6
        )
        np.testing.assert_allclose(
            grad_logprobs(loss_fn, scores, batch), [[0, 0, -1 / 3]], rtol=1e-6
        )

    def test_correction_weights_multiply_after_the_clip(self, rows):
        # r = 1.35 clipped to 1.28, w = 2 (capped e^1): -2.56; before the clip it would be -1.28
        scores, batch = rows([[tokens([1.35], [1], sampler_logprobs=[-1.0])]])
        loss, _ = grpo_loss(
            scores,
            batch,
            clip_low=0.2,
            clip_high=0.28,
            correction=partial(truncated_importance_sampling, cap=2.0),
        )
        np.testing.assert_allclose(loss.value, -2.56, rtol=1e-6)

    def test_agrees_with_gspo_on_sequences_of_one_token(self, rows):
        scores, batch = rows([[tokens([1.1], [1]), tokens([0.7], [-1]), tokens([1.4], [1])]])
        options = {"clip_low": 0.2, "clip_high": 0.28}
        np.testing.assert_allclose(
            grpo_loss(scores, batch, **options)[0].value,
            gspo_loss(scores, batch, **options)[0].value,
            rtol=1e-6,
        )

    def test_huge_ratios_leave_no_nan_in_the_gradient(self, rows):
        # exp(500) overflows; 0 * inf in the backward pass of a clipped token would be NaN
        scores, batch = rows(
            [[tokens([1, 1, 1], [1, -1, 1]) | {"logprobs": [500.0, 500.0, -500.0]}]]
        )
        for loss_fn in (grpo_loss, gspo_loss, gspo_token_loss):
            bound = partial(loss_fn, clip_low=0.2, clip_high=0.28)
            assert np.isfinite(bound(scores, batch)[0].value)
            assert np.isfinite(grad_logprobs(bound, scores, batch)).all()

    def test_nan_at_a_masked_tail_leaves_loss_and_gradient_finite(self, rows):
        # multiplied by a mask of 0 it would be NaN
        sequence = tokens([1, 1], [1, 1]) | {"mask": [1, 0], "logprobs": [-1.0, NAN]}
        for loss_fn in (grpo_loss, gspo_loss):
            bound = partial(loss_fn, clip_low=0.2, clip_high=0.28)
            scores, batch = rows([[sequence]])
            assert np.isfinite(bound(scores, batch)[0].value)
            assert np.isfinite(grad_logprobs(bound, scores, batch)).all()

    def test_entropy_is_reported_where_the_model_gives_it(self, rows):
        sequence = tokens([1, 1, 1], [1, 1, 1]) | {"mask": [1, 0, 1], "entropy": [1.0, NAN, 2.0]}
        scores, batch = rows([[sequence]])
        options = {"clip_low": 0.2, "clip_high": 0.28}
        assert grpo_loss(scores, batch, **options)[1]["entropy"].value == 1.5
        scores = dataclasses.replace(scores, entropy=None)
        assert "entropy" not in grpo_loss(scores, batch, **options)[1]


# The log-probs of G1 with an advantage for each token; the tool token's is never looked at.
G2 = [G1[0] | {"advantages": [1, 0.5, 9, -1]}, G1[1]]


class TestGspoToken:
    @pytest.mark.parametrize("layout", [[G2], [[G2[0]], [G2[1]]]], ids=["one row", "two rows"])
    def test_loss_and_gradients_of_vector_g2(self, rows, double, layout):
        # s = 1.00066689 for every token of sequence 0: tokens (-1 - .5 + 1) * s / 3 = -.16677781,
        # sequence 1 clipped at .999: (-.16677781 + .999)/2 = .41611109. Each token's own advantage
        # in its gradient: -A_t s / 3 / 2.
        scores, batch = rows(layout, dtype=F64)
        loss_fn = partial(gspo_token_loss, clip_low=1e-3, clip_high=2e-3)
        np.testing.assert_allclose(loss_fn(scores, batch)[0].value, 0.41611111, atol=3e-8)
        np.testing.assert_allclose(
            flat(grad_logprobs(loss_fn, scores, batch, divided=True), batch),
            [-0.16677782, -0.08338891, 0, 0.16677782, 0, 0],
            atol=1.5e-8,
        )

    def test_with_one_advantage_for_a_sequence_it_is_gspo(self, rows, double):
        scores, batch = rows(ONE_ROW, dtype=F64)
        options = {"clip_low": 1e-3, "clip_high": 2e-3}
        outcomes = []
        for loss_fn in (partial(gspo_loss, **options), partial(gspo_token_loss, **options)):
            loss, metrics = loss_fn(scores, batch)
            outcomes.append([loss.value, *(metrics[k].value for k in ("ratio", "clip_frac"))])
            outcomes[-1] += grad_logprobs(loss_fn, scores, batch).ravel().tolist()
        np.testing.assert_allclose(*outcomes, rtol=1e-12)


class TestCispo:
    def test_the_clip_bounds_the_weight_and_keeps_the_gradient(self, rows):
        # r = [6, .5] in [0, 5]: weights 5 and .5. -5 * 1 * -1 = 5; -.5 * -1 * -2 = -1
        logprobs = np.array([-1.0, -2.0])
        sequence = tokens([6, 0.5], [1, -1]) | {
            "logprobs": logprobs,
            "old_logprobs": logprobs - np.log([6, 0.5]),
        }
        scores, batch = rows([[sequence]])
        loss_fn = partial(cispo_loss, clip_low=1.0, clip_high=4.0)
        np.testing.assert_allclose(per_token(loss_fn, scores, batch), [[5, -1]], rtol=1e-6)
        # d/dl = -weight * A, over 2 tokens: the clipped one learns too
        np.testing.assert_allclose(grad_logprobs(loss_fn, scores, batch), [[-2.5, 0.25]], rtol=1e-6)
        assert loss_fn(scores, batch)[1]["clip_frac"].value == 0.5


class TestSft:
    def test_loss_is_nats_per_supervised_token(self, rows):
        scores, batch = rows([[{"mask": [0, 1, 1], "logprobs": [NAN, -1, -3]}]], denominator=2)
        batch = dataclasses.replace(batch, weights=batch.loss_mask.astype(jnp.float32))
        assert sft_loss(scores, batch)[0].value == 2
        np.testing.assert_array_equal(
            grad_logprobs(sft_loss, scores, batch, divided=True), [[0, -0.5, -0.5]]
        )


def pair(chosen, rejected):
    """Two responses of two predictions each, scored at their last."""
    return [
        {"mask": [0, 1], "values": [NAN, chosen], "advantages": [NAN, 1.0]},
        {"mask": [0, 1], "values": [NAN, rejected], "advantages": [NAN, -1.0]},
    ]


def pairs_only(batch):
    """Weights as each_pair_alike gives them: 1 at the chosen's position."""
    weights = jnp.where(batch.loss_mask & (batch.advantages > 0), batch.weights, 0.0)
    return dataclasses.replace(batch, weights=weights)


class TestPreference:
    def test_bradley_terry_by_hand(self, rows):
        # margins 1.5 and -1: softplus(-1.5) = .2014133, softplus(1) = 1.3132617, mean .7573375
        scores, batch = rows([pair(2.0, 0.5) + pair(-1.0, 0.0)], length=10, denominator=2, fill=NAN)
        batch = pairs_only(batch)
        loss, metrics = preference_loss(scores, batch)
        np.testing.assert_allclose(loss.value, 0.7573375, rtol=1e-6)
        assert metrics["accuracy"].value == 0.5
        np.testing.assert_allclose(metrics["margin"].value, 0.25)

        def objective(values):
            return preference_loss(dataclasses.replace(scores, values=values), batch)[0].value

        # d/d chosen = -sigmoid(-margin)/2: sigmoid(-1.5) = .1824255, sigmoid(1) = .7310586
        expected = np.array([0, -0.1824255, 0, 0.1824255, 0, -0.7310586, 0, 0.7310586, 0, 0]) / 2
        np.testing.assert_allclose(jax.grad(objective)(scores.values), [expected], atol=1e-7)

    def test_pairs_in_one_row_and_in_two_have_the_same_loss(self, rows):
        packed = rows([pair(2.0, 0.5) + pair(-1.0, 0.0)], denominator=2)
        apart = rows([pair(2.0, 0.5), pair(-1.0, 0.0)], denominator=2)
        losses = [preference_loss(s, pairs_only(b))[0].value for s, b in (packed, apart)]
        np.testing.assert_allclose(*losses, rtol=1e-6)

    def test_the_rejected_response_may_come_first(self, rows):
        scores, batch = rows([pair(2.0, 0.5)[::-1]], denominator=1)
        loss, _ = preference_loss(scores, pairs_only(batch))
        np.testing.assert_allclose(loss.value, math.log1p(math.exp(-1.5)), rtol=1e-6)

    def test_a_tie_is_not_accurate(self, rows):
        scores, batch = rows([pair(1.0, 1.0)], denominator=1)
        loss, metrics = preference_loss(scores, pairs_only(batch))
        np.testing.assert_allclose(loss.value, math.log(2), rtol=1e-6)
        assert metrics["accuracy"].value == 0

    def test_a_model_without_a_scalar_head_is_refused(self, rows):
        scores, batch = rows([pair(1.0, 0.0)])
        scores = dataclasses.replace(scores, values=None)
        with pytest.raises(ValueError, match=r"needs Scores\.values, .* a scalar head"):
            preference_loss(scores, batch)


POLICY_LOSSES = {
    "grpo": partial(grpo_loss, clip_low=0.2, clip_high=0.28),
    "grpo dual": partial(grpo_loss, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "grpo tis": partial(
        grpo_loss,
        clip_low=0.2,
        clip_high=0.28,
        correction=partial(truncated_importance_sampling, cap=2.0),
    ),
    "gspo": partial(gspo_loss, clip_low=0.2, clip_high=0.28),
    "gspo_token": partial(gspo_token_loss, clip_low=0.2, clip_high=0.28),
    "cispo": partial(cispo_loss, clip_low=1.0, clip_high=4.0),
    "gspo tis": partial(
        gspo_loss,
        clip_low=0.2,
        clip_high=0.28,
        correction=partial(truncated_importance_sampling, cap=2.0),
    ),
    "sft": sft_loss,
}
every_policy_loss = pytest.mark.parametrize("name", POLICY_LOSSES)


def random_sequences(seed=0):
    rng = np.random.default_rng(seed)
    sequences = []
    for n in (3, 1, 4, 2):
        old = -rng.exponential(size=n)
        sequences.append(
            {
                "mask": [1] + [int(rng.random() < 0.7) for _ in range(n - 1)],
                "old_logprobs": old,
                "logprobs": old + 0.2 * rng.normal(size=n),
                "sampler_logprobs": old + 0.5 * rng.normal(size=n),
                "advantages": np.full(n, rng.normal()),
                "entropy": rng.random(n),
            }
        )
    return sequences


@every_policy_loss
def test_packing_and_padding_change_nothing(rows, name):
    a, b, c, d = random_sequences()
    results = []
    for layout, length in (([[a, b, c, d]], 10), ([[d], [a, c], [b]], 9), ([[c, a, b], [d]], 30)):
        scores, batch = rows(layout, length=length, fill=NAN)
        loss, metrics = POLICY_LOSSES[name](scores, batch)
        grad = grad_logprobs(POLICY_LOSSES[name], scores, batch)
        values = {k: float(m.value) for k, m in metrics.items()}
        results.append([float(loss.value), float(jnp.abs(grad).sum()), *values.values()])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-5, atol=1e-6)


@every_policy_loss
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_masked_positions_may_hold_anything(rows, name, bad):
    clean, dirty = [], []
    for sequence in random_sequences():
        masked = np.asarray(sequence["mask"]) == 0
        clean.append(sequence)
        dirty.append(
            {
                field: values if field == "mask" else np.where(masked, bad, values)
                for field, values in sequence.items()
            }
        )
    outcomes = []
    for sequences, fill in ((clean, 0.0), (dirty, bad)):
        scores, batch = rows([sequences], length=12, fill=fill)
        batch = dataclasses.replace(batch, weights=jnp.where(batch.loss_mask, batch.weights, 0.0))
        loss, metrics = POLICY_LOSSES[name](scores, batch)
        grad = grad_logprobs(POLICY_LOSSES[name], scores, batch)
        outcomes.append((loss.value, [m.value for m in metrics.values()], grad.tolist()))
    assert outcomes[0] == outcomes[1]


@every_policy_loss
def test_a_fully_masked_batch_has_loss_0_and_gradient_0(rows, name):
    masked = [s | {"mask": np.zeros(len(s["mask"]))} for s in random_sequences()]
    scores, batch = rows([masked], fill=NAN)
    loss, metrics = POLICY_LOSSES[name](scores, batch)
    assert (loss.total, loss.value, loss.weight) == (0, 0, 4)
    assert all(m.value == 0 for m in metrics.values())
    assert not grad_logprobs(POLICY_LOSSES[name], scores, batch).any()


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "cispo"])
@pytest.mark.parametrize("field", ["advantages", "old_logprobs"])
def test_a_missing_field_is_named_with_the_next_move(rows, name, field):
    scores, batch = rows(ONE_ROW)
    batch = dataclasses.replace(batch, **{field: None})
    move = {"advantages": "assign_advantages", "old_logprobs": "make_score_step"}[field]
    with pytest.raises(ValueError, match=rf"{name} needs Batch\.{field}, .* {move}"):
        POLICY_LOSSES[name](scores, batch)
