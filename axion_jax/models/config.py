"""What a model is: sizes and switches of one decoder, checked when they are put together.

One set of fields covers GLM-4.5's mixture of experts (Glm4Moe) and the dense families that share
its layer (Qwen3, Llama): a dense model has `num_dense_layers == num_layers` and no experts.

Field names say what a thing is; `checkpoint/` maps them from a Hugging Face `config.json`. The
surprise for newcomers: `head_dim` is never derived (GLM-4.5-Air has 96 heads of 128 on a width of
4096).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder, dense or with mixture-of-experts layers.

    Layers 0 .. num_dense_layers-1 have a dense MLP, the rest `num_experts` routed experts and
    `num_shared_experts` shared ones. Token choice is sigmoid + correction bias (selection only),
    optionally limited to the best `topk_groups` of `num_groups` groups of experts.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the dense MLP layers."""
    num_dense_layers: int
    moe_intermediate_size: int = 0
    """Width of one expert."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    num_groups: int = 1
    topk_groups: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    attention_bias: bool = True
    """Bias on q, k, v; the output projection never has one."""
    qk_norm: bool = False
    rope_theta: float = 1_000_000.0
    partial_rotary_factor: float = 0.5
    rms_norm_eps: float = 1e-5
    initializer_range: float | None = None
    """Standard deviation of initial weights; None: 1 / sqrt(fan in), which suits training from
    scratch at small width."""
    tie_embeddings: bool = False
    """The vocabulary head is the embedding itself: there is no `head` leaf."""
    vocab_head: bool = True
    """False for a sequence classifier, which has a scalar head only."""
    value_head: bool = False
    """A scalar output per position: reward models."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1.")
        if self.num_shared_experts < 0:
            raise ValueError(
                f"model.num_shared_experts={self.num_shared_experts} must be at least 0."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}."
            )
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"num_dense_layers={self.num_dense_layers} must lie in 0..num_layers={self.num_layers}."
            )
        if self.num_dense_layers and self.intermediate_size < 1:
            raise ValueError(
                f"model.intermediate_size={self.intermediate_size} must be at least 1."
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"head_dim={self.head_dim} times partial_rotary_factor={self.partial_rotary_factor} must be an even"
                f" number of rotated dimensions within the head, not {self.rotary_dim}."
            )
        if not self.vocab_head and not self.value_head:
            raise ValueError(
                "vocab_head=False and value_head=False leave the model without output."
            )
        if self.num_moe_layers:
            self._check_experts()

    def _check_experts(self) -> None:
        for name in (
            "num_experts",
            "num_experts_per_token",
            "moe_intermediate_size",
            "num_groups",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} must be at least 1, since num_dense_layers="
                    f"{self.num_dense_layers} of {self.num_layers} leaves mixture-of-experts layers."
                )
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token={self.num_experts_per_token} exceeds num_experts={self.num_experts}."
            )
        if self.num_experts % self.num_groups or not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts}, and topk_groups="
                f"{self.topk_groups} must lie in 1..num_groups."
            )
        group = self.num_experts // self.num_groups
        if self.num_groups > 1 and group < 2:
            raise ValueError(
                f"num_groups={self.num_groups} leaves {group} expert a group; a group is ranked by its best two."
            )
        if self.topk_groups * group < self.num_experts_per_token:
            raise ValueError(
                f"topk_groups={self.topk_groups} groups of {group} experts cannot supply num_experts_per_token="
                f"{self.num_experts_per_token}."
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size * self.num_shared_experts

    @property
    def routing_shape(self) -> tuple[int, int]:
        """(MoE layers, experts per token): the trailing shape of every routing array."""
        return self.num_moe_layers, self.num_experts_per_token


GLM_45_AIR = ModelConfig(
    vocab_size=151_552,
    hidden_size=4096,
    num_layers=46,
    num_heads=96,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=10_944,
    moe_intermediate_size=1408,
    num_dense_layers=1,
    num_experts=128,
    num_experts_per_token=8,
    num_shared_experts=1,
)
