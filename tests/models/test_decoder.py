"""What must not change what the decoder says: packing, padding, scanning, replaying itself."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn
from axion_jax.types import Batch

T = 12
LENGTHS = [[5, 7], [4, 3, 2]]  # documents of each row; the second row ends in padding
REAL = np.array([[True] * 12, [True] * 9 + [False] * 3])


@pytest.fixture(scope="module")
def decoder(tiny):
    return Decoder(tiny)


@pytest.fixture(scope="module")
def params(decoder, random_params):
    return random_params(decoder)


@pytest.fixture(scope="module")
def tokens(tiny):
    return np.random.default_rng(1).integers(0, tiny.vocab_size, (2, T)).astype(np.int32)


@pytest.fixture(scope="module")
def rows(packed):
    """(positions, segment_ids) of the two packed rows."""
    return packed(LENGTHS, T)


@pytest.fixture(scope="module")
def no_replay(decoder):
    """Leaves every expert to the router, in the same compiled program that replays."""
    return np.full((2, T, *decoder.config.routing_shape), -1, np.int8)


@pytest.fixture(scope="module")
def own(forward, decoder, params, tokens, rows, no_replay):
    """(logits, routing) of the packed rows, experts of the router's own choice."""
    return jax.device_get(forward(decoder, params, tokens, *rows, no_replay))


def documents(tokens):
    """(row, slice, tokens) of every document."""
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        for length, end in zip(lengths, ends, strict=True):
            span = slice(end - length, end)
            yield row, span, tokens[row, span]


# -- packing and padding --------------------------------------------------------------------------


def test_packed_documents_get_the_logits_they_get_alone(
    forward, decoder, params, tokens, own, no_replay, packed
):
    for row, span, ids in documents(tokens):
        alone = np.zeros((2, T), np.int32)
        alone[0, : len(ids)] = ids
        positions, segment_ids = packed([[len(ids)], [T]], T)
        logits, routing = forward(decoder, params, alone, positions, segment_ids, no_replay)
        np.testing.assert_allclose(own[0][row, span], logits[0, : len(ids)], atol=1e-5)
        np.testing.assert_array_equal(own[1][row, span], routing[0, : len(ids)])


def test_one_document_never_hears_of_another_in_its_row(
    forward, decoder, params, tokens, rows, own, no_replay
):
    changed = tokens.copy()
    changed[0, :5] = (changed[0, :5] + 1) % decoder.config.vocab_size  # document 1 of row 0
    changed[1, 4:7] = (changed[1, 4:7] + 1) % decoder.config.vocab_size  # document 2 of row 1
    logits, _ = forward(decoder, params, changed, *rows, no_replay)
    same = np.ones((2, T), bool)
    same[0, :5] = same[1, 4:7] = False
    np.testing.assert_array_equal(logits[same], own[0][same])
    assert not np.any(np.all(logits[~same] == own[0][~same], axis=-1))


def test_a_token_never_hears_of_later_ones(forward, decoder, params, tokens, rows, own, no_replay):
    changed = tokens.copy()
    changed[0, 9] = (changed[0, 9] + 1) % decoder.config.vocab_size
    logits, _ = forward(decoder, params, changed, *rows, no_replay)
    np.testing.assert_array_equal(logits[0, :9], own[0][0, :9])
    # And every later one of its own document does.
    assert np.all(np.abs(logits[0, 9:] - own[0][0, 9:]).max(-1) > 1e-3)


def test_what_stands_in_padding_is_irrelevant(
    forward, decoder, params, tokens, rows, own, no_replay
):
    changed = np.where(REAL, tokens, 7)
    logits, routing = forward(decoder, params, changed, *rows, no_replay)
    np.testing.assert_array_equal(logits[REAL], own[0][REAL])
    np.testing.assert_array_equal(routing[REAL], own[1][REAL])
    assert np.all(np.isfinite(logits))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_equals_none(forward, decoder, params, tokens, own, no_replay, side):
    # The seven tokens of row 0's second document, five of padding.
    real = slice(5, 12) if side == "left" else slice(0, 7)
    ids, positions, segment_ids = np.zeros((3, 2, T), np.int32)
    ids[0, real] = tokens[0, 5:]
    positions[0, real], segment_ids[0, real] = np.arange(7), 1
    segment_ids[1] = 1
    logits, _ = forward(decoder, params, ids, positions, segment_ids, no_replay)
    np.testing.assert_allclose(logits[0, real], own[0][0, 5:], atol=1e-5)


def test_positions_count(forward, decoder, params, tokens, rows, own, no_replay):
    # Rotary embeddings are relative: shifting a document changes nothing, spreading it out does.
    positions, segment_ids = rows
    shifted, _ = forward(decoder, params, tokens, positions + 100, segment_ids, no_replay)
    np.testing.assert_allclose(shifted[REAL], own[0][REAL], atol=2e-4)
    spread, _ = forward(decoder, params, tokens, positions * 2, segment_ids, no_replay)
    assert np.abs(spread - own[0]).max() > 1e-2


