"""One reinforcement-learning stage: sample, score, shape, recompute, update; GSPO and GRPO alike.

The life of a step:

    engine.update_weights             the policy's parameters, rounded to FP8 if the engine plays an FP8 server
    collect_groups                    rounds of prompts x samples until enough groups pass the filter (raw rewards)
    shape, assign_advantages          length penalty, group baseline; truncated rollouts are masked but stay counted
    pack                              one packed batch for each optimizer step
    old log-probs                     recomputed by the trainer with the sampler's routing replayed (R3)
    update                            one clipped, corrected, guarded step for each batch
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

from axion_jax.data.pack import Packed, pack
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn
from axion_jax.recipe.guards import GuardConfig
from axion_jax.recipe.optimizers import bind, make_optimizer, make_schedule
from axion_jax.recipe.run import RunDirectory
from axion_jax.recipe.stage import Stage, init_state, put_microbatches, to_floats
from axion_jax.rl import shaping
from axion_jax.rl.advantages import BASELINES, assign_advantages
from axion_jax.rl.algorithms import make_reduction
from axion_jax.rl.compose import make_policy_loss
from axion_jax.rl.corrections import mismatch_metrics
from axion_jax.rl.filters import Keep, mean_above, mean_at_most, rewards_differ
from axion_jax.rl.reduce import Reduction
from axion_jax.rl.routing import prepare_routing
from axion_jax.rl.update import LossFn, make_score_step, make_update_step
from axion_jax.rollout.collect import Collected, Task, collect_groups
from axion_jax.rollout.engine import Engine, Sampling
from axion_jax.types import Reward, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Online filter: keep groups with low < mean raw reward <= high, over-sampling to replace the
    others."""

    low: float | None = None
    """None: no lower end."""
    high: float | None = None
    """None: no upper end."""
    differing: bool = False
    """Also drop groups whose rewards are all alike: all pass, all fail."""
    max_oversampling: int
    """Most prompts drawn for each one wanted."""

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"filter.low={self.low} must be below filter.high={self.high}.")
        if not self.keep:
            raise ValueError("filter drops nothing: set low, high or differing, or leave it out.")
        if self.max_oversampling < 1:
            raise ValueError(f"filter.max_oversampling={self.max_oversampling} must be at least 1.")

    @property
    def keep(self) -> dict[str, Keep]:
        """Filters, each named after what it takes out."""
        filters: dict[str, Keep] = {}
        if self.low is not None:
            filters["too_hard"] = functools.partial(mean_above, low=self.low)
        if self.high is not None:
            filters["too_easy"] = functools.partial(mean_at_most, high=self.high)
        if self.differing:
            filters["all_alike"] = rewards_differ
        return filters


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig:
    task: str
    """reasoning, instruction_following or preference."""
    num_steps: int
    """Rollout steps."""
    prompts_per_step: int
    samples_per_prompt: int
    updates_per_step: int
    """Optimizer steps on each rollout; the kept groups are dealt out to them in order."""
    max_response_length: int
    temperature: float
    replay_routing: bool
    """R3: the sampler's experts in log-prob recomputation and training."""
    high_precision_layers: int | None
    """First layers that the rollout engine keeps in full precision, FP8 after them; None: no
    FP8."""
    mask_truncated: bool
    advantage: dict[str, Any]
    """The group's baseline: group_std, group_mean or leave_one_out (rl/advantages.py)."""
    algorithm: dict[str, Any]
    """The policy loss (rl/algorithms.py) and its options."""
    schedule: dict[str, Any]
    optimizer: dict[str, Any]
    rows: int
    row_length: int
    evaluate_every: int
    checkpoint_every: int
    guards: GuardConfig
    filter: FilterConfig | None = None
    shaping: dict[str, Any] | None = None
    correction: dict[str, Any] | None = None
    """Weights of trainer over engine. This and what follows: rl/compose.py."""
    rejection: dict[str, Any] | None = None
    """Sequences left out for how trainer and engine differ on them."""
    staleness: dict[str, Any] | None = None
    """Weights of the current policy over the one that the rollout step began with."""
    kl: dict[str, Any] | None = None
    """Distance to the stage's initial policy."""
    entropy_bonus: float | None = None
    """Coefficient of the entropy."""
    reduction: dict[str, Any] | None = None
    """How tokens are weighed (rl/reduce.py); None: the algorithm's default."""

    def __post_init__(self) -> None:
        for name in (
            "num_steps",
            "prompts_per_step",
            "updates_per_step",
            "max_response_length",
            "rows",
            "row_length",
            "evaluate_every",
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt={self.samples_per_prompt}: a group needs at least 2 for a baseline."
            )
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"updates_per_step={self.updates_per_step} exceeds prompts_per_step={self.prompts_per_step}: some"
                " updates would get no group."
            )
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature} must be above 0: a greedy rollout has one answer."
            )
        make_optimizer(make_schedule(**self.schedule), **self.optimizer)
        shape = make_shaping(self.shaping, self.max_response_length)
        shape([0.0, 1.0], [1, 1])  # answers an option out of range
        name = self.advantage.get("name")
        if name not in BASELINES or len(self.advantage) > 1:
            raise ValueError(
                f"advantage={self.advantage} must be a name alone; known: {', '.join(BASELINES)}."
            )
        policy_loss(self)
        reduction_of(self)


