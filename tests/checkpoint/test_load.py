"""Hugging Face tensors into stacked leaves, on any mesh."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from axion_jax.checkpoint import names
from axion_jax.checkpoint.hf_config import GLM4_MOE, QWEN3_CLASSIFIER, hf_config, model_config
from axion_jax.checkpoint.load import load_params
from axion_jax.checkpoint.source import open_checkpoint
from axion_jax.models.decoder import Decoder

from .conftest import GLM, glm_shapes, random_tensors, write_hf


def f32(x):
    return np.asarray(x).astype(np.float32)


@pytest.fixture(scope="module")
def params(glm_directory):
    return load_params(glm_directory)


def test_every_leaf_holds_the_numbers_of_its_tensors(params, glm_tensors):
    t = {name: f32(tensor) for name, tensor in glm_tensors.items()}
    moe, attention = params["moe"]["mlp"], params["moe"]["attention"]
    np.testing.assert_array_equal(params["embed"], t["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], t["lm_head.weight"].T)
    np.testing.assert_array_equal(
        params["dense"]["mlp"]["down"][0], t["model.layers.0.mlp.down_proj.weight"].T
    )
    # y[n, h] = sum_d W[n * 8 + h, d] x[d]: head 3, feature 5 of layer 2 is row 29.
    np.testing.assert_array_equal(
        attention["q"][1, :, 3, 5], t["model.layers.2.self_attn.q_proj.weight"][29]
    )
    np.testing.assert_array_equal(
        attention["o"][1, 3, 5], t["model.layers.2.self_attn.o_proj.weight"][:, 29]
    )
    np.testing.assert_array_equal(
        attention["k_bias"][0, 1], t["model.layers.1.self_attn.k_proj.bias"][8:]
    )
    np.testing.assert_array_equal(moe["router"][1], t["model.layers.2.mlp.gate.weight"].T)
    np.testing.assert_array_equal(
        moe["router_bias"][1], t["model.layers.2.mlp.gate.e_score_correction_bias"]
    )
    expert = "model.layers.2.mlp.experts.6"
    np.testing.assert_array_equal(moe["gate_up"][1, 6, :, 0], t[f"{expert}.gate_proj.weight"].T)
    np.testing.assert_array_equal(moe["gate_up"][1, 6, :, 1], t[f"{expert}.up_proj.weight"].T)
    np.testing.assert_array_equal(moe["down"][1, 6], t[f"{expert}.down_proj.weight"].T)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        jnp.shape, Decoder(model_config(GLM)).abstract_params()
    )


def test_any_mesh_gives_the_same_numbers(params, glm_directory):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axes = Decoder(model_config(GLM)).logical_axes()
    rules = {"embed": "b", "experts": "a", "heads": "a", "vocab": "a", "ffn": None}
    specs = jax.tree.map(
        lambda names: jax.NamedSharding(mesh, jax.P(*(rules.get(n) for n in names))),
        axes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    sharded = load_params(glm_directory, shardings=specs)
    jax.tree.map(np.testing.assert_array_equal, sharded, params)
    shard = sharded["moe"]["mlp"]["gate_up"].addressable_shards[0].data
    assert shard.shape == (2, 4, 4, 2, 8)  # [L, E/2, D/4, 2, F]


def test_router_and_its_bias_stay_float32_whatever_the_rest_is(glm_directory):
    params = load_params(glm_directory, dtype=jnp.bfloat16)
    dtypes = {names.leaf_path(p): x.dtype for p, x in jax.tree_util.tree_leaves_with_path(params)}
    float32 = {path for path, dtype in dtypes.items() if dtype == jnp.float32}
    assert float32 == {"moe/mlp/router", "moe/mlp/router_bias"}


def test_fused_experts_are_read_like_separate_ones(params, glm_tensors, tmp_path):
    fused = {n: t for n, t in glm_tensors.items() if ".experts." not in n}
    for layer in (1, 2, 3):
        p = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([glm_tensors[f"{p}.{e}.{part}_proj.weight"] for e in range(8)])
            for part in ("gate", "up", "down")
        }
        fused[f"{p}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        fused[f"{p}.down_proj"] = parts["down"]
    directory = write_hf(tmp_path / "fused", GLM, fused)
    jax.tree.map(np.testing.assert_array_equal, load_params(directory), params)


def test_a_reward_model_has_its_score_where_the_value_head_is(tmp_path):
    c = {k: v for k, v in GLM.items() if not k.startswith(("n_", "moe", "num_exp", "first_k"))}
    for name in ["norm_topk_prob", "routed_scaling_factor", "topk_group", "use_qk_norm"]:
        del c[name]
    c |= {
        "architectures": [QWEN3_CLASSIFIER],
        "model_type": "qwen3",
        "num_labels": 1,
        "partial_rotary_factor": 1.0,
        "attention_bias": False,
    }
    dense = GLM | {"first_k_dense_replace": 3, "use_qk_norm": True, "attention_bias": False}
    shapes = glm_shapes(dense | {"num_nextn_predict_layers": 0})
    del shapes["lm_head.weight"]
    tensors = random_tensors(shapes | {"score.weight": (1, 16)})
    loaded = load_params(write_hf(tmp_path / "rm", c, tensors))
    np.testing.assert_array_equal(loaded["value_head"], f32(tensors["score.weight"]).T)
    assert "head" not in loaded and "moe" not in loaded


def test_a_wrong_shape_names_tensor_file_and_the_field_to_look_at(glm_tensors, tmp_path):
    directory = write_hf(tmp_path / "hf", GLM | {"n_routed_experts": 4}, glm_tensors)
    with pytest.raises(ValueError) as error:
        load_params(directory)
    assert (
        "model.layers.1.mlp.gate.e_score_correction_bias: checkpoint has (8,), config asks for (4,)."
        in str(error.value)
    )
    assert "Is num_experts right?" in str(error.value) and "model.safetensors" in str(error.value)


def test_missing_and_unexpected_tensors_are_named(glm_tensors, tmp_path):
    tensors = dict(glm_tensors)
    tensors["model.layers.1.mlp.extra.weight"] = tensors.pop("model.layers.1.mlp.gate.weight")
    directory = write_hf(tmp_path / "hf", GLM, tensors)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate\.weight is missing.*extra\.weight"):
        load_params(directory)


def test_integers_where_weights_belong_are_refused(glm_tensors, tmp_path):
    tensors = glm_tensors | {"model.norm.weight": np.ones(16, np.int32)}
    with pytest.raises(ValueError, match=r"model\.norm\.weight: checkpoint has dtype int32"):
        load_params(write_hf(tmp_path / "hf", GLM, tensors))


def test_a_truncated_file_names_itself_and_the_tensor_it_cuts(glm_directory, glm_tensors, tmp_path):
    directory = write_hf(tmp_path / "hf", GLM, glm_tensors)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated: .*\.weight ends at byte"):
        open_checkpoint(directory)


def test_a_missing_shard_names_what_it_held(glm_tensors, tmp_path):
    directory = write_hf(tmp_path / "hf", GLM, glm_tensors, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"model-00002-of-00003\.safetensors: missing shard.*model\.layers"
    ):
        open_checkpoint(directory)


def test_an_index_that_names_a_tensor_no_shard_has_is_refused(glm_tensors, tmp_path):
    directory = write_hf(tmp_path / "hf", GLM, glm_tensors, shards=3)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.ghost"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"model\.layers\.9\.ghost is in .*model-00001.*lacks it"):
        open_checkpoint(directory)


def test_the_name_table_of_the_released_air_counts_what_the_release_has():
    air = model_config(hf_config(model_config(GLM), GLM4_MOE) | {
        "num_hidden_layers": 46, "n_routed_experts": 128, "num_experts_per_tok": 8,
    })  # fmt: skip
    assert len(names.expected(air, GLM4_MOE)) == 17_925  # 12 + 45 * 398 + 3


def test_names_and_shapes_agree_with_the_data_sheet():
    config = GLM | {"use_qk_norm": True, "num_nextn_predict_layers": 0}
    ours = {n: p.shape for n, p in names.expected(model_config(config), GLM4_MOE).items()}
    assert ours == glm_shapes(config)


def test_pieces_and_tensors_are_inverse_views():
    for leaf in names.leaves(model_config(GLM), GLM4_MOE).values():
        tensor = np.arange(np.prod(leaf.tensor_shape)).reshape(leaf.tensor_shape)
        piece = leaf.to_piece(tensor)
        assert piece.base is not None and piece.shape == leaf.piece_shape
        np.testing.assert_array_equal(leaf.to_tensor(piece), tensor)


def test_bfloat16_survives_the_way_in(params, glm_tensors):
    assert glm_tensors["lm_head.weight"].dtype == ml_dtypes.bfloat16
    assert params["head"].dtype == jnp.float32
