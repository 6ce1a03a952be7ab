"""Grouped-query attention: over packed rows for training and prefill, over a KV cache for decoding
and for prompts taken in pieces.

Decoding attends to the *old* cache and to the current key and value apart, and only then writes
them: if the updated cache fed both the attention and the next iteration, XLA would copy every cache
each step.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from axion_jax.models.config import ModelConfig
from axion_jax.models.layers import declare, quantizer, rms_norm, rotary, weight_init

MASKED = -1e30
"""Score of a key that may not be seen; finite, so that a row without any visible key stays finite
too."""


class Attention(nn.Module):
    config: ModelConfig
    fp8: bool = False

    def setup(self) -> None:
        c = self.config
        init = functools.partial(weight_init, c)
        d, n, m, h = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
        self.q = declare(self, "q", (d, n, h), ("embed", "heads", "head_dim"), init(d))
        self.k = declare(self, "k", (d, m, h), ("embed", "kv_heads", "head_dim"), init(d))
        self.v = declare(self, "v", (d, m, h), ("embed", "kv_heads", "head_dim"), init(d))
        self.o = declare(
            self, "o", (n, h, d), ("heads", "head_dim", "embed"), init(n * h, residual=True)
        )
        if c.attention_bias:
            zeros = nn.initializers.zeros
            self.q_bias = declare(self, "q_bias", (n, h), ("heads", "head_dim"), zeros)
            self.k_bias = declare(self, "k_bias", (m, h), ("kv_heads", "head_dim"), zeros)
            self.v_bias = declare(self, "v_bias", (m, h), ("kv_heads", "head_dim"), zeros)
        if c.qk_norm:
            ones = nn.initializers.ones
            self.q_norm = declare(self, "q_norm", (h,), ("head_dim",), ones)
            self.k_norm = declare(self, "k_norm", (h,), ("head_dim",), ones)

    def project(self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "B T"]):
        """Queries [B, T, N, H], keys and values [B, T, M, H]; bias, then qk-norm, then rotary."""
        c, x = self.config, quantizer(self.fp8)(x_BTD)
        q, k, v = (_into_heads(x, w) for w in (self.q, self.k, self.v))
        if c.attention_bias:
            q, k, v = (
                y + bias[None, None].astype(y.dtype)
                for y, bias in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias))
            )
        if c.qk_norm:
            q = rms_norm(q, self.q_norm, c.rms_norm_eps)
            k = rms_norm(k, self.k_norm, c.rms_norm_eps)
        return rotary(q, positions_BT, c), rotary(k, positions_BT, c), v

    def output(self, mixed_BTNH):
        b, t, n, h = mixed_BTNH.shape
        mixed = quantizer(self.fp8)(mixed_BTNH.reshape(b, t, n * h))
        return mixed @ self.o.reshape(n * h, -1).astype(mixed.dtype)

    def __call__(self, x_BTD, positions_BT, mask_BTT: Bool[Array, "B T T"]):
        """Attends within packed rows. Returns the output [B, T, D] and this layer's keys and values
        [B, T, M, H]."""
        q, k, v = self.project(x_BTD, positions_BT)
        return self.output(attend(q, k, v, mask_BTT)), (k, v)

    def decode(self, x_B1D, positions_B1, cache, visible_BS: Bool[Array, "B S"], slot):
        """One token per row against a cache of keys [B, M, H, S] and values [B, M, S, H]; returns
        (output, cache)."""
        keys, values = cache
        q, k, v = self.project(x_B1D, positions_B1)
        mixed = attend_cache(q, k, v, keys, values, visible_BS)
        mixed, k, v = lax.optimization_barrier((mixed, k, v))
        keys = lax.dynamic_update_slice(keys, k.transpose(0, 2, 3, 1), (0, 0, 0, slot))
        values = lax.dynamic_update_slice(values, v.transpose(0, 2, 1, 3), (0, 0, slot, 0))
        return self.output(mixed), (keys, values)

    def extend(self, x_BTD, positions_BT, cache, visible_BS: Bool[Array, "B S"], mask_BTT, slot):
        """A piece of a prompt against a cache, which it joins at `slot`; returns (output, cache)."""
        keys, values = cache
        q, k, v = self.project(x_BTD, positions_BT)
        all_keys = jnp.concatenate([keys.transpose(0, 3, 1, 2), k], axis=1)
        all_values = jnp.concatenate([values.transpose(0, 2, 1, 3), v], axis=1)
        old = jnp.broadcast_to(visible_BS[:, None], (*mask_BTT.shape[:2], visible_BS.shape[1]))
        mixed = attend(q, all_keys, all_values, jnp.concatenate([old, mask_BTT], axis=2))
        keys = lax.dynamic_update_slice(keys, k.transpose(0, 2, 3, 1), (0, 0, 0, slot))
        values = lax.dynamic_update_slice(values, v.transpose(0, 2, 1, 3), (0, 0, slot, 0))
        return self.output(mixed), (keys, values)


def _into_heads(x, weight):
    d, n, h = weight.shape
    return (x @ weight.reshape(d, n * h).astype(x.dtype)).reshape(*x.shape[:-1], n, h)


def packed_causal_mask(segment_ids_BT: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """True where query t may see key s: same packed sequence, s <= t. Padding (segment 0) sees only
    padding."""
    t = segment_ids_BT.shape[1]
    same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return same & jnp.tril(jnp.ones((t, t), bool))[None]


def attend(q_BTNH, k_BSMH, v_BSMH, mask_BTS) -> Float[Array, "B T N H"]:
    """Softmax(q k / sqrt(H)) v with float32 scores; query head n uses key/value head n // (N /
    M)."""
    b, t, n, h = q_BTNH.shape
    s, m = k_BSMH.shape[1:3]
    g = n // m
    # Fold the query heads of a group into the query axis: one plain matmul per key/value head.
    q = (q_BTNH * jnp.asarray(h**-0.5, q_BTNH.dtype)).reshape(b, t, m, g, h)
    q = q.transpose(0, 2, 3, 1, 4).reshape(b, m, g * t, h)
    k, v = k_BSMH.transpose(0, 2, 3, 1), v_BSMH.transpose(0, 2, 1, 3)
    scores = (q @ k).astype(jnp.float32).reshape(b, m, g, t, s)
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, MASKED), axis=-1)
    mixed = weights.astype(v.dtype).reshape(b, m, g * t, s) @ v
    return mixed.reshape(b, m, g, t, h).transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def attend_cache(q_B1NH, k_B1MH, v_B1MH, keys_BMHS, values_BMSH, visible_BS):
    """`attend` for one new token: softmax over the visible cache slots and the token's own key."""
    b, _, n, h = q_B1NH.shape
    m = k_B1MH.shape[2]
    q = (q_B1NH * jnp.asarray(h**-0.5, q_B1NH.dtype)).reshape(b, m, n // m, h)
    k, v = k_B1MH[:, 0], v_B1MH[:, 0]
    old = jnp.where(visible_BS[:, None, None], (q @ keys_BMHS).astype(jnp.float32), MASKED)
    own = jnp.sum(q * k[:, :, None], axis=-1).astype(jnp.float32)
    top = jnp.maximum(jnp.max(old, axis=-1), own)
    old, own = jnp.exp(old - top[..., None]), jnp.exp(own - top)
    mixed = old.astype(v.dtype) @ values_BMSH + own[..., None].astype(v.dtype) * v[:, :, None]
    total = (jnp.sum(old, axis=-1) + own)[..., None]
    return (mixed / total.astype(mixed.dtype)).reshape(b, 1, n, h)
