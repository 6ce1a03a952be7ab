"""How far trainer and FP8 sampler are apart, with and without replayed routing, on the same
rollouts."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from axion_jax.data.pack import pack
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn
from axion_jax.recipe.stage import put_microbatches
from axion_jax.rl.corrections import mismatch_metrics
from axion_jax.rl.reduce import each_token_alike
from axion_jax.types import Trajectory


def measure_mismatch(
    decoder: Decoder,
    params: Any,
    trajectories: list[Trajectory],
    *,
    temperature: float,
    rows: int,
    row_length: int,
    pad_id: int,
) -> dict[str, dict[str, float]]:
    """{"with_replay", "without_replay"}: mean |log-prob difference|, k3, largest difference, expert
    disagreement.

    Expert disagreement is the share of (token, MoE layer) pairs in which the forward used another
    set of experts than
    the sampler did: 0 with replay by construction.
    """
    weights, denominator = each_token_alike(trajectories)
    packed = pack(
        trajectories,
        row_length=row_length,
        rows=rows,
        pad_id=pad_id,
        weights=weights,
        denominator=denominator,
        routing_shape=decoder.config.routing_shape,
        with_sampler_logprobs=True,
    )
    batch = packed.batch
    assert batch.routing is not None and batch.sampler_logprobs is not None
    known = np.asarray(batch.routing[..., 0] >= 0)
    result = {}
    for name, replay in (("with_replay", True), ("without_replay", False)):
        score = jax.jit(
            make_score_fn(decoder, temperature=temperature, replay=replay, entropy=False)
        )
        found = [score(params, put_one(batch, m, decoder)) for m in range(packed.num_microbatches)]
        logprobs = np.stack([np.asarray(s.logprobs) for s in found])
        routing = np.stack([np.asarray(s.routing) for s in found])
        means = mismatch_metrics(logprobs, batch.sampler_logprobs, batch.loss_mask)
        differs = np.any(np.sort(routing, -1) != np.sort(batch.routing, -1), axis=-1)
        result[name] = {
            "mean_abs_logprob_diff": float(means["logprob_abs_diff"].value),
            "k3": float(means["k3"].value),
            "max_abs_logprob_diff": float(
                np.abs(logprobs - batch.sampler_logprobs)[batch.loss_mask].max()
            ),
            "expert_disagreement": float(differs[known].mean()),
            "tokens": int(batch.loss_mask.sum()),
        }
    return result


def put_one(batch, m: int, decoder: Decoder):
    """Micro-batch m on the devices, without the stacking axis."""
    stacked = put_microbatches(jax.tree.map(lambda x: x[m : m + 1], batch), decoder)
    return jax.tree.map(lambda x: x[0], stacked)
