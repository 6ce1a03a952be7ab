"""The decoder: embedding, dense layers, mixture-of-experts layers, final norm, vocabulary head.

Flax names and initialises the parameters of one layer; layers of a kind are stacked on a leading
axis, so that outside this package parameters are one nested dict of few leaves:

    embed [V, D]   dense/... [L_dense, ...]   moe/... [L_moe, ...]   final_norm [D]   head [D, V]   value_head [D, 1]

Of these `dense` or `moe` is absent where there are no such layers, `head` where it is tied or the
model has none, `value_head` where there is none.

`Decoder` is a value: a config plus how to run it (dtype, mesh, scan). Its methods are pure
functions of `params`. One class serves training, scoring, prefill and decoding, so trainer and
engine cannot drift apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from axion_jax.models import moe
from axion_jax.models.attention import Attention, packed_causal_mask
from axion_jax.models.config import ModelConfig
from axion_jax.models.layers import GatedMLP, RMSNorm, rms_norm
from axion_jax.models.quantize import fake_quantize_weight

Params = Any


class Block(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)), with a dense or a mixture-of-experts MLP."""

    config: ModelConfig
    is_moe: bool
    fp8: bool = False
    block: int = moe.TRAIN_BLOCK
    mesh: jax.sharding.Mesh | None = None

    def setup(self) -> None:
        c = self.config
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = Attention(c, self.fp8)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if self.is_moe:
            self.mlp = moe.MoE(c, self.fp8, self.block, self.mesh)
        else:
            self.mlp = GatedMLP(c, c.intermediate_size, self.fp8)

    def __call__(self, x, positions, mask, routing=None):
        mixed, cache = self.attention(self.attention_norm(x), positions, mask)
        x, used = self._mlp(x + mixed, routing)
        return x, used, cache

    def decode(self, x, positions, cache, visible, slot):
        normed = self.attention_norm(x)
        mixed, cache = self.attention.decode(normed, positions, cache, visible, slot)
        x, used = self._mlp(x + mixed, None)
        return x, used, cache

    def extend(self, x, positions, cache, visible, mask, slot):
        normed = self.attention_norm(x)
        mixed, cache = self.attention.extend(normed, positions, cache, visible, mask, slot)
        x, used = self._mlp(x + mixed, None)
        return x, used, cache

    def _mlp(self, x, routing):
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, moe.MoE):
            y, used = self.mlp(normed, routing)
        else:
            y, used = self.mlp(normed), None
        return x + y, used


