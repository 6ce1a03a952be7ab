"""Preference data: a hidden taste, and pairs that follow it more often than not."""

import math
import random

import numpy as np
import pytest

from axion_jax.data.chat import encode_example
from axion_jax.data.preference import (
    PAIR_TEMPERATURE,
    PreferencePrompts,
    answer,
    make_pair,
    quality,
)


@pytest.fixture(scope="module")
def pairs():
    """1500 pairs with how much better the preferred answer is."""
    prompts = PreferencePrompts(seed=0)
    made = [make_pair(prompts, prompts.train(i), i) for i in range(1500)]
    margins = [
        quality(p.prompt.entry, p.chosen["content"])
        - quality(p.prompt.entry, p.rejected["content"])
        for p in made
    ]
    return made, np.array(margins)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # opening + closing + 2 * share of the words described - 1 - 0.5 * wrong or repeated, of 2 words
        ("Of course! otter is an animal. lemon is a fruit. Hope that helps!", 1 + 1 + 2 - 1),
        ("Of course! otter is an animal. Hope that helps!", 1 + 1 + 1 - 1),
        ("Whatever. otter is an animal. Hope that helps!", -1 + 1 + 1 - 1),
        ("Of course! otter is a fruit. Now go away.", 1 - 1 + 0 - 1 - 0.5),
        ("Of course! lemon is a fruit. lemon is a fruit. Hope that helps!", 1 + 1 + 1 - 1 - 0.5),
        (
            "Whatever. saw is a tool. saw is a tool. saw is a tool. saw is a tool. That is all.",
            -4.5,
        ),
        ("", -1),
    ],
)
def test_quality_by_hand(text, expected):
    assert quality(("otter", "lemon"), text) == expected


def test_answers_come_in_every_quality():
    found = [
        quality(("otter", "lemon"), answer(("otter", "lemon"), random.Random(i)))
        for i in range(500)
    ]
    assert min(found) < -2 and max(found) == 3 and len(set(found)) > 10


def test_the_better_answer_is_preferred_more_often_than_not_but_not_always(pairs):
    _, margins = pairs
    differ = margins[margins != 0]
    assert 0.85 < np.mean(differ > 0) < 0.99


def test_labels_follow_the_logistic_law_of_the_margin(pairs):
    _, margins = pairs
    for size in (0.5, 1.0):
        same = margins[np.abs(margins) == size]
        expected = 1 / (1 + math.exp(-size / PAIR_TEMPERATURE))  # 0.73 and 0.88
        assert len(same) > 50
        spread = math.sqrt(expected * (1 - expected) / len(same))
        assert abs(np.mean(same > 0) - expected) < 4 * spread


def test_a_pair_is_two_answers_to_one_prompt_and_depends_on_its_index_alone(pairs):
    made, _ = pairs
    prompts = PreferencePrompts(seed=0)
    assert make_pair(prompts, prompts.train(7), 7) == made[7]
    assert make_pair(prompts, prompts.train(7), 8) != made[7]
    assert np.mean([p.chosen != p.rejected for p in made]) > 0.9


def test_of_two_equally_good_answers_either_is_preferred():
    prompts = PreferencePrompts(seed=0)
    prompt = prompts.train(0)

    class OneOfTwo(PreferencePrompts):
        def demonstrate(self, prompt, rng):
            self.asked = getattr(self, "asked", 0) + 1
            return {"role": "assistant", "content": f"answer {self.asked % 2}"}

    chosen = [make_pair(OneOfTwo(seed=0), prompt, i).chosen["content"] for i in range(200)]
    assert 60 < chosen.count("answer 1") < 140


def test_answers_take_few_tokens_of_the_tiny_tokenizer(pairs, tiny_tokenizer):
    made, _ = pairs
    for pair in made[:300]:
        for message in (pair.chosen, pair.rejected):
            example = encode_example(
                tiny_tokenizer, [*pair.prompt.messages, message], enable_thinking=False
            )
            assert example.num_trained <= 16 and len(example.token_ids) <= 32
