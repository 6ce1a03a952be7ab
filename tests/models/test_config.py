"""A config that cannot work says why, in one sentence, when it is put together."""

import dataclasses

import jax
import pytest

from axion_jax.models.config import GLM_45_AIR
from axion_jax.models.decoder import Decoder, num_parameters


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 0}, r"model\.vocab_size=0 must be at least 1\."),
        ({"hidden_size": 0}, r"model\.hidden_size=0 must be at least 1\."),
        ({"num_layers": -1}, r"model\.num_layers=-1 must be at least 1\."),
        ({"num_heads": 0}, r"model\.num_heads=0 must be at least 1\."),
        ({"num_kv_heads": 0}, r"model\.num_kv_heads=0 must be at least 1\."),
        ({"head_dim": 0}, r"model\.head_dim=0 must be at least 1\."),
        ({"intermediate_size": 0}, r"model\.intermediate_size=0 must be at least 1\."),
        (
            {"moe_intermediate_size": 0},
            r"model\.moe_intermediate_size=0 must be at least 1, since num_dense_layers=1 of 3",
        ),
        (
            {"num_experts": 0},
            r"model\.num_experts=0 must be at least 1, since num_dense_layers=1 of 3",
        ),
        (
            {"num_experts_per_token": 0},
            r"model\.num_experts_per_token=0 must be at least 1, since num_dense_layers=1 of 3",
        ),
        (
            {"num_groups": 0},
            r"model\.num_groups=0 must be at least 1, since num_dense_layers=1 of 3",
        ),
        ({"num_shared_experts": -1}, r"model\.num_shared_experts=-1 must be at least 0\."),
        ({"vocab_head": False}, r"vocab_head=False and value_head=False leave the model without"),
        (
            {"num_heads": 32, "num_kv_heads": 5},
            r"num_heads=32 must be a multiple of num_kv_heads=5\.",
        ),
        ({"num_dense_layers": 4}, r"num_dense_layers=4 must lie in 0\.\.num_layers=3\."),
        ({"num_dense_layers": -1}, r"num_dense_layers=-1 must lie in 0\.\.num_layers=3\."),
        # 10 * .5 = 5: rotation pairs dimensions.
        ({"head_dim": 10}, r"head_dim=10 times partial_rotary_factor=0\.5 .* not 5\."),
        ({"partial_rotary_factor": 0.0}, r"partial_rotary_factor=0\.0 .* not 0\."),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor=1\.5 .* not 12\."),
        ({"num_experts_per_token": 9}, r"num_experts_per_token=9 exceeds num_experts=8\."),
        ({"num_groups": 3}, r"num_groups=3 must divide num_experts=8"),
        ({"num_groups": 2, "topk_groups": 3}, r"topk_groups=3 must lie in 1\.\.num_groups\."),
        ({"num_groups": 2, "topk_groups": 0}, r"topk_groups=0 must lie in 1\.\.num_groups\."),
        ({"num_groups": 8, "topk_groups": 8}, r"num_groups=8 leaves 1 expert a group"),
        (
            {"num_groups": 4, "topk_groups": 1, "num_experts_per_token": 3},
            r"topk_groups=1 groups of 2 experts cannot supply num_experts_per_token=3\.",
        ),
    ],
)
def test_a_wrong_config_is_refused_with_the_numbers_that_clash(tiny, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny, **changes)


def test_sizes_of_a_kind_of_layer_that_is_not_there_are_free(tiny):
    dataclasses.replace(tiny, num_dense_layers=0, intermediate_size=0)
    dataclasses.replace(
        tiny, num_dense_layers=3, num_experts=0, num_experts_per_token=0, moe_intermediate_size=0
    )


def test_head_width_is_free_of_the_models_width():
    # 96 heads of 128 on a width of 4096.
    assert GLM_45_AIR.num_heads * GLM_45_AIR.head_dim == 3 * GLM_45_AIR.hidden_size


def test_glm_45_air_has_its_published_number_of_parameters():
    # Embedding and head 2 * 151552 * 4096 = 1 241 513 984, final norm 4 096.
    # A layer's attention: q and o 2 * 4096 * 12288, k and v 2 * 4096 * 1024, biases
    #   12288 + 2 * 1024, two norms 8192: 109 074 432; 46 of them.
    # Dense MLP 3 * 4096 * 10944 = 134 479 872.
    # 45 times: router 4096 * 128, 129 experts of 3 * 4096 * 1408: 2 232 418 304 + 524 288.
    attention = 2 * 4096 * 12288 + 2 * 4096 * 1024 + 12288 + 2 * 1024 + 2 * 4096
    mixture = 4096 * 128 + 129 * 3 * 4096 * 1408
    total = 2 * 151552 * 4096 + 4096 + 46 * attention + 3 * 4096 * 10944 + 45 * mixture
    assert total == 106_852_245_504
    assert num_parameters(GLM_45_AIR) == total


def test_the_correction_bias_is_a_buffer_and_not_counted(tiny):
    params = Decoder(tiny).abstract_params()
    assert params["moe"]["mlp"]["router_bias"].shape == (2, 8)
    leaves = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert num_parameters(tiny) == leaves - 2 * 8