class Output(NamedTuple):
    hidden: jax.Array
    """[B, T, D]. After the final norm."""
    routing: jax.Array
    """[B, T, L, K] int32. Experts used."""
    caches: list
    """Per layer keys [B, T, M, H] and values [B, T, M, H]; empty where layers are scanned."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    config: ModelConfig
    dtype: Any = jnp.float32
    """Of activations; parameters are cast to it where they are used, the router never."""
    mesh: jax.sharding.Mesh | None = None
    scan_layers: bool = False
    """One compiled layer body for all layers of a kind (deep models), instead of one each (fast on
    CPU)."""
    remat: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    high_precision_layers: int | None = None
    """None: no quantisation. n: layers n.. round the input of every linear layer to FP8 (see
    `quantize`)."""
    block: int = moe.TRAIN_BLOCK

    def __post_init__(self) -> None:
        if self.scan_layers and self.high_precision_layers is not None:
            raise ValueError("FP8 layers differ from the first ones, so they cannot be scanned.")

    # -- parameters
    # -----------------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> Params:
        """Random parameters, float32. Jit it: un-jitted it dispatches hundreds of small
        programs."""
        return nn.meta.unbox(self._boxed(key))

    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters, allocating nothing."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def logical_axes(self) -> Params:
        """The same nested dict with a tuple of logical axis names for each leaf."""
        boxed = jax.eval_shape(self._boxed, jax.random.key(0))
        return jax.tree.map(
            lambda box: tuple(box.names), boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned)
        )

    def _boxed(self, key):
        c = self.config
        keys = iter(jax.random.split(key, 5))
        small = Decoder(
            c
        )  # initialisation runs one tiny unsharded forward, only to let Flax name things
        x, positions = jnp.zeros((1, 2, c.hidden_size)), jnp.zeros((1, 2), jnp.int32)
        mask = jnp.ones((1, 2, 2), bool)

        def stack(is_moe: bool, count: int, key):
            layer = small._layer(0, is_moe)
            init = lambda k: layer.init(k, x, positions, mask)["params"]  # noqa: E731
            boxed = jax.vmap(init)(jax.random.split(key, count))
            return jax.tree.map(
                lambda box: box.replace(names=("layers", *box.names)),
                boxed,
                is_leaf=lambda y: isinstance(y, nn.Partitioned),
            )

        def leaf(key, shape, axes, scale):
            value = jax.random.normal(key, shape) * (c.initializer_range or scale)
            return nn.Partitioned(value, axes)

        params = {
            "embed": leaf(next(keys), (c.vocab_size, c.hidden_size), ("vocab", "embed"), 0.5),
            "final_norm": nn.Partitioned(jnp.ones(c.hidden_size), ("embed",)),
        }
        head_key, dense_key, moe_key, value_key = keys
        if c.vocab_head and not c.tie_embeddings:
            params["head"] = leaf(
                head_key, (c.hidden_size, c.vocab_size), ("embed", "vocab"), c.hidden_size**-0.5
            )
        if c.num_dense_layers:
            params["dense"] = stack(False, c.num_dense_layers, dense_key)
        if c.num_moe_layers:
            params["moe"] = stack(True, c.num_moe_layers, moe_key)
        if c.value_head:
            params["value_head"] = leaf(
                value_key, (c.hidden_size, 1), ("embed", None), c.hidden_size**-0.5
            )
        return params

    def quantize(self, params: Params) -> Params:
        """Parameters as an FP8 engine holds them: every linear weight of layers >=
        `high_precision_layers` rounded to block-scaled e4m3; router, its bias, norms, embeddings
        and heads keep full precision."""
        keep = self.high_precision_layers
        if keep is None:
            return params

        def rounded(stack: str, first_layer: int):
            def leaf(path, value):
                name = path[-1].key
                if name not in ("q", "k", "v", "o", "gate_up", "down"):
                    return value
                layers = [
                    _quantize_linear(name, value[i]) if first_layer + i >= keep else value[i]
                    for i in range(value.shape[0])
                ]
                return jnp.stack(layers)

            return jax.tree_util.tree_map_with_path(leaf, params[stack])

        out = dict(params)
        if "dense" in params:
            out["dense"] = rounded("dense", 0)
        if "moe" in params:
            out["moe"] = rounded("moe", self.config.num_dense_layers)
        return out

    # -- forward
    # --------------------------------------------------------------------------------------------------

    def _layer(self, index: int, is_moe: bool) -> Block:
        fp8 = self.high_precision_layers is not None and index >= self.high_precision_layers
        return Block(self.config, is_moe, fp8, self.block, self.mesh)

    def _layers(self, params: Params):
        """Yields (layer module, its parameters, index among MoE layers or None) from first to
        last."""
        c = self.config
        for i in range(c.num_layers):
            is_moe = i >= c.num_dense_layers
            j = i - c.num_dense_layers if is_moe else i
            stack = params["moe" if is_moe else "dense"]
            yield (
                self._layer(i, is_moe),
                jax.tree.map(lambda p, j=j: p[j], stack),
                j if is_moe else None,
            )

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        routing: Int[Array, "B T L K"] | None = None,
    ) -> Output:
        """Runs packed rows. `routing` >= 0 fixes the experts of a token in a layer, -1 leaves them
        to the router."""
        x = jnp.take(params["embed"], tokens, axis=0).astype(self.dtype)
        mask = packed_causal_mask(segment_ids)
        if self.scan_layers:
            x, used = self._scan(params, x, positions, mask, routing)
            caches = []
        else:
            used, caches = [], []
            for layer, weights, j in self._layers(params):
                forced = None if routing is None or j is None else routing[:, :, j]
                run = jax.checkpoint(_run, static_argnums=0) if self.remat else _run
                x, ids, cache = run(layer, weights, x, positions, mask, forced)
                caches.append(cache)
                if j is not None:
                    used.append(ids)
            used = jnp.stack(used, axis=2) if used else _no_routing(tokens, self.config)
        hidden = rms_norm(x, params["final_norm"], self.config.rms_norm_eps)
        return Output(hidden, used, caches)

    def _scan(self, params, x, positions, mask, routing):
        """`__call__`'s layers as one `lax.scan` per kind."""
        c = self.config
        used = _no_routing(x[..., 0], c)

        def body(layer):
            def step(x, scanned):
                weights, forced = scanned
                x, ids, _ = _run(layer, weights, x, positions, mask, forced)
                return x, ids

            return jax.checkpoint(step) if self.remat else step

        if c.num_dense_layers:
            x, _ = jax.lax.scan(body(self._layer(0, False)), x, (params["dense"], None))
        if c.num_moe_layers:
            forced = None if routing is None else jnp.moveaxis(routing, 2, 0)
            x, ids = jax.lax.scan(body(self._layer(0, True)), x, (params["moe"], forced))
            used = jnp.moveaxis(ids, 0, 2)
        return x, used

    def empty_caches(self, rows: int, slots: int) -> list:
        """Per layer keys [B, M, H, S] and values [B, M, S, H], as `extend` and `decode` read them."""
        b, s, m, h = rows, slots, self.config.num_kv_heads, self.config.head_dim
        return [
            (jnp.zeros((b, m, h, s), self.dtype), jnp.zeros((b, m, s, h), self.dtype))
            for _ in range(self.config.num_layers)
        ]

    def extend(
        self, params: Params, tokens_BT, positions_BT, segment_ids_BT, caches, visible_BS, slot
    ):
        """The next T tokens of each row's prompt against the caches, which they join at `slot`.

        A prompt taken in pieces gives what it gives in one, with scores for one piece at a time.
        Tokens of segment 0 are padding; of the caches a row sees the slots that are `visible`.

        Returns (hidden [B, T, D], routing [B, T, L, K], caches).
        """
        x = jnp.take(params["embed"], tokens_BT, axis=0).astype(self.dtype)
        mask = packed_causal_mask(segment_ids_BT)
        used, updated = [], []
        for (layer, weights, j), cache in zip(self._layers(params), caches, strict=True):
            x, ids, cache = _apply(
                layer, weights, x, positions_BT, cache, visible_BS, mask, slot, method="extend"
            )
            updated.append(cache)
            if j is not None:
                used.append(ids)
        hidden = rms_norm(x, params["final_norm"], self.config.rms_norm_eps)
        routing = jnp.stack(used, axis=2) if used else _no_routing(tokens_BT, self.config)
        return hidden, routing, updated

    def decode(self, params: Params, tokens_B, positions_B, caches, visible_BS, slot):
        """One token per row against the caches. Returns (hidden [B, D], routing [B, L, K],
        caches)."""
        x = jnp.take(params["embed"], tokens_B, axis=0).astype(self.dtype)[:, None]
        used, updated = [], []
        for (layer, weights, j), cache in zip(self._layers(params), caches, strict=True):
            x, ids, cache = _apply(
                layer,
                weights,
                x,
                positions_B[:, None],
                cache,
                visible_BS,
                slot,
                method="decode",
            )
            updated.append(cache)
            if j is not None:
                used.append(ids[:, 0])
        hidden = rms_norm(x[:, 0], params["final_norm"], self.config.rms_norm_eps)
        routing = jnp.stack(used, axis=1) if used else _no_routing(tokens_B, self.config)
        return hidden, routing, updated

    def logits(self, params: Params, hidden) -> jax.Array:
        """[..., V] float32."""
        head = params["embed"].T if self.config.tie_embeddings else params["head"]
        return (hidden @ head.astype(hidden.dtype)).astype(jnp.float32)


