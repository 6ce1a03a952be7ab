"""Open-ended prompts without a right answer, demonstrations of every manner, and preference pairs
for a reward model.

What people like here is made up but not given away to the policy: a hidden quality (polite opening,
true sentences about every word asked for, a helpful closing, nothing said twice) decides noisily
which of two answers is preferred; the reward model learns it from pairs, and RLHF sees only the
reward model.
"""

from __future__ import annotations

import dataclasses
import math
import random

from axion_jax.data.prompts import GeneratedPrompts, Message, Prompt, make_prompt, stream_rng
from axion_jax.data.writing import CATEGORY_OF, WORDS

KINDS = {"animals": "an animal", "fruits": "a fruit", "tools": "a tool", "colors": "a color"}
POLITE = ("Of course!", "Good question!", "Happy to help!")
RUDE = ("Whatever.", "Not again.", "If I must.")
HELPFUL = ("Hope that helps!", "Ask me anything else!")
ABRUPT = ("Now go away.", "That is all.")
PHRASES = (
    *POLITE,
    *RUDE,
    *(f" {text}" for text in (*HELPFUL, *ABRUPT)),
    *(f" is {kind}." for kind in KINDS.values()),
    "Tell me about ",
    "Compare ",
    "What should I know about ",
    " and ",
)
_QUESTIONS = ("Tell me about {}.", "Compare {}.", "What should I know about {}?")

PAIR_TEMPERATURE = 0.5
"""P(the better answer is preferred) = sigmoid(difference in quality / temperature): labels are
noisy, as people are."""


class PreferencePrompts(GeneratedPrompts):
    """`entry` is the tuple of words asked about."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(("chat",), _make, seed=seed)

    def demonstrate(self, prompt: Prompt, rng: random.Random) -> Message:
        return {"role": "assistant", "content": answer(prompt.entry, rng)}


def _make(family: str, rng: random.Random) -> Prompt:
    words = tuple(rng.sample(WORDS, rng.randint(1, 3)))
    text = rng.choice(_QUESTIONS).format(" and ".join(words))
    return make_prompt(family, text, thinking=False, entry=words)


def answer(words: tuple[str, ...], rng: random.Random) -> str:
    """An answer of random manner: each part good or bad by the toss of a coin."""
    said = [word for word in words if rng.random() < 0.8] or [words[0]]
    if rng.random() < 0.3:
        said += [rng.choice(said) for _ in range(rng.randint(1, 2))]
    sentences = []
    for word in said:
        kind = (
            KINDS[CATEGORY_OF[word]] if rng.random() < 0.7 else rng.choice(sorted(KINDS.values()))
        )
        sentences.append(f"{word} is {kind}.")
    opening = rng.choice(POLITE if rng.random() < 0.4 else RUDE)
    closing = rng.choice(HELPFUL if rng.random() < 0.4 else ABRUPT)
    return " ".join([opening, *sentences, closing])


def quality(words: tuple[str, ...], text: str) -> float:
    """The hidden taste, from -4.5 to 3: manner at both ends, share of the words truly described,
    repetition."""
    opening = sum(text.startswith(x) for x in POLITE) - sum(text.startswith(x) for x in RUDE)
    closing = sum(text.endswith(x) for x in HELPFUL) - sum(text.endswith(x) for x in ABRUPT)
    true = [f"{word} is {KINDS[CATEGORY_OF[word]]}." for word in words]
    covered = sum(sentence in text for sentence in true) / len(true)
    sentences = text.count(" is a")
    wrong_or_twice = sentences - sum(sentence in text for sentence in true)
    return opening + closing + 2 * covered - 1 - 0.5 * min(wrong_or_twice, 3)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, the preferred one first."""

    prompt: Prompt
    chosen: Message
    rejected: Message


def make_pair(prompts: PreferencePrompts, prompt: Prompt, index: int) -> Pair:
    """The index-th pair for this prompt; the label is drawn from a Bradley-Terry model of the
    hidden quality."""
    rng = stream_rng("pair", prompts.seed, prompt.task_id, index)
    first, second = prompts.demonstrate(prompt, rng), prompts.demonstrate(prompt, rng)
    margin = quality(prompt.entry, first["content"]) - quality(prompt.entry, second["content"])
    if rng.random() > 1 / (1 + math.exp(-margin / PAIR_TEMPERATURE)):
        first, second = second, first
    return Pair(prompt, first, second)
