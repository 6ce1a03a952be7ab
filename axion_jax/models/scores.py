"""From a model and a batch to `Scores`: log-probabilities, entropy, values, routing.

This is all that `rl/` ever sees of a model. Full-vocabulary logits exist for `chunk` predictions at
a time, and are recomputed in the backward pass, so `[B, T, V]` never does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from axion_jax.models.decoder import Decoder
from axion_jax.models.moe import expert_load
from axion_jax.types import Batch, Scores

LOGITS_AT_ONCE = 2**26
"""Logits that exist at one time by default: 256 MiB in float32, whatever the vocabulary."""


def make_score_fn(
    decoder: Decoder,
    *,
    temperature: float = 1.0,
    replay: bool = False,
    entropy: bool = True,
    chunk: int | None = None,
):
    """Returns `score(params, batch) -> Scores`.

    Args:
      temperature: logits are divided by it before the softmax, as the sampler did.
      replay: use `batch.routing` (R3). Needs the field; -1 rows fall back to the router's own
        choice.
      entropy: also compute the entropy of every prediction; SFT has no use for it.
      chunk: most predictions, over all rows and devices, whose logits exist at one time (at least
        one of each row). None: as many as `LOGITS_AT_ONCE` allows.
    """
    if chunk is None:
        chunk = max(1, LOGITS_AT_ONCE // decoder.config.vocab_size)

    def score(params: Any, batch: Batch) -> Scores:
        if replay and batch.routing is None:
            raise ValueError(
                "replay needs Batch.routing, which this batch lacks. Does the engine record experts?"
            )
        if not decoder.config.vocab_head:
            raise ValueError(
                "This model has no vocabulary head, so its log-probs do not exist; use make_value_fn."
            )
        out = decoder(
            params,
            batch.tokens,
            batch.positions,
            batch.segment_ids,
            batch.routing if replay else None,
        )
        logprobs, entropies = token_logprobs(
            decoder,
            params,
            out.hidden,
            batch.targets,
            temperature=temperature,
            entropy=entropy,
            chunk=chunk,
        )
        values = None
        if decoder.config.value_head:
            values = (out.hidden.astype(jnp.float32) @ params["value_head"])[..., 0]
        return Scores(
            logprobs=logprobs,
            entropy=entropies,
            values=values,
            routing=out.routing,
            expert_load=expert_load(out.routing, batch.segment_ids, decoder.config.num_experts)
            if decoder.config.num_moe_layers
            else None,
        )

    return score


def make_value_fn(decoder: Decoder):
    """Returns `values(params, batch) -> [B, T] float32`: the scalar head alone, no vocabulary
    logits."""

    def values(params: Any, batch: Batch) -> jax.Array:
        out = decoder(params, batch.tokens, batch.positions, batch.segment_ids)
        return (out.hidden.astype(jnp.float32) @ params["value_head"])[..., 0]

    return values


def token_logprobs(decoder, params, hidden_BTD, targets_BT, *, temperature, entropy, chunk):
    """Log-probabilities of `targets` and, if asked, entropies: both [B, T] float32, in nats."""
    b, t = targets_BT.shape
    n = b * t
    hidden, targets = hidden_BTD.reshape(n, -1), targets_BT.reshape(n)

    def of_chunk(hidden, targets):
        logits = decoder.logits(params, hidden) / temperature
        log_z = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        if not entropy:
            return chosen - log_z, jnp.zeros_like(log_z)
        mean_logit = jnp.sum(jnp.exp(logits - log_z[:, None]) * logits, axis=-1)
        return chosen - log_z, log_z - mean_logit

    if n <= chunk:
        logprobs, entropies = of_chunk(hidden, targets)
        logprobs, entropies = (x.reshape(b, t) for x in (logprobs, entropies))
    else:
        # A chunk is a stretch of every row: rows stay on the devices that hold them.
        width = max(1, chunk // b)

        def stretches(x):
            padded = jnp.pad(x, [(0, 0), (0, -t % width)] + [(0, 0)] * (x.ndim - 2))
            return jnp.moveaxis(padded.reshape(b, -1, width, *x.shape[2:]), 1, 0)

        def of_stretch(x):
            found = jax.checkpoint(of_chunk)(x[0].reshape(b * width, -1), x[1].reshape(-1))
            return tuple(y.reshape(b, width) for y in found)

        found = jax.lax.map(of_stretch, (stretches(hidden_BTD), stretches(targets_BT)))
        logprobs, entropies = (jnp.moveaxis(x, 0, 1).reshape(b, -1)[:, :t] for x in found)
    return logprobs, entropies if entropy else None