def _apply(layer: Block, weights: Params, *args: Any, method: str | None = None) -> Any:
    """Flax's `apply`, whose declared type says nothing of what a layer returns."""
    return layer.apply({"params": weights}, *args, method=method)


def _run(layer: Block, weights: Params, x, positions, mask, forced):
    return _apply(layer, weights, x, positions, mask, forced)


def _no_routing(tokens, config: ModelConfig):
    return jnp.zeros((*tokens.shape, 0, config.num_experts_per_token), jnp.int32)


def _quantize_linear(name: str, weight: jax.Array) -> jax.Array:
    """Rounds one layer's weight in the 2-D shape its checkpoint tensor has (gate and up are two
    tensors there)."""
    if name in ("q", "k", "v"):
        return fake_quantize_weight(weight.reshape(weight.shape[0], -1)).reshape(weight.shape)
    if name == "o":
        return fake_quantize_weight(weight.reshape(-1, weight.shape[-1])).reshape(weight.shape)
    if name == "gate_up":  # [..., D, 2, F]: quantise [..., 2, D, F]
        swapped = jnp.moveaxis(weight, -2, -3)
        return jnp.moveaxis(fake_quantize_weight(swapped), -3, -2)
    return fake_quantize_weight(weight)


def num_parameters(config: ModelConfig) -> int:
    """Trainable parameters; the router's correction bias is a buffer and not counted."""
    params = Decoder(config).abstract_params()
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    return total - (params["moe"]["mlp"]["router_bias"].size if config.num_moe_layers else 0)
