"""The few types that everything passes around.

One alignment everywhere: index `t` of any `[B, T]` array speaks of *the prediction made at position
t*, that is of `targets[:, t]`, the token that follows `tokens[:, t]`. A `Trajectory` is the ragged
host-side twin of a `Batch`: its per-prediction arrays have one entry fewer than it has tokens, so
nothing is shifted when trajectories are packed.

Denominators belong to the optimizer step, not to a mask: they are counted on the host over the
whole step before it is cut into micro-batches, and travel with the rows (`Batch.weights`,
`Batch.denominator`). Fully masked rollouts therefore still count, and any cut into micro-batches,
devices or hosts adds up to the same loss.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows, ready for one update. A field an algorithm has no use for is None."""

    tokens: jax.Array
    """[B, T] int32. Model inputs."""
    targets: jax.Array
    """[B, T] int32. The token after each input."""
    loss_mask: jax.Array
    """[B, T] bool. True where the target is ours to learn: policy tokens, SFT answers."""
    segment_ids: jax.Array
    """[B, T] int32. 1.. for each packed sequence of a row, 0 for padding."""
    positions: jax.Array
    """[B, T] int32. Position inside its own sequence, for RoPE."""
    weights: jax.Array
    """[B, T] float32. How much each prediction counts in the numerator of the loss; 0 where masked.
    See rl/reduce.py."""
    denominator: jax.Array
    """[B] float32. The row's share of the optimizer step's denominator; all rows of a step add up
    to it."""
    advantages: jax.Array | None = None
    """[B, T] float32. Constant over a sequence for group-relative methods."""
    returns: jax.Array | None = None
    """[B, T] float32. Targets of the value head, where there is one."""
    old_values: jax.Array | None = None
    """[B, T] float32. What the value head said before the first update on this data."""
    sampler_logprobs: jax.Array | None = None
    """[B, T] float32, nats. As the inference engine reported them when it sampled `targets`."""
    old_logprobs: jax.Array | None = None
    """[B, T] float32, nats. Recomputed by the trainer before the first update on this data."""
    ref_logprobs: jax.Array | None = None
    """[B, T] float32, nats. Under the frozen reference policy."""
    routing: jax.Array | None = None
    """[B, T, L, K], smallest signed integer type that holds the ids. Experts the sampler used per
    MoE layer; -1: unknown."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What a model says of a batch."""

    logprobs: jax.Array
    """[B, T] float32, nats. Of `targets`, under logits divided by the sampling temperature."""
    entropy: jax.Array | None = None
    """[B, T] float32, nats. Of the same distribution."""
    values: jax.Array | None = None
    """[B, T] float32. Output of the scalar head, where the model has one."""
    routing: jax.Array | None = None
    """[B, T, L, K] integer. Experts that this forward used."""
    expert_load: jax.Array | None = None
    """[L, E] float32. How many real (token, slot) pairs each expert of each MoE layer received."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean not yet divided. Adding two gives the mean of the union: micro-batches, devices, hosts
    combine exactly."""

    total: jax.Array
    weight: jax.Array

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def divide(self, x: jax.Array) -> jax.Array:
        """x / weight, and 0 where the weight is 0 (a step in which everything was masked)."""
        safe = jnp.where(self.weight == 0, 1.0, self.weight)
        return jnp.where(self.weight == 0, jnp.zeros_like(x), x / safe)

    @property
    def value(self) -> jax.Array:
        return self.divide(self.total)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything an optimizer step reads and writes."""

    step: jax.Array
    """int32 scalar. Optimizer steps applied."""
    params: Any
    """Nested dict of stacked leaves (models/decoder.py)."""
    opt_state: Any
    skipped: jax.Array
    """int32 scalar. Updates left out because loss or gradient was not finite."""


class StopReason(enum.Enum):
    """Why an episode ended."""

    ANSWERED = "answered"
    """The policy ended its turn itself, with a stop token."""
    GENERATION_LIMIT = "generation_limit"
    """The turn was cut at the most new tokens allowed: a truncated sample."""
    CONTEXT_LIMIT = "context_limit"
    """The whole sequence reached the most tokens allowed."""
    TOOL_BUDGET = "tool_budget"
    ITERATION_BUDGET = "iteration_budget"
    ABORTED = "aborted"
    """Our failure, not the policy's: the sample leaves its group before the baseline is taken."""

    @property
    def truncated(self) -> bool:
        return self in (StopReason.GENERATION_LIMIT, StopReason.CONTEXT_LIMIT)


@dataclasses.dataclass(frozen=True)
class Reward:
    """What a sample earned. `parts` are the named pieces that made up `value`; `reason` says why in
    a few words."""

    value: float
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Unscorable:
    """We failed to score the sample (a service down, a time-out of ours). Never turned into a
    reward of 0."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode on the host. N tokens make N - 1 predictions; every per-prediction array has N -
    1 entries."""

    token_ids: np.ndarray
    """[N] int32. Prompt, sampled and observation tokens, as they were fed and sampled."""
    loss_mask: np.ndarray
    """[N-1] bool. True where `token_ids[t + 1]` was sampled by the policy and is trained on."""
    sampler_logprobs: np.ndarray | None = None
    """[N-1] float32, nats; 0 where `loss_mask` is False."""
    routing: np.ndarray | None = None
    """[N-1, L, K] smallest signed integer type. Experts used for input token t; -1: unknown."""
    routing_version: np.ndarray | None = None
    """[N-1] int32. Version of the weights that chose each row of `routing`; None: those that
    sampled."""
    policy_version: np.ndarray | None = None
    """[N-1] int32. Version of the weights that sampled `token_ids[t + 1]`; -1 for tokens the policy
    did not sample."""
    stop_reason: StopReason = StopReason.ANSWERED
    reward: Reward | None = None
    group_id: int = 0
    """Samples of one prompt in one rollout share it; advantages are relative to it."""
    rollout_id: int = 0
    """Samples split from one rollout share it, and share its place in the denominator."""
    task_id: str = ""
    advantage: float | np.ndarray | None = None
    """Set by rl/advantages.py: one for all, or [N-1] float32, one for each prediction."""
    returns: np.ndarray | None = None
    """[N-1] float32. Targets of the value head (rl/gae.py)."""
    values: np.ndarray | None = None
    """[N-1] float32. What the value head said before the first update on this data."""

    def __post_init__(self) -> None:
        n = len(self.token_ids) - 1
        for name in _PER_PREDICTION:
            array = getattr(self, name)
            if array is not None and np.ndim(array) and len(array) != n:
                raise ValueError(
                    f"Trajectory.{name} has {len(array)} entries, but {n + 1} tokens make {n} predictions."
                )

    @property
    def num_trained(self) -> int:
        """Tokens the policy sampled and is trained on."""
        return int(self.loss_mask.sum())

    def replace(self, **changes: Any) -> Trajectory:
        return dataclasses.replace(self, **changes)


_PER_PREDICTION = (
    "loss_mask",
    "sampler_logprobs",
    "routing",
    "routing_version",
    "policy_version",
    "advantage",
    "returns",
    "values",
)
