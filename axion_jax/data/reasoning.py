"""Reasoning prompts from reasoning-gym's generators, with worked solutions for SFT.

Questions, gold answers and scorers are the library's; only the traces are ours, since the library
ships none. Half of the demonstrations reason inside `<think>` and half answer at once; both end in
the right answer. A model trained on the mixture answers either way, and RL finds out which way is
right more often.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

from axion_jax.data.prompts import GeneratedPrompts, Message, Prompt, make_prompt

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # from one of the library's own dependencies
    import reasoning_gym

DIRECT_SHARE = 0.5
"""Demonstrations that skip the reasoning."""

GENERATORS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3},
    "decimal_chain_sum": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "min_decimal_places": 1,
        "max_decimal_places": 1,
    },
    "letter_counting": {"min_words": 2, "max_words": 3},
}
"""Families of the tiny recipe and the sizes they are asked for."""

PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    'How many times does the letter "',
    '" appear in the text: "',
    '"?',
)
"""Fixed wording of the questions; the tiny tokenizer spends one token on each."""

_DATASETS: dict[str, Any] = {}


def dataset(family: str) -> Any:
    """reasoning-gym's dataset for a family: `dataset[i]` is a pure function of i."""
    if family not in _DATASETS:
        if family not in GENERATORS:
            raise ValueError(
                f"Unknown reasoning family {family!r}; known: {', '.join(GENERATORS)}."
            )
        _DATASETS[family] = reasoning_gym.create_dataset(
            family, size=2**31 - 1, seed=0, **GENERATORS[family]
        )
    return _DATASETS[family]


class ReasoningPrompts(GeneratedPrompts):
    """Verifiable questions; `entry` is reasoning-gym's own entry."""

    def __init__(self, families: tuple[str, ...] = tuple(GENERATORS), *, seed: int = 0) -> None:
        for family in families:
            dataset(family)
        super().__init__(families, _make, seed=seed)

    def demonstrate(self, prompt: Prompt, rng: random.Random) -> Message:
        direct = rng.random() < DIRECT_SHARE
        return {
            "role": "assistant",
            "reasoning_content": "" if direct else TRACES[prompt.family](prompt.entry),
            "content": prompt.entry["answer"],
        }


def _make(family: str, rng: random.Random) -> Prompt | None:
    entry = dataset(family)[rng.randrange(2**31 - 1)]
    if TRACES[family](entry) is None:
        return None
    return make_prompt(family, entry["question"], thinking=True, entry=entry)


def trace_sum(entry: dict) -> str | None:
    """Column by column from the right, "digit+digit+carry=sum"; None for subtractions."""
    a, op, b = entry["metadata"]["expression"].replace(".", "").split()
    if op != "+":
        return None
    steps, carry = [], 0
    for i in range(max(len(a), len(b))):
        x, y = (int(n[-1 - i]) if i < len(n) else 0 for n in (a, b))
        steps.append(f"{x}+{y}+{carry}={x + y + carry}")
        carry = (x + y + carry) // 10
    return " ".join(steps)


def trace_count(entry: dict) -> str | None:
    """The text spelled out with a running count after each letter; None for texts too long to
    spell."""
    text = " ".join(entry["metadata"]["span"])
    if len(text) > 16 or any(character.isdigit() for character in text):
        return None
    letter, count, out = entry["metadata"]["target_letter"], 0, []
    for character in text:
        count += character.lower() == letter
        out.append(f"{character}{count}")
    return "".join(out)


TRACES: dict[str, Callable[[dict], str | None]] = {
    "chain_sum": trace_sum,
    "decimal_chain_sum": trace_sum,
    "letter_counting": trace_count,
}
