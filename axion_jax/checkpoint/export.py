"""What each tensor becomes in an exported checkpoint: kept, rounded to another dtype, or quantised to FP8.

Decided from names and shapes alone, once, for the file path (convert.py) and for weights pushed from
memory (push.py), so that both give the same bytes. Quantisation reads the tensor at the precision it is
held in: a trainer's float32 is not rounded to bfloat16 on the way to FP8.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from axion_jax.checkpoint import fp8, names
from axion_jax.models.config import ModelConfig
from axion_jax.models.quantize import BLOCK

TARGETS = ("orbax", "hf", "sglang_fp8", "sglang_fp8_channel", "sglang_bf16")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """What is asked for."""

    to: str
    router_dtype: str | None = None
    """None: as the source has it, or, from a trainer, the model's own dtype."""
    high_precision_layers: int | None = None
    """First layers that FP8 leaves alone. None: 3 for blocks; 0 for channels, as the vendor has it."""
    tensor_parallel: int = 1
    expert_parallel: int = 1
    """Of the server that will load FP8 blocks; each of its shards must hold whole blocks."""

    def __post_init__(self) -> None:
        if self.to not in TARGETS:
            raise ValueError(f"to={self.to!r} is unknown; known: {', '.join(TARGETS)}.")
        if self.router_dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"router_dtype={self.router_dtype!r} must be float32 or bfloat16.")
        if self.to == "orbax" and self.router_dtype is not None:
            raise ValueError("router_dtype does not apply to=orbax, which keeps every dtype.")
        if self.tensor_parallel < 1 or self.tensor_parallel % max(1, self.expert_parallel):
            raise ValueError(
                f"expert_parallel={self.expert_parallel} must divide tensor_parallel="
                f"{self.tensor_parallel}, as in SGLang."
            )

    @property
    def is_fp8(self) -> bool:
        return self.to in ("sglang_fp8", "sglang_fp8_channel")

    @property
    def first_layers(self) -> int:
        if self.high_precision_layers is not None:
            return self.high_precision_layers
        return 3 if self.to == "sglang_fp8" else 0


@dataclasses.dataclass(frozen=True)
class Encoding:
    """One source tensor's outputs, in order."""

    outputs: tuple[tuple[str, tuple[int, ...], np.dtype], ...]
    encode: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None
    """None: the same bytes."""


@dataclasses.dataclass(frozen=True)
class Plan:
    encodings: dict[str, Encoding]
    quantization_config: dict[str, Any] | None
    skipped: dict[str, str]
    """Modules that FP8 leaves alone although it would quantise their kind -> why."""

    def skipped_by_reason(self) -> dict[str, str]:
        """For people: why -> the first modules and how many more."""
        groups: dict[str, list[str]] = collections.defaultdict(list)
        for module, reason in self.skipped.items():
            groups[reason].append(module)
        return {
            reason: ", ".join(found[:3]) + (f" and {len(found) - 3} more" * (len(found) > 3))
            for reason, found in groups.items()
        }


def plan_export(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    config: ModelConfig,
    export: Export,
    *,
    trained: bool,
    released_dtype: np.dtype = BFLOAT16,
) -> Plan:
    """What becomes of every tensor.

    Args:
      tensors: name -> shape and dtype of the source.
      trained: the source holds a trainer's precision, to be rounded to `released_dtype`.

    Raises:
      ValueError: the experts cannot be quantised for this parallelism, or nothing can.
    """
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    skipped: dict[str, str] = {}
    quantised: set[str] = set()
    if export.is_fp8:
        quantised, skipped = _choose(shapes, config, export)
    encodings = {}
    for name, (shape, dtype) in tensors.items():
        if name in quantised:
            encodings[name] = _fp8(name, shape, export.to)
            continue
        wanted = _dtype(name, dtype, export, trained, released_dtype)
        same = wanted == dtype
        encodings[name] = Encoding(((name, shape, wanted),), None if same else _cast(wanted))
    section = _quantization_config(shapes, quantised, export) if export.is_fp8 else None
    return Plan(encodings, section, skipped)


def released_dtype(hf_config: Mapping[str, Any]) -> np.dtype:
    """The dtype that config.json says the weights have."""
    name = str(hf_config.get("torch_dtype") or hf_config.get("dtype") or "bfloat16")
    known = {"bfloat16": BFLOAT16, "float32": FLOAT32, "float16": np.dtype(np.float16)}
    return known.get(name.removeprefix("torch."), BFLOAT16)


def _dtype(name, dtype, export: Export, trained: bool, released: np.dtype) -> np.dtype:
    if dtype not in (FLOAT32, BFLOAT16, np.dtype(np.float16)) or export.to == "orbax":
        return dtype
    if name.endswith(".e_score_correction_bias"):
        return FLOAT32 if trained or export.to != "hf" else dtype
    if name.endswith(".mlp.gate.weight") and export.router_dtype is not None:
        return FLOAT32 if export.router_dtype == "float32" else BFLOAT16
    if export.to == "sglang_bf16":
        return BFLOAT16
    return released if trained else dtype


def _cast(dtype: np.dtype) -> Callable[[np.ndarray], tuple[np.ndarray, ...]]:
    return lambda array: (array.astype(dtype),)


