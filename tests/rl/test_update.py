"""The update step on a bigram model: one table of logits, one row for each input token."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axion_jax.rl.losses import grpo_loss, gspo_loss, sft_loss
from axion_jax.rl.update import make_score_step, make_update_step
from axion_jax.types import Batch, Scores, TrainState

V, T = 8, 6
GSPO = partial(gspo_loss, clip_low=0.2, clip_high=0.28)
GRPO = partial(grpo_loss, clip_low=0.2, clip_high=0.28)


def score(params, batch):
    logprobs_BTV = jax.nn.log_softmax(params["table"][batch.tokens])
    return Scores(
        logprobs=jnp.take_along_axis(logprobs_BTV, batch.targets[..., None], axis=-1)[..., 0],
        entropy=-jnp.sum(jnp.exp(logprobs_BTV) * logprobs_BTV, axis=-1),
        # Two "experts" of one layer: how many tokens are even, how many odd.
        expert_load=jnp.stack(
            [jnp.sum((batch.tokens % 2 == k) & (batch.segment_ids > 0)) for k in (0, 1)]
        )[None].astype(jnp.float32),
    )


def jit_step(*args, **options):
    return jax.jit(make_update_step(*args, **options))


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    return {"table": jnp.asarray(rng.normal(size=(V, V)), jnp.float32), "bias": jnp.zeros(2)}


def make_state(optimizer, params=None):
    params = make_params() if params is None else params
    return TrainState(
        step=jnp.int32(0), params=params, opt_state=optimizer.init(params), skipped=jnp.int32(0)
    )


def make_batch(num_rows=8, seed=0):
    """[num_rows, T] numpy rows of two sequences each (4 and 2 long), counted in the denominator."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, T)
    mask = rng.random(shape) < 0.7
    mask[:, 0] = True
    segment_ids = np.broadcast_to([1, 1, 1, 1, 2, 2], shape).astype(np.int32)
    tokens, targets = rng.integers(0, V, (2, *shape)).astype(np.int32)
    old = np.asarray(jax.nn.log_softmax(make_params(1)["table"]))[tokens, targets]
    return Batch(
        tokens=tokens,
        targets=targets,
        loss_mask=mask,
        segment_ids=segment_ids,
        positions=np.broadcast_to([0, 1, 2, 3, 0, 1], shape).astype(np.int32),
        weights=(mask * rng.random(shape)).astype(np.float32),
        denominator=np.full(num_rows, 2, np.float32),
        advantages=np.where(segment_ids == 1, 1.0, -1.0).astype(np.float32),
        old_logprobs=old + 0.05 * rng.normal(size=shape).astype(np.float32),
    )


def cut(batch, num_microbatches, *, storage=None, junk=np.nan):
    """The rows in `num_microbatches` equal parts, with unused storage filled with junk."""

    def leaf(x):
        parts = x.reshape(num_microbatches, -1, *x.shape[1:])
        unused = (storage or num_microbatches) - num_microbatches
        fill = junk if x.dtype == np.float32 else 1
        rest = np.full((unused, *parts.shape[1:]), fill, x.dtype)
        return jnp.asarray(np.concatenate([parts, rest]))

    return jax.tree.map(leaf, batch)


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def assert_close(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), **tolerance)


@pytest.mark.parametrize("loss_fn", [GSPO, GRPO, sft_loss], ids=["gspo", "grpo", "sft"])
def test_the_number_of_micro_batches_changes_nothing(loss_fn):
    optimizer = optax.sgd(1.0)
    step = jit_step(score, loss_fn, optimizer)
    state, metrics = step(make_state(optimizer), cut(make_batch(), 1), 1)
    assert metrics["grad_norm"] > 0.01
    for count in (2, 8):
        again, again_metrics = step(make_state(optimizer), cut(make_batch(), count), count)
        assert_close(again.params, state.params, atol=1e-6)
        assert again_metrics.keys() == metrics.keys()
        assert_close(again_metrics, metrics, rtol=1e-5, atol=1e-6)


