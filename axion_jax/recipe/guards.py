"""When to stop a stage: training that has gone wrong is cheaper to look at than to finish.

A single non-finite loss or gradient is skipped inside the update step and counted; several in a
row, a loss far above its recent median, or an entropy below its floor stop the stage with a
checkpoint and one sentence.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

WINDOW = 20
"""Steps over which the median loss is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Bounds; None switches one off."""

    max_skipped_in_a_row: int = 5
    max_loss_spike: float | None = None
    """Stop where the loss exceeds this multiple of the median of its last 20 values (losses above 0
    only: SFT)."""
    min_entropy: float | None = None
    """Stop where the policy's mean entropy, in nats per token, falls below this (RL)."""

    def __post_init__(self) -> None:
        if self.max_skipped_in_a_row < 1:
            raise ValueError(
                f"max_skipped_in_a_row={self.max_skipped_in_a_row} must be at least 1."
            )
        if self.max_loss_spike is not None and self.max_loss_spike <= 1:
            raise ValueError(f"max_loss_spike={self.max_loss_spike} must be above 1.")


class StageStopped(RuntimeError):
    """A guard stopped the stage. The message says what was seen and where the checkpoint is."""


class Guard:
    """Watches the metrics of successive optimizer steps. `state` is JSON-able and travels with the
    checkpoint."""

    def __init__(self, config: GuardConfig, state: dict[str, Any] | None = None) -> None:
        self.config = config
        self.state: dict[str, Any] = state or {"skipped_in_a_row": 0, "losses": []}

    def check(self, metrics: dict[str, float]) -> str | None:
        """One sentence on what is wrong, or None. Call once for each optimizer step."""
        c, s = self.config, self.state
        if metrics.get("update_skipped"):
            s["skipped_in_a_row"] += 1
            if s["skipped_in_a_row"] >= c.max_skipped_in_a_row:
                return (
                    f"{s['skipped_in_a_row']} updates in a row had a loss or gradient that is not finite"
                    f" (guards.max_skipped_in_a_row={c.max_skipped_in_a_row})."
                )
            return None
        s["skipped_in_a_row"] = 0
        loss, entropy = metrics["loss"], metrics.get("entropy")
        if c.max_loss_spike is not None and len(s["losses"]) == WINDOW:
            median = statistics.median(s["losses"])
            if median > 0 and loss > c.max_loss_spike * median:
                return (
                    f"The loss {loss:.4g} is {loss / median:.1f} times the median {median:.4g} of the last {WINDOW} steps"
                    f" (guards.max_loss_spike={c.max_loss_spike:g})."
                )
        if c.min_entropy is not None and entropy is not None and entropy < c.min_entropy:
            return (
                f"The policy's entropy fell to {entropy:.4g} nats per token"
                f" (guards.min_entropy={c.min_entropy:g}): it has collapsed onto one answer."
            )
        s["losses"] = [*s["losses"], loss][-WINDOW:]
        return None
