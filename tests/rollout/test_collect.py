"""From prompts to scored groups: what is sampled, what is kept, and in which order."""

import functools

import numpy as np
import pytest

from axion_jax.data.chat import encode_prompt
from axion_jax.data.prompts import make_prompt
from axion_jax.data.tokenizer import stop_ids
from axion_jax.rl.filters import mean_reward_window
from axion_jax.rollout.collect import Task, collect_groups, sample_and_score
from axion_jax.rollout.engine import Sampling
from axion_jax.types import Reward, StopReason, Unscorable

SAMPLES = 4


class Numbers:
    """Training prompt i says "Task i."."""

    families = ("numbers",)

    def train(self, index):
        return make_prompt("numbers", f"Task {index}.", thinking=False, entry=index)


class Spoken:
    """The reward is what the answer says; "none" is our failure to score it."""

    async def score(self, sample):
        if sample.response.content == "none":
            return Unscorable("no verdict")
        try:
            return Reward(float(sample.response.content))
        except (TypeError, ValueError):
            return Reward(0.0, reason="no number")


TASK = Task("numbers", Numbers(), Spoken())
in_window = functools.partial(mean_reward_window, low=0.0, high=0.8)


@pytest.fixture
def collect(scripted_engine, tiny_tokenizer):
    """`collect(say, ...) -> (Collected, engine)`; `say(task number, sample, round)` is an answer."""

    def run(
        say, *, start=0, num_groups=2, keep=in_window, max_oversampling=3, seed_key=(0, "rl", 5)
    ):
        def policy(text, request):
            number = int(text.split("Task ")[1].split(".")[0])
            said = say(number, request % SAMPLES)
            return said if said is None else f"\n{said}<|user|>"

        engine = scripted_engine(policy)
        sampling = Sampling(max_new_tokens=12, stop_ids=stop_ids(tiny_tokenizer))
        collected = collect_groups(
            engine,
            tiny_tokenizer,
            TASK,
            sampling,
            start_index=start,
            num_groups=num_groups,
            samples_per_prompt=SAMPLES,
            keep=keep,
            max_oversampling=max_oversampling,
            seed_key=seed_key,
        )
        return collected, engine

    return run


def kept_prompts(collected):
    return [{t.group_id for t in group} for group in collected.groups]


def test_one_round_is_enough_where_every_group_passes(collect):
    collected, engine = collect(lambda number, sample: sample % 2, start=10)
    assert len(engine.calls) == 1
    assert kept_prompts(collected) == [{10}, {11}]
    assert [[t.reward.value for t in group] for group in collected.groups] == [[0, 1, 0, 1]] * 2
    assert collected.next_index == 12
    assert collected.metrics["groups_kept"] == 2 and collected.metrics["rollout_rounds"] == 1


def test_every_prompt_is_sampled_as_often_as_asked_prompt_by_prompt(collect, tiny_tokenizer):
    _, engine = collect(lambda number, sample: sample % 2, start=3)
    prompts, _ = engine.calls[0]
    wanted = [
        encode_prompt(tiny_tokenizer, Numbers().train(i).messages, enable_thinking=False)
        for i in (3, 3, 3, 3, 4, 4, 4, 4)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(prompts, wanted, strict=True))


def test_rounds_go_on_until_enough_groups_pass_and_the_surplus_is_counted(collect):
    hopeless, solved = {0, 2}, {1, 4}

    def say(number, sample):
        return 0 if number in hopeless else 1 if number in solved else sample % 2

    collected, engine = collect(say, num_groups=3, max_oversampling=5)
    # Round one: of 0, 1, 2 none passes; round two: 3 and 5 pass, one too few; round three: 6, 7, 8 do.
    assert len(engine.calls) == 3
    assert kept_prompts(collected) == [{3}, {5}, {6}]
    assert collected.next_index == 9
    assert {k: v for k, v in collected.metrics.items() if k.startswith("groups")} == {
        "groups_kept": 3,
        "groups_filtered": 4,
        "groups_surplus": 2,
        "groups_too_small": 0,
    }
    assert len(collected.samples) == 9 * SAMPLES


def test_over_sampling_stops_at_its_limit_with_what_there_is(collect):
    collected, engine = collect(
        lambda number, sample: number == 3 and sample % 2, max_oversampling=2
    )
    assert len(engine.calls) == 2
    assert kept_prompts(collected) == [{3}]
    assert collected.next_index == 4
    nothing, engine = collect(lambda number, sample: 0, max_oversampling=3)
    assert len(engine.calls) == 3 and nothing.groups == [] and nothing.next_index == 6


