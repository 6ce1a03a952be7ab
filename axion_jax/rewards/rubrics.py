"""Python checks of writing constraints; the reward is 1 only when every rubric of a prompt
holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axion_jax.data.writing import CATEGORIES, WORDS, Constraint
from axion_jax.rewards.base import Sample
from axion_jax.types import Reward


def words_of(text: str) -> list[str]:
    """Lower-case lines, without a closing mark."""
    return [line.lower() for line in text.rstrip("!?.").split("\n")]


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "count": lambda text, n: len(words_of(text)) == n and all(w in WORDS for w in words_of(text)),
    "category": lambda text, name: all(word in CATEGORIES[name] for word in words_of(text)),
    "upper": lambda text, _: text == text.upper(),
    "sorted": lambda text, _: words_of(text) == sorted(words_of(text)),
    "distinct": lambda text, _: len(set(words_of(text))) == len(words_of(text)),
    "end": lambda text, mark: text.endswith(mark),
    "start": lambda text, word: words_of(text)[0] == word,
}


def check(text: str, constraint: Constraint) -> bool:
    """Whether `text` keeps one constraint."""
    kind, value = constraint
    return CHECKS[kind](text, value)


class RubricScorer:
    """1 where all constraints hold, else 0; `parts` names each rubric's verdict."""

    async def score(self, sample: Sample) -> Reward:
        if not sample.response.well_formed or not sample.response.content:
            return Reward(0.0, reason="malformed or empty response")
        if sample.response.tool_calls:
            return Reward(0.0, reason="called a tool that does not exist")
        text = sample.response.content.strip()
        parts = {kind: float(check(text, (kind, value))) for kind, value in sample.prompt.entry}
        broken = [kind for kind, held in parts.items() if not held]
        return Reward(
            float(not broken), parts, f"broke {', '.join(broken)}" if broken else "all held"
        )
