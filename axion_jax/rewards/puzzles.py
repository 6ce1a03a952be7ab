"""Reward of reasoning prompts: reasoning-gym's own scorer, made binary as the paper's reasoning
stage is."""

from __future__ import annotations

from axion_jax.data.reasoning import dataset
from axion_jax.rewards.base import Sample
from axion_jax.types import Reward


class PuzzleScorer:
    """1 where the final answer earns the scorer's full mark and the response is well formed, else
    0."""

    async def score(self, sample: Sample) -> Reward:
        response = sample.response
        if not response.well_formed or response.content is None:
            return Reward(0.0, reason="malformed response")
        if response.tool_calls:
            return Reward(0.0, reason="called a tool that does not exist")
        entry = sample.prompt.entry
        mark = dataset(sample.prompt.family).score_answer(response.content.strip(), entry)
        return Reward(
            float(mark >= 1.0), {"mark": float(mark)}, "right" if mark >= 1.0 else "wrong"
        )