def policy_loss(config: RLConfig) -> LossFn:
    """The loss of a stage, its sections checked and put together."""
    return make_policy_loss(
        config.algorithm,
        correction=config.correction,
        rejection=config.rejection,
        staleness=config.staleness,
        kl=config.kl,
        entropy_bonus=config.entropy_bonus,
    )


def reduction_of(config: RLConfig) -> Reduction:
    """How a stage weighs tokens."""
    options = dict(config.reduction or {})
    return make_reduction(config.algorithm["name"], options.pop("name", None), **options)


def make_shaping(
    section: dict[str, Any] | None, max_response_length: int
) -> Callable[[Sequence[float], Sequence[int]], np.ndarray]:
    """`shape(raw rewards of a group, lengths in tokens) -> shaped rewards`."""
    if section is None:
        return lambda rewards, lengths: np.asarray(rewards, np.float64)
    options = dict(section)
    name = options.pop("name", "")
    bind(SHAPINGS, "shaping", name, options | {"max_length": max_response_length})
    return functools.partial(SHAPINGS[name], max_length=max_response_length, **options)


def _relative_to_shortest(
    rewards, lengths, *, max_length: int, coefficient: float, apply_to: str = "correct"
):
    correct = np.asarray(rewards) > 0.5
    return shaping.length_penalty(
        rewards,
        lengths,
        correct,
        max_length=max_length,
        coefficient=coefficient,
        apply_to=apply_to,
    )


def _linear(scores, lengths, *, max_length: int, free_length: int, coefficient: float):
    return shaping.linear_length_penalty(
        scores, lengths, free_length=free_length, max_length=max_length, coefficient=coefficient
    )


SHAPINGS = {
    "length_penalty": _relative_to_shortest,
    "linear_length_penalty": _linear,
    "soft_overlong": shaping.soft_overlong,
}