def test_one_compilation_serves_every_count_and_unused_storage_is_never_computed():
    optimizer, traces = optax.sgd(1.0), []

    def counted(params, batch):
        traces.append(batch.tokens.shape)
        return score(params, batch)

    step = jit_step(counted, GSPO, optimizer)
    rows = make_batch(4)
    state, metrics = step(make_state(optimizer), cut(rows, 2, storage=3), 2)
    num_traces = len(traces)
    for count in (1, 3):
        used = jax.tree.map(lambda x, count=count: x[: 2 * count], make_batch(6))
        full = cut(used, count, storage=3)
        assert np.isfinite(step(make_state(optimizer), full, count)[1]["loss"])
    assert len(traces) == num_traces
    exact, exact_metrics = jit_step(score, GSPO, optimizer)(make_state(optimizer), cut(rows, 2), 2)
    assert_close(state.params, exact.params, atol=1e-7)
    assert_close(metrics, exact_metrics, rtol=1e-6)


def test_the_step_is_plain_gradient_descent_on_the_loss_of_the_whole_batch():
    batch = make_batch()

    def whole(params):
        rows = jax.tree.map(jnp.asarray, batch)
        return GSPO(score(params, rows), rows)[0].value

    params = make_params()
    loss, grads = jax.value_and_grad(whole)(params)
    optimizer = optax.sgd(0.5)
    step = jit_step(score, GSPO, optimizer)
    state, metrics = step(make_state(optimizer), cut(batch, 4), 4)
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    assert_close(state.params, expected, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    assert (state.step, state.skipped, metrics["update_skipped"]) == (1, 0, 0)


def test_grad_norm_is_taken_before_clipping():
    def run(optimizer):
        step = jit_step(score, GSPO, optimizer)
        return step(make_state(optimizer), cut(make_batch(), 2), 2)

    free, clipped = (
        run(optax.sgd(1.0)),
        run(optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))),
    )
    assert free[1]["grad_norm"] == clipped[1]["grad_norm"] > 1e-3
    moved = jax.tree.map(jnp.subtract, clipped[0].params, make_params())
    np.testing.assert_allclose(optax.tree.norm(moved), 1e-3, rtol=1e-3)


@pytest.mark.parametrize("loss_fn", [GSPO, GRPO], ids=["gspo", "grpo"])
def test_positive_advantage_raises_a_logprob_and_negative_lowers_it(loss_fn):
    # distinct input tokens, so that no two predictions share a row of the table
    batch = dataclasses.replace(
        make_batch(1),
        tokens=np.arange(T, dtype=np.int32)[None],
        loss_mask=np.ones((1, T), bool),
        weights=np.ones((1, T), np.float32),
    )
    before = score(make_params(), batch).logprobs
    batch = dataclasses.replace(batch, old_logprobs=np.asarray(before))
    optimizer = optax.sgd(0.1)
    state, _ = jit_step(score, loss_fn, optimizer)(make_state(optimizer), cut(batch, 1), 1)
    moved = np.asarray(score(state.params, batch).logprobs - before)
    assert (np.sign(moved) == batch.advantages).all()


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_loss_that_is_not_finite_leaves_everything_bit_identical(where):
    optimizer = optax.adamw(1e-2)
    step = jit_step(score, GSPO, optimizer, after_update=lambda p, load: p)
    state, _ = step(make_state(optimizer), cut(make_batch(), 4), 4)
    bad = make_batch()
    row = 0 if where == "first" else -1
    bad.old_logprobs[row, 0] = np.nan  # an unmasked position
    after, metrics = step(state, cut(bad, 4), 4)
    assert_same(after.params, state.params)
    assert_same(after.opt_state, state.opt_state)
    assert (after.step, after.skipped, metrics["update_skipped"]) == (1, 1, 1)
    assert not np.isfinite(metrics["loss"])
    resumed, metrics = step(after, cut(make_batch(), 4), 4)
    assert (resumed.step, resumed.skipped, metrics["update_skipped"]) == (2, 1, 0)


def test_a_gradient_that_is_not_finite_under_a_finite_loss_skips_the_update_too():
    def rooted(params, batch):
        scores = score(params, batch)
        # sqrt(0) = 0 with an infinite slope
        return dataclasses.replace(scores, logprobs=scores.logprobs + jnp.sqrt(params["bias"][0]))

    optimizer = optax.sgd(0.1)
    state, metrics = jit_step(rooted, sft_loss, optimizer)(
        make_state(optimizer), cut(make_batch(), 2), 2
    )
    assert np.isfinite(metrics["loss"])
    assert metrics["update_skipped"] == 1
    assert_same(state.params, make_params())


