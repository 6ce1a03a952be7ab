"""Writing tasks under 2 to 6 checkable constraints, with demonstrations of which half break one of them.

Constraints are data: (kind, argument) pairs. Their checks live in rewards/rubrics.py; here they are worded, combined
and demonstrated.
"""

from __future__ import annotations

import random

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

Constraint = tuple[str, object]

CLEAN_SHARE = 0.5
"""Demonstrations that keep every constraint."""

_FIXED = {
    "upper": "Use capital letters.",
    "sorted": "Keep them in alphabetical order.",
    "distinct": "Use no word twice.",
    "exclaim": "End with an exclamation mark.",
}
PHRASES = (
    "Write exactly ",
    " words.",
    *(f" Use only {name}." for name in CATEGORIES),
    *(f" {text}" for text in _FIXED.values()),
    " Include the word ",
)


def word_constraint(constraint: Constraint) -> str:
    """The sentence that asks for a constraint."""
    kind, value = constraint
    match kind:
        case "count":
            return f"Write exactly {value} words."
        case "category":
            return f"Use only {value}."
        case "include":
            return f"Include the word {value}."
        case _:
            return _FIXED[kind]


class WritingPrompts(GeneratedPrompts):
    """`entry` is the tuple of constraints. Answers need no reasoning, so the template switches thinking off."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(("word_list",), _make, seed=seed)

    def demonstrate(self, prompt: Prompt, rng: random.Random) -> Message:
        wanted = dict(prompt.entry)
        broken = None if rng.random() < CLEAN_SHARE else rng.choice(sorted(wanted))
        return {"role": "assistant", "content": compose(wanted, rng, broken)}


def _make(family: str, rng: random.Random) -> Prompt:
    category = rng.choice(sorted(CATEGORIES))
    constraints: list[Constraint] = [("count", rng.randint(3, 6)), ("category", category)]
    optional = [kind for kind in (*_FIXED, "include") if rng.random() < 0.4][:4]
    for kind in optional:
        constraints.append((kind, rng.choice(CATEGORIES[category]) if kind == "include" else True))
    text = " ".join(map(word_constraint, constraints))
    return make_prompt(family, text, thinking=False, entry=tuple(constraints))


def compose(wanted: dict[str, object], rng: random.Random, broken: str | None) -> str:
    """A word list that keeps every constraint, except that `broken` is not taken care of."""
    count = wanted["count"] + (rng.choice([-1, 1]) if broken == "count" else 0)
    pool = list(WORDS if broken == "category" else CATEGORIES[wanted["category"]])
    words = rng.sample(pool, count) if broken != "distinct" else rng.choices(pool[:4], k=count)
    if "include" in wanted and broken != "include" and wanted["include"] not in words:
        words[rng.randrange(count)] = wanted["include"]
    if "sorted" in wanted and broken != "sorted":
        words.sort()
    text = " ".join(words)
    if ("upper" in wanted) != (broken == "upper"):
        text = text.upper()
    return text + ("!" if ("exclaim" in wanted) != (broken == "exclaim") else "")
