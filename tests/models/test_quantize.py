"""The emulated FP8 against ml_dtypes' float8_e4m3fn, and which tensors it touches."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Decoder
from axion_jax.models.quantize import (
    fake_quantize_activations,
    fake_quantize_weight,
    round_to_e4m3,
)


def cast(x):
    """To float8_e4m3fn and back, by ml_dtypes."""
    return np.asarray(x, np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


@pytest.fixture(scope="module")
def e4m3_numbers():
    """Every finite non-negative e4m3 number: 0, seven subnormals 2^-9 .. 7 * 2^-9, .. 448."""
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)  # code 127 is NaN
    return codes.astype(np.float32)


def assert_rounds_as_a_cast(x):
    x = np.concatenate([x, -x]).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(round_to_e4m3)(jnp.asarray(x)), cast(x))


def test_e4m3_numbers_stay_what_they_are(e4m3_numbers):
    assert e4m3_numbers[[1, 7, 8, -1]].tolist() == [2**-9, 7 * 2**-9, 2**-6, 448]
    np.testing.assert_array_equal(round_to_e4m3(jnp.asarray(e4m3_numbers)), e4m3_numbers)


def test_ties_go_to_even_and_their_neighbours_to_the_nearer(e4m3_numbers):
    middle = (e4m3_numbers[1:] + e4m3_numbers[:-1]) / 2  # exact in float32
    for x in (middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf, dtype=np.float32)):
        assert_rounds_as_a_cast(x)


def test_a_dense_sweep_rounds_as_a_cast_does():
    # Every exponent from far below the subnormals to the largest number, 2^10 mantissas each.
    mantissas = 1 + np.arange(2**10) / 2**10
    sweep = (mantissas[None] * 2.0 ** np.arange(-14, 9)[:, None]).ravel()
    assert_rounds_as_a_cast(sweep[sweep <= 448])


def test_subnormals_are_a_grid_of_step_one_512th():
    assert_rounds_as_a_cast(np.linspace(0, 2**-5, 4097))
    small = np.array([2**-10, 2**-10 * 1.001, 3 * 2**-10, 1e-30])
    np.testing.assert_array_equal(
        round_to_e4m3(jnp.asarray(small, jnp.float32)) * 512, [0, 1, 2, 0]
    )


# -- weights --------------------------------------------------------------------------------------


def test_a_block_is_scaled_so_that_its_largest_value_becomes_448():
    # scale = .7 / 448 = .0015625; .1, .2, .3, .7 are 64, 128, 192, 448 of it, all e4m3 numbers.
    # .11 is 70.4 of it, between 64 and 72: 72 * .0015625 = .1125. -.21 is 134.4 -> 128: -.2.
    row = jnp.asarray([[0.1, 0.2, 0.3, 0.7, 0.11, -0.21]])
    np.testing.assert_allclose(
        fake_quantize_weight(row), [[0.1, 0.2, 0.3, 0.7, 0.1125, -0.2]], rtol=1e-6
    )


def blockwise(weight, block=128):
    """By the book: scale = max(|block|, 1e-12) / 448, dequantised as q * scale."""
    out = np.empty_like(weight)
    for i in range(0, weight.shape[0], block):
        for j in range(0, weight.shape[1], block):
            part = weight[i : i + block, j : j + block]
            scale = np.float32(max(np.abs(part).max(), 1e-12) / 448)
            out[i : i + block, j : j + block] = cast(np.clip(part / scale, -448, 448)) * scale
    return out


def test_every_block_has_its_own_scale_and_ragged_edges_are_blocks_too():
    # 130 x 300 is 2 x 3 blocks, the last ones 2 high and 44 wide; magnitudes a decade apart.
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(130, 300)) * np.repeat([1, 10, 100], [128, 128, 44])
    weight[128:] *= 1000
    weight = weight.astype(np.float32)
    got = fake_quantize_weight(jnp.asarray(weight))
    np.testing.assert_allclose(got, blockwise(weight), rtol=1e-6)
    # 3 bits of mantissa: at most 1/16 off, and typically about 1/40.
    error = np.abs(got - weight) / np.abs(weight)
    assert 0.01 < error.mean() < 0.05


def test_a_stack_of_matrices_is_many_matrices():
    weights = np.random.default_rng(1).normal(size=(3, 5, 7)).astype(np.float32)
    weights[1] *= 1e-3
    got = fake_quantize_weight(jnp.asarray(weights))
    np.testing.assert_allclose(got, [blockwise(w) for w in weights], rtol=1e-6)


def test_zeros_stay_zeros_and_the_type_stays_what_it_was():
    for x in (
        fake_quantize_weight(jnp.zeros((3, 5))),
        fake_quantize_activations(jnp.zeros((3, 5))),
    ):
        assert not np.any(x) and np.all(np.isfinite(x))
    assert fake_quantize_weight(jnp.ones((3, 5), jnp.bfloat16)).dtype == jnp.bfloat16


# -- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [5, 128, 300])
def test_activations_have_one_scale_for_each_token_and_group_of_128(width):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 3, width)) * rng.choice([0.01, 1, 100], (2, 3, 1))
    x[..., 128:] *= 30
    x = x.astype(np.float32)
    expected = np.empty_like(x)
    for token in np.ndindex(2, 3):
        for j in range(0, width, 128):
            part = x[token][j : j + 128]
            scale = np.float32(np.abs(part).max() / 448)
            expected[token][j : j + 128] = cast(np.clip(part / scale, -448, 448)) * scale
    np.testing.assert_allclose(fake_quantize_activations(jnp.asarray(x)), expected, rtol=1e-6)


# -- the decoder ----------------------------------------------------------------------------------

LINEAR = ("q", "k", "v", "o", "gate_up", "down")


@pytest.mark.parametrize("keep", [0, 2])
def test_linear_weights_of_later_layers_are_rounded_and_nothing_else(tiny, random_params, keep):
    decoder = Decoder(tiny, high_precision_layers=keep)
    params = random_params(decoder)
    quantized = jax.jit(decoder.quantize)(params)

    def check(path, new, old):
        names = [key.key for key in path]
        first = {"dense": 0, "moe": tiny.num_dense_layers}.get(names[0])
        if first is None or names[-1] not in LINEAR:
            np.testing.assert_array_equal(new, old, err_msg=str(names))
            return
        for layer, (a, b) in enumerate(zip(new, old, strict=True), start=first):
            assert np.array_equal(a, b) == (layer < keep), (names, layer)

    assert jax.tree.structure(quantized) == jax.tree.structure(params)
    jax.tree_util.tree_map_with_path(check, quantized, params)


# Several blocks in every direction: q is [136, 144], o [144, 136], gate and up [136, 130] each.
WIDE = ModelConfig(
    vocab_size=8,
    hidden_size=136,
    num_layers=1,
    num_dense_layers=0,
    num_heads=9,
    num_kv_heads=3,
    head_dim=16,
    intermediate_size=8,
    moe_intermediate_size=130,
    num_experts=2,
    num_experts_per_token=1,
    num_shared_experts=1,
)


def test_weights_are_rounded_in_the_shape_of_their_checkpoint_tensors(random_params):
    wide = Decoder(WIDE, high_precision_layers=0)
    params = random_params(wide)
    quantized = jax.device_get(jax.jit(wide.quantize)(params))
    d = wide.config.hidden_size

    def leaf(tree, *names):
        for name in names:
            tree = tree[name]
        return np.asarray(tree)[0]

    q, o = (leaf(params, "moe", "attention", name) for name in "qo")
    np.testing.assert_allclose(
        leaf(quantized, "moe", "attention", "q").reshape(d, -1),
        blockwise(q.reshape(d, -1)),
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        leaf(quantized, "moe", "attention", "o").reshape(-1, d),
        blockwise(o.reshape(-1, d)),
        rtol=1e-6,
    )
    old, new = (leaf(tree, "moe", "mlp", "gate_up") for tree in (params, quantized))
    for expert in range(wide.config.num_experts):
        for part in (0, 1):
            np.testing.assert_allclose(
                new[expert, :, part], blockwise(old[expert, :, part]), rtol=1e-6
            )
    old, new = (leaf(tree, "moe", "mlp", "shared", "down") for tree in (params, quantized))
    np.testing.assert_allclose(new, blockwise(old), rtol=1e-6)


def test_without_quantisation_parameters_are_returned_untouched(tiny, random_params):
    decoder = Decoder(tiny)
    params = random_params(decoder)
    assert decoder.quantize(params) is params


def test_layers_kept_in_high_precision_do_not_round_their_inputs_either(
    tiny, random_params, forward, packed
):
    # Keeping all layers is the plain decoder, bit for bit; keeping all but the last is not.
    plain = Decoder(dataclasses.replace(tiny, num_layers=2))
    params = random_params(plain)
    tokens = np.random.default_rng(3).integers(0, tiny.vocab_size, (2, 12)).astype(np.int32)
    run = lambda decoder: np.asarray(  # noqa: E731
        forward(decoder, params, tokens, *packed([[12], [12]], 12))[0]
    )
    expected = run(plain)
    np.testing.assert_array_equal(
        run(dataclasses.replace(plain, high_precision_layers=2)), expected
    )
    rounded = run(dataclasses.replace(plain, high_precision_layers=1))
    assert 1e-3 < np.abs(rounded - expected).mean() < 0.3


def test_fp8_layers_cannot_be_scanned(tiny):
    with pytest.raises(ValueError, match="cannot be scanned"):
        Decoder(tiny, scan_layers=True, high_precision_layers=1)
