"""`ModelConfig` from a Hugging Face `config.json`, and back.

A family is named by its architecture, as `config.json` names it. Defaults of absent fields are
transformers' own. Every field is either used, known to change nothing here, or refused by name: a
switch that is silently ignored makes a model that is 1 % off.

Two spellings exist of some fields, both are read: transformers 4 wrote `rope_theta`,
`partial_rotary_factor` and `torch_dtype`, transformers 5 writes `rope_parameters` and `dtype`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from axion_jax.models.config import ModelConfig

GLM4_MOE = "Glm4MoeForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
QWEN3_CLASSIFIER = "Qwen3ForSequenceClassification"
LLAMA = "LlamaForCausalLM"

_MODEL_TYPES = {GLM4_MOE: "glm4_moe", QWEN3: "qwen3", QWEN3_CLASSIFIER: "qwen3", LLAMA: "llama"}
FAMILIES = tuple(_MODEL_TYPES)

# Our field, transformers' field, transformers' default (None: the field must be there).
_COMMON = (
    ("vocab_size", "vocab_size", None),
    ("hidden_size", "hidden_size", None),
    ("num_layers", "num_hidden_layers", None),
    ("num_heads", "num_attention_heads", None),
    ("intermediate_size", "intermediate_size", None),
    ("initializer_range", "initializer_range", 0.02),
)
_EXPERTS = (
    ("moe_intermediate_size", "moe_intermediate_size", None),
    ("num_experts", "n_routed_experts", None),
    ("num_experts_per_token", "num_experts_per_tok", None),
    ("num_dense_layers", "first_k_dense_replace", 1),
    ("num_shared_experts", "n_shared_experts", 1),
    ("num_groups", "n_group", 1),
    ("topk_groups", "topk_group", 1),
    ("norm_topk_prob", "norm_topk_prob", True),
    ("routed_scaling_factor", "routed_scaling_factor", 1.0),
    ("qk_norm", "use_qk_norm", False),
)
_INERT = frozenset(
    [
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "max_position_embeddings",
        "output_router_logits",
        "router_aux_loss_coef",
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "problem_type",
        "label2id",
        "name_or_path",
        "auto_map",
        "pretraining_tp",
        "tokenizer_class",
        "is_llama_config",
        "transformers.js_config",
    ]
)
"""Fields that change no number of the models here, whatever they say."""

_ONLY = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "use_sliding_window": False,
    "rope_interleaved": False,
}
"""Fields of which one value is supported."""

_READ = frozenset(
    [
        "head_dim",
        "num_key_value_heads",
        "attention_bias",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "tie_word_embeddings",
        "sliding_window",
        "layer_types",
        "num_labels",
        "id2label",
    ]
)


def family_of(config: Mapping[str, Any]) -> str:
    """The architecture that `config.json` names; one of `FAMILIES`."""
    named = list(config.get("architectures") or ())
    known = f"Supported: {', '.join(FAMILIES)}."
    if len(named) == 1 and named[0] in _MODEL_TYPES:
        return named[0]
    if named:
        raise ValueError(f"config.json: architectures={named} is not supported. {known}")
    causal = [f for f, kind in _MODEL_TYPES.items() if kind == config.get("model_type")]
    if not causal:
        raise ValueError(
            "config.json names no architectures, and its model_type="
            f"{config.get('model_type')!r} is unknown. {known}"
        )
    return causal[0]


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder that a Hugging Face `config.json` describes.

    Raises:
      ValueError: a field is missing, unknown, or has a value that we do not implement; names it.
    """
    family = family_of(config)
    moe = family == GLM4_MOE
    _refuse_unknown(config, family)
    _refuse_unsupported(config, family)
    rows = _COMMON + (_EXPERTS if moe else ())
    values: dict[str, Any] = {
        ours: _get(config, theirs, default, family) for ours, theirs, default in rows
    }
    heads = values["num_heads"]
    values["num_kv_heads"] = config.get("num_key_value_heads") or (
        _get(config, "num_key_value_heads", None, family) if moe else heads
    )
    values["head_dim"] = config.get("head_dim")
    if values["head_dim"] is None:
        if moe:
            raise ValueError(
                "config.json lacks head_dim. It cannot be derived for Glm4Moe (GLM-4.5-Air has 96"
                ' heads of 128 on a width of 4096): add "head_dim".'
            )
        values["head_dim"] = 128 if _qwen(family) else values["hidden_size"] // heads
    values["rms_norm_eps"] = config.get("rms_norm_eps", 1e-5 if moe else 1e-6)
    values["rope_theta"], values["partial_rotary_factor"] = _rope(config, moe)
    values["attention_bias"] = bool(config.get("attention_bias", False))
    values["tie_embeddings"] = bool(config.get("tie_word_embeddings", False))
    if moe:
        values["num_dense_layers"] = min(values["num_dense_layers"], values["num_layers"])
    else:
        values["num_dense_layers"] = values["num_layers"]
        values["qk_norm"] = _qwen(family)
    if family == QWEN3_CLASSIFIER:
        values |= {"vocab_head": False, "value_head": True, "tie_embeddings": False}
    values["rope_theta"] = float(values["rope_theta"])
    try:
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None


