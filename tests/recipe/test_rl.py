"""What an RL stage does between sampling and updating: shaped rewards, advantages, batches."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn
from axion_jax.recipe.config import parse
from axion_jax.recipe.rl import (
    RLConfig,
    make_batches,
    make_reference,
    make_shaping,
    shaped_groups,
)
from axion_jax.types import Reward, StopReason, Trajectory

PAD = 0
PROMPT = 3
"""Tokens of every prompt here."""


@pytest.fixture
def config(recipe_config):
    """`config(**changes)`: the reasoning stage, with small rows and a change or two."""

    def make(**changes):
        section = recipe_config()["reasoning_rl"] | {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_response_length": 10,
            "rows": 2,
            "row_length": 16,
        }
        return parse(RLConfig, section | changes, "reasoning_rl")

    return make


@pytest.fixture
def decoder(tiny):
    return SimpleNamespace(config=tiny)


def group(number, rewards, lengths, *, truncated=(), routing_shape=(2, 2)):
    """A group whose tokens are 100 * its number + the sample's, which is also the first expert of each row."""
    made = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        n = PROMPT + length - 1
        made.append(
            Trajectory(
                token_ids=np.full(n + 1, 100 * number + i, np.int32),
                loss_mask=np.arange(n) >= PROMPT - 1,
                sampler_logprobs=np.full(n, -0.5, np.float32),
                routing=np.broadcast_to(np.array([i, i + 4], np.int8), (n, *routing_shape)),
                stop_reason=StopReason.GENERATION_LIMIT if i in truncated else StopReason.ANSWERED,
                reward=Reward(reward, {"mark": reward}, "because"),
                group_id=number,
                rollout_id=100 * number + i,
                task_id=f"task-{number}",
            )
        )
    return made


def advantages_of(packed):
    """{first token of a sequence: its advantage}, from the rows of a packed step."""
    batch = packed.batch
    found = {}
    for slot in packed.index:
        row = slot.microbatch, slot.row, slice(slot.offset, slot.offset + slot.length)
        values = set(batch.advantages[row][batch.loss_mask[row]].tolist())
        found[int(batch.tokens[row][0])] = values.pop() if values else None
        assert not values
    return found


def test_correct_rollouts_pay_for_being_longer_than_the_shortest_correct_one(config):
    shaping = {"name": "length_penalty", "coefficient": 0.1}
    groups = [group(1, [1, 1, 0, 1], [2, 6, 9, 10])]
    (shaped,) = shaped_groups(config(shaping=shaping), groups)
    # 0.1 * (length - 2) / (10 - 2) off; the wrong one keeps its 0.
    assert [t.reward.value for t in shaped] == pytest.approx([1, 0.95, 0, 0.9])
    assert [t.reward.parts["raw"] for t in shaped] == [1, 1, 0, 1]
    assert shaped[0].reward.parts["mark"] == 1 and shaped[0].reward.reason == "because"
    assert [t.reward.value for t in groups[0]] == [1, 1, 0, 1]  # what came in is left as it was


def test_positive_scores_pay_for_length_beyond_the_free_part(config):
    shaping = {"name": "linear_length_penalty", "free_length": 5, "coefficient": 1.0}
    (shaped,) = shaped_groups(config(shaping=shaping), [group(1, [2, 2, 0.3, -1], [5, 6, 10, 10])])
    assert [t.reward.value for t in shaped] == pytest.approx([2, 1.8, 0, -1])


def test_without_shaping_rewards_stay(config):
    (shaped,) = shaped_groups(config(shaping=None), [group(1, [2, 0.5, -1, 0], [1, 2, 3, 4])])
    assert [t.reward.value for t in shaped] == [2, 0.5, -1, 0]
    assert make_shaping(None, 10)([1, 2], [3, 4]).tolist() == [1, 2]


def test_lengths_of_a_penalty_are_sampled_tokens_not_prompts(config):
    shaping = {"name": "length_penalty", "coefficient": 0.1}
    (shaped,) = shaped_groups(config(shaping=shaping), [group(1, [1, 1], [10 - PROMPT, 10])])
    assert shaped[1].reward.value == pytest.approx(0.9)  # the whole penalty at 10, not before


