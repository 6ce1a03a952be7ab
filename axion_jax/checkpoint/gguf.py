"""Llama models from llama.cpp's GGUF files, under Hugging Face's names, with their tokenizer.

A GGUF file is self-contained: sizes, tokenizer, chat template and (usually quantised) weights. This
reader gives what a Hugging Face directory would hold, so everything that reads those reads these:
weights dequantised to float32, a `config.json`, a fast tokenizer.

The surprise: llama.cpp rotates neighbouring features (2i, 2i+1) where Hugging Face and this package
rotate the halves (i, i + H/2). Its converter therefore permuted the rows of every head's query and
key projection, and we put them back. Forget it and the model babbles, fluently.

Needs the `gguf` package: pip install axion_jax[gguf].
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4
"""GGUF's types of tokens that are cut out of the text before anything else."""


class GgufFile:
    """One GGUF file of a Llama model.

    Raises:
      ImportError: the `gguf` package is not installed.
      ValueError: the file is no GGUF file, or of another architecture.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import gguf
        except ImportError:
            raise ImportError(
                "Reading GGUF files needs the gguf package: pip install axion_jax[gguf]."
            ) from None
        self.path = pathlib.Path(path)
        self._dequantize = gguf.dequantize
        try:
            self._reader = gguf.GGUFReader(str(self.path))
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} is no readable GGUF file: {error}") from None
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"{path} holds a model of architecture {architecture!r}; only 'llama' is read."
            )

    def config(self) -> dict[str, Any]:
        """What Hugging Face's `config.json` would say."""
        field = lambda name: self._field(f"llama.{name}")  # noqa: E731
        heads = field("attention.head_count")
        names = {tensor.name for tensor in self._reader.tensors}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": len(self._field("tokenizer.ggml.tokens")),
            "hidden_size": field("embedding_length"),
            "intermediate_size": field("feed_forward_length"),
            "num_hidden_layers": field("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": field("attention.head_count_kv"),
            "head_dim": self._field(
                "llama.attention.key_length", field("embedding_length") // heads
            ),
            "rope_theta": self._field("llama.rope.freq_base", 10_000.0),
            # The file has it as float32, which would print as 9.999999747378752e-06.
            "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),
            "max_position_embeddings": field("context_length"),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", None),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id", None),
        }

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(Hugging Face's name, float32 array in Hugging Face's layout) of every tensor, one at a
        time."""
        config = self.config()
        heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
        for tensor in self._reader.tensors:
            value = self._dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            if tensor.name in _NAMES:
                yield _NAMES[tensor.name], value
                continue
            block, layer, part, kind = (tensor.name.split(".") + [""] * 4)[:4]
            if block != "blk" or kind != "weight" or part not in _LAYER_NAMES:
                raise ValueError(
                    f"{self.path}: tensor {tensor.name!r} belongs to no plain Llama; it would be lost."
                )
            if part in heads:
                value = halves_from_neighbours(value, heads[part])
            yield f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", value

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Byte-level BPE from the file's own vocabulary and merges, with its chat template."""
        if (kind := self._field("tokenizer.ggml.model")) != "gpt2":
            raise ValueError(f"{self.path}: tokenizer of type {kind!r}; only 'gpt2' is read.")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        known = {
            "gpt-2": byte_level,
            "smollm": pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), byte_level]
            ),
        }
        pre = self._field("tokenizer.ggml.pre", "gpt-2")
        if pre not in known:
            raise ValueError(
                f"{self.path}: text is to be split as {pre!r}; known: {', '.join(known)}."
            )
        tokens = self._field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        backend.pre_tokenizer = known[pre]
        backend.decoder = decoders.ByteLevel()
        types = self._field("tokenizer.ggml.token_type")
        backend.add_tokens(
            [
                AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )
        special = {
            f"{name}_token": tokens[number]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if (number := self._field(f"tokenizer.ggml.{key}_token_id", None)) is not None
        }
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
        )
        tokenizer.chat_template = self._field("tokenizer.chat_template", None)
        return tokenizer

    def _field(self, name: str, *default: Any) -> Any:
        found = self._reader.fields.get(name)
        if found is not None:
            return found.contents()
        if default:
            return default[0]
        raise ValueError(f"{self.path} lacks the field {name!r}.")


def halves_from_neighbours(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of [heads * H, D] from llama.cpp's order of each head's features to Hugging Face's.

    Feature 2i of a head goes to i, feature 2i + 1 to H/2 + i.
    """
    rows, *rest = weight.shape
    by_pair = weight.reshape(num_heads, rows // num_heads // 2, 2, *rest)
    return by_pair.swapaxes(1, 2).reshape(weight.shape)


def to_huggingface(path: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Writes a GGUF file's model as a Hugging Face directory: config, weights (float32),
    tokenizer."""
    from safetensors.numpy import save_file

    file, target = GgufFile(path), pathlib.Path(directory)
    target.mkdir(parents=True)
    file.tokenizer().save_pretrained(str(target))
    tensors = {name: np.ascontiguousarray(value) for name, value in file.tensors()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = file.config() | {"dtype": "float32"}
    # Last: a directory without a config is not taken for a whole one.
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
