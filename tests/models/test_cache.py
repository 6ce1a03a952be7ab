"""A cache must not change what the decoder says: pieces of a prompt, and one token at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.models.decoder import Decoder

T, SLOTS = 12, 16
PADDING = np.array([0, 3, 10])
"""Left padding of each row: none; within the first piece; more than two pieces of four."""
REAL = np.arange(T)[None] >= PADDING[:, None]
POSITIONS = np.maximum(np.arange(T)[None] - PADDING[:, None], 0).astype(np.int32)

VARIANTS = {
    "mixture": {},
    "mixture_qk_norm_groups": {
        "qk_norm": True,
        "attention_bias": False,
        "num_groups": 4,
        "topk_groups": 2,
        "routed_scaling_factor": 2.5,
    },
    "dense": {
        "num_dense_layers": 2,
        "qk_norm": True,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
        "tie_embeddings": True,
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def decoder(tiny, request):
    return Decoder(dataclasses.replace(tiny, num_layers=2, **VARIANTS[request.param]))


@pytest.fixture(scope="module")
def params(decoder, random_params):
    return random_params(decoder)


@pytest.fixture(scope="module")
def tokens(decoder):
    rng = np.random.default_rng(3)
    return rng.integers(0, decoder.config.vocab_size, (len(PADDING), T)).astype(np.int32)


@pytest.fixture(scope="module")
def plain(forward, decoder, params, tokens):
    """(logits, routing) of every row in one plain forward."""
    return jax.device_get(forward(decoder, params, tokens, POSITIONS, REAL.astype(np.int32)))


@functools.partial(jax.jit, static_argnums=0)
def extend(decoder, params, tokens, positions, segment_ids, caches, visible, slot):
    hidden, routing, caches = decoder.extend(
        params, tokens, positions, segment_ids, caches, visible, slot
    )
    return decoder.logits(params, hidden), routing, caches


@functools.partial(jax.jit, static_argnums=0)
def decode(decoder, params, tokens, positions, caches, visible, slot):
    hidden, routing, caches = decoder.decode(params, tokens, positions, caches, visible, slot)
    return decoder.logits(params, hidden), routing, caches


def filled(until):
    """[B, S] True for the real tokens among the first `until` slots."""
    visible = np.zeros((len(PADDING), SLOTS), bool)
    visible[:, :until] = REAL[:, :until]
    return visible


def in_pieces(decoder, params, tokens, pieces):
    caches, at, found = decoder.empty_caches(len(tokens), SLOTS), 0, []
    for length in pieces:
        span = slice(at, at + length)
        logits, routing, caches = extend(
            decoder,
            params,
            tokens[:, span],
            POSITIONS[:, span],
            REAL[:, span].astype(np.int32),
            caches,
            filled(at),
            at,
        )
        found.append((logits, routing))
        at += length
    logits, routing = (np.concatenate(x, axis=1) for x in zip(*found, strict=True))
    return logits, routing, caches


@pytest.mark.parametrize("pieces", [(4, 4, 4), (7, 5)], ids=str)
def test_a_prompt_in_pieces_gives_what_it_gives_in_one(decoder, params, tokens, plain, pieces):
    logits, routing, _ = in_pieces(decoder, params, tokens, pieces)
    np.testing.assert_allclose(logits[REAL], plain[0][REAL], atol=2e-5)
    np.testing.assert_array_equal(routing[REAL], plain[1][REAL])
    assert np.all(np.isfinite(logits))


def test_decoding_goes_on_where_pieces_end(decoder, params, tokens, plain):
    logits, _, caches = in_pieces(decoder, params, tokens[:, :8], (4, 4))
    for at in range(8, T):
        logits, routing, caches = decode(
            decoder, params, tokens[:, at], POSITIONS[:, at], caches, filled(at), at
        )
        real = REAL[:, at]
        np.testing.assert_allclose(logits[real], plain[0][real, at], atol=2e-5)
        np.testing.assert_array_equal(routing[real], plain[1][real, at])


def test_caches_keep_the_type_of_activations(decoder):
    half = dataclasses.replace(decoder, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.empty_caches(1, 2))} == {
        jnp.dtype(jnp.bfloat16)
    }
