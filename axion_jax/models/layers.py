"""The small pieces every layer is made of: parameters with logical axes, RMSNorm, rotary embedding,
gated MLP.

Shapes carry Shazeer's suffixes, one legend for the package:
B row  T position  D model width  N query heads  M key/value heads  H head width  F MLP width  V
vocabulary E experts  K experts per token  L layers  S cache slots
"""

from __future__ import annotations

import functools
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from axion_jax.models.config import ModelConfig
from axion_jax.models.quantize import fake_quantize_activations


def declare(
    module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init
) -> jax.Array:
    """Declares one float32 parameter of `module` together with its logical axes (sharding/rules.py
    maps them)."""
    assert len(shape) == len(axes), (name, shape, axes)
    return cast(jax.Array, module.param(name, nn.with_partitioning(init, axes), shape, jnp.float32))


def weight_init(config: ModelConfig, fan_in: int, *, residual: bool = False):
    """Normal initialiser; projections back into the residual stream shrink with depth when no range
    is given."""
    if config.initializer_range is not None:
        return nn.initializers.normal(config.initializer_range)
    scale = fan_in**-0.5
    return nn.initializers.normal(scale * (2 * config.num_layers) ** -0.5 if residual else scale)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float):
    """x / rms(x) in float32, cast back, then times `weight` (Glm4Moe: plain weight, not 1 +
    weight)."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed.astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class RMSNorm(nn.Module):
    width: int
    eps: float
    axis: str | None = "embed"

    @nn.compact
    def __call__(self, x):
        weight = declare(self, "weight", (self.width,), (self.axis,), nn.initializers.ones)
        return rms_norm(x, weight, self.eps)


def rotary(x_BTNH: Float[Array, "B T N H"], positions_BT: Int[Array, "B T"], config: ModelConfig):
    """Rotates the first `rotary_dim` features of each head; the rest pass through.

    Half-split pairing (i, i + rotary_dim/2), frequencies theta^(-2i/rotary_dim). Angles stay
    float32: bfloat16 rounds 257 to 256.
    """
    dim = config.rotary_dim
    exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    inverse_frequency = config.rope_theta**-exponent
    angle = (
        positions_BT.astype(jnp.float32)[:, :, None, None] * inverse_frequency[None, None, None, :]
    )
    cos, sin = jnp.cos(angle).astype(x_BTNH.dtype), jnp.sin(angle).astype(x_BTNH.dtype)
    first, second, rest = jnp.split(x_BTNH, [dim // 2, dim], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def quantizer(fp8: bool):
    """What happens to the input of a linear layer: nothing, or rounding to FP8 as a W8A8 engine
    does."""
    return fake_quantize_activations if fp8 else lambda x: x


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): the dense MLP and the shared expert. gate and up are one leaf,
    [D, 2, F]."""

    config: ModelConfig
    width: int
    fp8: bool = False

    @nn.compact
    def __call__(self, x):
        d, f = self.config.hidden_size, self.width
        init = functools.partial(weight_init, self.config)
        gate_up = declare(self, "gate_up", (d, 2, f), ("embed", None, "ffn"), init(d))
        down = declare(self, "down", (f, d), ("ffn", "embed"), init(f, residual=True))
        return gated_mlp(x, gate_up, down, fp8=self.fp8)


def gated_mlp(x: Float[Array, "... D"], gate_up: Float[Array, "D 2 F"], down, *, fp8: bool = False):
    round_input = quantizer(fp8)
    d, _, f = gate_up.shape
    gate, up = jnp.split(round_input(x) @ gate_up.reshape(d, 2 * f).astype(x.dtype), 2, axis=-1)
    return round_input(jax.nn.silu(gate) * up) @ down.astype(x.dtype)
