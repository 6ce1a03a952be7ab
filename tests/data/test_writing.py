"""Writing tasks prove themselves: a clean demonstration keeps every constraint, a careless one breaks its own."""

import asyncio
import random

import numpy as np
import pytest

from axion_jax.data import writing
from axion_jax.data.chat import encode_example, encode_prompt, parse_response
from axion_jax.data.writing import CATEGORIES, WritingPrompts, compose, word_constraint
from axion_jax.rewards.base import Sample
from axion_jax.rewards.rubrics import CHECKS, RubricScorer, check
from axion_jax.types import Trajectory

NOTHING = Trajectory(token_ids=np.zeros(2, np.int32), loss_mask=np.ones(1, bool))
KINDS = sorted(CHECKS)


@pytest.fixture(scope="module")
def prompts():
    stream = WritingPrompts(seed=0)
    return [stream.train(i) for i in range(1500)]


def score(prompt, text):
    turn = f"\n{text}<|user|>"
    sample = Sample(prompt, turn, parse_response(turn, enable_thinking=False), NOTHING)
    return asyncio.run(RubricScorer().score(sample)).value


def test_a_clean_demonstration_earns_full_marks_whatever_the_constraints(prompts):
    seen = set()
    for i, prompt in enumerate(prompts):
        assert score(prompt, compose(dict(prompt.entry), random.Random(i), None)) == 1.0
        seen |= {kind for kind, _ in prompt.entry}
    assert seen == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_demonstration_careless_of_a_constraint_usually_breaks_it_and_then_earns_nothing(
    prompts, kind
):
    kept, others_kept = [], []
    for i, prompt in enumerate(prompts):
        wanted = dict(prompt.entry)
        if kind in wanted:
            text = compose(wanted, random.Random(i), kind)
            kept.append(check(text, (kind, wanted[kind])))
            others_kept.append(all(check(text, c) for c in prompt.entry if c[0] != kind))
            assert score(prompt, text) == float(kept[-1] and others_kept[-1])
    assert len(kept) > 100
    assert np.mean(kept) < 0.5  # a word list may keep a constraint by luck
    assert np.mean(others_kept) > 0.5


def test_about_half_of_the_demonstrations_earn_full_marks(prompts):
    stream = WritingPrompts(seed=0)
    marks = [
        score(prompt, stream.demonstrate(prompt, random.Random(i))["content"])
        for i, prompt in enumerate(prompts)
    ]
    assert 0.5 < np.mean(marks) < 0.65


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (("count", 2), ["apple\nlemon", "APPLE\nLEMON!"], ["apple", "apple\nlemon\nmango"]),
        (("count", 2), [], ["apple, lemon", "apple lemon", "apple\n\nlemon", "apple\nhouse", ""]),
        (("category", "fruits"), ["apple\nlemon?", "Apple"], ["apple\notter", "pear", ""]),
        (("upper", True), ["APPLE\nLEMON!"], ["apple", "APPLE\nLEMOn"]),
        (("sorted", True), ["apple\nlemon", "apple\napple"], ["lemon\napple", "apple\nzoo\nfox"]),
        (("distinct", True), ["apple\nlemon"], ["apple\nlemon\napple", "apple\nAPPLE!"]),
        (("end", "!"), ["apple!"], ["apple", "apple?", "apple! "]),
        (("start", "lemon"), ["lemon\napple", "LEMON!"], ["apple\nlemon", "lemons", ""]),
    ],
)
def test_a_check_accepts_what_keeps_the_constraint_and_nothing_else(constraint, good, bad):
    assert [text for text in good if not check(text, constraint)] == []
    assert [text for text in bad if check(text, constraint)] == []


def test_a_prompt_words_each_of_its_two_to_six_constraints_and_no_other(prompts):
    every = {(kind, value) for p in prompts for kind, value in p.entry}
    for prompt in prompts[:200]:
        assert 2 <= len(prompt.entry) <= 6
        assert [kind for kind, _ in prompt.entry[:2]] == ["count", "category"]
        worded = {c for c in every if word_constraint(c) in prompt.text}
        assert worded == set(prompt.entry)
        assert not prompt.thinking


def test_of_a_list_in_alphabetical_order_the_first_word_leaves_enough_words_after_it(prompts):
    found = 0
    for prompt in prompts:
        wanted = dict(prompt.entry)
        if {"start", "sorted"} <= wanted.keys():
            after = [w for w in CATEGORIES[wanted["category"]] if w > wanted["start"]]
            assert len(after) >= wanted["count"] - 1
            found += 1
    assert found > 50


def test_words_have_one_category_each_and_are_in_alphabetical_order():
    assert len(set(writing.WORDS)) == len(writing.WORDS) == 48
    assert all(list(words) == sorted(words) for words in CATEGORIES.values())


def test_demonstrations_take_few_tokens_of_the_tiny_tokenizer(prompts, tiny_tokenizer):
    stream = WritingPrompts(seed=0)
    for i, prompt in enumerate(prompts[:400]):
        message = stream.demonstrate(prompt, random.Random(i))
        example = encode_example(tiny_tokenizer, [*prompt.messages, message], enable_thinking=False)
        assert len(encode_prompt(tiny_tokenizer, prompt.messages, enable_thinking=False)) <= 24
        assert example.num_trained <= 20  # 8 words, 7 line breaks, 3 marks at most