def train_rl(
    name: str,
    config: RLConfig,
    run: RunDirectory,
    decoder: Decoder,
    params: Any,
    task: Task,
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    held_out_score: Callable[[Any, int], float],
    *,
    stop_ids: tuple[int, ...],
    pad_id: int,
    seed: int,
) -> Any:
    """Trains from `params` and returns the parameters of the last step.

    Args:
      held_out_score: measures parameters (and their version) on held-out prompts, for the curve.
    """
    schedule = make_schedule(**config.schedule)
    optimizer = make_optimizer(schedule, **config.optimizer)
    score_fn = make_score_fn(decoder, temperature=config.temperature, replay=config.replay_routing)
    recompute = jax.jit(make_score_step(score_fn))
    update = jax.jit(make_update_step(score_fn, policy_loss(config), optimizer), donate_argnums=0)
    score_reference = None
    if config.kl is not None:
        score_reference = make_reference(decoder, params, temperature=config.temperature)
    stage = Stage(
        run,
        name,
        num_steps=config.num_steps,
        checkpoint_every=config.checkpoint_every,
        guards=config.guards,
        shown=("raw_reward", "response_length", "entropy", "held_out", "tokens_per_second"),
    )
    state, host = stage.resume(init_state(params, optimizer, decoder))
    del params
    index = host.get("next_prompt", 0)
    sampling = Sampling(
        max_new_tokens=config.max_response_length, stop_ids=stop_ids, temperature=config.temperature
    )
    if stage.step == 0:
        held_out = held_out_score(state.params, int(state.step))
        run.log(name, 0, {"held_out": held_out, "seconds": stage.seconds})
    while stage.step < config.num_steps:
        before = stage.seconds
        engine.update_weights(state.params, int(state.step))
        collected = collect_groups(
            engine,
            tokenizer,
            task,
            sampling,
            start_index=index,
            num_groups=config.prompts_per_step,
            samples_per_prompt=config.samples_per_prompt,
            keep=config.filter.keep if config.filter else {},
            max_oversampling=config.filter.max_oversampling if config.filter else 1,
            seed_key=(seed, name, stage.step),
        )
        index = collected.next_index
        save_trajectories(stage, collected)
        batches = make_batches(config, decoder, collected.groups, pad_id=pad_id)
        placed = [
            _with_logprobs(p, state.params, recompute, score_reference, decoder) for p in batches
        ]
        metrics = collected.metrics | {"learning_rate": float(schedule(int(state.step)))}
        updates = []
        for (batch, _), packed in zip(placed, batches, strict=True):
            state, result = update(state, batch, np.int32(packed.num_microbatches))
            updates.append(to_floats(result))
        metrics |= _average(updates) | _recomputed_metrics(batches, placed)
        shaped = [
            [reward_of(t).value for t in group] for group in shaped_groups(config, collected.groups)
        ]
        metrics["reward"] = _mean(reward for rewards in shaped for reward in rewards)
        metrics["frac_reward_zero_std"] = _mean(not rewards_differ(r) for r in shaped)
        metrics["tokens_per_second"] = metrics["sampled_tokens"] / (stage.seconds - before)
        if (stage.step + 1) % config.evaluate_every == 0 or stage.step + 1 == config.num_steps:
            metrics["held_out"] = held_out_score(state.params, int(state.step))
        stage.finish_step(state, metrics, {"next_prompt": index}, updates)
    stage.close()
    return state.params


def make_reference(decoder: Decoder, params: Any, *, temperature: float):
    """`score(batch, num_microbatches) -> log-probs [M, B, T]` under a copy of `params`.

    The reference never replays routing: the sampler's experts are the policy's choice, not its.
    """
    score_fn = make_score_fn(decoder, temperature=temperature, entropy=False)
    score = jax.jit(make_score_step(score_fn))
    reference = jax.tree.map(jnp.copy, params)  # the update step donates its own
    return lambda batch, num_microbatches: score(reference, batch, num_microbatches)["logprobs"]


def shaped_groups(
    config: RLConfig, groups: Sequence[Sequence[Trajectory]]
) -> list[list[Trajectory]]:
    """The groups with shaped rewards; the raw reward stays among the reward's parts."""
    shape = make_shaping(config.shaping, config.max_response_length)
    out = []
    for group in groups:
        rewards = [reward_of(t).value for t in group]
        values = shape(rewards, [t.num_trained for t in group])
        out.append(
            [
                t.replace(
                    reward=Reward(float(v), reward_of(t).parts | {"raw": r}, reward_of(t).reason)
                )
                for t, v, r in zip(group, values, rewards, strict=True)
            ]
        )
    return out


def reward_of(trajectory: Trajectory) -> Reward:
    """The reward of a trajectory in a kept group: unscored ones have left it."""
    assert trajectory.reward is not None
    return trajectory.reward


