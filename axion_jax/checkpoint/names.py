"""Which checkpoint tensors each parameter leaf is made of: one table per family, read in both directions.

Our leaves are stacked: all layers of a kind, all experts of a layer. A checkpoint has one tensor for
each layer and expert, and stores the weight of a linear layer as [outputs, inputs]. Outputs and inputs
may be several axes here (heads and their width), and gate and up are one leaf with an axis of two.

Everything below works on views: no numbers move until somebody copies the result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from axion_jax.checkpoint.hf_config import FAMILIES, GLM4_MOE, QWEN3_CLASSIFIER
from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Names:
    """Where one leaf lives in a checkpoint."""

    tensors: tuple[str, ...]
    """Names with {layer} and {expert}; two where gate and up are one leaf."""
    inputs: int | None
    """Leading axes that a linear layer sums over; its checkpoint tensor is [outputs, inputs]. 0: a
    vector of outputs. None: stored as it is."""
    sizes: tuple[str, ...]
    """For each dimension of the checkpoint tensor, the config field to suspect when it differs."""

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.tensors[0]

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.tensors[0]

    @property
    def gate_and_up(self) -> bool:
        return len(self.tensors) == 2


def _row(tensor: str, inputs: int | None, *sizes: str) -> Names:
    return Names((tensor,), inputs, sizes)


def _mlp(prefix: str, width: str) -> dict[str, Names]:
    gate, up, down = (f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return {
        "gate_up": Names((gate, up), 1, (width, "hidden_size")),
        "down": _row(down, 1, "hidden_size", width),
    }


def _under(prefix: str, rows: Mapping[str, Names]) -> dict[str, Names]:
    return {f"{prefix}/{key}": value for key, value in rows.items()}


_L = "model.layers.{layer}"
_LAYER = {
    "attention_norm/weight": _row(f"{_L}.input_layernorm.weight", None, "hidden_size"),
    "mlp_norm/weight": _row(f"{_L}.post_attention_layernorm.weight", None, "hidden_size"),
    "attention/q": _row(f"{_L}.self_attn.q_proj.weight", 1, "num_heads", "hidden_size"),
    "attention/k": _row(f"{_L}.self_attn.k_proj.weight", 1, "num_kv_heads", "hidden_size"),
    "attention/v": _row(f"{_L}.self_attn.v_proj.weight", 1, "num_kv_heads", "hidden_size"),
    "attention/o": _row(f"{_L}.self_attn.o_proj.weight", 2, "hidden_size", "num_heads"),
    "attention/q_bias": _row(f"{_L}.self_attn.q_proj.bias", 0, "num_heads"),
    "attention/k_bias": _row(f"{_L}.self_attn.k_proj.bias", 0, "num_kv_heads"),
    "attention/v_bias": _row(f"{_L}.self_attn.v_proj.bias", 0, "num_kv_heads"),
    "attention/q_norm": _row(f"{_L}.self_attn.q_norm.weight", None, "head_dim"),
    "attention/k_norm": _row(f"{_L}.self_attn.k_norm.weight", None, "head_dim"),
}
_DENSE = _under(
    "dense", _LAYER | {f"mlp/{k}": v for k, v in _mlp(f"{_L}.mlp", "intermediate_size").items()}
)
_MIXTURE = {
    "router": _row(f"{_L}.mlp.gate.weight", 1, "num_experts", "hidden_size"),
    "router_bias": _row(f"{_L}.mlp.gate.e_score_correction_bias", None, "num_experts"),
    **_mlp(f"{_L}.mlp.experts.{{expert}}", "moe_intermediate_size"),
    **_under("shared", _mlp(f"{_L}.mlp.shared_experts", "num_shared_experts")),
}
_TOP = {
    "embed": _row("model.embed_tokens.weight", None, "vocab_size", "hidden_size"),
    "final_norm": _row("model.norm.weight", None, "hidden_size"),
    "head": _row("lm_head.weight", 1, "vocab_size", "hidden_size"),
}
_CAUSAL = _TOP | _DENSE

TABLE: dict[str, dict[str, Names]] = dict.fromkeys(FAMILIES, _CAUSAL) | {
    GLM4_MOE: _CAUSAL | _under("moe", _LAYER | _under("mlp", _MIXTURE)),
    QWEN3_CLASSIFIER: _CAUSAL
    | {"value_head": _row("score.weight", 1, "num_labels", "hidden_size")},
}
"""Family -> path of a leaf in the parameters -> its checkpoint tensors."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter leaf of a given model, with its place in the checkpoint."""

    path: str
    names: Names
    shape: tuple[int, ...]
    """Of the stacked leaf."""
    layers: tuple[int, ...]
    """Checkpoint index of each stacked layer; empty for leaves outside layers."""

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Of one layer and expert, without the axis of gate and up."""
        shape = self.shape[self.names.per_layer + self.names.per_expert :]
        return shape[:1] + shape[2:] if self.names.gate_and_up else shape

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of each checkpoint tensor."""
        shape, inputs = self.piece_shape, self.names.inputs
        if inputs is None:
            return shape
        if inputs == 0:
            return (math.prod(shape),)
        return math.prod(shape[inputs:]), math.prod(shape[:inputs])

    @property
    def num_experts(self) -> int:
        return self.shape[1] if self.names.per_expert else 0

    def to_piece(self, tensor: np.ndarray) -> np.ndarray:
        """A view of a checkpoint tensor in the shape it has in the leaf."""
        return (tensor.T if self.names.inputs else tensor).reshape(self.piece_shape)

    def to_tensor(self, piece: np.ndarray) -> np.ndarray:
        """The inverse of `to_piece`; a view where strides allow."""
        if not self.names.inputs:
            return piece.reshape(self.tensor_shape)
        rows, cols = self.tensor_shape
        return piece.reshape(cols, rows).T

    def part(self, layer_and_expert: np.ndarray, index: int) -> np.ndarray:
        """gate (0) or up (1) of the slice of one layer and expert; the slice itself elsewhere."""
        return layer_and_expert[:, index] if self.names.gate_and_up else layer_and_expert

    def checkpoint_names(self, layer: int | None = None, expert: int | None = None) -> list[str]:
        return [name.format(layer=layer, expert=expert) for name in self.names.tensors]


