"""The embedded engine: batched prefill and decode with a KV cache in one compiled loop.

Prompts are left-padded to a bucketed length and filled up to a bucketed batch, so a handful of
compiled programs serve every call; the most new tokens are a traced number inside a bucketed
buffer. The loop ends when every row has stopped.

With `high_precision_layers` set the engine plays an FP8 server: weights of the later layers are
held rounded to e4m3 blocks and their inputs are rounded too, while the trainer stays in full
precision. That mismatch is what replayed routing (R3) and truncated importance sampling exist for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axion_jax.models import moe
from axion_jax.models.decoder import Decoder
from axion_jax.rl.routing import smallest_dtype
from axion_jax.rollout.engine import FinishReason, Generation, Sampling


def bucket(n: int, multiple: int) -> int:
    """n rounded up to a multiple: how many different shapes, hence compilations, lengths may
    cause."""
    return -(-n // multiple) * multiple


class JaxEngine:
    """Samples from a `Decoder` on the devices of its mesh.

    Args:
      decoder: the trainer's decoder; the engine derives its own variant from it.
      high_precision_layers: None for no quantisation, else how many first layers stay in full
        precision.
      max_batch: most rows in one compiled batch; a call with more prompts runs several.
      length_multiple: prompts and new tokens are padded to a multiple of this many tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        high_precision_layers: int | None = None,
        max_batch: int = 256,
        length_multiple: int = 16,
    ) -> None:
        self.decoder = dataclasses.replace(
            decoder,
            high_precision_layers=high_precision_layers,
            scan_layers=False,
            remat=False,
            block=moe.DECODE_BLOCK,
        )
        self.max_batch = max_batch
        self.length_multiple = length_multiple
        self.version = -1
        self._params: Any = None
        self._asleep = False
        self._quantize = jax.jit(self.decoder.quantize)
        self._run = jax.jit(
            functools.partial(sample_batch, self.decoder), static_argnames=("max_slots",)
        )

    def update_weights(self, params: Any, version: int) -> None:
        """Takes a copy of the trainer's weights (quantised here), so that the trainer may donate
        its own."""
        self._params = jax.tree.map(jnp.copy, self._quantize(params))
        self.version = version

    def abort(self) -> None:
        """Nothing runs between calls: `generate` is synchronous."""

    def flush(self) -> None:
        """No prefix cache outlives a call, so there is nothing stale to drop."""

    def sleep(self) -> None:
        """Releases the weights; `update_weights` (after `wake`) brings new ones."""
        self._params, self._asleep = None, True

    def wake(self) -> None:
        self._asleep = False

    def generate(self, prompts: Sequence[np.ndarray], sampling: Sampling) -> list[Generation]:
        """One continuation for each prompt, in order.

        Raises:
          ValueError: an empty prompt.
          RuntimeError: no weights were pushed yet, or the engine sleeps.
        """
        if self._params is None:
            state = (
                "sleeps; call wake() and update_weights()"
                if self._asleep
                else "has no weights; call update_weights()"
            )
            raise RuntimeError(f"The engine {state} before generate().")
        for i, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"Prompt {i} is empty; a prompt needs at least one token.")
        out: list[Generation] = []
        for start in range(0, len(prompts), self.max_batch):
            out += self._generate_batch(prompts[start : start + self.max_batch], start, sampling)
        return out

    def _generate_batch(self, prompts, first: int, sampling: Sampling) -> list[Generation]:
        devices = self.decoder.mesh.size if self.decoder.mesh is not None else 1
        rows = min(bucket(len(prompts), 64), self.max_batch)
        rows = bucket(rows, devices)
        width = bucket(max(map(len, prompts)), self.length_multiple)
        tokens = np.zeros((rows, width), np.int32)
        real = np.zeros((rows, width), np.int32)
        real[len(prompts) :, -1] = (
            1  # rows that fill up the batch hold one token, and are done from the start
        )
        for i, prompt in enumerate(prompts):
            tokens[i, width - len(prompt) :] = prompt
            real[i, width - len(prompt) :] = 1
        stop_ids = np.full(8, -1, np.int32)
        if len(sampling.stop_ids) > len(stop_ids):
            raise ValueError(
                f"{len(sampling.stop_ids)} stop ids; at most {len(stop_ids)} are supported."
            )
        stop_ids[: len(sampling.stop_ids)] = sampling.stop_ids
        inputs = {
            "tokens": tokens,
            "real": real,
            "unused": np.arange(rows) >= len(prompts),
            "request": first + np.arange(rows),
        }
        if self.decoder.mesh is not None:
            sharding = jax.NamedSharding(self.decoder.mesh, jax.P(("data", "fsdp")))
            inputs = jax.device_put(inputs, sharding)
        drawn = self._run(
            self._params,
            inputs,
            jax.random.key(sampling.seed),
            np.float32(sampling.temperature),
            np.int32(sampling.max_new_tokens),
            stop_ids,
            max_slots=bucket(sampling.max_new_tokens, self.length_multiple),
        )
        ids, logprobs, routing, lengths, stopped = map(np.asarray, drawn)
        out = []
        for i, prompt in enumerate(prompts):
            n, skip = int(lengths[i]), width - len(prompt)
            out.append(
                Generation(
                    token_ids=ids[i, :n],
                    logprobs=logprobs[i, :n],
                    routed_experts=routing[i, skip : width + n - 1],
                    finish_reason=FinishReason.STOP if stopped[i] else FinishReason.LENGTH,
                    weight_version=self.version,
                )
            )
        return out


