"""Tiny random Hugging Face checkpoints, written with the safetensors package."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [5, 6],
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 48,
}


def glm_shapes(c):
    """Names and shapes of a GLM-4.5 release with this config, written down anew from its data sheet."""
    d, h = c["hidden_size"], c["head_dim"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], d)}

    def mlp(prefix, f):
        shapes[f"{prefix}.gate_proj.weight"] = (f, d)
        shapes[f"{prefix}.up_proj.weight"] = (f, d)
        shapes[f"{prefix}.down_proj.weight"] = (d, f)

    layers = c["num_hidden_layers"] + c.get("num_nextn_predict_layers", 0)
    for i in range(layers):
        p = f"model.layers.{i}"
        shapes[f"{p}.input_layernorm.weight"] = (d,)
        shapes[f"{p}.post_attention_layernorm.weight"] = (d,)
        for part, n in dict(q=c["num_attention_heads"], k=None, v=None).items():
            n = n or c["num_key_value_heads"]
            shapes[f"{p}.self_attn.{part}_proj.weight"] = (n * h, d)
            if c["attention_bias"]:
                shapes[f"{p}.self_attn.{part}_proj.bias"] = (n * h,)
        shapes[f"{p}.self_attn.o_proj.weight"] = (d, c["num_attention_heads"] * h)
        if c["use_qk_norm"]:
            shapes[f"{p}.self_attn.q_norm.weight"] = (h,)
            shapes[f"{p}.self_attn.k_norm.weight"] = (h,)
        if i < c["first_k_dense_replace"]:
            mlp(f"{p}.mlp", c["intermediate_size"])
            continue
        shapes[f"{p}.mlp.gate.weight"] = (c["n_routed_experts"], d)
        shapes[f"{p}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        mlp(f"{p}.mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
        for e in range(c["n_routed_experts"]):
            mlp(f"{p}.mlp.experts.{e}", c["moe_intermediate_size"])
        if i >= c["num_hidden_layers"]:
            shapes[f"{p}.eh_proj.weight"] = (d, 2 * d)
            for name in ("enorm", "hnorm", "shared_head.norm"):
                shapes[f"{p}.{name}.weight"] = (d,)
            for name in ("embed_tokens", "shared_head.head"):
                shapes[f"{p}.{name}.weight"] = (c["vocab_size"], d)
    shapes["model.norm.weight"] = (d,)
    shapes["lm_head.weight"] = (c["vocab_size"], d)
    return shapes


def random_tensors(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape).astype(
            np.float32 if name.endswith("e_score_correction_bias") else ml_dtypes.bfloat16
        )
        for name, shape in shapes.items()
    }


def write_hf(directory, config, tensors, *, shards=1):
    """A release as its vendor writes it: shards with an index, or a single file."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text('{"temperature": 0.6}')
    (directory / "tokenizer.json").write_text('{"not": "a real tokenizer"}')
    (directory / "chat_template.jinja").write_text("[gMASK]<sop>")
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names, weight_map = list(tensors), {}
    size = -(-len(names) // shards)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[i * size : (i + 1) * size]
        save_file({n: tensors[n] for n in chosen}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": weight_map,
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture(scope="session")
def glm_tensors():
    return random_tensors(glm_shapes(GLM))


@pytest.fixture(scope="session")
def glm_directory(glm_tensors, tmp_path_factory):
    """GLM-4.5 in miniature, with a multi-token-prediction layer, in three shards."""
    return write_hf(tmp_path_factory.mktemp("release") / "glm", GLM, glm_tensors, shards=3)