def _fp8(name: str, shape: tuple[int, ...], to: str) -> Encoding:
    blocks = to == "sglang_fp8"
    kernel = fp8.quantize_blocks if blocks else fp8.quantize_channels
    scale_shape = tuple(-(-n // BLOCK) for n in shape) if blocks else (shape[0], 1)
    scale_name = f"{name}_scale_inv" if blocks else f"{name}_scale"

    def encode(array: np.ndarray) -> tuple[np.ndarray, ...]:
        codes, scales = fp8.in_panels(kernel, array)
        if not np.isfinite(scales).all():
            raise ValueError(f"{name} has values that are not finite; FP8 cannot hold them.")
        return codes.view(E4M3), scales

    return Encoding(((name, shape, E4M3), (scale_name, scale_shape, FLOAT32)), encode)


# -- which modules are quantised


_LINEAR = re.compile(
    r"^(?P<layer>.*layers\.\d+)\.(?:self_attn\.(?P<attention>[qkvo])_proj"
    r"|mlp\.(?P<mlp>shared_experts\.|experts\.\d+\.|)(?:gate|up|down)_proj)\.weight$"
)
"""Linear layers. Everything else stays as it is: router, norms, embeddings, heads, and what joins the
multi-token-prediction layer to the model (eh_proj, its own embedding and head)."""


def _group(name: str) -> str | None:
    """The modules that an engine fuses or treats as one, as a common prefix; None if not a linear layer."""
    match = _LINEAR.match(name)
    if match is None:
        return None
    layer, attention, mlp = match["layer"], match["attention"], match["mlp"]
    if attention is not None:
        return f"{layer}.self_attn.{'o_proj' if attention == 'o' else 'qkv_proj'}"
    return f"{layer}.mlp" + ("" if not mlp else f".{mlp.split('.')[0]}")


def _choose(shapes, config: ModelConfig, export: Export) -> tuple[set[str], dict[str, str]]:
    """(tensors to quantise, modules left alone -> why)."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for name in shapes:
        if group := _group(name):
            groups[group].append(name)
    quantised: set[str] = set()
    skipped: dict[str, str] = {}
    for group, members in groups.items():
        layer = names.layer_index(members[0])
        assert layer is not None
        if layer < export.first_layers:
            reason = f"one of the first {export.first_layers} layers"
        else:
            reason = _misaligned(group, members, shapes, config, export)
        if reason is None:
            quantised.update(members)
        else:
            skipped |= {name.removesuffix(".weight"): reason for name in members}
    if not quantised:
        some = next(iter(skipped.items()), ("it has no linear layers", ""))
        raise ValueError(f"Nothing in this model can be quantised: {some[0]}: {some[1]}.")
    return quantised, skipped


def _misaligned(group, members, shapes, config: ModelConfig, export: Export) -> str | None:
    """Why SGLang could not load these modules as FP8 blocks, or None.

    Its rule: every shard of a split dimension holds whole blocks, and so does every part of a merged
    matrix (q k v; gate up) even when nothing is split. Experts are split over tensor_parallel /
    expert_parallel.
    """
    if export.to != "sglang_fp8":
        return None
    tp = export.tensor_parallel
    kind = group.rsplit(".", 1)[1]
    by_role = {name.split(".")[-2]: shapes[name] for name in members}
    if kind == "experts":
        return _misaligned_experts(group, by_role["gate_proj"][0], config, export)
    if kind == "qkv_proj":
        heads = max(1, config.num_kv_heads // tp) * config.head_dim  # few heads are replicated
        parts = {"q_proj": by_role["q_proj"][0] / tp, "k_proj": heads, "v_proj": heads}
        return _not_whole(parts, tp)
    if kind == "o_proj":
        return _not_whole({"o_proj": by_role["o_proj"][1] / tp}, tp)
    width = by_role["gate_proj"][0] / tp
    return _not_whole({"gate_proj": width, "up_proj": width}, tp)


def _not_whole(parts: Mapping[str, float], tp: int) -> str | None:
    if tp == 1 and len(parts) == 1:
        return None  # nothing is split and nothing merged: ragged edges are fine
    for name, size in parts.items():
        if size % BLOCK:
            return f"{name} has {size:g} rows a shard at tensor_parallel={tp}, not a multiple of {BLOCK}"
    return None


def _misaligned_experts(group, width: int, config: ModelConfig, export: Export) -> str | None:
    if config.num_experts % export.expert_parallel:
        raise ValueError(
            f"{group}: expert_parallel={export.expert_parallel} does not divide num_experts="
            f"{config.num_experts}."
        )
    parts = export.tensor_parallel // export.expert_parallel
    if width % BLOCK:
        return f"experts are {width} wide, not a multiple of {BLOCK}"
    if width / parts % BLOCK:
        raise ValueError(
            f"{group}: experts {width} wide, split over tensor_parallel / expert_parallel = {parts},"
            f" leave {width / parts:g} columns a shard, not a multiple of {BLOCK}. SGLang refuses to load"
            f" that. Serve with --ep-size equal to --tp-size, and export with"
            f" --expert_parallel={export.tensor_parallel}."
        )
    return None


def _fused(module: str) -> str | None:
    """The engine's module that holds this one merged with others."""
    head, _, last = module.rpartition(".")
    if ".experts." in module:
        return module.split(".experts.")[0] + ".experts"
    if last in ("q_proj", "k_proj", "v_proj"):
        return f"{head}.qkv_proj"
    return f"{head}.gate_up_proj" if last in ("gate_proj", "up_proj") else None


def _quantization_config(shapes, quantised: set[str], export: Export) -> dict[str, Any]:
    kept = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and name not in quantised
    ]
    # An engine also asks by the names of its own, fused modules.
    fused = {m: _fused(m) for m in kept}
    kept = sorted({*kept, *filter(None, fused.values())}, key=names.sort_key)
    if export.to == "sglang_fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": kept,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": eight | {"strategy": "channel", "dynamic": False},
                "input_activations": eight | {"strategy": "token", "dynamic": True},
            }
        },
    }
