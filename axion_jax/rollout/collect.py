"""From prompts to scored groups of trajectories, with over-sampling until enough groups are worth
training on.

Groups are judged by their raw rewards and taken in the order of their prompts, never in the order
in which they finish.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging
from transformers import PreTrainedTokenizerFast

from axion_jax.data.chat import encode_prompt, parse_response
from axion_jax.data.prompts import Prompt, PromptSet, stream_rng
from axion_jax.rewards.base import Sample, Scorer, score_all
from axion_jax.rl.filters import Keep, select_groups
from axion_jax.rollout.engine import Engine, Sampling, to_trajectory
from axion_jax.types import Reward, Trajectory, Unscorable

SCORE_TIMEOUT = 60.0
"""Seconds after which a scorer is given up on; its sample then leaves its group."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a stage trains on or a benchmark measures: prompts, and how answers are scored."""

    name: str
    prompts: PromptSet
    scorer: Scorer


@dataclasses.dataclass(frozen=True)
class Collected:
    """What one rollout step brought."""

    groups: list[list[Trajectory]]
    """Kept groups, in the order of their prompts. Rewards are raw."""
    samples: list[Sample]
    """Everything that was sampled, for logs."""
    metrics: dict[str, float]
    next_index: int
    """The first training prompt that was not used."""


def enable_thinking(prompt: Prompt) -> bool | None:
    """The template's switch: None leaves thinking to the model."""
    return None if prompt.thinking else False


def sample_and_score(
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    samples_per_prompt: int,
    first_group: int = 0,
) -> list[Sample]:
    """`samples_per_prompt` scored samples of each prompt, prompt by prompt.

    Group ids count up from `first_group`; a sample that could not be scored has reward None.
    """
    encoded = [
        encode_prompt(tokenizer, p.messages, enable_thinking=enable_thinking(p)) for p in prompts
    ]
    repeated = [ids for ids in encoded for _ in range(samples_per_prompt)]
    generations = engine.generate(repeated, sampling)
    texts = tokenizer.batch_decode([g.token_ids for g in generations], skip_special_tokens=False)
    samples = []
    for i, (ids, generation, text) in enumerate(zip(repeated, generations, texts, strict=True)):
        prompt = prompts[i // samples_per_prompt]
        trajectory = to_trajectory(
            ids,
            generation,
            group_id=first_group + i // samples_per_prompt,
            rollout_id=i,
            task_id=prompt.task_id,
        )
        response = parse_response(text, enable_thinking=enable_thinking(prompt))
        samples.append(Sample(prompt, text, response, trajectory))
    rewards = score_all(task.scorer, samples, timeout=SCORE_TIMEOUT)
    failures = Counter(r.reason for r in rewards if isinstance(r, Unscorable))
    for reason, count in failures.items():
        logging.warning("%d of %d samples not scored: %s", count, len(samples), reason)
    return [
        dataclasses.replace(
            sample,
            trajectory=sample.trajectory.replace(
                reward=reward if isinstance(reward, Reward) else None
            ),
        )
        for sample, reward in zip(samples, rewards, strict=True)
    ]


def collect_groups(
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    sampling: Sampling,
    *,
    start_index: int,
    num_groups: int,
    samples_per_prompt: int,
    keep: Keep | Mapping[str, Keep],
    max_oversampling: int,
    seed_key: tuple,
) -> Collected:
    """Samples rounds of `num_groups` prompts until `num_groups` groups are kept, in at most
    `max_oversampling` rounds.

    Args:
      start_index: the first training prompt to use.
      keep: judges a group by its raw rewards; several by name (rl/filters.py).
      seed_key: with the round it decides the sampling seed.
    """
    samples: list[Sample] = []
    kept: list[list[Trajectory]] = []
    counts: dict[str, int] = {}
    index, seconds, rounds = start_index, 0.0, 0
    while len(kept) < num_groups and rounds < max_oversampling:
        seed = stream_rng("sampling", *seed_key, rounds).getrandbits(31)
        prompts = [task.prompts.train(index + i) for i in range(num_groups)]
        start = time.perf_counter()
        drawn = sample_and_score(
            engine,
            tokenizer,
            task,
            prompts,
            dataclasses.replace(sampling, seed=seed),
            samples_per_prompt=samples_per_prompt,
            first_group=index,
        )
        seconds += time.perf_counter() - start
        samples += drawn
        index += num_groups
        rounds += 1
        groups: dict[int, list[Trajectory]] = {}
        for number, sample in enumerate(samples):
            trajectory = sample.trajectory.replace(rollout_id=number)
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        kept, counts = select_groups(list(groups.values()), num_groups=num_groups, keep=keep)
    return Collected(
        kept, samples, rollout_metrics(samples, seconds) | group_metrics(counts, rounds), index
    )


def group_metrics(counts: dict[str, int], rounds: int) -> dict[str, float]:
    return {f"groups_{reason}": float(n) for reason, n in counts.items()} | {
        "rollout_rounds": float(rounds)
    }


def rollout_metrics(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Metrics over everything that was sampled, kept or not."""
    rewards = [s.trajectory.reward.value for s in samples if s.trajectory.reward is not None]
    lengths = np.array([s.trajectory.num_trained for s in samples])
    return {
        "raw_reward": float(np.mean(rewards)) if rewards else 0.0,
        "unscorable_share": 1 - len(rewards) / len(samples),
        "response_length": float(lengths.mean()),
        "truncated_share": float(np.mean([s.trajectory.stop_reason.truncated for s in samples])),
        "malformed_share": float(np.mean([not s.response.well_formed for s in samples])),
        "sampled_tokens": float(lengths.sum()),
        "sampled_tokens_per_second": float(lengths.sum() / max(seconds, 1e-9)),
    }
