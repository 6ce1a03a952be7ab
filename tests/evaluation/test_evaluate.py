"""Held-out results from a scripted engine: pass rates, intervals, families, and what is left out."""

import dataclasses
import json

import numpy as np
import pytest

from axion_jax.data.prompts import make_prompt
from axion_jax.data.tokenizer import stop_ids
from axion_jax.evaluation.evaluate import EvaluationConfig, evaluate
from axion_jax.evaluation.passk import confidence_interval, mean_interval
from axion_jax.rollout.collect import Task
from axion_jax.types import Reward, Unscorable


class Held:
    """Held-out prompt i says "Task i."; even ones are easy, odd ones hard."""

    def __init__(self, families=("easy", "hard")):
        self.families = families

    def held_out(self, count):
        return [
            make_prompt(
                self.families[i % len(self.families)], f"Task {i}.", thinking=False, entry=i
            )
            for i in range(count)
        ]


class Spoken:
    async def score(self, sample):
        text = sample.response.content
        return Unscorable("no verdict") if text == "none" else Reward(float(text))


@pytest.fixture
def measure(scripted_engine, tiny_tokenizer):
    """`measure(answers, ...)`: results where prompt i is answered with `answers[i]`, in turn."""

    def run(answers, *, families=("easy", "hard"), real_valued=False, **config):
        per_prompt = len(answers[0])

        def policy(text, request):
            said = answers[int(text.split("Task ")[1].split(".")[0])][request % per_prompt]
            return said if said is None else f"\n{said}<|user|>"

        engine = scripted_engine(policy)
        config = EvaluationConfig(
            num_prompts=len(answers),
            samples_per_prompt=per_prompt,
            max_response_length=8,
            **config,
        )
        task = Task("spoken", Held(families), Spoken())
        result, samples = evaluate(
            engine,
            tiny_tokenizer,
            task,
            config,
            stop_ids=stop_ids(tiny_tokenizer),
            real_valued=real_valued,
        )
        return result, samples, engine

    return run


def test_pass_rates_by_hand(measure):
    # Prompts right 4, 2, 1, 0 times of 4. pass@2 = 1 - C(wrong, 2) / C(4, 2): 1, 5/6, 1/2, 0.
    answers = [[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    result, samples, _ = measure(answers)
    assert result["pass@1"] == (4 + 2 + 1 + 0) / 16
    assert result["pass@2"] == pytest.approx((1 + 5 / 6 + 1 / 2 + 0) / 4)
    assert result["pass@4"] == 3 / 4
    assert "pass@8" not in result
    assert result["ci95"] == list(confidence_interval([1, 0.5, 0.25, 0]))
    assert (result["n"], result["samples_per_prompt"], len(samples)) == (4, 4, 16)
    json.dumps(result)


def test_every_family_is_measured_on_its_own_prompts(measure):
    result, _, _ = measure([[1, 1], [0, 0], [1, 0], [0, 1]])
    easy, hard = result["families"]["easy"], result["families"]["hard"]
    assert (easy["pass@1"], easy["pass@2"], easy["n"]) == (0.75, 1.0, 2)
    assert (hard["pass@1"], hard["pass@2"], hard["n"]) == (0.25, 0.5, 2)
    assert result["pass@1"] == 0.5
    assert easy["ci95"] == list(confidence_interval([1, 0.5]))


def test_a_single_family_is_not_reported_twice(measure):
    result, _, _ = measure([[1], [0]], families=("only",))
    assert "families" not in result and "pass@2" not in result


def test_a_reward_must_exceed_one_half_to_pass(measure):
    result, _, _ = measure([[0.5, 0.51], [0.49, 1.0]])
    assert result["pass@1"] == 0.5


def test_real_valued_scores_report_their_mean_and_pass_above_0(measure):
    # Means 1.5 and -0.25; three of four scores are above 0.
    result, _, _ = measure([[1, 2], [-1, 0.5]], real_valued=True)
    assert result["reward_score"] == pytest.approx(0.625)
    assert result["ci95"] == pytest.approx(list(mean_interval([1.5, -0.25])))
    assert result["pass@1"] == 0.75
    assert result["families"]["hard"]["reward_score"] == pytest.approx(-0.25)


def test_failures_of_ours_are_left_out_and_counted_never_taken_for_wrong(measure):
    result, _, _ = measure([[1, "none"], [1, 0], [None, "none"]], families=("only",))
    # Prompt 0 is right in the sample that was scored, prompt 2 has none and leaves.
    assert result["pass@1"] == (1 + 0.5) / 2
    assert result["pass@2"] == 1.0  # of the one prompt whose samples are all there
    assert (result["n"], result["unscorable"]) == (2, 3)


def test_nothing_that_could_be_scored_is_an_error_and_not_a_number(measure):
    with pytest.raises(RuntimeError, match="None of the 4 samples of easy, hard could be scored"):
        measure([["none", None], ["none", "none"]])


def test_lengths_and_truncation_are_those_of_all_samples(measure):
    result, _, _ = measure([["1", "1000000000000"], ["0", "1"]], families=("only",))
    # A line break, a digit and the stop marker; the long answer is cut at 8 tokens.
    assert result["response_length"] == np.mean([3, 8, 3, 3])
    assert result["truncated_share"] == 0.25


def test_sampling_is_what_the_config_says_and_the_same_in_every_measurement(measure):
    _, _, engine = measure([[1, 0], [0, 1]], temperature=0.5, seed=9)
    ((prompts, sampling),) = engine.calls
    assert len(prompts) == 4
    assert (sampling.temperature, sampling.seed, sampling.max_new_tokens) == (0.5, 9, 8)
    _, _, again = measure([[1, 0], [0, 1]], temperature=0.5, seed=9)
    assert again.calls[0][1] == sampling


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prompts": 1}, "num_prompts=1 must be at least 2"),
        ({"samples_per_prompt": 0}, "samples_per_prompt=0 at least 1"),
        ({"max_response_length": 0}, "max_response_length=0 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 0 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, message):
    config = EvaluationConfig(num_prompts=2, samples_per_prompt=1, max_response_length=8)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)
