"""Log-probabilities, entropy and values: closed forms, chunking, and what never takes up memory."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn, make_value_fn, token_logprobs
from axion_jax.types import Batch

B, T = 3, 10
IDENTITY_HEAD = SimpleNamespace(logits=lambda params, hidden: hidden)
"""Hidden states are the logits."""


def scores_of(logits, target, *, temperature=1.0):
    """(log-prob of target, entropy) of one prediction."""
    logprobs, entropies = token_logprobs(
        IDENTITY_HEAD,
        None,
        jnp.asarray(logits, jnp.float32)[None, None],
        jnp.asarray([[target]]),
        temperature=temperature,
        entropy=True,
        chunk=1,
    )
    return float(logprobs[0, 0]), float(entropies[0, 0])


def test_temperature_divides_the_logits_before_the_softmax():
    # log p(1) = -log(1 + exp(-1 / .6)) = -log(1.1888756) = -.1730100; log p(0) is 1/.6 less.
    assert scores_of([0, 1], 1, temperature=0.6)[0] == pytest.approx(-0.17301, abs=1e-5)
    assert scores_of([0, 1], 0, temperature=0.6)[0] == pytest.approx(-1.83968, abs=1e-5)


def test_entropy_is_that_of_the_temperature_scaled_distribution():
    # T = .6: p = (.1588688, .8411312); H = .1588688 * 1.8396767 + .8411312 * .1730100 = .4377912.
    # T = 1: p = (.2689414, .7310586); H = .2689414 * 1.3132617 + .7310586 * .3132617 = .5822031.
    assert scores_of([0, 1], 0, temperature=0.6)[1] == pytest.approx(0.4377912, abs=1e-5)
    assert scores_of([0, 1], 0)[1] == pytest.approx(0.5822031, abs=1e-5)


def test_gradients_of_logprob_and_entropy_are_the_textbooks():
    # d log p_y / d z = (onehot(y) - p) / T,   d H / d z = -p (log p + H) / T.
    z, temperature = jnp.asarray([0.3, -1.0, 2.0]), 0.6
    log_p = jax.nn.log_softmax(z / temperature)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p)

    @jax.jacobian
    def gradients(z):
        arguments = (IDENTITY_HEAD, None, z[None, None], jnp.asarray([[1]]))
        options = {"temperature": temperature, "entropy": True, "chunk": 1}
        return jnp.concatenate(token_logprobs(*arguments, **options))[:, 0]

    expected = [
        (jnp.asarray([0.0, 1.0, 0.0]) - jnp.exp(log_p)) / temperature,
        -jnp.exp(log_p) * (log_p + entropy) / temperature,
    ]
    np.testing.assert_allclose(gradients(z), expected, atol=1e-6)


def test_a_uniform_distribution_has_the_entropy_of_its_number_of_choices():
    logprob, entropy = scores_of([2.0] * 5, 3)
    assert logprob == pytest.approx(-np.log(5), abs=1e-6)
    assert entropy == pytest.approx(np.log(5), abs=1e-6)


def test_huge_and_banned_logits_stay_finite():
    # Only the second choice is possible: log-prob 0, entropy 0; the others come out at -1e4.
    logprob, entropy = scores_of([-1e4, 1e4, -1e4], 1)
    assert (logprob, entropy) == (0, 0)
    assert scores_of([-1e4, 1e4, -1e4], 0)[0] == -2e4


@pytest.fixture(scope="module")
def decoder(tiny):
    return Decoder(dataclasses.replace(tiny, num_layers=1, value_head=True, num_dense_layers=0))


@pytest.fixture(scope="module")
def params(decoder, random_params):
    return random_params(decoder)


@pytest.fixture(scope="module")
def batch(tiny, packed):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, tiny.vocab_size, (2, B, T)).astype(np.int32)
    positions, segment_ids = packed([[10], [4, 3], [6]], T)
    real = segment_ids > 0
    fields = {
        "tokens": tokens,
        "targets": targets,
        "loss_mask": real,
        "segment_ids": segment_ids,
        "positions": positions,
        "weights": real.astype(np.float32),
        "denominator": np.ones(B, np.float32),
        "routing": np.tile(np.array([5, 2], np.int8), (B, T, 1, 1)),
    }
    return Batch(**{name: jnp.asarray(x) for name, x in fields.items()})


def scores_and_grads(decoder, params, batch, **options):
    score = make_score_fn(decoder, temperature=0.7, **options)

    @jax.jit
    def both(params):
        def objective(params):
            s = score(params, batch)
            total = jnp.sum(s.logprobs * batch.weights) + 0.1 * jnp.sum(s.entropy * batch.weights)
            return total, s

        grads, scores = jax.grad(objective, has_aux=True)(params)
        return scores, grads

    return both(params)


@pytest.fixture(scope="module")
def whole(decoder, params, batch):
    """(scores, gradients), all 30 predictions in one piece."""
    return scores_and_grads(decoder, params, batch, chunk=30)


def test_chunks_change_neither_scores_nor_gradients(decoder, params, batch, whole):
    # Stretches of 9 // B = 3 predictions of each row, the last one padded.
    scores, grads = scores_and_grads(decoder, params, batch, chunk=9)
    np.testing.assert_allclose(scores.logprobs, whole[0].logprobs, atol=1e-5)
    np.testing.assert_allclose(scores.entropy, whole[0].entropy, atol=1e-5)
    worst = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), grads, whole[1])
    assert max(jax.tree.leaves(worst)) < 2e-5, worst


def shapes_in(jaxpr):
    """The shape of every intermediate value, inside loops and calls too."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield getattr(variable.aval, "shape", ())
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda x: isinstance(x, jax.extend.core.ClosedJaxpr)
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


