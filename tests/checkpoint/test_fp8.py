"""FP8 numbers against arithmetic done by hand and by plain numpy, and what is quantised at all."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from axion_jax.checkpoint import convert, fp8
from axion_jax.checkpoint.export import Export, plan_export
from axion_jax.checkpoint.hf_config import GLM4_MOE
from axion_jax.checkpoint.load import load_params
from axion_jax.checkpoint.names import expected
from axion_jax.checkpoint.push import hf_tensors
from axion_jax.checkpoint.source import open_checkpoint
from axion_jax.models.config import GLM_45_AIR

from .conftest import GLM, glm_shapes, random_tensors, write_hf
from .test_convert import all_tensors, to

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = np.dtype(ml_dtypes.bfloat16)


def plain_blocks(weight, block=128):
    """The definition, one block after the other."""
    w = weight.astype(np.float32)
    scales = np.empty([-(-n // block) for n in w.shape], np.float32)
    codes = np.empty(w.shape, E4M3)
    for i, j in np.ndindex(scales.shape):
        at = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
        largest = np.maximum(np.abs(w[at]).max(), np.float32(1e-12))
        scales[i, j] = largest / np.float32(448)
        codes[at] = np.clip(w[at] / scales[i, j], -448, 448).astype(E4M3)
    return codes, scales


def as_e4m3(codes):
    return np.asarray(codes).view(E4M3)


def test_codes_are_those_of_the_format_for_every_float32_near_a_boundary():
    values = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    between = (values[1:] + values[:-1]) / 2  # ties, to be rounded to even
    every = np.concatenate(
        [values, between, np.nextafter(between, np.inf), np.nextafter(between, -np.inf), [-0.0]]
    ).astype(np.float32)
    codes = jax.jit(fp8.e4m3_codes)(every)
    np.testing.assert_array_equal(codes, every.astype(E4M3).view(np.uint8))


def test_a_block_by_hand():
    # max .7: scale .7 / 448 = .0015625; .1 .2 .3 .7 -> 64 128 192 448, each a number of the format.
    weight = np.array([[0.1, 0.2, 0.3, 0.7]], np.float32)
    codes, scales = fp8.quantize_blocks(weight)
    np.testing.assert_array_equal(as_e4m3(codes).astype(np.float32), [[64, 128, 192, 448]])
    assert scales[0, 0] == np.float32(0.7) / np.float32(448)


def test_ragged_and_zero_blocks_by_hand():
    # Four blocks of a 129 x 130 weight: 448, a lone 0.3, a lone 7 in the last row, nothing.
    weight = np.zeros((129, 130), np.float32)
    weight[0, 0], weight[1, 1], weight[5, 129], weight[128, 3] = 1, -448, 0.3, 7
    codes, scales = fp8.quantize_blocks(weight)
    f = np.float32
    np.testing.assert_array_equal(scales, [[1, f(0.3) / f(448)], [0.015625, f(1e-12) / f(448)]])
    np.testing.assert_allclose(scales[0, 1], 6.696429e-4, rtol=1e-6)
    np.testing.assert_allclose(scales[1, 1], 2.2321e-15, rtol=1e-4)
    back = as_e4m3(codes).astype(f) * np.repeat(np.repeat(scales, 128, 0), 128, 1)[:129, :130]
    np.testing.assert_array_equal(back, weight)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (300, 517), (1, 4096), (257, 3)])
def test_blocks_equal_the_plain_loop_bit_for_bit(shape, dtype):
    rng = np.random.default_rng(3)
    weight = rng.normal(size=shape) * np.exp(4 * rng.normal(size=shape))  # many orders of magnitude
    weight[: shape[0] // 2, : min(128, shape[1] // 2)] = 0
    weight = weight.astype(dtype)
    codes, scales = fp8.quantize_blocks(weight)
    want_codes, want_scales = plain_blocks(weight)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(codes, want_codes.view(np.uint8))


def test_channels_have_one_scale_a_row():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(200, 300)).astype(ml_dtypes.bfloat16)
    codes, scales = fp8.quantize_channels(weight)
    w = weight.astype(np.float32)
    want = np.maximum(np.abs(w).max(1, keepdims=True), np.float32(1e-12)) / np.float32(448)
    np.testing.assert_array_equal(scales, want)
    np.testing.assert_array_equal(as_e4m3(codes), np.clip(w / want, -448, 448).astype(E4M3))


@pytest.mark.parametrize("kernel", [fp8.quantize_blocks, fp8.quantize_channels])
def test_panels_change_nothing(kernel, monkeypatch):
    weight = np.random.default_rng(0).normal(size=(700, 130)).astype(np.float32)
    monkeypatch.setattr(fp8, "PANEL", 300 * 130 * 4)  # two blocks of rows at a time
    for ours, whole in zip(fp8.in_panels(kernel, weight), kernel(weight), strict=True):
        np.testing.assert_array_equal(ours, whole)


# -- a whole checkpoint

WIDE = GLM | {
    "hidden_size": 128,
    "head_dim": 64,
    "num_hidden_layers": 5,
    "intermediate_size": 200,  # does not divide by 128
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
}
"""Layer 0 dense, 1..4 with experts, 5 for multi-token prediction."""


@pytest.fixture(scope="module")
def wide_tensors():
    return random_tensors(glm_shapes(WIDE))


@pytest.fixture(scope="module")
def wide_directory(wide_tensors, tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("wide") / "hf", WIDE, wide_tensors, shards=2)


@pytest.fixture(scope="module")
def blocks_directory(wide_directory, tmp_path_factory):
    return to(wide_directory, tmp_path_factory.mktemp("fp8") / "blocks", "sglang_fp8")


def test_linear_layers_after_the_first_three_are_blocks_and_nothing_else_is(
    blocks_directory, wide_tensors
):
    tensors = all_tensors(blocks_directory)
    config = json.loads((blocks_directory / "config.json").read_text())["quantization_config"]
    kept = set(config.pop("modules_to_not_convert"))
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    quantised = {n for n in tensors if f"{n}_scale_inv" in tensors}
    for name, weight in wide_tensors.items():
        linear = "_proj.weight" in name and "eh_proj" not in name
        layer = int(name.split(".")[2]) if "layers" in name else -1
        assert (name in quantised) == (linear and layer >= 3), name
        if name in quantised:
            codes, scales = plain_blocks(weight)
            np.testing.assert_array_equal(tensors[name].view(np.uint8), codes.view(np.uint8))
            np.testing.assert_array_equal(tensors[f"{name}_scale_inv"], scales)
        else:
            np.testing.assert_array_equal(
                tensors[name].view(np.uint8), weight.view(np.uint8), err_msg=name
            )
            if weight.ndim == 2:
                assert name.removesuffix(".weight") in kept
    assert set(tensors) == set(wide_tensors) | {f"{n}_scale_inv" for n in quantised}
    assert not kept & {n.removesuffix(".weight") for n in quantised}
    # An engine asks by the names of its own fused modules.
    assert {"model.layers.1.mlp.experts", "model.layers.2.self_attn.qkv_proj"} <= kept
    assert "model.layers.0.mlp.gate_up_proj" in kept and "model.layers.3.mlp.experts" not in kept
    assert convert.verify(blocks_directory) == sum(t.nbytes for t in tensors.values())


def test_fp8_times_its_scale_is_within_half_a_step_of_the_weight(blocks_directory, wide_tensors):
    tensors = all_tensors(blocks_directory)
    name = "model.layers.4.mlp.experts.3.down_proj.weight"
    back = tensors[name].astype(np.float32) * tensors[f"{name}_scale_inv"]  # one block
    weight = wide_tensors[name].astype(np.float32)
    step = np.maximum(np.abs(weight) * 2**-4, 2**-10 * tensors[f"{name}_scale_inv"])
    assert (np.abs(back - weight) <= step * (1 + 1e-6)).all() and (back != weight).any()


def test_an_fp8_checkpoint_is_no_source_for_anything(blocks_directory):
    with pytest.raises(ValueError, match="quantization_config.*high-precision checkpoint"):
        open_checkpoint(blocks_directory)


def test_channel_layout_is_the_vendors(wide_directory, wide_tensors, tmp_path):
    target = to(wide_directory, tmp_path / "channel", "sglang_fp8_channel")
    tensors = all_tensors(target)
    section = json.loads((target / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "compressed-tensors"
    assert section["format"] == "float-quantized"
    group = section["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"] and group["weights"]["strategy"] == "channel"
    assert group["input_activations"]["strategy"] == "token"
    assert {"lm_head", "model.layers.1.mlp.gate", "model.layers.5.eh_proj"} <= set(
        section["ignore"]
    )
    name = (
        "model.layers.0.mlp.down_proj.weight"  # dense first layer, ragged: quantised all the same
    )
    assert tensors[name].dtype == E4M3 and tensors[f"{name}_scale"].shape == (128, 1)
    weight = wide_tensors[name].astype(np.float32)
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(448)
    np.testing.assert_array_equal(tensors[f"{name}_scale"], scale)


def test_bf16_export_has_nothing_else_but_the_correction_bias(wide_directory, tmp_path):
    target = to(wide_directory, tmp_path / "bf16", "sglang_bf16")
    dtypes = {n: t.dtype for n, t in all_tensors(target).items()}
    wide = {n for n, dtype in dtypes.items() if dtype != BF16}
    assert wide == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(1, 6)}


def test_values_that_are_not_finite_are_refused_by_name(wide_tensors, tmp_path):
    name = "model.layers.3.mlp.experts.2.up_proj.weight"
    broken = dict(wide_tensors)
    broken[name] = wide_tensors[name].copy()
    broken[name][3, 4] = np.inf
    source = write_hf(tmp_path / "hf", WIDE, broken)
    with pytest.raises(
        ValueError, match=r"experts\.2\.up_proj\.weight has values that are not finite"
    ):
        to(source, tmp_path / "out", "sglang_fp8")
    assert not (tmp_path / "out").exists()


# -- pushed from memory


@pytest.mark.parametrize("kind", ["hf", "sglang_bf16", "sglang_fp8", "sglang_fp8_channel"])
def test_pushed_tensors_have_the_bytes_of_the_file(kind, wide_directory, tmp_path):
    config = open_checkpoint(wide_directory).config
    params = load_params(wide_directory)
    rng = np.random.default_rng(1)  # as after training: numbers that only float32 holds
    params = jax.tree.map(lambda x: x + 1e-5 * rng.normal(size=x.shape).astype(np.float32), params)
    from axion_jax.checkpoint.training import TrainingCheckpoints

    checkpoints = TrainingCheckpoints(tmp_path / "run" / "rlhf" / "checkpoints")
    checkpoints.save(1, {"params": params}, {})
    checkpoints.close()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model": config.__dict__}))
    written = all_tensors(to(tmp_path / "run" / "rlhf", tmp_path / "file", kind))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    params["moe"]["mlp"]["gate_up"] = jax.device_put(
        params["moe"]["mlp"]["gate_up"], jax.NamedSharding(mesh, jax.P(None, None, "x"))
    )
    pushed = dict(hf_tensors(params, config, GLM4_MOE, Export(to=kind)))
    assert list(pushed) == list(json_order(tmp_path / "file"))
    for name, array in pushed.items():
        assert (array.dtype, array.shape) == (written[name].dtype, written[name].shape), name
        np.testing.assert_array_equal(array.view(np.uint8), written[name].view(np.uint8), name)


def json_order(directory):
    data = (directory / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def test_a_float32_weight_is_quantised_as_it_is_and_not_by_way_of_bfloat16():
    # 1 + 2^-9 rounds to 1 in bfloat16; against a block maximum of 448 with scale 1, in e4m3 both
    # are 1, so look where it shows: 1.0625 + 2^-9 is past the middle of 1 and 1.125, bfloat16 is on it.
    weight = np.array([[448.0, 1.0625 + 2**-9]], np.float32)
    direct = as_e4m3(fp8.quantize_blocks(weight)[0]).astype(np.float32)
    rounded = as_e4m3(fp8.quantize_blocks(weight.astype(ml_dtypes.bfloat16))[0]).astype(np.float32)
    assert (direct[0, 1], rounded[0, 1]) == (1.125, 1.0)


# -- which server it is for


def air_plan(**options):
    shapes = {n: (p.shape, BF16) for n, p in expected(GLM_45_AIR, GLM4_MOE).items()}
    return plan_export(shapes, GLM_45_AIR, Export(to="sglang_fp8", **options), trained=False)


def test_air_on_one_chip_loses_only_its_ragged_first_layer():
    # 10944 = 85.5 * 128: gate and up are merged, so a block would straddle them. 1408 = 11 * 128.
    plan = air_plan(high_precision_layers=0)
    skipped = {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert set(plan.skipped) == skipped
    assert "10944" in plan.skipped["model.layers.0.mlp.gate_proj"]


def test_air_over_eight_chips_also_loses_its_shared_experts():
    plan = air_plan(tensor_parallel=8, expert_parallel=8)
    late = {m for m in plan.skipped if int(m.split(".")[2]) >= 3}
    shared = (f"model.layers.{i}.mlp.shared_experts" for i in range(3, 46))
    assert late == {f"{prefix}.{part}_proj" for prefix in shared for part in ("gate", "up", "down")}
    experts = [n for n in plan.encodings if ".experts." in n and int(n.split(".")[2]) >= 3]
    assert all(len(plan.encodings[n].outputs) == 2 for n in experts)


def test_key_heads_narrower_than_a_block_stay_in_high_precision():
    # 2 heads of 32 make 64 columns of keys, merged with queries: no block may hold both.
    config = dataclasses.replace(
        GLM_45_AIR, head_dim=32, num_kv_heads=2, num_layers=5, num_experts=8
    )
    shapes = {n: (p.shape, BF16) for n, p in expected(config, GLM4_MOE).items()}
    plan = plan_export(shapes, config, Export(to="sglang_fp8"), trained=False)
    late = {m for m in plan.skipped if int(m.split(".")[2]) >= 3}
    assert late == {f"model.layers.{i}.self_attn.{p}_proj" for i in (3, 4) for p in "qkv"}


def test_experts_split_inside_a_block_are_refused_with_the_way_out():
    with pytest.raises(ValueError) as error:
        air_plan(tensor_parallel=8)
    message = str(error.value)
    assert "model.layers.3.mlp.experts" in message and "176 columns" in message  # 1408 / 8
    assert "--expert_parallel=8" in message


def test_a_parallelism_that_sglang_has_not_is_refused():
    with pytest.raises(ValueError, match="expert_parallel=3 must divide tensor_parallel=8"):
        Export(to="sglang_fp8", tensor_parallel=8, expert_parallel=3)


def test_a_model_too_small_for_blocks_is_refused(glm_directory, tmp_path):
    # Three layers, all of them among the first three; the prediction layer is 8 wide.
    with pytest.raises(ValueError, match="Nothing in this model can be quantised"):
        convert.prepare(
            glm_directory, tmp_path / "x", Export(to="sglang_fp8", high_precision_layers=4)
        )


def test_the_quantised_copy_in_the_engine_and_the_file_share_one_definition():
    from axion_jax.models.quantize import fake_quantize_weight

    weight = np.random.default_rng(0).normal(size=(256, 384)).astype(np.float32)
    codes, scales = fp8.quantize_blocks(weight)
    wide = np.repeat(np.repeat(np.asarray(scales), 128, 0), 128, 1)
    back = as_e4m3(codes).astype(np.float32) * wide
    np.testing.assert_allclose(fake_quantize_weight(jnp.asarray(weight)), back, rtol=1e-6)