def test_a_fully_masked_step_has_loss_0_and_moves_nothing():
    batch = make_batch()
    batch = dataclasses.replace(
        batch, loss_mask=np.zeros_like(batch.loss_mask), weights=np.zeros_like(batch.weights)
    )
    optimizer = optax.sgd(1.0)
    for denominator in (batch.denominator, np.zeros_like(batch.denominator)):
        masked = dataclasses.replace(batch, denominator=denominator)
        state, metrics = jit_step(score, GSPO, optimizer)(make_state(optimizer), cut(masked, 2), 2)
        assert (metrics["loss"], metrics["grad_norm"], metrics["update_skipped"]) == (0, 0, 0)
        assert_same(state.params, make_params())


def test_after_update_sees_the_new_parameters_and_the_load_of_all_micro_batches():
    seen = []

    def balance(params, load):
        seen.append(load)
        return params | {"bias": params["bias"] + load[0]}

    optimizer, batch = optax.sgd(1.0), make_batch()
    step = jit_step(score, GSPO, optimizer, after_update=balance)
    plain = jit_step(score, GSPO, optimizer)
    state, _ = step(make_state(optimizer), cut(batch, 4), 4)
    even = int((batch.tokens % 2 == 0).sum())
    np.testing.assert_array_equal(state.params["bias"], [even, batch.tokens.size - even])
    assert_same(
        state.params["table"], plain(make_state(optimizer), cut(batch, 4), 4)[0].params["table"]
    )
    assert len(seen) == 1


def test_after_update_without_an_expert_load_is_refused():
    def dense(params, batch):
        return dataclasses.replace(score(params, batch), expert_load=None)

    optimizer = optax.sgd(1.0)
    step = jit_step(dense, GSPO, optimizer, after_update=lambda p, load: p)
    with pytest.raises(ValueError, match=r"Scores\.expert_load, which this model does not return"):
        step(make_state(optimizer), cut(make_batch(), 1), 1)


def test_bfloat16_parameters_accumulate_gradients_in_float32_and_keep_their_types():
    # 256 + 1 is 256 in bfloat16: an accumulator of that type would stop half-way through 512
    # equal micro-batches
    optimizer = optax.adam(1e-3)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_params())
    batch = jax.tree.map(lambda x: np.repeat(x[:1], 512, axis=0), make_batch())

    def half_score(params, batch):
        return score(jax.tree.map(lambda p: p.astype(jnp.float32), params), batch)

    step = jit_step(half_score, sft_loss, optimizer)
    state = make_state(optimizer, params)
    after, many = step(state, cut(batch, 512), 512)
    _, once = step(state, cut(batch, 1), 1)
    np.testing.assert_allclose(many["grad_norm"], once["grad_norm"], rtol=1e-2)
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]


def test_rows_and_parameters_over_eight_devices_change_nothing():
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    optimizer = optax.adam(1e-2)
    step = jit_step(score, GSPO, optimizer)
    expected, expected_metrics = step(make_state(optimizer), cut(make_batch(16), 2), 2)

    def place(tree, spec):
        return jax.device_put(tree, NamedSharding(mesh, spec))

    sharded = {"table": PartitionSpec("data"), "bias": PartitionSpec()}
    params = {k: place(v, sharded[k]) for k, v in make_params().items()}
    batch = place(cut(make_batch(16), 2), PartitionSpec(None, "data"))
    state, metrics = jax.jit(step)(make_state(optimizer, params), batch, 2)
    assert_close(state.params, expected.params, atol=1e-6)
    assert_close(metrics, expected_metrics, rtol=1e-5, atol=1e-6)


def test_score_step_gives_each_micro_batch_its_logprobs_and_0_in_unused_storage():
    batch = make_batch(4)
    scored = jax.jit(make_score_step(score))(make_params(), cut(batch, 2, storage=3), 2)
    direct = score(make_params(), batch)
    assert scored.keys() == {"logprobs", "entropy"}
    for name, array in scored.items():
        assert array.shape == (3, 2, T)
        np.testing.assert_allclose(
            array[:2].reshape(4, T), getattr(direct, name), rtol=1e-6, atol=1e-7
        )
        assert not array[2].any()


def test_score_step_of_a_model_without_entropy_leaves_it_out():
    def without(params, batch):
        return Scores(logprobs=score(params, batch).logprobs)

    assert make_score_step(without)(make_params(), cut(make_batch(2), 1), 1).keys() == {"logprobs"}
