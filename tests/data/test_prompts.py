"""Prompt streams: pure functions of (seed, index), and a held-out part that nothing trains on."""

import random

import pytest

from axion_jax.data.preference import PreferencePrompts
from axion_jax.data.prompts import GeneratedPrompts, is_held_out, make_prompt, stream_rng
from axion_jax.data.reasoning import ReasoningPrompts
from axion_jax.data.writing import WritingPrompts

SETS = {
    "reasoning": ReasoningPrompts,
    "instruction_following": WritingPrompts,
    "preference": PreferencePrompts,
}


@pytest.fixture(params=SETS)
def prompt_set(request):
    """`prompt_set(seed=0)`: each of the recipe's sets in turn."""
    return SETS[request.param]


def numbers(below, **options):
    """A set of one family with `below` different prompts."""

    def make(family, rng):
        n = rng.randrange(below)
        return make_prompt(family, f"Say {n}.", thinking=False, entry=n)

    return GeneratedPrompts(("numbers",), make, seed=0, **options)


def test_a_prompt_depends_on_seed_and_index_alone(prompt_set):
    forwards = [prompt_set(seed=3).train(i) for i in range(40)]
    stream = prompt_set(seed=3)
    backwards = [stream.train(i) for i in reversed(range(40))]
    assert forwards == backwards[::-1]


def test_another_seed_gives_another_stream(prompt_set):
    first, second = (prompt_set(seed=seed) for seed in (0, 1))
    assert sum(first.train(i) == second.train(i) for i in range(100)) < 5


def test_a_stream_does_not_go_round_in_circles(prompt_set):
    stream = prompt_set(seed=0)
    # Some repeat: the shortest prompts are few.
    assert len({stream.train(i).text for i in range(1000)}) > 600


def test_training_and_held_out_prompts_never_share_a_text(prompt_set):
    held_out = {prompt.text for prompt in prompt_set(seed=0).held_out(500)}
    streams = [prompt_set(seed=seed) for seed in (0, 1)]
    trained = {stream.train(i).text for stream in streams for i in range(2500)}
    assert not held_out & trained
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, trained))


def test_held_out_prompts_are_distinct_and_the_same_for_every_seed(prompt_set):
    prompts = prompt_set(seed=0).held_out(300)
    assert len({prompt.text for prompt in prompts}) == 300
    assert prompts == prompt_set(seed=7).held_out(300)
    assert prompts[:50] == prompt_set(seed=0).held_out(50)


def test_every_family_has_its_turn():
    stream = ReasoningPrompts(seed=0)
    assert [stream.train(i).family for i in range(7)] == [
        stream.families[i % len(stream.families)] for i in range(7)
    ]
    held_out = [prompt.family for prompt in stream.held_out(90)]
    for family in stream.families:
        assert held_out.count(family) >= 25  # 30 unless a text came up twice


def test_the_held_out_part_is_a_tenth_of_the_prompt_space():
    share = sum(is_held_out(f"Say {n}.") for n in range(10_000)) / 10_000
    assert abs(share - 26 / 256) < 0.01  # 3 standard deviations of 10,000 draws are 0.009


def test_a_task_id_is_the_hash_of_the_text():
    first, again, other = (
        make_prompt("f", text, thinking=True, entry=None) for text in ("a", "a", "b")
    )
    assert first.task_id == again.task_id != other.task_id


def test_unwanted_draws_are_drawn_again():
    def make(family, rng):
        n = rng.randrange(1000)
        return None if n % 2 else make_prompt(family, f"Say {n}.", thinking=False, entry=n)

    stream = GeneratedPrompts(("even",), make, seed=0)
    assert not any(stream.train(i).entry % 2 for i in range(50))


def test_a_prompt_space_too_small_for_the_held_out_prompts_is_an_error_that_says_so():
    few = numbers(200)  # a tenth of them, about 20, are held out
    assert len(few.held_out(5)) == 5
    with pytest.raises(ValueError, match=r"Only \d+ distinct held-out prompts .*Ask for fewer"):
        few.held_out(60)


def test_a_space_without_any_held_out_prompt_is_an_error_that_names_the_family():
    index = next(i for i in range(100) if not is_held_out(f"Say {i}."))

    def make(family, rng):
        return make_prompt(family, f"Say {index}.", thinking=False, entry=index)

    with pytest.raises(ValueError, match="draws of one gave no prompt with held_out=True"):
        GeneratedPrompts(("one",), make, seed=0).held_out(1)


def test_streams_are_the_same_in_every_process_and_version():
    # Written down once: a run that is resumed by another Python must find the prompts it had.
    assert stream_rng("sampling", 0, "rlhf", 3).getrandbits(31) == 1_083_663_835
    assert stream_rng("a", 1).random() != stream_rng("a", "1").random()


def test_a_demonstration_depends_on_its_generator_alone(prompt_set):
    stream = prompt_set(seed=0)
    prompt = stream.train(0)
    told = [prompt_set(seed=9).demonstrate(prompt, random.Random(5)) for _ in range(2)]
    assert told[0] == told[1] == stream.demonstrate(prompt, random.Random(5))
    assert told[0]["role"] == "assistant"
    assert len({str(stream.demonstrate(prompt, random.Random(i))) for i in range(30)}) > 1