def hf_config(config: ModelConfig, family: str, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """A `config.json` for `config`, in the spelling that every version of transformers reads.

    Raises:
      ValueError: the family cannot express `config`.
    """
    if family not in _MODEL_TYPES:
        raise ValueError(f"family={family!r} is unknown; known: {', '.join(FAMILIES)}.")
    moe = family == GLM4_MOE
    result: dict[str, Any] = {
        "architectures": [family],
        "model_type": _MODEL_TYPES[family],
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
    }
    for ours, theirs, default in _COMMON + (_EXPERTS if moe else ()):
        value = getattr(config, ours)
        result[theirs] = default if value is None else value
    if moe:
        result["partial_rotary_factor"] = config.partial_rotary_factor
        result["num_nextn_predict_layers"] = 0
    if family == QWEN3_CLASSIFIER:
        result |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    back = model_config(result)
    for name in ModelConfig.__dataclass_fields__:
        ours, theirs = getattr(config, name), getattr(back, name)
        if ours != theirs and not (name == "initializer_range" and ours is None):
            raise ValueError(f"{family} cannot express model.{name}={ours!r}; it has {theirs!r}.")
    return result


def _qwen(family: str) -> bool:
    return family in (QWEN3, QWEN3_CLASSIFIER)


def _get(config: Mapping[str, Any], name: str, default: Any, family: str) -> Any:
    value = config.get(name, default)
    if value is None:
        raise ValueError(f"config.json lacks {name}, which {family} needs.")
    return value


def _refuse_unknown(config: Mapping[str, Any], family: str) -> None:
    used = {theirs for _, theirs, _ in _COMMON + (_EXPERTS if family == GLM4_MOE else ())}
    known = used | _READ | _INERT | set(_ONLY)
    if config.get("quantization_config") is not None:
        raise ValueError(
            "config.json has a quantization_config: this is a checkpoint for an inference engine."
            " Convert from the high-precision checkpoint instead."
        )
    known.add("quantization_config")
    for name in config:
        if name in known or name.startswith("_"):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Is it a misspelt {close[0]!r}?" if close else ""
        raise ValueError(
            f"config.json: {family} has no use for {name}={config[name]!r} here, so the model may"
            f" not be what it seems.{hint} Remove the field if it changes nothing."
        )


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    for name, value in _ONLY.items():
        if config.get(name, value) not in (value, None):
            raise ValueError(
                f"config.json: {name}={config[name]!r} is not supported, only {value!r}."
            )
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise ValueError(
            f"config.json: layer_types with {', '.join(sorted(layer_types))} are not supported,"
            " only full_attention."
        )
    # Qwen3's sliding_window counts only with use_sliding_window, which is refused above.
    if config.get("sliding_window") is not None and not _qwen(family):
        raise ValueError(
            f"config.json: sliding_window={config['sliding_window']} is not supported, only null."
        )
    if config.get("attention_bias") and family != GLM4_MOE:
        raise ValueError(
            f"config.json: attention_bias=true is not supported for {family}, where it also puts a"
            " bias on the output projection."
        )
    if family == QWEN3_CLASSIFIER:
        labels = config.get("num_labels", len(config.get("id2label") or (0, 1)))
        if labels != 1:
            raise ValueError(
                f"config.json: {family} with {labels} labels is not supported, only the scalar"
                " head of a reward model (num_labels=1)."
            )


def _rope(config: Mapping[str, Any], moe: bool) -> tuple[float, float]:
    """(theta, share of each head that is rotated)."""
    parameters = dict(config.get("rope_parameters") or {})
    scaling = config.get("rope_scaling")
    for where, section in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if not section:
            continue
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            raise ValueError(
                f"config.json: {where} of type {kind!r} is not supported, only plain rotary"
                " embeddings (null or 'default')."
            )
        extra = set(section) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if extra:
            raise ValueError(f"config.json: {where}.{min(extra)} is not supported.")
    merged = {**config, **(scaling or {}), **parameters}
    theta = merged.get("rope_theta", 10_000.0)
    factor = merged.get("partial_rotary_factor", 0.5 if moe else 1.0)
    if not moe and factor != 1.0:
        raise ValueError(
            f"config.json: partial_rotary_factor={factor} is not supported for a dense family,"
            " which rotates whole heads."
        )
    return theta, factor
