"""Writing tasks under 2 to 6 checkable constraints, with demonstrations of which half break one of
them.

Constraints are data: (kind, argument) pairs. Their checks live in rewards/rubrics.py; here they are
worded, combined and demonstrated.
"""

from __future__ import annotations

import random
from typing import Any

from axion_jax.data.prompts import GeneratedPrompts, Message, Prompt, make_prompt

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animals": tuple(
        [
            "badger",
            "camel",
            "dolphin",
            "ferret",
            "gorilla",
            "hamster",
            "lizard",
            "otter",
            "panther",
            "rabbit",
            "turtle",
            "weasel",
        ]
    ),
    "fruits": tuple(
        [
            "apple",
            "banana",
            "cherry",
            "damson",
            "grape",
            "lemon",
            "mango",
            "nectarine",
            "orange",
            "papaya",
            "quince",
            "raisin",
        ]
    ),
    "tools": tuple(
        [
            "anvil",
            "chisel",
            "drill",
            "file",
            "hammer",
            "ladder",
            "pliers",
            "ruler",
            "saw",
            "trowel",
            "vise",
            "wrench",
        ]
    ),
    "colors": tuple(
        [
            "amber",
            "beige",
            "crimson",
            "emerald",
            "gold",
            "indigo",
            "khaki",
            "lilac",
            "maroon",
            "navy",
            "olive",
            "purple",
        ]
    ),
}
WORDS = tuple(word for words in CATEGORIES.values() for word in words)
CATEGORY_OF = {word: name for name, words in CATEGORIES.items() for word in words}

Constraint = tuple[str, Any]

COUNTS = (3, 7)
"""Fewest and most words asked for."""

CLEAN_SHARE = 0.5
"""Demonstrations that keep every constraint."""

_FIXED = {
    "upper": "Use capital letters.",
    "sorted": "Keep them in alphabetical order.",
    "distinct": "Use no word twice.",
}
END_MARKS = {"!": "an exclamation mark", "?": "a question mark", ".": "a period"}
PHRASES = (
    "Write exactly ",
    " words, one on each line.",
    *(f" Use only {name}." for name in CATEGORIES),
    *(f" {text}" for text in _FIXED.values()),
    *(f" End with {name}." for name in END_MARKS.values()),
    ' Start with the word "',
    '".',
)


def word_constraint(constraint: Constraint) -> str:
    """The sentence that asks for a constraint."""
    kind, value = constraint
    match kind:
        case "count":
            return f"Write exactly {value} words, one on each line."
        case "category":
            return f"Use only {value}."
        case "start":
            return f'Start with the word "{value}".'
        case "end":
            return f"End with {END_MARKS[value]}."
        case _:
            return _FIXED[kind]


class WritingPrompts(GeneratedPrompts):
    """`entry` is the tuple of constraints. Answers need no reasoning, so the template switches
    thinking off."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(("word_list",), _make, seed=seed)

    def demonstrate(self, prompt: Prompt, rng: random.Random) -> Message:
        wanted = dict(prompt.entry)
        broken = None if rng.random() < CLEAN_SHARE else rng.choice(sorted(wanted))
        return {"role": "assistant", "content": compose(wanted, rng, broken)}


def _make(family: str, rng: random.Random) -> Prompt:
    count, category = rng.randint(*COUNTS), rng.choice(sorted(CATEGORIES))
    kinds = [kind for kind in ("start", *_FIXED, "end") if rng.random() < 0.4][:4]
    # Of a list in alphabetical order the first word must leave enough words after it.
    starts = CATEGORIES[category][: 13 - count] if "sorted" in kinds else CATEGORIES[category]
    values = {"start": rng.choice(starts), "end": rng.choice(sorted(END_MARKS))}
    constraints: list[Constraint] = [("count", count), ("category", category)]
    constraints += [(kind, values.get(kind, True)) for kind in kinds]
    text = " ".join(map(word_constraint, constraints))
    return make_prompt(family, text, thinking=False, entry=tuple(constraints))


def compose(wanted: dict[str, Any], rng: random.Random, broken: str | None) -> str:
    """A word list that keeps every constraint, except that `broken` is not taken care of."""
    count = wanted["count"] + (rng.choice([-1, 1]) if broken == "count" else 0)
    pool = list(WORDS if broken == "category" else CATEGORIES[wanted["category"]])
    first = [wanted["start"]] if "start" in wanted and broken != "start" else []
    in_order = "sorted" in wanted and broken != "sorted"
    if first:
        pool = [word for word in pool if word > first[0] or (word < first[0] and not in_order)]
    if broken == "distinct":
        rest = rng.choices(rng.sample(pool, 2), k=count - len(first))
    else:
        rest = rng.sample(pool, min(len(pool), count - len(first)))
    words = first + (sorted(rest) if in_order else rest)
    text = "\n".join(words)
    if ("upper" in wanted) != (broken == "upper"):
        text = text.upper()
    if broken == "end":
        return text + rng.choice(["", *(mark for mark in END_MARKS if mark != wanted["end"])])
    return text + wanted.get("end", "")
