"""FP8 (e4m3) as the rollout engine holds it: weights in 128 x 128 blocks, activations in groups of
128.

The embedded engine emulates an FP8 server on any device: every value is rounded to a number that
e4m3 times its scale can represent, then kept in the compute dtype. What differs from the server is
the order of accumulation, nothing else. Scales are dequantisation multipliers, as
`weight_scale_inv` in a block-quantised checkpoint.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

E4M3_MAX = 448.0
BLOCK = 128
MIN_SCALE_NUMERATOR = 1e-12
"""Keeps the scale of an all-zero block away from 0, so that it dequantises to 0 and not to NaN."""


def round_to_e4m3(x: Float[Array, ...]) -> Float[Array, ...]:
    """Rounds float32 values in [-448, 448] to the nearest e4m3 number (ties to even), staying in
    float32.

    e4m3 keeps 3 mantissa bits: round off the other 20 of float32 on its bit pattern. Below 2^-6 the
      format is
    subnormal with a step of 2^-9. Bit arithmetic, because casts to float8 are emulated slowly on
    CPU.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    odd = (bits >> 20) & 1
    rounded = (bits + 0x7FFFF + odd) & ~0xFFFFF
    normal = lax.bitcast_convert_type(rounded, jnp.float32)
    subnormal = jnp.round(x * 512.0) / 512.0
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, normal)


def fake_quantize_activations(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Rounds each token's activations to e4m3 with one dynamic scale per group of 128 features (the
    last may be short)."""
    width = x.shape[-1]
    group = min(BLOCK, width)
    padding = -width % group
    grouped = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    grouped = grouped.reshape(*x.shape[:-1], -1, group)
    amax = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True)
    scale = jnp.maximum(amax, MIN_SCALE_NUMERATOR) / E4M3_MAX
    rounded = round_to_e4m3(grouped / scale) * scale
    return rounded.reshape(*x.shape[:-1], -1)[..., :width].astype(x.dtype)


def fake_quantize_weight(weight: Float[Array, "... D F"]) -> Float[Array, "... D F"]:
    """Rounds a weight to e4m3 with one scale per 128 x 128 block of its last two dimensions; ragged
    edges allowed."""
    *lead, rows, cols = weight.shape
    pad = [(0, 0)] * len(lead) + [(0, -rows % BLOCK), (0, -cols % BLOCK)]
    padded = jnp.pad(weight.astype(jnp.float32), pad)
    blocks = padded.reshape(
        *lead, padded.shape[-2] // BLOCK, BLOCK, padded.shape[-1] // BLOCK, BLOCK
    )
    amax = jnp.max(jnp.abs(blocks), axis=(-3, -1), keepdims=True)
    scale = jnp.maximum(amax, MIN_SCALE_NUMERATOR) / E4M3_MAX
    rounded = round_to_e4m3(jnp.clip(blocks / scale, -E4M3_MAX, E4M3_MAX)) * scale
    return rounded.reshape(padded.shape)[..., :rows, :cols].astype(weight.dtype)