def sample_batch(
    decoder: Decoder, params, inputs, key, temperature, max_new_tokens, stop_ids, *, max_slots: int
):
    """Prefill, then one token per row and iteration until all rows stopped or `max_new_tokens`.

    Returns ids [B, G], logprobs [B, G], routing [B, P + G, L, K], lengths [B], stopped [B].
    """
    tokens, real = inputs["tokens"], inputs["real"]
    rows, width = tokens.shape
    c = decoder.config
    dtype = smallest_dtype(c.num_experts)
    uniforms = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (max_slots,)))(
        inputs["request"]
    )
    positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    prefill = decoder(params, tokens, positions, real)
    room = [(0, 0)] * 3 + [(0, max_slots)]
    caches = [
        (
            jnp.pad(k.transpose(0, 2, 3, 1), room),
            jnp.pad(v.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, max_slots), (0, 0))),
        )
        for k, v in prefill.caches
    ]
    routing = jnp.pad(
        prefill.routing.astype(dtype), ((0, 0), (0, max_slots), (0, 0), (0, 0)), constant_values=-1
    )
    pick = functools.partial(_pick, temperature=temperature)
    first, first_logprob = pick(decoder.logits(params, prefill.hidden[:, -1]), uniforms[:, 0])
    is_stop = lambda ids: jnp.any(ids[:, None] == stop_ids[None], axis=1)  # noqa: E731
    stopped = is_stop(first) & ~inputs["unused"]
    carry = {
        "n": jnp.int32(1),
        "last": first,
        "ids": jnp.zeros((rows, max_slots), jnp.int32).at[:, 0].set(first),
        "logprobs": jnp.zeros((rows, max_slots), jnp.float32).at[:, 0].set(first_logprob),
        "lengths": jnp.ones(rows, jnp.int32),
        "stopped": stopped,
        "done": stopped | inputs["unused"],
        "routing": routing,
        "caches": caches,
    }
    prompt_length = positions[:, -1] + 1
    visible = jnp.concatenate([real > 0, jnp.ones((rows, max_slots), bool)], axis=1)
    slots = jnp.arange(width + max_slots)

    def unfinished(s):
        return (s["n"] < max_new_tokens) & ~jnp.all(s["done"])

    def one_token(s):
        n = s["n"]
        slot = width + n - 1  # where the last sampled token's key goes
        hidden, used, caches = decoder.decode(
            params,
            s["last"],
            prompt_length + n - 1,
            s["caches"],
            visible & (slots < slot)[None],
            slot,
        )
        drawn = lax.dynamic_index_in_dim(uniforms, n, axis=1, keepdims=False)
        ids, logprobs = pick(decoder.logits(params, hidden), drawn)
        ids, logprobs = jnp.where(s["done"], 0, ids), jnp.where(s["done"], 0.0, logprobs)
        stops = is_stop(ids) & ~s["done"]
        return {
            "n": n + 1,
            "last": ids,
            "ids": lax.dynamic_update_slice(s["ids"], ids[:, None], (0, n)),
            "logprobs": lax.dynamic_update_slice(s["logprobs"], logprobs[:, None], (0, n)),
            "lengths": s["lengths"] + ~s["done"],
            "stopped": s["stopped"] | stops,
            "done": s["done"] | stops,
            "routing": lax.dynamic_update_slice(
                s["routing"], used[:, None].astype(dtype), (0, slot, 0, 0)
            ),
            "caches": caches,
        }

    end = lax.while_loop(unfinished, one_token, carry)
    return end["ids"], end["logprobs"], end["routing"], end["lengths"], end["stopped"]


def _pick(logits_BV, uniform_B, *, temperature):
    """Inverse-CDF sampling: one uniform per row, and the float32 log-probability of what was
    drawn."""
    greedy = temperature == 0
    scaled = logits_BV / jnp.where(greedy, 1.0, temperature)
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    mass = jnp.cumsum(jnp.exp(logprobs), axis=-1)
    drawn = jnp.sum(mass < uniform_B[:, None] * mass[:, -1:], axis=-1)
    drawn = jnp.minimum(drawn, logits_BV.shape[-1] - 1)
    ids = jnp.where(greedy, jnp.argmax(scaled, axis=-1), drawn).astype(jnp.int32)
    return ids, jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]