def leaf_path(path: tuple[Any, ...]) -> str:
    """`moe/mlp/gate_up` from a path of `jax.tree_util`."""
    return "/".join(str(key.key) for key in path)


@functools.lru_cache(maxsize=8)
def leaves(config: ModelConfig, family: str) -> dict[str, Leaf]:
    """Every leaf of the model by path, in the order of its parameters."""
    if family not in TABLE:
        raise ValueError(f"family={family!r} is unknown; known: {', '.join(TABLE)}.")
    first = {"dense": 0, "moe": config.num_dense_layers}
    result = {}
    for path, like in jax.tree_util.tree_leaves_with_path(Decoder(config).abstract_params()):
        key = leaf_path(path)
        if key not in TABLE[family]:
            raise ValueError(
                f"Parameter {key} has no checkpoint tensor in {family}; see checkpoint/names.py."
            )
        start = first.get(key.split("/")[0])
        layers = () if start is None else tuple(range(start, start + like.shape[0]))
        result[key] = Leaf(key, TABLE[family][key], tuple(like.shape), layers)
    return result


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a checkpoint tensor goes: leaf, index among its stacked layers, expert, gate or up."""

    leaf: Leaf
    index: int | None
    expert: int | None
    part: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.tensor_shape


@functools.lru_cache(maxsize=8)
def expected(config: ModelConfig, family: str) -> dict[str, Place]:
    """Every checkpoint tensor that the model consists of, layer by layer in checkpoint order."""
    found: dict[str, Place] = {}
    for leaf in leaves(config, family).values():
        for index, layer in enumerate(leaf.layers) if leaf.layers else ((None, None),):
            for expert in range(leaf.num_experts) if leaf.num_experts else (None,):
                for part, name in enumerate(leaf.checkpoint_names(layer, expert)):
                    found[name] = Place(leaf, index, expert, part)
    return dict(sorted(found.items(), key=lambda item: sort_key(item[0])))


def sort_key(name: str) -> tuple[Any, ...]:
    """Embedding first, then layers by number with experts by number, then norm and head."""
    layer = layer_index(name)
    group = 1 if layer is not None else 0 if "embed" in name else 2
    numbers = [(0, int(x), "") if x.isdigit() else (1, 0, x) for x in re.split(r"[.]", name)]
    return group, -1 if layer is None else layer, numbers


def layer_index(name: str) -> int | None:
    """The number after `layers.`, whatever the prefix; None outside layers."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def is_mtp(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to a multi-token-prediction layer, stored after the last layer."""
    layer = layer_index(name)
    return layer is not None and layer >= config.num_layers


def check_tensor(
    name: str, shape: tuple[int, ...], dtype: Any, place: Place, where: str, config: ModelConfig
) -> None:
    """Raises a ValueError that names file, tensor and the config field to look at."""
    if tuple(shape) != place.shape:
        fields = [
            field
            for field, have, want in zip(place.leaf.names.sizes, shape, place.shape, strict=False)
            if have != want
        ]
        hint = f" Is {fields[0]} right?" if fields and len(shape) == len(place.shape) else ""
        raise ValueError(
            f"{name}: checkpoint has {tuple(shape)}, config asks for {place.shape}.{hint} ({where})"
        )
    if np.dtype(dtype).name not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"{name}: checkpoint has dtype {np.dtype(dtype).name}; float32, bfloat16 or float16 is"
            f" expected. ({where})"
        )


def compare(names: Iterable[str], config: ModelConfig, family: str) -> tuple[list[str], list[str]]:
    """(missing, unexpected) tensors of a checkpoint with these names.

    Not unexpected: layers beyond the last one (multi-token prediction), and what transformers also
    ignores: a stored copy of a tied head, rotary frequencies.
    """
    names, wanted = set(names), expected(config, family)
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    missing = [name for name in wanted if name not in names]
    unexpected = [
        name
        for name in sorted(names - set(wanted) - ignored, key=sort_key)
        if not is_mtp(name, config) and not name.endswith("rotary_emb.inv_freq")
    ]
    return missing, unexpected