def test_groups_are_dealt_out_to_the_updates_in_order(config, decoder):
    groups = [group(k, [1, 0, 0, 0], [2, 3, 4, 5]) for k in (1, 2, 3)]
    batches = make_batches(config(updates_per_step=2), decoder, groups, pad_id=PAD)
    dealt = [sorted({token // 100 for token in advantages_of(packed)}) for packed in batches]
    assert dealt == [[1, 2], [3]]


@pytest.mark.parametrize(("num_groups", "num_batches"), [(0, 0), (1, 1), (2, 2), (4, 2)])
def test_too_few_groups_make_fewer_updates_and_none_makes_none(
    config, decoder, num_groups, num_batches
):
    groups = [group(k, [1, 0, 0, 0], [2, 3, 4, 5]) for k in range(1, num_groups + 1)]
    batches = make_batches(config(updates_per_step=2), decoder, groups, pad_id=PAD)
    assert len(batches) == num_batches


def test_every_number_of_groups_and_lengths_has_the_same_compiled_shape(config, decoder):
    few = [group(1, [1, 0], [1, 1])]
    many = [group(k, [1, 0, 0, 0], [10, 10, 10, 10]) for k in (1, 2, 3, 4)]
    shapes = {
        packed.batch.tokens.shape
        for groups in (few, many)
        for packed in make_batches(config(updates_per_step=2), decoder, groups, pad_id=PAD)
    }
    # At worst 2 prompts * 4 samples of a row each in micro-batches of 2 rows.
    assert shapes == {(4, 2, 16)}


def test_advantages_are_relative_to_the_group_and_its_shaped_rewards(config, decoder):
    shaping = {"name": "length_penalty", "coefficient": 0.1}
    groups = [group(1, [1, 1, 0, 0], [2, 10, 4, 4]), group(2, [1, 1, 1, 1], [3, 3, 3, 3])]
    (packed,) = make_batches(
        config(updates_per_step=1, shaping=shaping), decoder, groups, pad_id=PAD
    )
    found = advantages_of(packed)
    rewards = np.array([1, 0.9, 0, 0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert [found[100 + i] for i in range(4)] == pytest.approx(expected)
    assert [found[200 + i] for i in range(4)] == [0, 0, 0, 0]


def test_a_truncated_rollout_trains_nothing_but_counts_in_baseline_and_denominator(config, decoder):
    groups = [group(1, [1, 0, 1, 0], [2, 3, 4, 10], truncated=(3,))]
    options = {"updates_per_step": 1, "shaping": None}
    (masked,) = make_batches(config(**options, mask_truncated=True), decoder, groups, pad_id=PAD)
    (whole,) = make_batches(config(**options, mask_truncated=False), decoder, groups, pad_id=PAD)
    cut = 103
    assert advantages_of(masked) == advantages_of(whole) | {cut: None}
    of_cut = masked.batch.tokens == cut
    assert of_cut.sum() == PROMPT + 10 - 1
    assert not masked.batch.loss_mask[of_cut].any() and not masked.batch.weights[of_cut].any()
    assert whole.batch.loss_mask[of_cut].sum() == 10
    for packed in (masked, whole):
        assert packed.batch.denominator.sum() == 4


def test_every_rollout_weighs_the_same_whatever_its_length(config, decoder):
    groups = [group(k, [1, 0, 0, 0], [1, 5, 2, 10]) for k in (1, 2)]
    (packed,) = make_batches(config(updates_per_step=1), decoder, groups, pad_id=PAD)
    for token in (100, 101, 102, 103, 200, 203):
        assert packed.batch.weights[packed.batch.tokens == token].sum() == pytest.approx(1)
    assert packed.batch.denominator.sum() == 8


def test_recorded_routing_travels_only_where_it_is_replayed(config, decoder):
    groups = [group(1, [1, 0, 0, 0], [2, 3, 4, 5])]
    replayed, own = (
        make_batches(config(replay_routing=replay), decoder, groups, pad_id=PAD)[0].batch
        for replay in (True, False)
    )
    assert own.routing is None
    assert replayed.routing.shape == (*replayed.tokens.shape, *decoder.config.routing_shape)
    real = replayed.segment_ids > 0
    assert np.all(replayed.routing[real][..., 0] == (replayed.tokens[real] % 100)[:, None])
    assert np.all(replayed.routing[~real] == -1)
    assert np.all(replayed.sampler_logprobs[replayed.loss_mask] == -0.5)


def test_routing_that_no_router_can_have_chosen_never_reaches_a_batch(config, decoder):
    (stale,) = [group(1, [1, 0], [2, 3])]
    zeros = [t.replace(routing=np.zeros_like(t.routing)) for t in stale]
    with pytest.raises(ValueError, match="'task-1' has an expert twice in the routing of token 0"):
        make_batches(config(replay_routing=True), decoder, [zeros], pad_id=PAD)
    assert make_batches(config(replay_routing=False), decoder, [zeros], pad_id=PAD)


def test_no_group_is_left_over_whatever_their_number(config, decoder):
    # nine groups in four updates: 3, 2, 2, 2. A step of a fixed size would leave the ninth out.
    groups = [group(k, [1, 0, 0, 0], [2, 3, 4, 5]) for k in range(1, 10)]
    options = config(prompts_per_step=9, updates_per_step=4)
    batches = make_batches(options, decoder, groups, pad_id=PAD)
    dealt = [sorted({token // 100 for token in advantages_of(packed)}) for packed in batches]
    assert dealt == [[1, 2, 3], [4, 5], [6, 7], [8, 9]]


def test_dr_grpo_is_a_matter_of_sections(config, decoder):
    options = config(
        updates_per_step=1,
        shaping=None,
        algorithm={"name": "grpo", "clip_low": 0.2, "clip_high": 0.28},
        advantage={"name": "group_mean"},
        reduction={"name": "constant_length", "length": 10},
    )
    (packed,) = make_batches(options, decoder, [group(1, [1, 0, 0, 0], [1, 5, 2, 10])], pad_id=PAD)
    assert [advantages_of(packed)[100 + i] for i in range(4)] == [0.75, -0.25, -0.25, -0.25]
    assert packed.batch.weights[packed.batch.loss_mask] == pytest.approx(0.1)
    assert packed.batch.denominator.sum() == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": {"name": "group"}}, "must be a name alone; known: group_std, group_mean"),
        ({"reduction": {"name": "each_token_alike"}}, "gspo does not go with each_token_alike"),
        ({"filter": {"max_oversampling": 4}}, "filter drops nothing: set low, high or differing"),
        ({"kl": {"name": "k3"}}, "kl k3 needs a value for coefficient"),
        ({"staleness": {"name": "truncated"}}, "staleness truncated needs a value for cap"),
        ({"entropy_bonus": 0.0}, "entropy_bonus=0.0 must be above 0"),
        ({"shaping": {"name": "soft_overlong", "buffer": 99, "factor": 1.0}}, "buffer=99 must lie"),
        (
            {"shaping": {"name": "length_penalty", "coefficient": 0.1, "apply_to": "some"}},
            "apply_to='some' must be 'correct' or 'all'",
        ),
    ],
)
def test_a_mistake_in_a_section_is_named(config, changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_filters_are_named_after_what_they_take_out(config):
    made = config(filter={"low": 0.0, "high": 0.8, "differing": True, "max_oversampling": 4})
    judged = {
        name: [keep(rewards) for rewards in ([0, 0], [1, 1], [0.5, 0.5], [0, 1])]
        for name, keep in made.filter.keep.items()
    }
    assert judged == {
        "too_hard": [False, True, True, True],
        "too_easy": [True, False, True, True],
        "all_alike": [False, False, False, True],
    }


def test_the_reference_is_a_copy_of_the_first_parameters_and_never_replays(
    config, tiny, random_params
):
    decoder = Decoder(tiny)
    params = random_params(decoder)
    groups = [group(0, [1, 0, 0, 0], [2, 3, 4, 5])]  # tokens 0..3, within the tiny vocabulary
    (packed,) = make_batches(config(updates_per_step=1), decoder, groups, pad_id=PAD)
    first = jax.tree.map(lambda x: x[0], packed.batch)
    own, replayed = (
        jax.jit(make_score_fn(decoder, entropy=False, replay=replay))(params, first).logprobs
        for replay in (False, True)
    )
    score = make_reference(decoder, params, temperature=1.0)
    jax.tree.map(lambda x: x.delete(), params)  # as donating them to an update does
    found = score(packed.batch, np.int32(packed.num_microbatches))
    mask = first.loss_mask
    np.testing.assert_allclose(found[0][mask], own[mask], atol=1e-5)
    assert np.abs(np.asarray(replayed - own))[mask].max() > 1e-3