def make_batches(
    config: RLConfig, decoder: Decoder, groups: Sequence[Sequence[Trajectory]], *, pad_id: int
) -> list[Packed]:
    """One packed batch for each optimizer step, groups dealt out in order; fewer where there are
    too few groups."""
    groups = shaped_groups(config, groups)
    reduction = reduction_of(config)
    most_rollouts = (
        -(-config.prompts_per_step // config.updates_per_step) * config.samples_per_prompt
    )
    packed = []
    for part in np.array_split(np.arange(len(groups)), config.updates_per_step):
        trajectories = [t for i in part for t in groups[i]]
        trajectories, dropped = assign_advantages(trajectories, baseline=config.advantage["name"])
        assert not any(dropped.values()), f"collect_groups kept what cannot be trained: {dropped}"
        if config.replay_routing and decoder.config.num_moe_layers:
            trajectories = prepare_routing(
                trajectories,
                num_experts=decoder.config.num_experts,
                routing_shape=decoder.config.routing_shape,
            )
        if config.mask_truncated:
            trajectories = shaping.mask_truncated(trajectories)
        if not trajectories:
            continue
        weights, denominator = reduction(trajectories)
        packed.append(
            pack(
                trajectories,
                row_length=config.row_length,
                rows=config.rows,
                pad_id=pad_id,
                weights=weights,
                denominator=denominator,
                routing_shape=decoder.config.routing_shape if config.replay_routing else None,
                with_advantages=True,
                with_sampler_logprobs=True,
                microbatches=-(-most_rollouts // config.rows),  # worst case: one rollout a row
            )
        )
    return packed


def _with_logprobs(packed: Packed, params: Any, recompute, score_reference, decoder: Decoder):
    """The batch on the devices with `old_logprobs` filled in, and `ref_logprobs` where there is a
    reference; and the entropies found on the way."""
    batch = put_microbatches(packed.batch, decoder)
    used = np.int32(packed.num_microbatches)
    scores = recompute(params, batch, used)
    reference = None if score_reference is None else score_reference(batch, used)
    batch = dataclasses.replace(batch, old_logprobs=scores["logprobs"], ref_logprobs=reference)
    return batch, scores["entropy"]


def _recomputed_metrics(batches: list[Packed], placed) -> dict[str, float]:
    """Entropy, and the difference between trainer and sampler log-probs, before the first update on
    this data."""
    if not batches:
        return {}
    mask = np.concatenate([p.batch.loss_mask.ravel() for p in batches])
    sampler = np.concatenate([np.ravel(cast(Any, p.batch.sampler_logprobs)) for p in batches])
    old = np.concatenate([np.asarray(batch.old_logprobs).ravel() for batch, _ in placed])
    entropy = np.concatenate([np.asarray(e).ravel() for _, e in placed])
    found = {k: float(m.value) for k, m in mismatch_metrics(old, sampler, mask).items()}
    return found | {"entropy": float(entropy[mask].mean()) if mask.any() else 0.0}


def _average(updates: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a rollout step from those of its updates: means, and the number of updates and of
    skipped ones."""
    if not updates:
        return {"updates": 0.0}
    mean = {name: _mean(u[name] for u in updates) for name in updates[0]}
    return mean | {
        "updates": float(len(updates)),
        "update_skipped": sum(u["update_skipped"] for u in updates),
    }


def _mean(values) -> float:
    values = list(values)
    return float(np.mean(values)) if values else 0.0


def save_trajectories(stage: Stage, collected: Collected) -> None:
    """Everything sampled in this step, as one parquet file; written again by a resumed run."""
    directory = stage.directory / "trajectories"
    directory.mkdir(exist_ok=True)
    kept = {t.group_id for group in collected.groups for t in group}
    rows = [
        {
            "task_id": t.task_id,
            "group_id": t.group_id,
            "rollout_id": number,
            "kept": t.group_id in kept,
            "token_ids": t.token_ids.tolist(),
            "loss_mask": t.loss_mask.tolist(),
            "sampler_logprobs": None if t.sampler_logprobs is None else t.sampler_logprobs.tolist(),
            "policy_version": None if t.policy_version is None else int(t.policy_version.max()),
            "stop_reason": t.stop_reason.value,
            "reward": t.reward.value if t.reward else None,
            "reason": t.reward.reason if t.reward else "unscorable",
            "response": sample.text,
        }
        for number, sample in enumerate(collected.samples)
        for t in [sample.trajectory]
    ]
    partial = directory / "partial"
    pq.write_table(pa.Table.from_pylist(rows), partial, compression="zstd")
    partial.rename(directory / f"{stage.step + 1:06d}.parquet")
