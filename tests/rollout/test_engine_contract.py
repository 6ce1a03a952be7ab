"""What the trainer may rely on, from any engine (rollout/engine.py)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from axion_jax.rollout.engine import FinishReason, Sampling

NEVER = Sampling(max_new_tokens=14, stop_ids=(), temperature=0.7, seed=3)
"""Without stop ids, every row runs to the limit."""


@pytest.fixture
def free(engine, prompts):
    """Continuations of all prompts that nothing stops."""
    return engine.generate(prompts, NEVER)


def ids_of(generations):
    return [g.token_ids.tolist() for g in generations]


def cut_after(ids, stop_ids):
    """`ids` up to and including the first stop id."""
    for n, token in enumerate(ids, start=1):
        if token in stop_ids:
            return ids[:n], FinishReason.STOP
    return ids, FinishReason.LENGTH


# -- agreement with the trainer -------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_the_trainers_own_token_by_token(engine, policy, prompts, temperature):
    sampling = dataclasses.replace(NEVER, temperature=temperature)
    generations = engine.generate(prompts, sampling)
    expected = policy.logprobs(prompts, generations, temperature)
    for generation, (logprobs, _) in zip(generations, expected, strict=True):
        assert generation.logprobs.dtype == np.float32
        np.testing.assert_allclose(generation.logprobs, logprobs, rtol=0, atol=1e-4)


def test_experts_are_the_trainers_own_for_every_token_but_the_last(free, policy, prompts):
    for prompt, generation, (_, routing) in zip(
        prompts, free, policy.logprobs(prompts, free), strict=True
    ):
        used = generation.routed_experts
        assert used is not None and used.dtype == np.int8
        num_rows = len(prompt) + len(generation.token_ids) - 1
        assert used.shape == (num_rows, *policy.decoder.config.routing_shape)
        np.testing.assert_array_equal(np.sort(used), np.sort(routing))


def test_sampled_frequencies_are_the_probabilities(engine, policy, prompts):
    # Pearson's statistic over 2400 first tokens; tokens with fewer than 5 expected are one bin.
    n, temperature = 2400, 1.3
    sampling = Sampling(max_new_tokens=1, stop_ids=(), temperature=temperature, seed=1)
    drawn = [g.token_ids[0] for g in engine.generate([prompts[0]] * n, sampling)]
    counts = np.bincount(drawn, minlength=policy.decoder.config.vocab_size)
    logits, _ = policy.logits([prompts[0]])
    expected = n * np.asarray(jax.nn.softmax(logits[0, len(prompts[0]) - 1] / temperature))
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    statistic = np.sum((observed - expected) ** 2 / expected)
    assert len(expected) > 15
    # A sound engine fails once in a thousand seeds, and this one is fixed.
    assert statistic < scipy.stats.chi2.ppf(0.999, df=len(expected) - 1)


def test_draws_at_successive_positions_and_in_neighbouring_rows_are_independent(engine, policy):
    # Where in its distribution a draw fell (0..1): u1 of the first token, u2 of the second, which
    # is uniform whatever the first one was. |correlation| of 1000 pairs is below 4 / sqrt(1000).
    prompt, n = np.array([5, 9, 2], np.int32), 1000
    sampling = Sampling(max_new_tokens=2, stop_ids=(), seed=2)
    drawn = np.stack([g.token_ids for g in engine.generate([prompt] * n, sampling)])
    vocab = np.arange(policy.decoder.config.vocab_size)
    after = [[*prompt, token] for token in vocab]
    logits = np.concatenate([policy.logits(after[i : i + 16])[0] for i in range(0, len(vocab), 16)])

    def fell_at(tokens, probabilities):
        below = np.sum(probabilities * (vocab[None] < tokens[:, None]), axis=-1)
        return below + np.take_along_axis(probabilities, tokens[:, None], axis=-1)[:, 0] / 2

    first, second = drawn.T
    p1 = np.asarray(jax.nn.softmax(logits[:1, 2]))
    u1 = fell_at(first, np.repeat(p1, n, axis=0))
    u2 = fell_at(second, np.asarray(jax.nn.softmax(logits[:, 3]))[first])
    assert abs(np.mean(u1) - 0.5) < 4 * (1 / 12 / n) ** 0.5
    assert abs(np.mean(u2) - 0.5) < 4 * (1 / 12 / n) ** 0.5
    assert abs(np.corrcoef(u1, u2)[0, 1]) < 4 * n**-0.5
    assert abs(np.corrcoef(u1[1:], u1[:-1])[0, 1]) < 4 * n**-0.5


def test_temperature_zero_takes_the_most_likely_token_and_reports_it_at_temperature_one(
    engine, policy, prompts
):
    generations = engine.generate(prompts, dataclasses.replace(NEVER, temperature=0.0))
    whole = [np.concatenate([p, g.token_ids]) for p, g in zip(prompts, generations, strict=True)]
    logits, _ = policy.logits(whole)
    for row, (prompt, ids) in enumerate(zip(prompts, whole, strict=True)):
        greedy = np.argmax(logits[row, len(prompt) - 1 : len(ids) - 1], axis=-1)
        np.testing.assert_array_equal(generations[row].token_ids, greedy)
    expected = policy.logprobs(prompts, generations, 1.0)
    for generation, (logprobs, _) in zip(generations, expected, strict=True):
        np.testing.assert_allclose(generation.logprobs, logprobs, rtol=0, atol=1e-4)


# -- where a continuation ends --------------------------------------------------------------------


def test_without_a_stop_token_a_row_ends_at_the_limit(free):
    assert all(len(g.token_ids) == len(g.logprobs) == 14 for g in free)
    assert {g.finish_reason for g in free} == {FinishReason.LENGTH}


@pytest.mark.parametrize("how_many", [1, 2, 3])
def test_any_of_the_stop_tokens_ends_its_row_and_is_its_last_token(engine, prompts, free, how_many):
    # Stop tokens from the fourth to the sixth of the first rows, so that those rows do stop.
    stop_ids = tuple(int(free[row].token_ids[3 + row]) for row in range(how_many))
    stopped = engine.generate(prompts, dataclasses.replace(NEVER, stop_ids=stop_ids))
    expected = [cut_after(ids, stop_ids) for ids in ids_of(free)]
    assert [(g.token_ids.tolist(), g.finish_reason) for g in stopped] == expected
    assert {reason for _, reason in expected} == {FinishReason.STOP, FinishReason.LENGTH}
    for generation, unstopped, prompt in zip(stopped, free, prompts, strict=True):
        n = len(generation.token_ids)
        np.testing.assert_allclose(generation.logprobs, unstopped.logprobs[:n], atol=1e-5)
        assert len(generation.routed_experts) == len(prompt) + n - 1


def test_a_stop_token_sampled_at_the_very_limit_is_a_stop(engine, prompts, free):
    # The first row whose last token is new to it.
    row = next(i for i, ids in enumerate(ids_of(free)) if ids[-1] not in ids[:-1])
    stop = dataclasses.replace(NEVER, stop_ids=(int(free[row].token_ids[-1]),))
    generation = engine.generate(prompts, stop)[row]
    assert len(generation.token_ids) == 14
    assert generation.finish_reason is FinishReason.STOP


def test_one_new_token_is_a_continuation_too(engine, prompts, free):
    first = engine.generate(prompts, dataclasses.replace(NEVER, max_new_tokens=1))
    assert ids_of(first) == [ids[:1] for ids in ids_of(free)]
    assert all(len(g.routed_experts) == len(p) for g, p in zip(first, prompts, strict=True))
    stop = dataclasses.replace(NEVER, max_new_tokens=1, stop_ids=(ids_of(free)[0][0],))
    assert engine.generate(prompts, stop)[0].finish_reason is FinishReason.STOP


# -- seeds ----------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_tokens(engine, prompts, free):
    assert ids_of(engine.generate(prompts, NEVER)) == ids_of(free)


def test_another_seed_gives_other_tokens(engine, prompts, free):
    other = engine.generate(prompts, dataclasses.replace(NEVER, seed=4))
    assert all(a != b for a, b in zip(ids_of(other), ids_of(free), strict=True))


def test_a_draw_depends_on_a_prompts_place_in_the_call_and_not_on_the_others(engine, prompts, free):
    # Alone, in front of longer and fewer others, and as the tenth after others.
    assert ids_of(engine.generate(prompts[:1], NEVER)) == ids_of(free)[:1]
    others = [np.full(20, 3, np.int32)] * 9
    assert ids_of(engine.generate([prompts[0], *others[:3]], NEVER))[0] == ids_of(free)[0]
    assert ids_of(engine.generate([*others, prompts[9]], NEVER))[9] == ids_of(free)[9]


def test_copies_of_one_prompt_are_drawn_independently(engine, prompts):
    generations = engine.generate([prompts[0]] * 8, NEVER)
    assert len({tuple(ids) for ids in ids_of(generations)}) == 8


def test_a_higher_limit_continues_the_same_draws(engine, prompts, free):
    longer = engine.generate(prompts, dataclasses.replace(NEVER, max_new_tokens=30))
    assert all(len(ids) == 30 for ids in ids_of(longer))
    assert [ids[:14] for ids in ids_of(longer)] == ids_of(free)


# -- weights --------------------------------------------------------------------------------------


def test_generations_carry_the_version_of_the_weights_that_made_them(
    engine, policy, prompts, free, random_params
):
    assert {g.weight_version for g in free} == {7}
    engine.update_weights(random_params(policy.decoder, seed=9), 8)
    other = engine.generate(prompts, NEVER)
    assert {g.weight_version for g in other} == {8}
    assert ids_of(other) != ids_of(free)
    engine.update_weights(policy.params, 9)
    assert ids_of(engine.generate(prompts, NEVER)) == ids_of(free)


def test_the_trainer_may_donate_its_weights_right_after_the_push(engine, policy, prompts, free):
    mine = jax.tree.map(jnp.copy, policy.params)
    engine.update_weights(mine, 8)
    for leaf in jax.tree.leaves(mine):
        leaf.delete()
    assert ids_of(engine.generate(prompts, NEVER)) == ids_of(free)


def test_generating_without_weights_says_what_to_do(new_engine, prompts):
    with pytest.raises(RuntimeError, match=r"no weights.*update_weights\(\)"):
        new_engine.generate(prompts, NEVER)


def test_a_sleeping_engine_says_what_to_do_and_wakes_with_new_weights(
    engine, policy, prompts, free
):
    engine.sleep()
    with pytest.raises(RuntimeError, match=r"sleeps.*wake\(\) and update_weights\(\)"):
        engine.generate(prompts, NEVER)
    engine.wake()
    with pytest.raises(RuntimeError, match=r"update_weights\(\)"):
        engine.generate(prompts, NEVER)
    engine.update_weights(policy.params, 8)
    again = engine.generate(prompts, NEVER)
    assert ids_of(again) == ids_of(free) and again[0].weight_version == 8


def test_flushing_and_aborting_between_calls_changes_nothing(engine, prompts, free):
    engine.flush()
    engine.abort()
    assert ids_of(engine.generate(prompts, NEVER)) == ids_of(free)


# -- input ----------------------------------------------------------------------------------------


def test_an_empty_prompt_is_named(engine, prompts):
    with pytest.raises(ValueError, match=r"Prompt 2 is empty"):
        engine.generate([*prompts[:2], np.zeros(0, np.int32)], NEVER)


def test_no_prompts_are_no_generations(engine):
    assert engine.generate([], NEVER) == []


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_new_tokens": 0}, r"max_new_tokens=0 must be at least 1\."),
        ({"temperature": -0.1}, r"temperature=-0\.1 must be 0 or more\."),
    ],
)
def test_sampling_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(NEVER, **changes)