# -- replay ---------------------------------------------------------------------------------------


def test_replaying_its_own_routing_reproduces_a_forward_bit_for_bit(
    forward, decoder, params, tokens, rows, own
):
    logits, routing = forward(decoder, params, tokens, *rows, own[1].astype(np.int8))
    np.testing.assert_array_equal(routing, own[1])
    np.testing.assert_array_equal(logits, own[0])


def test_a_forward_without_replay_agrees_with_one_that_replays(
    forward, decoder, params, tokens, rows, own
):
    logits, routing = forward(decoder, params, tokens, *rows)
    np.testing.assert_array_equal(routing, own[1])
    np.testing.assert_allclose(logits, own[0], atol=1e-6)


def test_replaying_another_routing_does_not_reproduce_it(
    forward, decoder, params, tokens, rows, own
):
    other = ((own[1] + 1) % decoder.config.num_experts).astype(np.int8)
    logits, routing = forward(decoder, params, tokens, *rows, other)
    np.testing.assert_array_equal(routing, other)
    assert np.all(np.abs(logits - own[0]).max(-1) > 1e-3)


def test_replay_acts_on_the_layer_and_token_it_names(
    forward, decoder, params, tokens, rows, own, no_replay
):
    # Only token 7 of row 0 and only the last layer: no other token can notice.
    routing = no_replay.copy()
    routing[0, 7, 1] = (own[1][0, 7, 1] + 1) % decoder.config.num_experts
    logits, used = forward(decoder, params, tokens, *rows, routing)
    different = np.any(logits != own[0], axis=-1)
    assert np.argwhere(different).tolist() == [[0, 7]]
    assert np.argwhere(np.any(used != own[1], axis=-1)).tolist() == [[0, 7, 1]]


# -- gradients ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(tokens, rows, no_replay):
    positions, segment_ids = rows
    return Batch(
        tokens=jnp.asarray(tokens),
        targets=jnp.asarray(np.roll(tokens, -1, axis=1)),
        loss_mask=jnp.asarray(REAL),
        segment_ids=jnp.asarray(segment_ids),
        positions=jnp.asarray(positions),
        weights=jnp.asarray(REAL, jnp.float32),
        denominator=jnp.asarray([1.0, 0.0]),
        routing=jnp.asarray(no_replay),
    )


@pytest.fixture(scope="module")
def replayed(batch, own, decoder):
    """Experts moved on by one and two, in the last layer by two and three: never the own pair."""
    moved = own[1] + np.array([[1, 2], [2, 3]])
    moved = (moved % decoder.config.num_experts).astype(np.int8)
    return dataclasses.replace(batch, routing=jnp.asarray(moved))


@partial(jax.jit, static_argnames="decoder")
def loss_and_grads(params, batch, *, decoder):
    score = make_score_fn(decoder, replay=True, entropy=False)
    num_real = jnp.sum(batch.weights)
    return jax.value_and_grad(
        lambda p: -jnp.sum(score(p, batch).logprobs * batch.weights) / num_real
    )(params)


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_recomputing_layers_in_the_backward_pass_changes_neither_loss_nor_gradients(
    decoder, params, replayed, scan_layers
):
    # Replay differs from layer to layer, so scanning has to hand each its own.
    expected_loss, expected = loss_and_grads(params, replayed, decoder=decoder)
    other = dataclasses.replace(decoder, remat=True, scan_layers=scan_layers)
    loss, grads = loss_and_grads(params, replayed, decoder=other)
    assert loss == pytest.approx(float(expected_loss), abs=1e-6)
    worst = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), grads, expected)
    assert max(jax.tree.leaves(worst)) < 2e-6, worst


def test_replayed_experts_that_the_router_would_not_choose_still_teach_it(
    decoder, params, replayed
):
    _, grads = loss_and_grads(params, replayed, decoder=decoder)
    mlp = grads["moe"]["mlp"]
    for layer in range(decoder.config.num_moe_layers):
        reached = np.any(np.asarray(mlp["router"][layer]) != 0, axis=0)
        used = np.asarray(replayed.routing)[REAL][:, layer]
        np.testing.assert_array_equal(reached, np.isin(np.arange(len(reached)), used))
    assert not np.any(mlp["router_bias"])


def test_every_parameter_but_the_correction_bias_gets_a_gradient(decoder, params, batch):
    _, grads = loss_and_grads(params, batch, decoder=decoder)
    silent = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if not np.any(leaf)
    ]
    assert silent == ["['moe']['mlp']['router_bias']"]


# -- variants -------------------------------------------------------------------------------------


