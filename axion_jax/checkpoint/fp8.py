"""FP8 (e4m3) weights as inference engines store them: codes and the scales that multiply them.

    scale = max(absmax, 1e-12) / 448        of a 128 x 128 block, or of an output channel
    code  = e4m3(clip(w / scale, -448, 448))

all in float32, rounded to nearest even: bit for bit what the converters of the reference stack write.
Two things are kept out: XLA turns a division by a constant, or by a broadcast array, into a multiplication
with the reciprocal (one bit off, hence the barrier and the `where` below), and casts to float8 are
emulated slowly on CPU (the code is taken from the bits of the float32 instead).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axion_jax.models.quantize import BLOCK, E4M3_MAX, MIN_SCALE_NUMERATOR

PANEL = 4 * 2**20
"""Bytes of a weight that are quantised at a time on the host."""


@jax.jit
def quantize_blocks(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(codes [N, K] uint8, scales [ceil(N/128), ceil(K/128)] float32) of a float32 or bfloat16 weight.

    Blocks at the edges may be ragged. A block of zeros has codes 0 and the scale 1e-12 / 448.
    """
    n, k = weight.shape
    magnitude = jnp.pad(_magnitude_bits(weight), ((0, -n % BLOCK), (0, -k % BLOCK)))
    rows, cols = magnitude.shape[0] // BLOCK, magnitude.shape[1] // BLOCK
    by_column = jnp.max(magnitude.reshape(rows, BLOCK, -1), axis=1)  # in two steps: twice as fast
    largest = jnp.max(by_column.reshape(rows, cols, BLOCK), axis=2)
    scales = _scales(_float32(largest))
    wide = jnp.broadcast_to(scales[:, None, :, None], (rows, BLOCK, cols, BLOCK))
    return _codes(weight, wide.reshape(magnitude.shape)[:n, :k]), scales


def in_panels(kernel, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`kernel(weight)` on the host, some rows at a time: what is in flight stays in the caches."""
    rows = max(1, PANEL // (weight[:1].nbytes * BLOCK)) * BLOCK
    if len(weight) <= rows:
        codes, scales = kernel(np.ascontiguousarray(weight))
        return np.asarray(codes), np.asarray(scales)
    all_codes, all_scales = np.empty(weight.shape, np.uint8), []
    for start in range(0, len(weight), rows):
        codes, scales = kernel(np.ascontiguousarray(weight[start : start + rows]))
        all_codes[start : start + rows] = codes
        all_scales.append(np.asarray(scales))
    return all_codes, np.concatenate(all_scales)


@jax.jit
def quantize_channels(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(codes [N, K] uint8, scales [N, 1] float32): one scale for each output."""
    largest = jnp.max(_magnitude_bits(weight), axis=1, keepdims=True)
    scales = _scales(_float32(largest))
    return _codes(weight, jnp.broadcast_to(scales, weight.shape)), scales


def _magnitude_bits(x: jax.Array) -> jax.Array:
    """|x| as an integer that orders like it."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16) & jnp.uint16(0x7FFF)
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & jnp.uint32(0x7FFFFFFF)


def _float32(bits: jax.Array) -> jax.Array:
    if bits.dtype == jnp.uint16:
        bits = bits.astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(bits, jnp.float32)


def _scales(largest: jax.Array) -> jax.Array:
    divisor = lax.optimization_barrier(jnp.full(largest.shape, E4M3_MAX, jnp.float32))
    return jnp.maximum(largest, MIN_SCALE_NUMERATOR) / divisor


def _codes(weight: jax.Array, scales: jax.Array) -> jax.Array:
    x = weight.astype(jnp.float32)
    divisor = jnp.where(jnp.isnan(x), x, scales)  # no longer a broadcast, and no array either
    return e4m3_codes(jnp.clip(x / divisor, -E4M3_MAX, E4M3_MAX))


def e4m3_codes(x: jax.Array) -> jax.Array:
    """The uint8 e4m3 codes of float32 values in [-448, 448], ties to even.

    e4m3 has 4 bits of exponent with bias 7 and 3 of mantissa: its code is the upper bits of the float32
    with 120 = 127 - 7 taken off the exponent. Below 2^-6 it counts steps of 2^-9; adding 2^14, where
    float32 has just that step, rounds to them.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    to_even = (magnitude >> 20) & 1
    normal = ((magnitude + 0x7FFFF + to_even) >> 20) - (120 << 3)
    size = lax.bitcast_convert_type(magnitude, jnp.float32)
    subnormal = lax.bitcast_convert_type(size + 2.0**14, jnp.uint32) & 0xF
    return (sign | jnp.where(size < 2.0**-6, subnormal, normal)).astype(jnp.uint8)