def test_the_filter_sees_raw_rewards_of_the_whole_group(collect):
    seen = []

    def keep(rewards):
        seen.append(list(rewards))
        return True

    collect(lambda number, sample: number + sample / 4, keep=keep)
    assert seen == [[0.0, 0.25, 0.5, 0.75], [1.0, 1.25, 1.5, 1.75]]


def test_unscorable_and_aborted_samples_leave_their_group_and_count_as_no_reward(collect, caplog):
    said = {0: [1, "none", 0, 0], 1: [1, None, "none", "none"]}
    collected, _ = collect(lambda number, sample: said[number][sample], max_oversampling=1)
    # Of prompt 1 a single scored sample is left, which has nothing to be compared with.
    (group,) = collected.groups
    assert [t.reward.value for t in group] == [1, 0, 0]
    assert collected.metrics["groups_too_small"] == 1
    assert collected.metrics["unscorable_share"] == 4 / 8
    assert collected.metrics["raw_reward"] == 2 / 4
    assert "3 of 8 samples not scored: no verdict" in caplog.text
    assert collected.samples[5].trajectory.stop_reason is StopReason.ABORTED


def test_rollout_ids_are_unique_over_all_rounds(collect):
    collected, _ = collect(lambda number, sample: sample % 2 if number % 2 else 0, num_groups=3)
    ids = [t.rollout_id for group in collected.groups for t in group]
    assert len(set(ids)) == len(ids) == 3 * SAMPLES


def test_every_round_and_every_step_samples_with_a_seed_of_its_own(collect):
    def seeds(**options):
        _, engine = collect(lambda number, sample: 0, max_oversampling=4, **options)
        return [sampling.seed for _, sampling in engine.calls]

    first = seeds()
    assert len(set(first)) == 4
    assert first == seeds()
    for other in ((1, "rl", 5), (0, "other", 5), (0, "rl", 6)):
        assert not set(first) & set(seeds(seed_key=other))


def test_the_same_call_collects_the_same_groups(collect):
    def texts():
        collected, _ = collect(lambda number, sample: (number * 7 + sample) % 3 / 2)
        return [[t.token_ids.tolist() for t in group] for group in collected.groups]

    assert texts() == texts()


def test_metrics_count_everything_that_was_sampled(collect):
    answers = ["1", "0", "long and unfinished", "<think>0"]
    collected, _ = collect(lambda number, sample: answers[sample], num_groups=1, max_oversampling=1)
    m = collected.metrics
    lengths = [s.trajectory.num_trained for s in collected.samples]
    assert lengths[:2] == [3, 3] and lengths[2] == 12  # a line break, a digit, the stop marker
    assert m["raw_reward"] == 0.25
    assert m["truncated_share"] == 0.25
    assert (
        m["malformed_share"] == 0.25
    )  # a thought where thinking is off; a cut text is well formed
    assert m["response_length"] == np.mean(lengths)
    assert m["sampled_tokens"] == sum(lengths)
    assert m["unscorable_share"] == 0.0


def test_trajectories_hold_the_ids_that_were_fed_and_sampled(scripted_engine, tiny_tokenizer):
    engine = scripted_engine(lambda text, request: "\n1<|user|>" if request else "\nnever ends")
    engine.update_weights(None, 7)
    sampling = Sampling(max_new_tokens=4, stop_ids=stop_ids(tiny_tokenizer))
    prompt = Numbers().train(0)
    cut, ended = sample_and_score(
        engine, tiny_tokenizer, TASK, [prompt], sampling, samples_per_prompt=2, first_group=40
    )
    ids = encode_prompt(tiny_tokenizer, prompt.messages, enable_thinking=False)
    for sample, length in ((cut, 4), (ended, 3)):
        t = sample.trajectory
        assert t.token_ids[: len(ids)].tolist() == ids.tolist()
        assert len(t.token_ids) == len(ids) + length == len(t.loss_mask) + 1
        assert t.loss_mask.tolist() == [False] * (len(ids) - 1) + [True] * length
        assert np.all((t.policy_version == 7) == t.loss_mask)
        assert np.all((t.sampler_logprobs != 0) <= t.loss_mask)
        assert (t.group_id, t.task_id) == (40, prompt.task_id)
    assert cut.trajectory.stop_reason is StopReason.GENERATION_LIMIT
    assert ended.trajectory.stop_reason is StopReason.ANSWERED
    assert ended.text == "\n1<|user|>" and ended.response.content == "1"
