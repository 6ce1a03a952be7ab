"""Trains the reward model: Bradley-Terry on preference pairs, from the SFT policy's weights and a
fresh scalar head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerFast

from axion_jax.checkpoint.training import write_json
from axion_jax.data.chat import encode_example
from axion_jax.data.pack import pack
from axion_jax.data.preference import Pair, PreferencePrompts, make_pair, quality
from axion_jax.evaluation.passk import confidence_interval
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn
from axion_jax.recipe.guards import GuardConfig
from axion_jax.recipe.optimizers import make_optimizer, make_schedule
from axion_jax.recipe.run import RunDirectory
from axion_jax.recipe.stage import Stage, init_state, mesh_of, put_microbatches, to_floats
from axion_jax.rewards.reward_model import RewardModel, judged
from axion_jax.rl.algorithms import make_loss, make_reduction
from axion_jax.rl.update import make_update_step
from axion_jax.rollout.collect import enable_thinking
from axion_jax.sharding.rules import batch_sharding
from axion_jax.types import Trajectory

CENTRING_PAIRS = 128
"""Training pairs whose mean score becomes 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    num_steps: int
    pairs_per_step: int
    num_held_out_pairs: int
    rows: int
    row_length: int
    schedule: dict[str, Any]
    optimizer: dict[str, Any]
    checkpoint_every: int
    guards: GuardConfig

    def __post_init__(self) -> None:
        for name in (
            "num_steps",
            "pairs_per_step",
            "num_held_out_pairs",
            "rows",
            "row_length",
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        make_optimizer(make_schedule(**self.schedule), **self.optimizer)


def train_reward_model(
    config: RewardModelConfig,
    run: RunDirectory,
    policy: Decoder,
    policy_params: Any,
    prompts: PreferencePrompts,
    tokenizer: PreTrainedTokenizerFast,
    *,
    pad_id: int,
    seed: int,
) -> RewardModel:
    """The trained model. `done.json` says how often it prefers the truly better of two held-out
    answers."""
    decoder = dataclasses.replace(
        policy, config=dataclasses.replace(policy.config, value_head=True)
    )
    head = jax.jit(lambda key: decoder.init(key)["value_head"])(jax.random.key(seed))
    schedule = make_schedule(**config.schedule)
    optimizer = make_optimizer(schedule, **config.optimizer)
    reduction = make_reduction("preference")
    update = jax.jit(
        make_update_step(make_score_fn(decoder, entropy=False), make_loss("preference"), optimizer),
        donate_argnums=0,
    )
    stage = Stage(
        run,
        "reward_model",
        num_steps=config.num_steps,
        checkpoint_every=config.checkpoint_every,
        guards=config.guards,
        shown=("loss", "accuracy", "margin"),
    )
    state, _ = stage.resume(init_state(policy_params | {"value_head": head}, optimizer, decoder))

    def encode(pair: Pair) -> list[Trajectory]:
        return [
            judged(
                encode_example(
                    tokenizer,
                    [*pair.prompt.messages, message],
                    enable_thinking=enable_thinking(pair.prompt),
                ),
                end_id=pad_id,
                advantage=sign,
            )
            for message, sign in ((pair.chosen, 1.0), (pair.rejected, -1.0))
        ]

    def training_pair(index: int) -> list[Trajectory]:
        return encode(make_pair(prompts, prompts.train(index), index))

    storage = -(-config.pairs_per_step // config.rows)
    while stage.step < config.num_steps:
        first = stage.step * config.pairs_per_step
        sequences = [t for i in range(config.pairs_per_step) for t in training_pair(first + i)]
        sequences = [t.replace(rollout_id=i) for i, t in enumerate(sequences)]
        weights, denominator = reduction(sequences)
        packed = pack(
            sequences,
            row_length=config.row_length,
            rows=config.rows,
            pad_id=pad_id,
            weights=weights,
            denominator=denominator,
            with_advantages=True,
            microbatches=storage,
            together=2,
        )
        learning_rate = float(schedule(int(state.step)))
        batch = put_microbatches(packed.batch, decoder)
        state, metrics = update(state, batch, np.int32(packed.num_microbatches))
        stage.finish_step(state, to_floats(metrics) | {"learning_rate": learning_rate}, {})
    stage.close()

    model = RewardModel(
        decoder,
        state.params,
        offset=0.0,
        end_id=pad_id,
        row_length=config.row_length,
        rows=config.rows,
        sharding=batch_sharding(mesh_of(decoder)),
    )
    pairs = [make_pair(prompts, prompts.train(i), i) for i in range(CENTRING_PAIRS)]
    model.offset = float(np.mean(_scores(model, tokenizer, pairs)))
    file = stage.directory / "done.json"
    if not file.exists():
        report = _held_out_accuracy(model, tokenizer, prompts, config.num_held_out_pairs)
        write_json(file, report | {"seconds": stage.seconds})
    return model


def _scores(
    model: RewardModel, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair]
) -> np.ndarray:
    """[N, 2]: scores of the preferred and the rejected answer."""
    sequences = [
        encode_example(
            tokenizer,
            [*pair.prompt.messages, message],
            enable_thinking=enable_thinking(pair.prompt),
        )
        for pair in pairs
        for message in (pair.chosen, pair.rejected)
    ]
    return model.score_trajectories(sequences).reshape(-1, 2)


def _held_out_accuracy(model, tokenizer, prompts: PreferencePrompts, count: int) -> dict[str, Any]:
    """Share of held-out pairs of different quality in which the better answer scores higher."""
    pairs = [make_pair(prompts, prompt, i) for i, prompt in enumerate(prompts.held_out(count))]
    scores = _scores(model, tokenizer, pairs)
    better = []
    for pair, (chosen, rejected) in zip(pairs, scores, strict=True):
        truth = quality(pair.prompt.entry, pair.chosen["content"]) - quality(
            pair.prompt.entry, pair.rejected["content"]
        )
        if truth:
            better.append(float((chosen - rejected) * truth > 0))
    return {
        "accuracy": float(np.mean(better)),
        "ci95": list(confidence_interval(better)),
        "n": len(better),
        "agrees_with_labels": float(np.mean(scores[:, 0] > scores[:, 1])),
    }
