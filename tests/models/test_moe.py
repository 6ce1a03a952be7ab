"""Router, replayed routing, expert matmuls and load balancing, on numbers worked out by hand.

The router's logits are x W; with x = 1 and D = 1 the row W *is* the logits, and so is its gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.models import moe
from axion_jax.models.config import ModelConfig

FOUR_EXPERTS = ModelConfig(
    vocab_size=4,
    hidden_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=1,
    moe_intermediate_size=1,
    num_experts=4,
    num_experts_per_token=2,
    num_dense_layers=0,
)
LOGITS = np.array([1.0, 0.0, -1.0, 2.0], np.float32)
BIAS = np.array([0.0, 0.0, 3.0, 0.0], np.float32)


def logit(probabilities):
    p = np.asarray(probabilities, np.float32)
    return np.log(p / (1 - p))


@functools.partial(jax.jit, static_argnames="config")
def _route(logits, bias, config, forced=None):
    ids, gates = moe.route(jnp.ones((1, 1)), logits[None], bias, config, forced)
    return ids[0], gates[0]


def route(logits=LOGITS, bias=BIAS, config=FOUR_EXPERTS, replay=None):
    """{expert: gate} of one token, in the order chosen."""
    forced = None if replay is None else jnp.asarray([replay], jnp.int8)
    ids, gates = _route(jnp.asarray(logits), jnp.asarray(bias), config, forced)
    return dict(zip(ids.tolist(), gates.tolist(), strict=True))


def test_the_bias_decides_who_is_chosen_but_not_with_what_weight():
    # sigmoid: [.7310586, .5, .2689414, .8807971]. With the bias expert 2 stands at 3.27: {2, 3}.
    # Gates from the unbiased scores: .2689414 and .8807971 over their sum 1.1497385.
    gates = route()
    assert list(gates) == [2, 3]
    assert gates == pytest.approx({2: 0.2339153, 3: 0.7660847}, abs=1e-6)


def test_replayed_experts_get_gates_from_this_forwards_own_unbiased_scores():
    # .5 and .2689414 over .7689414.
    assert route(replay=[1, 2]) == pytest.approx({1: 0.6502446, 2: 0.3497554}, abs=1e-6)


def test_the_order_of_replayed_experts_is_kept():
    assert list(route(replay=[2, 1])) == [2, 1]


def test_an_expert_outside_the_live_choice_still_sends_gradient_to_the_router():
    # gate0 = s1 / (s1 + s2), s' = s (1 - s):
    #   d/dlogit1 =  s1' s2 / (s1 + s2)^2 =  .25      * .2689414 / .5912709 =  .1137133
    #   d/dlogit2 = -s1 s2' / (s1 + s2)^2 = -.1966119 * .5       / .5912709 = -.1662621
    # Experts 0 and 3, which this forward would have preferred, get exactly nothing.
    def gate0(logits):
        return _route(logits, jnp.asarray(BIAS), FOUR_EXPERTS, jnp.asarray([[1, 2]]))[1][0]

    gradient = jax.grad(gate0)(jnp.asarray(LOGITS))
    np.testing.assert_allclose(gradient, [0, 0.1137133, -0.1662621, 0], atol=1e-7)
    assert gradient[0] == 0 and gradient[3] == 0


@pytest.mark.parametrize("replay", [None, [[1, 2]]])
def test_the_correction_bias_gets_exactly_no_gradient(replay):
    def weighted_gates(bias):
        forced = None if replay is None else jnp.asarray(replay)
        _, gates = _route(jnp.asarray(LOGITS), bias, FOUR_EXPERTS, forced)
        return gates @ jnp.asarray([1.0, 3.0])

    assert not np.any(jax.grad(weighted_gates)(jnp.asarray(BIAS)))


def test_a_row_of_minus_ones_falls_back_to_the_routers_own_choice_token_by_token():
    x = jnp.ones((2, 1))
    forced = jnp.asarray([[-1, -1], [0, 1]], jnp.int8)
    logits, bias = jnp.asarray(LOGITS[None]), jnp.asarray(BIAS)
    ids, gates = moe.route(x, logits, bias, FOUR_EXPERTS, forced)
    assert ids.tolist() == [[2, 3], [0, 1]]
    # Second token: .7310586 and .5 over 1.2310586.
    np.testing.assert_allclose(gates, [[0.2339153, 0.7660847], [0.5938455, 0.4061545]], atol=1e-6)


def test_gates_are_scaled_after_they_are_normalised():
    config = dataclasses.replace(FOUR_EXPERTS, routed_scaling_factor=2.5)
    gates = route(config=config)
    assert gates == pytest.approx({2: 2.5 * 0.2339153, 3: 2.5 * 0.7660847}, abs=1e-6)


def test_without_normalisation_the_gates_are_the_scores_themselves():
    config = dataclasses.replace(FOUR_EXPERTS, norm_topk_prob=False, routed_scaling_factor=2.0)
    assert route(config=config) == pytest.approx({2: 2 * 0.2689414, 3: 2 * 0.8807971}, abs=1e-6)


def test_a_bias_that_is_the_same_for_all_experts_changes_nothing():
    # The released biases sit near 7.
    assert route(bias=BIAS + 7) == route()


def test_the_router_is_float32_whatever_the_activations():
    # bfloat16 scores of these logits are all .5: 1/512 and 2/512 are below its step at .5, 1/256.
    x = jnp.ones((1, 1), jnp.bfloat16)
    logits = jnp.asarray([[0, 1 / 512, 2 / 512, -1]], jnp.float32)
    ids, gates = moe.route(x, logits, jnp.zeros(4), FOUR_EXPERTS)
    assert ids.tolist() == [[2, 1]]
    assert gates.dtype == jnp.float32 and gates[0, 0] > gates[0, 1]


# Four groups of two. Scores, and each group's best two together:
#   (.9, .1) = 1.0   (.6, .5) = 1.1   (.7, .2) = 0.9   (.55, .52) = 1.07
GROUPS = dataclasses.replace(FOUR_EXPERTS, num_experts=8, num_groups=4, topk_groups=2)
GROUP_SCORES = [0.9, 0.1, 0.6, 0.5, 0.7, 0.2, 0.55, 0.52]


def test_experts_come_from_the_groups_whose_best_two_are_best_together():
    # Groups 1 and 3 remain; expert 0, the best of all, is not in them. Gates over .6 + .55 = 1.15.
    gates = route(logit(GROUP_SCORES), np.zeros(8, np.float32), GROUPS)
    assert gates == pytest.approx({2: 0.6 / 1.15, 6: 0.55 / 1.15}, abs=1e-6)


def test_groups_are_ranked_with_the_bias():
    # + .3 on expert 1 lifts group 0 to 1.3: groups 0 and 1, experts 0 (.9) and 2 (.6).
    bias = np.array([0, 0.3, 0, 0, 0, 0, 0, 0], np.float32)
    gates = route(logit(GROUP_SCORES), bias, GROUPS)
    assert gates == pytest.approx({0: 0.9 / 1.5, 2: 0.6 / 1.5}, abs=1e-6)


def test_a_left_out_group_stays_out_when_all_choices_are_negative():
    # With a bias of -2 a left-out expert set to 0 would win over every other.
    gates = route(logit(GROUP_SCORES), np.full(8, -2, np.float32), GROUPS)
    assert list(gates) == [2, 6]


def test_replay_reaches_experts_of_left_out_groups():
    gates = route(logit(GROUP_SCORES), np.zeros(8, np.float32), GROUPS, replay=[0, 4])
    assert gates == pytest.approx({0: 0.9 / 1.6, 4: 0.7 / 1.6}, abs=1e-6)


# -- expert matmuls -------------------------------------------------------------------------------

T, D, F, E = 37, 6, 5, 7


CASES = {  # expert ids [T, K]
    "random": lambda rng: np.stack([rng.permutation(E)[:3] for _ in range(T)]),
    "every token on the same three": lambda rng: np.tile([E - 1, 0, 2], (T, 1)),
    "random, one each": lambda rng: rng.integers(0, E, (T, 1)),
    "every token on one": lambda rng: np.full((T, 1), 2),
    "every token but one on the last": lambda rng: np.array([[0]] + [[E - 1]] * (T - 1)),
}


@functools.partial(jax.jit, static_argnames="block")
def output_and_grads(arguments, ids, out_weights, *, block):
    """With `block` None those of the dense reference."""

    def scalar(arguments):
        x, gate_up, down, gates = arguments
        if block is None:
            y = moe.dense_experts(x, gate_up, down, ids, gates)
        else:
            y = moe.grouped_experts(x, gate_up, down, ids, gates, block=block)
        return jnp.sum(y * out_weights), y

    (_, y), grads = jax.value_and_grad(scalar, has_aux=True)(arguments)
    return y, *grads


@pytest.mark.parametrize("block", [1, 8, 64])
@pytest.mark.parametrize("case", CASES)
def test_grouped_experts_equal_the_dense_reference_with_their_gradients(case, block):
    rng = np.random.default_rng(3)
    ids = jnp.asarray(CASES[case](rng), jnp.int32)
    shapes = [(T, D), (E, D, 2, F), (E, F, D), ids.shape]
    arguments = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    out_weights = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    grouped = output_and_grads(arguments, ids, out_weights, block=block)
    dense = output_and_grads(arguments, ids, out_weights, block=None)
    # Sums over up to T tokens of terms of order 10, in float32.
    for got, expected in zip(grouped, dense, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


def test_experts_that_nobody_chose_get_exactly_no_gradient():
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.tile([1, 4], (T, 1)), jnp.int32)
    x, gate_up, down = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(T, D), (E, D, 2, F), (E, F, D)]
    )

    @jax.jit
    @jax.grad
    def gradient(weights):
        gates = jnp.full((T, 2), 0.5)
        return jnp.sum(moe.grouped_experts(x, *weights, ids, gates, block=8) ** 2)

    for leaf in gradient((gate_up, down)):
        reached = np.any(np.asarray(leaf).reshape(E, -1) != 0, axis=1)
        assert reached.tolist() == [False, True, False, False, True, False, False]


# -- load balancing -------------------------------------------------------------------------------


def test_load_counts_the_experts_of_real_tokens_only():
    # One row of three tokens, the last one padding; one layer, K = 2.
    routing = jnp.asarray([[[[0, 3]], [[0, 2]], [[1, 1]]]])
    segment_ids = jnp.asarray([[1, 2, 0]])
    assert moe.expert_load(routing, segment_ids, 4).tolist() == [[2, 0, 1, 1]]


def test_rebalancing_moves_each_bias_one_step_towards_equal_load():
    # Mean load 2: expert 0 has more and goes down, 1 and 2 have less and go up, 3 stays.
    bias = jnp.asarray([[0.5, 0.0, -0.5, 1.0]])
    moved = moe.rebalance(bias, jnp.asarray([[5.0, 0.0, 1.0, 2.0]]), rate=0.1)
    np.testing.assert_allclose(moved, [[0.4, 0.1, -0.4, 1.0]], atol=1e-7)
