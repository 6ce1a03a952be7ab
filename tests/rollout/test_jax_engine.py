"""The embedded engine beyond the contract: what compiles when, and FP8 rollouts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.models.decoder import Decoder
from axion_jax.rl.routing import smallest_dtype
from axion_jax.rollout.engine import Sampling
from axion_jax.rollout.jax_engine import JaxEngine, bucket, sample_batch

SAMPLING = Sampling(max_new_tokens=14, stop_ids=(), temperature=0.7, seed=3)


@pytest.fixture
def jax_engine(warm_engine, policy):
    if not isinstance(warm_engine, JaxEngine):
        pytest.skip("for the embedded engine only")
    warm_engine.wake()
    warm_engine.update_weights(policy.params, 7)
    return warm_engine


def test_lengths_and_counts_inside_one_bucket_share_one_compilation(jax_engine):
    # length_multiple=16: prompts of 1..16 and limits of 1..16; max_batch=8: any number of prompts.
    def generate(num_prompts, length, limit, **changes):
        prompts = [np.full(length, 5, np.int32)] * num_prompts
        sampling = dataclasses.replace(SAMPLING, max_new_tokens=limit, **changes)
        return jax_engine.generate(prompts, sampling)

    generate(1, 16, 16)
    compiled = jax_engine._run._cache_size()
    generate(1, 1, 1)
    generate(8, 9, 12, temperature=0.0)
    generate(3, 16, 7, seed=99, stop_ids=(1, 2, 3))
    generate(20, 2, 16, temperature=1.5)
    assert jax_engine._run._cache_size() == compiled
    # The next bucket does compile: the count would notice.
    generate(1, 33, 1)
    assert jax_engine._run._cache_size() == compiled + 1


def test_another_batch_size_gives_the_same_tokens(jax_engine, policy, prompts):
    other = JaxEngine(policy.decoder, max_batch=3, length_multiple=5)
    other.update_weights(policy.params, 1)
    expected = jax_engine.generate(prompts, SAMPLING)
    for a, b in zip(other.generate(prompts, SAMPLING), expected, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        np.testing.assert_array_equal(np.sort(a.routed_experts), np.sort(b.routed_experts))


def test_more_stop_ids_than_there_is_room_for_are_refused(jax_engine, prompts):
    with pytest.raises(ValueError, match="9 stop ids; at most 8"):
        jax_engine.generate(prompts, dataclasses.replace(SAMPLING, stop_ids=tuple(range(9))))


@pytest.fixture(scope="module")
def fp8(policy, prompts):
    """(the engine's decoder, its weights, generations) with all layers but the first in FP8."""
    engine = JaxEngine(policy.decoder, high_precision_layers=1, max_batch=16, length_multiple=16)
    engine.update_weights(policy.params, 1)
    rounded = dataclasses.replace(policy.decoder, high_precision_layers=1)
    return rounded, jax.jit(rounded.quantize)(policy.params), engine.generate(prompts, SAMPLING)


def test_an_fp8_engine_decodes_what_an_fp8_forward_computes(fp8, policy, prompts):
    # Not to 1e-4: a rounding of e4m3 may fall the other way on a value that float32 got 1e-7 off.
    decoder, params, generations = fp8
    same = dataclasses.replace(policy, decoder=decoder, params=params)
    expected = same.logprobs(prompts, generations, 0.7)
    off = [
        np.abs(g.logprobs - logprobs)
        for g, (logprobs, _) in zip(generations, expected, strict=True)
    ]
    assert np.median(np.concatenate(off)) < 1e-5
    assert np.mean(np.concatenate(off)) < 5e-3


def test_an_fp8_engine_differs_from_the_trainer_as_an_fp8_server_does(fp8, policy, prompts):
    # What replayed routing and importance sampling are for: nearly the policy, but not it.
    _, _, generations = fp8
    expected = policy.logprobs(prompts, generations, 0.7)
    off = np.concatenate(
        [
            np.abs(g.logprobs - logprobs)
            for g, (logprobs, _) in zip(generations, expected, strict=True)
        ]
    )
    assert 0.01 < off.mean() < 0.5


def test_a_model_without_experts_can_be_sampled_from(tiny):
    decoder = Decoder(dataclasses.replace(tiny, num_layers=2, num_dense_layers=2))
    rows, width, slots = 4, 8, 8
    like = jax.ShapeDtypeStruct
    inputs = {
        "tokens": like((rows, width), jnp.int32),
        "real": like((rows, width), jnp.int32),
        "unused": like((rows,), jnp.bool_),
        "request": like((rows,), jnp.int32),
    }
    ids, logprobs, routing, *_ = jax.eval_shape(
        functools.partial(sample_batch, decoder, max_slots=slots),
        decoder.abstract_params(),
        inputs,
        jax.random.key(0),
        np.float32(1),
        np.int32(slots),
        np.full(8, -1, np.int32),
    )
    assert ids.shape == logprobs.shape == (rows, slots)
    assert routing.shape == (rows, width + slots, 0, 2)


def test_expert_ids_are_kept_in_the_smallest_signed_type_that_holds_them():
    # 128 experts are ids 0..127, the most that int8 holds.
    assert smallest_dtype(128) == np.int8
    assert smallest_dtype(129) == np.int16


def test_a_bucket_is_the_next_multiple():
    assert [bucket(n, 16) for n in (1, 16, 17, 32)] == [16, 16, 32, 32]
