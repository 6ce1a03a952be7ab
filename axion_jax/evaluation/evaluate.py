"""Measuring a policy on held-out prompts: pass@1 and pass@k with confidence intervals, per task and
family."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from axion_jax.evaluation.passk import confidence_interval, mean_interval, mean_pass_at_k
from axion_jax.rewards.base import Sample
from axion_jax.rollout.collect import Task, sample_and_score
from axion_jax.rollout.engine import Engine, Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How a policy is measured."""

    num_prompts: int
    """Held-out prompts of each task."""
    samples_per_prompt: int
    max_response_length: int
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 2 or self.samples_per_prompt < 1:
            raise ValueError(
                f"num_prompts={self.num_prompts} must be at least 2 and samples_per_prompt={self.samples_per_prompt}"
                " at least 1."
            )
        if self.max_response_length < 1 or self.temperature < 0:
            raise ValueError(
                f"max_response_length={self.max_response_length} must be at least 1 and temperature={self.temperature}"
                " 0 or more."
            )


def evaluate(
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    config: EvaluationConfig,
    *,
    stop_ids: tuple[int, ...],
    real_valued: bool = False,
) -> tuple[dict[str, Any], list[Sample]]:
    """Results of one task, JSON-able, and the samples they come from.

    A sample passes where its reward is above 0.5, or above 0 for `real_valued` rewards (a reward
    model centred on its training pairs), whose mean is reported as `reward_score`. Unscorable
    samples are left out and counted.
    """
    prompts = task.prompts.held_out(config.num_prompts)
    samples = sample_and_score(
        engine,
        tokenizer,
        task,
        prompts,
        Sampling(
            max_new_tokens=config.max_response_length,
            stop_ids=stop_ids,
            temperature=config.temperature,
            seed=config.seed,
        ),
        samples_per_prompt=config.samples_per_prompt,
    )
    result = _summary(samples, config.samples_per_prompt, real_valued)
    families = sorted({p.family for p in prompts})
    if len(families) > 1:
        result["families"] = {
            family: _summary(
                [s for s in samples if s.prompt.family == family],
                config.samples_per_prompt,
                real_valued,
            )
            for family in families
        }
    return result, samples


def _summary(samples: list[Sample], per_prompt: int, real_valued: bool) -> dict[str, Any]:
    rewards: dict[str, list[float]] = {}
    for sample in samples:
        if sample.trajectory.reward is not None:
            rewards.setdefault(sample.prompt.task_id, []).append(sample.trajectory.reward.value)
    if not rewards:
        families = ", ".join(sorted({s.prompt.family for s in samples}))
        raise RuntimeError(f"None of the {len(samples)} samples of {families} could be scored.")
    threshold = 0.0 if real_valued else 0.5
    passed = {task: [r > threshold for r in values] for task, values in rewards.items()}
    rates = [float(np.mean(values)) for values in passed.values()]
    result: dict[str, Any] = {}
    if real_valued:
        means = [float(np.mean(values)) for values in rewards.values()]
        result["reward_score"] = float(np.mean(means))
        result["ci95"] = list(mean_interval(means))
        result["pass@1"] = float(np.mean(rates))
    else:
        result["pass@1"] = float(np.mean(rates))
        result["ci95"] = list(confidence_interval(rates))
    k = 2
    while k <= per_prompt:
        complete = [values for values in passed.values() if len(values) == per_prompt]
        if complete:
            result[f"pass@{k}"] = mean_pass_at_k(np.array(complete), k)
        k *= 2
    return result | {
        "n": len(rates),
        "samples_per_prompt": per_prompt,
        "unscorable": sum(s.trajectory.reward is None for s in samples),
        "response_length": float(np.mean([s.trajectory.num_trained for s in samples])),
        "truncated_share": float(np.mean([s.trajectory.stop_reason.truncated for s in samples])),
    }
