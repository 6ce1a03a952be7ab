"""Supervised fine-tuning: cross-entropy on assistant tokens of packed conversations.

Examples are a pure function of their index; grain shuffles, repeats and batches the indices and
remembers its place, and `pack` turns the examples of one step into rows.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import grain
import jax
import numpy as np
from transformers import PreTrainedTokenizerFast

from axion_jax.data.chat import encode_example
from axion_jax.data.pack import pack
from axion_jax.data.prompts import PromptSet, stream_rng
from axion_jax.models import moe
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn
from axion_jax.recipe.guards import GuardConfig
from axion_jax.recipe.optimizers import make_optimizer, make_schedule
from axion_jax.recipe.run import RunDirectory
from axion_jax.recipe.stage import Stage, init_state, put_microbatches, to_floats
from axion_jax.rl.algorithms import make_loss, make_reduction
from axion_jax.rl.update import make_update_step
from axion_jax.rollout.collect import enable_thinking
from axion_jax.types import Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig:
    num_steps: int
    examples_per_step: int
    num_examples: int
    """Distinct examples; they repeat, reshuffled, once used up."""
    mixture: dict[str, float]
    """Share of the examples drawn from each task."""
    rows: int
    """Rows of a micro-batch."""
    row_length: int
    """Predictions of a row."""
    schedule: dict[str, Any]
    optimizer: dict[str, Any]
    router_bias_update_rate: float
    """Step of the aux-loss-free load balancing; 0 where the checkpoint's biases are kept."""
    checkpoint_every: int
    guards: GuardConfig

    def __post_init__(self) -> None:
        if (
            min(
                self.num_steps,
                self.examples_per_step,
                self.num_examples,
                self.rows,
                self.row_length,
                self.checkpoint_every,
            )
            < 1
        ):
            raise ValueError(
                "num_steps, examples_per_step, num_examples, rows, row_length and checkpoint_every must be at"
                " least 1."
            )
        if not self.mixture:
            raise ValueError("mixture is empty: name the tasks to draw examples from.")
        if any(share <= 0 for share in self.mixture.values()):
            raise ValueError(f"mixture shares must be above 0, not {self.mixture}.")
        planned = self.schedule.get("num_steps", self.num_steps)
        if planned != self.num_steps:
            raise ValueError(
                f"schedule.num_steps={planned} must be num_steps={self.num_steps}, or the learning rate"
                " does not end where training does."
            )
        make_optimizer(make_schedule(**self.schedule), **self.optimizer)


class Demonstrations:
    """`example(i)`: the i-th SFT example, a conversation with a loss on its assistant tokens."""

    def __init__(
        self,
        prompt_sets: Mapping[str, PromptSet],
        mixture: Mapping[str, float],
        tokenizer: PreTrainedTokenizerFast,
        *,
        seed: int,
    ) -> None:
        self._sets, self._tokenizer, self._seed = prompt_sets, tokenizer, seed
        self._names, self._shares = list(mixture), list(mixture.values())

    def example(self, index: int) -> Trajectory:
        rng = stream_rng("sft", self._seed, index)
        name = rng.choices(self._names, self._shares)[0]
        prompts = self._sets[name]
        prompt = prompts.train(index * len(prompts.families) + rng.randrange(len(prompts.families)))
        message = prompts.demonstrate(prompt, rng)
        return encode_example(
            self._tokenizer,
            [*prompt.messages, message],
            enable_thinking=enable_thinking(prompt),
            task_id=prompt.task_id,
        )


def train_sft(
    config: SFTConfig,
    run: RunDirectory,
    decoder: Decoder,
    params: Any,
    demonstrations: Demonstrations,
    *,
    pad_id: int,
    seed: int,
) -> Any:
    """Trains from `params` and returns the parameters of the last step."""
    schedule = make_schedule(**config.schedule)
    optimizer = make_optimizer(schedule, **config.optimizer)
    reduction = make_reduction("sft")
    update = make_update_step(
        make_score_fn(decoder, entropy=False),
        make_loss("sft"),
        optimizer,
        after_update=balance(config.router_bias_update_rate)
        if config.router_bias_update_rate
        else None,
    )
    update = jax.jit(update, donate_argnums=0)
    stage = Stage(
        run,
        "sft",
        num_steps=config.num_steps,
        checkpoint_every=config.checkpoint_every,
        guards=config.guards,
        shown=("loss", "learning_rate", "tokens_per_second"),
    )
    state, host = stage.resume(init_state(params, optimizer, decoder))
    del params
    examples = iter(
        grain.MapDataset.range(config.num_examples)
        .seed(random.Random(seed).getrandbits(31))
        .shuffle()
        .repeat()
        .map(demonstrations.example)
        .batch(config.examples_per_step, batch_fn=list)
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    )
    if host:
        examples.set_state(host["data"])
    storage = -(-config.examples_per_step // config.rows)  # worst case: one example a row
    while stage.step < config.num_steps:
        before = stage.seconds
        step_examples = [example.replace(rollout_id=i) for i, example in enumerate(next(examples))]
        weights, denominator = reduction(step_examples)
        packed = pack(
            step_examples,
            row_length=config.row_length,
            rows=config.rows,
            pad_id=pad_id,
            weights=weights,
            denominator=denominator,
            microbatches=storage,
        )
        learning_rate = float(schedule(int(state.step)))
        batch = put_microbatches(packed.batch, decoder)
        state, metrics = update(state, batch, np.int32(packed.num_microbatches))
        metrics = to_floats(metrics)
        tokens = sum(len(e.loss_mask) for e in step_examples)
        metrics |= {
            "learning_rate": learning_rate,
            "tokens": float(tokens),
            "tokens_per_second": tokens / (stage.seconds - before),
        }
        stage.finish_step(state, metrics, {"data": examples.get_state()})
    stage.close()
    return state.params


def balance(rate: float):
    """`after_update` of the update step: moves every router's selection bias towards equal load."""

    def after_update(params, load_LE):
        mlp = params["moe"]["mlp"]
        bias = moe.rebalance(mlp["router_bias"], load_LE, rate=rate)
        return params | {"moe": params["moe"] | {"mlp": mlp | {"router_bias": bias}}}

    return after_update
