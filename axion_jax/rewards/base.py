"""What a reward is: `async score(sample) -> Reward | Unscorable`.

Unscorable means *our* failure and removes the sample from its group; whatever the policy caused is
scored, with the reason recorded, or a policy would learn to hang its way out of bad groups.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

from axion_jax.data.chat import Response
from axion_jax.data.prompts import Prompt
from axion_jax.types import Reward, StopReason, Trajectory, Unscorable


@dataclasses.dataclass(frozen=True)
class Sample:
    """A finished episode as scorers see it."""

    prompt: Prompt
    text: str
    """The sampled tokens, decoded, stop token included."""
    response: Response
    """The same, parsed: reasoning, content, tool calls, and whether it was well formed."""
    trajectory: Trajectory


class Scorer(Protocol):
    async def score(self, sample: Sample) -> Reward | Unscorable: ...


def score_all(
    scorer: Scorer, samples: Sequence[Sample], *, timeout: float
) -> list[Reward | Unscorable]:
    """Scores samples concurrently. An aborted sample, and an exception, a time-out (seconds) or a
    reward that is not finite of the scorer, are Unscorable, never a 0."""

    async def one(sample: Sample) -> Reward | Unscorable:
        if sample.trajectory.stop_reason is StopReason.ABORTED:
            return Unscorable("the sample was aborted")
        try:
            async with asyncio.timeout(timeout):
                reward = await scorer.score(sample)
        except TimeoutError:
            return Unscorable(f"scorer exceeded {timeout:g} s")
        except Exception as error:
            return Unscorable(f"scorer failed: {type(error).__name__}: {error}")
        if isinstance(reward, Reward) and not math.isfinite(reward.value):
            return Unscorable(f"scorer gave {reward.value}")
        return reward

    async def every() -> list[Reward | Unscorable]:
        return list(await asyncio.gather(*map(one, samples)))

    return asyncio.run(every())
