"""Five losses of a tiny SFT run and three of GSPO with replayed routing, as they were when last reviewed.

A change that should not move numbers leaves them alone; one that should is seen in the diff of
`make golden`. Compared to 1e-3, since another CPU may add in another order.
"""

import functools
import json
import os
import pathlib

import jax
import numpy as np
import optax

from axion_jax.data.pack import pack
from axion_jax.data.reasoning import ReasoningPrompts
from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn
from axion_jax.recipe.pipeline import build_tokenizer
from axion_jax.recipe.sft import Demonstrations
from axion_jax.rl.algorithms import make_loss, make_reduction
from axion_jax.rl.corrections import truncated_importance_sampling
from axion_jax.rl.update import make_update_step
from axion_jax.types import TrainState

FILE = pathlib.Path(__file__).parent / "golden" / "losses.json"

MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=32,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    num_dense_layers=1,
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_token=2,
    num_shared_experts=1,
    rope_theta=10_000.0,
)


def five_sft_losses(decoder: Decoder) -> list[float]:
    tokenizer = build_tokenizer()
    examples = Demonstrations(
        {"reasoning": ReasoningPrompts(seed=0)}, {"reasoning": 1.0}, tokenizer, seed=0
    )
    loss, reduction = make_loss("sft"), make_reduction("sft")
    step, state = train(decoder, make_score_fn(decoder, entropy=False), loss)
    losses = []
    for i in range(5):
        batch = packed(
            [examples.example(8 * i + j).replace(rollout_id=j) for j in range(8)], reduction
        )
        state, metrics = step(state, batch, np.int32(1))
        losses.append(float(metrics["loss"]))
    return losses


def three_gspo_losses(decoder: Decoder) -> list[float]:
    """Rollouts made of demonstrations: random routing, old log-probs off the policy's by noise."""
    rng = np.random.default_rng(0)
    examples = Demonstrations(
        {"reasoning": ReasoningPrompts(seed=0)}, {"reasoning": 1.0}, build_tokenizer(), seed=0
    )
    trajectories = []
    for i in range(8):
        trajectory = examples.example(i)
        n = len(trajectory.loss_mask)
        chosen = np.argsort(rng.random((n, MODEL.num_moe_layers, MODEL.num_experts)), axis=-1)
        trajectories.append(
            trajectory.replace(
                rollout_id=i,
                advantage=float(rng.normal()),
                routing=chosen[..., : MODEL.num_experts_per_token].astype(np.int8),
                sampler_logprobs=(-6 + 0.3 * rng.normal(size=n)).astype(np.float32),
            )
        )
    batch = packed(trajectories, make_reduction("gspo"), routing=True)
    noise = rng.normal(size=batch.tokens.shape)
    score = make_score_fn(decoder, replay=True)
    loss = make_loss(
        "gspo",
        clip_low=0.05,
        clip_high=0.1,
        correction=functools.partial(truncated_importance_sampling, cap=2.0),
    )
    step, state = train(decoder, score, loss)
    first = jax.tree.map(lambda x: x[0], batch)
    old = np.asarray(jax.jit(score)(state.params, first).logprobs)[None] + 0.05 * noise
    batch = jax.tree.map(lambda x: x, batch)
    batch = type(batch)(**(vars(batch) | {"old_logprobs": old.astype(np.float32)}))
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch, np.int32(1))
        losses.append(float(metrics["loss"]))
    return losses


def train(decoder: Decoder, score_fn, loss_fn):
    optimizer = optax.adamw(3e-3)
    params = jax.jit(decoder.init)(jax.random.key(0))
    state = TrainState(np.int32(0), params, optimizer.init(params), np.int32(0))
    return jax.jit(make_update_step(score_fn, loss_fn, optimizer)), state


def packed(trajectories, reduction, *, routing: bool = False):
    weights, denominator = reduction(trajectories)
    return pack(
        trajectories,
        row_length=64,
        rows=8,
        pad_id=0,
        weights=weights,
        denominator=denominator,
        routing_shape=MODEL.routing_shape if routing else None,
        with_advantages=routing,
        with_sampler_logprobs=routing,
        microbatches=1,
    ).batch


def test_golden_losses_are_those_last_reviewed():
    decoder = Decoder(MODEL)
    losses = {"sft": five_sft_losses(decoder), "gspo": three_gspo_losses(decoder)}
    if os.environ.get("REWRITE_GOLDEN"):
        FILE.write_text(json.dumps(losses, indent=1) + "\n")
    golden = json.loads(FILE.read_text())
    for name, values in golden.items():
        np.testing.assert_allclose(losses[name], values, rtol=1e-3, atol=1e-5, err_msg=name)
