"""What a rollout engine is: prompt token ids in, sampled token ids out, never text.

The embedded JAX engine and the SGLang client implement this protocol and pass the same contract
tests.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from axion_jax.types import StopReason, Trajectory


class FinishReason(enum.Enum):
    STOP = "stop"
    """A stop token was sampled; it is the last of `token_ids`."""
    LENGTH = "length"
    """`max_new_tokens` were sampled without one."""
    ABORT = "abort"
    """The engine gave up: its failure, not the policy's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample. No top-p or top-k: the trainer's distribution is the full one and truncation
    renormalises the engine's log-probs only."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token and reports log-probs at temperature
    1."""
    seed: int = 0
    """With the position of a prompt in the call it fixes every draw, whatever the batching."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1.")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be 0 or more.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One sampled continuation of one prompt."""

    token_ids: np.ndarray
    """[G] int32. Sampled ids, a stop token included."""
    logprobs: np.ndarray
    """[G] float32, nats. Of the sampled ids under the temperature-scaled distribution."""
    routed_experts: np.ndarray | None
    """[P + G - 1, L, K] smallest signed integer type. Experts of every token but the last sampled,
    MoE layers only."""
    finish_reason: FinishReason
    weight_version: int


class Engine(Protocol):
    """The contract. `update_weights` flushes caches; no call mixes two weight versions."""

    def generate(self, prompts: Sequence[np.ndarray], sampling: Sampling) -> list[Generation]: ...

    def update_weights(self, params: Any, version: int) -> None: ...

    def abort(self) -> None: ...

    def flush(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


def to_trajectory(prompt: np.ndarray, generation: Generation, **fields: Any) -> Trajectory:
    """One prompt and its continuation as a trajectory; per-prediction arrays start at the prompt's
    first token."""
    g, before = len(generation.token_ids), len(prompt) - 1
    sampled = np.zeros(before + g, bool)
    sampled[before:] = True
    logprobs = np.zeros(before + g, np.float32)
    logprobs[before:] = generation.logprobs
    stop_reason = {
        FinishReason.STOP: StopReason.ANSWERED,
        FinishReason.LENGTH: StopReason.GENERATION_LIMIT,
        FinishReason.ABORT: StopReason.ABORTED,
    }[generation.finish_reason]
    return Trajectory(
        token_ids=np.concatenate([prompt, generation.token_ids]).astype(np.int32),
        loss_mask=sampled,
        sampler_logprobs=logprobs,
        routing=generation.routed_experts,
        policy_version=np.where(sampled, generation.weight_version, -1).astype(np.int32),
        stop_reason=stop_reason,
        **fields,
    )
