"""config.json to ModelConfig and back; whatever we would not honour is refused by name."""

import dataclasses

import pytest

from axion_jax.checkpoint.hf_config import (
    GLM4_MOE,
    LLAMA,
    QWEN3,
    QWEN3_CLASSIFIER,
    hf_config,
    model_config,
)
from axion_jax.models.config import GLM_45_AIR

AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
"""GLM-4.5-Air as released."""

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def test_glm_45_air_as_released_is_the_model_we_know():
    assert model_config(AIR) == dataclasses.replace(GLM_45_AIR, initializer_range=0.02)


def test_transformers_5_spelling_says_the_same():
    new = {k: v for k, v in AIR.items() if not k.startswith("rope_") and k != "torch_dtype"}
    del new["partial_rotary_factor"]
    new |= {
        "dtype": "bfloat16",
        "bos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000,
            "partial_rotary_factor": 0.5,
        },
    }
    assert model_config(new) == model_config(AIR)


def test_an_absent_rope_theta_is_ten_thousand_as_in_transformers():
    assert model_config({k: v for k, v in AIR.items() if k != "rope_theta"}).rope_theta == 10_000.0


def test_qwen3_and_llama_are_dense_to_the_last_layer():
    qwen, llama = model_config(QWEN), model_config(SMALL_LLAMA)
    assert (qwen.num_dense_layers, qwen.qk_norm, qwen.partial_rotary_factor) == (36, True, 1.0)
    assert (llama.num_dense_layers, llama.qk_norm, llama.head_dim) == (30, False, 576 // 9)
    assert llama.tie_embeddings and not qwen.tie_embeddings


def test_a_sequence_classifier_has_a_scalar_head_and_no_vocabulary():
    scalar = QWEN | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "x"}}
    config = model_config(scalar | {"tie_word_embeddings": True})
    assert (config.vocab_head, config.value_head, config.tie_embeddings) == (False, True, False)
    del scalar["id2label"]
    with pytest.raises(ValueError, match="2 labels.*num_labels=1"):  # transformers' default is two
        model_config(scalar)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters of type 'llama3'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"n_routed_expert": 64}, "n_routed_expert=64.*misspelt 'n_routed_experts'"),
        ({"head_dim": None}, "lacks head_dim"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"architectures": ["Glm4MoeLiteForCausalLM"]}, "Glm4MoeLiteForCausalLM.*Supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"num_key_value_heads": 7}, "config.json: num_heads=96 must be a multiple"),
    ],
)
def test_what_we_would_not_honour_is_refused_by_name(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        model_config(AIR | changes)


def test_dense_families_refuse_a_bias_on_the_output_projection_and_sliding_windows():
    with pytest.raises(ValueError, match="attention_bias=true.*output projection"):
        model_config(QWEN | {"attention_bias": True})
    with pytest.raises(ValueError, match="use_sliding_window=True"):
        model_config(QWEN | {"use_sliding_window": True})
    with pytest.raises(ValueError, match="sliding_window=4096"):
        model_config(SMALL_LLAMA | {"sliding_window": 4096})


@pytest.mark.parametrize(
    ("family", "source"),
    [
        (GLM4_MOE, AIR),
        (GLM4_MOE, AIR | {"n_group": 4, "topk_group": 2, "use_qk_norm": True}),
        (QWEN3, QWEN),
        (QWEN3_CLASSIFIER, QWEN | {"architectures": [QWEN3_CLASSIFIER], "num_labels": 1}),
        (LLAMA, SMALL_LLAMA),
    ],
)
def test_a_config_written_and_read_again_is_the_same(family, source):
    config = model_config(source)
    assert model_config(hf_config(config, family)) == config


def test_a_family_that_cannot_express_a_config_says_which_field():
    config = dataclasses.replace(model_config(QWEN), qk_norm=False)
    with pytest.raises(ValueError, match="cannot express model.qk_norm=False"):
        hf_config(config, QWEN3)