def most_logits(decoder, params, batch, chunk):
    """Most rows of full-vocabulary numbers that exist at one time, forward or backward."""
    score = make_score_fn(decoder, chunk=chunk)

    def objective(params):
        s = score(params, batch)
        return jnp.sum(s.logprobs + s.entropy)

    jaxpr = jax.make_jaxpr(jax.grad(objective))(params).jaxpr
    v, d = decoder.config.vocab_size, decoder.config.hidden_size
    rows = [int(np.prod(s[:-1])) for s in shapes_in(jaxpr) if s and s[-1] == v and s[:-1] != (d,)]
    return max(rows)


def test_logits_of_a_whole_batch_never_exist(decoder, params, batch):
    # The head's gradient, [D, V] with D = 16, is no logits; a chunk of at most 7 predictions is a
    # stretch of 7 // B of each row.
    assert most_logits(decoder, params, batch, chunk=7) == 7 // B * B
    assert most_logits(decoder, params, batch, chunk=30) == B * T


def test_entropy_is_left_out_on_request(decoder, params, batch):
    scores = jax.eval_shape(make_score_fn(decoder, entropy=False), params, batch)
    assert scores.entropy is None
    assert scores.logprobs.shape == (B, T)


def test_values_come_from_the_scalar_head_with_and_without_the_vocabulary(
    decoder, params, batch, whole
):
    value = jax.jit(make_value_fn(decoder))
    alone = value(params, batch)
    np.testing.assert_allclose(alone, whole[0].values, atol=1e-5)
    doubled = value(params | {"value_head": 2 * params["value_head"]}, batch)
    np.testing.assert_allclose(doubled, 2 * alone, rtol=1e-5, atol=1e-6)


def test_expert_load_counts_real_tokens_only(decoder, batch, whole):
    scores, _ = whole
    real = np.asarray(batch.segment_ids) > 0
    used = np.asarray(scores.routing)[real][:, 0]
    expected = np.bincount(used.ravel(), minlength=decoder.config.num_experts)
    assert scores.expert_load.tolist() == [expected.tolist()]
    assert scores.expert_load.sum() == 23 * 2  # real tokens, experts each


def test_replay_without_recorded_routing_says_what_is_missing(decoder, params, batch):
    without = dataclasses.replace(batch, routing=None)
    with pytest.raises(ValueError, match=r"replay needs Batch\.routing, which this batch lacks"):
        make_score_fn(decoder, replay=True)(params, without)


def test_recorded_routing_is_used_only_where_replay_is_asked_for(decoder, params, batch, whole):
    replayed = jax.jit(make_score_fn(decoder, replay=True))(params, batch)
    np.testing.assert_array_equal(replayed.routing, batch.routing)
    assert np.any(np.asarray(whole[0].routing) != batch.routing)


def test_a_model_without_a_vocabulary_head_has_values_but_no_logprobs(decoder, params, batch):
    headless = Decoder(dataclasses.replace(decoder.config, vocab_head=False))
    without = {name: leaf for name, leaf in params.items() if name != "head"}
    assert jax.tree.structure(headless.abstract_params()) == jax.tree.structure(without)
    with pytest.raises(ValueError, match="no vocabulary head"):
        make_score_fn(headless)(without, batch)
    values = jax.eval_shape(make_value_fn(headless), without, batch)
    assert values.shape == (B, T)
