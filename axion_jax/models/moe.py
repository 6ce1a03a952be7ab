"""Mixture of experts: sigmoid router with correction bias, replayable routing, grouped matmuls.

Replayed routing is an argument, not a mode (R3, arXiv:2510.11370): where `routing` is >= 0 its ids
replace the router's own choice, the gates are recomputed from this forward's unbiased scores at
those ids, and gradients reach the router through them. Rows holding -1 fall back to the own choice.
The ids used come back as an output.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from axion_jax.models.config import ModelConfig
from axion_jax.models.layers import GatedMLP, declare, quantizer, weight_init

TRAIN_BLOCK = 64
"""Tokens per block of the grouped matmul; blocks of one expert are padded up to it."""
DECODE_BLOCK = 16


class MoE(nn.Module):
    """Routed experts plus shared expert, added unweighted."""

    config: ModelConfig
    fp8: bool = False
    block: int = TRAIN_BLOCK
    mesh: jax.sharding.Mesh | None = None
    """Where it is given, rows are dispatched on the device that holds them (jax.shard_map)."""

    @nn.compact
    def __call__(self, x_BTD, routing_BTK=None):
        """Returns (output [B, T, D], expert ids used [B, T, K] int32)."""
        c = self.config
        d, e, f = c.hidden_size, c.num_experts, c.moe_intermediate_size
        init = functools.partial(weight_init, c)
        router = declare(self, "router", (d, e), ("embed", None), init(d))
        bias = declare(self, "router_bias", (e,), (None,), nn.initializers.zeros)
        gate_up = declare(self, "gate_up", (e, d, 2, f), ("experts", "embed", None, "ffn"), init(d))
        down = declare(self, "down", (e, f, d), ("experts", "ffn", "embed"), init(f, residual=True))

        def routed(x, routing, router, bias, gate_up, down):
            flat = x.reshape(-1, d)
            forced = None if routing is None else routing.reshape(-1, c.num_experts_per_token)
            ids, gates = route(flat, router, bias, c, forced)
            y = grouped_experts(flat, gate_up, down, ids, gates, block=self.block, fp8=self.fp8)
            return y.reshape(x.shape), ids.reshape(*x.shape[:-1], -1)

        if self.mesh is not None and self.mesh.size > 1:
            rows = jax.P(("data", "fsdp"))
            routed = jax.shard_map(
                routed,
                mesh=self.mesh,
                in_specs=(rows, rows, jax.P(), jax.P(), jax.P(), jax.P()),
                out_specs=(rows, rows),
            )
        y, ids = routed(x_BTD, routing_BTK, router, bias, gate_up, down)
        if c.num_shared_experts:
            y = y + GatedMLP(c, c.shared_intermediate_size, self.fp8, name="shared")(x_BTD)
        return y, ids


def route(
    x: Float[Array, "T D"],
    router: Float[Array, "D E"],
    bias: Float[Array, " E"],
    config: ModelConfig,
    forced: Int[Array, "T K"] | None = None,
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Chooses experts and gates. All float32, the gate weights without the bias.

        s      = sigmoid(x W)
        choice = top-k of (s + bias), within the best groups
        gate   = s[choice] / sum of s[choice] * routed_scaling_factor

    The selection carries no gradient; W is reached through the gates only.
    """
    logits = jnp.matmul(
        x.astype(jnp.float32), router.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(logits)
    choice = lax.stop_gradient(scores) + lax.stop_gradient(bias.astype(jnp.float32))[None]
    if config.num_groups > 1:
        choice = _keep_best_groups(choice, config)
    ids = lax.top_k(choice, config.num_experts_per_token)[1].astype(jnp.int32)
    if forced is not None:
        forced = forced.astype(jnp.int32)
        ids = jnp.where(forced[:, :1] >= 0, forced, ids)
    gates = jnp.take_along_axis(scores, ids, axis=-1)
    if config.norm_topk_prob:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
    return ids, gates * config.routed_scaling_factor


def _keep_best_groups(choice_TE, config: ModelConfig):
    """Sets experts outside the `topk_groups` best groups to -inf; a group is as good as its best
    two together."""
    t, e = choice_TE.shape
    grouped = choice_TE.reshape(t, config.num_groups, -1)
    quality = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    best = lax.top_k(quality, config.topk_groups)[1]
    kept = jnp.any(best[:, :, None] == jnp.arange(config.num_groups)[None, None], axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(t, e)


def grouped_experts(
    x: Float[Array, "T D"],
    gate_up: Float[Array, "E D 2 F"],
    down: Float[Array, "E F D"],
    ids: Int[Array, "T K"],
    gates: Float[Array, "T K"],
    *,
    block: int,
    fp8: bool = False,
) -> Float[Array, "T D"]:
    """Sum over each token's experts of gate * expert(x); no token is ever dropped.

    Tokens are laid out by expert, each expert's share padded up to whole blocks, and every block
    multiplies the weights of its one expert: dense batched matmuls of static shape, whatever the
    balance. `dense_experts` is the reference.
    """
    t, k = ids.shape
    e, d, _, f = gate_up.shape
    num_slots = t * k
    num_blocks = -(-num_slots // block) + e
    flat = ids.reshape(-1)
    counts = jnp.sum(jax.nn.one_hot(flat, e, dtype=jnp.int32), axis=0)
    blocks = (counts + block - 1) // block
    first_block = jnp.cumsum(blocks) - blocks
    # Rank of each slot within its expert: position in a stable sort by expert, minus the expert's
    # start.
    order = jnp.argsort(flat, stable=True)
    start = jnp.cumsum(counts) - counts
    rank_sorted = jnp.arange(num_slots) - start[flat[order]]
    place_sorted = first_block[flat[order]] * block + rank_sorted
    place = jnp.zeros(num_slots, jnp.int32).at[order].set(place_sorted.astype(jnp.int32))
    source = (
        jnp.zeros(num_blocks * block, jnp.int32)
        .at[place]
        .set(jnp.arange(num_slots, dtype=jnp.int32) // k)
    )
    owner = jnp.searchsorted(jnp.cumsum(blocks), jnp.arange(num_blocks), side="right")
    owner = jnp.minimum(owner, e - 1)

    round_input = quantizer(fp8)
    laid_out = round_input(x)[source].reshape(num_blocks, block, d)
    up_weights = gate_up.reshape(e, d, 2 * f)[owner].astype(x.dtype)
    gate, up = jnp.split(laid_out @ up_weights, 2, axis=-1)
    out = round_input(jax.nn.silu(gate) * up) @ down[owner].astype(x.dtype)
    per_slot = out.reshape(num_blocks * block, d)[place].reshape(t, k, d)
    return jnp.sum(per_slot * gates[..., None].astype(jnp.float32), axis=1).astype(x.dtype)


def dense_experts(x, gate_up, down, ids, gates) -> Float[Array, "T D"]:
    """The three-line reference: every expert on every token, weighted by its gate or by 0."""
    weight = jnp.sum(jax.nn.one_hot(ids, gate_up.shape[0]) * gates[..., None], axis=1)
    hidden = jnp.einsum("td,edcf->tecf", x, gate_up)
    return jnp.einsum(
        "tef,efd,te->td", jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1], down, weight
    )


def expert_load(routing_BTLK, segment_ids_BT, num_experts: int) -> Float[Array, "L E"]:
    """How many (token, slot) pairs of real tokens each expert of each MoE layer received."""
    real = (segment_ids_BT > 0).astype(jnp.float32)
    hits = jax.nn.one_hot(routing_BTLK, num_experts, dtype=jnp.float32)
    return jnp.einsum("btlke,bt->le", hits, real)


def rebalance(router_bias_LE, load_LE, *, rate: float):
    """Moves each expert's selection bias one step of `rate` towards equal load (arXiv:2408.15664,
    Algorithm 1)."""
    mean = jnp.mean(load_LE, axis=-1, keepdims=True)
    return router_bias_LE + rate * jnp.sign(mean - load_LE)
