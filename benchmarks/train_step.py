r"""Trained tokens per CPU-second at the size of the tiny recipe: SFT, and GSPO with replayed
routing, with and without a distance to a reference and an entropy bonus, side by side.

    python benchmarks/train_step.py

Both take the same packed rows of 128 through the whole update step (forward, backward, AdamW).
CPU-seconds are this process's own, whatever else the machine does.
"""

from __future__ import annotations

import time

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Decoder, num_parameters
from axion_jax.models.scores import make_score_fn
from axion_jax.rl.algorithms import make_loss
from axion_jax.rl.compose import make_policy_loss
from axion_jax.rl.update import make_update_step
from axion_jax.types import Batch, TrainState
from configs.tiny.recipe import get_config

MICROBATCHES, ROWS, LENGTH, SEGMENT, REPEATS = 2, 16, 128, 32, 10


def main() -> None:
    config = ModelConfig(**get_config().model.to_dict())
    decoder = Decoder(config)
    batch = random_batch(config)
    algorithm = {"name": "gspo", "clip_low": 0.01, "clip_high": 0.02}
    tis = {"name": "tis", "cap": 2.0}
    gspo = make_policy_loss(algorithm, correction=tis)
    everything = make_policy_loss(
        algorithm,
        correction=tis,
        rejection={"name": "geometric_mask", "low": 0.5, "high": 2.0},
        staleness={"name": "truncated", "cap": 2.0},
        kl={"name": "k3", "coefficient": 1e-3},
        entropy_bonus=1e-3,
    )
    steps = {
        "SFT": (make_score_fn(decoder, entropy=False), make_loss("sft")),
        "GSPO + TIS, own routing": (make_score_fn(decoder), gspo),
        "GSPO + TIS, R3": (make_score_fn(decoder, replay=True), gspo),
        "R3, all weights, KL, entropy": (
            make_score_fn(decoder, replay=True),
            everything,
        ),
    }
    tokens = MICROBATCHES * ROWS * LENGTH
    table = Table(title=f"{num_parameters(config):,} parameters, {tokens:,} tokens a step")
    for column in ("update", "tokens / CPU-s", "tokens / s", "CPU time against SFT"):
        table.add_column(column, justify="right")
    baseline = None
    for name, (score_fn, loss_fn) in steps.items():
        wall, cpu = measure(decoder, score_fn, loss_fn, batch)
        baseline = baseline or cpu
        table.add_row(
            name, f"{tokens / cpu:,.0f}", f"{tokens / wall:,.0f}", f"{cpu / baseline:.2f}x"
        )
    Console().print(table)


def measure(decoder: Decoder, score_fn, loss_fn, batch: Batch) -> tuple[float, float]:
    """(wall, CPU) seconds of one update step, after compilation."""
    optimizer = optax.adamw(1e-4)
    params = jax.jit(decoder.init)(jax.random.key(0))
    state = TrainState(np.int32(0), params, optimizer.init(params), np.int32(0))
    step = jax.jit(make_update_step(score_fn, loss_fn, optimizer), donate_argnums=0)
    state, _ = jax.block_until_ready(step(state, batch, np.int32(MICROBATCHES)))
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(REPEATS):
        state, _ = jax.block_until_ready(step(state, batch, np.int32(MICROBATCHES)))
    return (time.perf_counter() - wall) / REPEATS, (time.process_time() - cpu) / REPEATS


def random_batch(config: ModelConfig) -> Batch:
    """Full rows of four sequences each, with every field that GSPO needs."""
    rng = np.random.default_rng(0)
    shape = (MICROBATCHES, ROWS, LENGTH)
    ids = rng.integers(0, config.vocab_size, (*shape[:-1], LENGTH + 1)).astype(np.int32)
    logprobs = rng.normal(-5, 1, shape).astype(np.float32)
    routing = np.argsort(rng.random((*shape, config.num_moe_layers, config.num_experts)))
    return Batch(
        tokens=ids[..., :-1],
        targets=ids[..., 1:],
        loss_mask=np.ones(shape, bool),
        segment_ids=np.broadcast_to(np.arange(LENGTH) // SEGMENT + 1, shape).astype(np.int32),
        positions=np.broadcast_to(np.arange(LENGTH) % SEGMENT, shape).astype(np.int32),
        weights=np.full(shape, 1 / SEGMENT, np.float32),
        denominator=np.full(shape[:-1], LENGTH / SEGMENT, np.float32),
        advantages=rng.choice([-1.0, 1.0], shape).astype(np.float32),
        sampler_logprobs=logprobs,
        old_logprobs=logprobs,
        ref_logprobs=logprobs,
        routing=routing[..., : config.num_experts_per_token].astype(np.int8),
    )


if __name__ == "__main__":
    main()