def test_without_attention_bias_equals_a_bias_of_zero(forward, decoder, params, tokens, rows):
    names = ("q_bias", "k_bias", "v_bias")
    zeroed, dropped = dict(params), dict(params)
    for stack in ("dense", "moe"):
        attention = params[stack]["attention"]
        zeros = {name: jnp.zeros_like(attention[name]) for name in names}
        rest = {name: leaf for name, leaf in attention.items() if name not in names}
        zeroed[stack] = params[stack] | {"attention": attention | zeros}
        dropped[stack] = params[stack] | {"attention": rest}
    plain = Decoder(dataclasses.replace(decoder.config, attention_bias=False))
    assert jax.tree.structure(plain.abstract_params()) == jax.tree.structure(dropped)
    expected, _ = forward(decoder, zeroed, tokens, *rows)
    logits, _ = forward(plain, dropped, tokens, *rows)
    np.testing.assert_allclose(logits, expected, atol=1e-6)


def test_tied_embeddings_equal_a_head_that_is_the_embedding(forward, decoder, params, tokens, rows):
    tied = Decoder(dataclasses.replace(decoder.config, tie_embeddings=True))
    without = {name: leaf for name, leaf in params.items() if name != "head"}
    assert jax.tree.structure(tied.abstract_params()) == jax.tree.structure(without)
    expected, _ = forward(decoder, params | {"head": params["embed"].T}, tokens, *rows)
    logits, _ = forward(tied, without, tokens, *rows)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_qk_norm_takes_the_length_out_of_queries_and_keys(
    forward, tiny, random_params, rows, tokens
):
    # RMSNorm of q: three times its weight and bias change nothing (up to eps).
    decoder = Decoder(dataclasses.replace(tiny, qk_norm=True, num_layers=2))
    params = random_params(decoder)
    attention = params["moe"]["attention"]
    assert attention["q_norm"].shape == attention["k_norm"].shape == (1, tiny.head_dim)
    louder = {name: 3 * attention[name] for name in ("q", "q_bias")}
    scaled = params | {"moe": params["moe"] | {"attention": attention | louder}}
    expected, _ = forward(decoder, params, tokens, *rows)
    logits, _ = forward(decoder, scaled, tokens, *rows)
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    louder = {"q_norm": 3 * attention["q_norm"]}
    scaled = params | {"moe": params["moe"] | {"attention": attention | louder}}
    logits, _ = forward(decoder, scaled, tokens, *rows)
    assert np.abs(logits - expected).max() > 1e-2


@pytest.mark.parametrize("num_dense_layers", [0, 2])
def test_decoders_of_one_kind_of_layer_only_run_unrolled_and_scanned(
    forward, tiny, random_params, tokens, rows, num_dense_layers
):
    config = dataclasses.replace(tiny, num_layers=2, num_dense_layers=num_dense_layers)
    params = random_params(Decoder(config))
    logits, routing = forward(Decoder(config), params, tokens, *rows)
    scanned = forward(Decoder(config, scan_layers=True), params, tokens, *rows)
    assert np.std(logits) > 0.1
    assert routing.shape == (2, T, 2 - num_dense_layers, 2)
    np.testing.assert_allclose(scanned[0], logits, atol=1e-5)
    np.testing.assert_array_equal(scanned[1], routing)


def test_bfloat16_activations_stay_near_float32(forward, decoder, params, tokens, rows, own):
    # 8 bits of mantissa and two dozen roundings on logits of order 3; replay keeps the experts.
    half = dataclasses.replace(decoder, dtype=jnp.bfloat16)
    logits, _ = forward(half, params, tokens, *rows, own[1].astype(np.int8))
    assert logits.dtype == jnp.float32
    error = np.abs(logits - own[0])[REAL]
    assert 1e-4 < error.mean() < 0.05


# -- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": True, "value_head": True}, {"num_dense_layers": 0}]
)
def test_every_parameter_names_one_logical_axis_for_each_dimension(tiny, changes):
    decoder = Decoder(dataclasses.replace(tiny, **changes))
    axes, shapes = decoder.logical_axes(), decoder.abstract_params()
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    assert jax.tree.structure(axes, is_leaf=is_axes) == jax.tree.structure(shapes)
    jax.tree.map(lambda a, s: _same_rank(a, s), axes, shapes, is_leaf=is_axes)
    assert axes["moe"]["mlp"]["gate_up"] == ("layers", "experts", "embed", None, "ffn")
    assert axes["moe"]["attention"]["o"] == ("layers", "heads", "head_dim", "embed")
    assert axes["embed"] == ("vocab", "embed")


def _same_rank(axes, leaf):
    assert len(axes) == leaf.ndim, (axes, leaf.shape)


def test_initial_logits_are_of_order_one_and_layers_differ(tiny, forward, tokens, rows):
    decoder = Decoder(dataclasses.replace(tiny, num_layers=2, num_dense_layers=0))
    # rbg: the default generator takes four times as long to compile.
    params = jax.jit(decoder.init)(jax.random.key(0, impl="rbg"))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), decoder.abstract_params()
    )
    logits, _ = forward(decoder, params, tokens, *rows)
    assert 0.3 < float(np.std(logits)) < 3
    assert not np.any(params["moe"]["mlp"]["router_bias"])
    first, second = np.asarray(params["moe"]["attention"]["q"])
    assert not np.allclose(first, second)
