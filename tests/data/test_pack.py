"""Packing: nothing lost, nothing doubled, sums preserved, and every result finds its way back."""

import jax
import numpy as np
import pytest

from axion_jax.data.pack import Slot, pack, unpack
from axion_jax.types import Trajectory


def make(num_tokens, seed=0, **fields):
    rng = np.random.default_rng(seed)
    return Trajectory(
        token_ids=rng.integers(1, 1000, num_tokens).astype(np.int32),
        loss_mask=rng.random(num_tokens - 1) < 0.5,
        task_id=f"task-{seed}",
        **fields,
    )


def ones(trajectories):
    return [np.where(t.loss_mask, 1, 0).astype(np.float32) for t in trajectories]


def pack_plain(trajectories, **options):
    defaults = dict(row_length=32, rows=4, pad_id=0, weights=ones(trajectories), denominator=7.0)
    return pack(trajectories, **(defaults | options))


@pytest.fixture
def ragged():
    return [
        make(int(n), seed) for seed, n in enumerate(np.random.default_rng(9).integers(2, 34, 50))
    ]


def test_two_trajectories_share_a_row_longest_first():
    a = Trajectory(token_ids=np.array([5, 6, 7]), loss_mask=np.array([False, True]))
    b = Trajectory(token_ids=np.array([1, 2, 3, 4]), loss_mask=np.array([False, True, True]))
    batch, used, index = pack_plain(
        [a, b],
        row_length=6,
        rows=1,
        pad_id=9,
        weights=[np.array([0, 0.5]), np.array([0, 0.25, 0.25])],
        denominator=2.0,
    )
    assert used == 1
    assert index == [Slot(0, 0, 3, 2), Slot(0, 0, 0, 3)]
    assert batch.tokens.tolist() == [[[1, 2, 3, 5, 6, 9]]]
    assert batch.targets.tolist() == [[[2, 3, 4, 6, 7, 9]]]
    assert batch.loss_mask.tolist() == [[[False, True, True, False, True, False]]]
    assert batch.segment_ids.tolist() == [[[1, 1, 1, 2, 2, 0]]]
    assert batch.positions.tolist() == [[[0, 1, 2, 0, 1, 0]]]
    assert batch.weights.tolist() == [[[0, 0.25, 0.25, 0, 0.5, 0]]]
    assert batch.denominator.tolist() == [[2.0]]
    assert batch.advantages is None and batch.routing is None


def test_every_prediction_is_there_once_and_padding_is_empty(ragged):
    batch, used, index = pack_plain(ragged)
    assert batch.tokens.shape == (used, 4, 32)
    for trajectory, tokens, targets, mask, position in zip(
        ragged,
        *(
            unpack(x, index)
            for x in (batch.tokens, batch.targets, batch.loss_mask, batch.positions)
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(tokens, trajectory.token_ids[:-1])
        np.testing.assert_array_equal(targets, trajectory.token_ids[1:])
        np.testing.assert_array_equal(mask, trajectory.loss_mask)
        np.testing.assert_array_equal(position, np.arange(len(tokens)))
    total = sum(len(t.token_ids) - 1 for t in ragged)
    padding = batch.segment_ids == 0
    assert (~padding).sum() == total
    assert not batch.tokens[padding].any() and not batch.loss_mask[padding].any()
    assert not batch.weights[padding].any()


def test_segments_of_a_row_are_numbered_from_one_in_order(ragged):
    batch, _, _ = pack_plain(ragged)
    for row in batch.segment_ids.reshape(-1, 32):
        text = row[row > 0]
        assert (np.diff(text) >= 0).all() and (row[: len(text)] > 0).all()
        assert set(text.tolist()) == set(range(1, len(set(text.tolist())) + 1))


def test_weights_and_denominator_add_up_however_rows_are_cut(ragged):
    weights = [w * 0.125 for w in ones(ragged)]
    total = sum(w.sum() for w in weights)
    for rows, microbatches in ((1, None), (3, None), (8, 20), (64, 1)):
        batch, used, _ = pack_plain(ragged, rows=rows, weights=weights, microbatches=microbatches)
        np.testing.assert_allclose(batch.weights.sum(), total, rtol=1e-6)
        np.testing.assert_allclose(batch.denominator.sum(), 7.0, rtol=1e-6)
        shares = batch.denominator[:used]
        assert (shares == shares[0, 0]).all() and not batch.denominator[used:].any()
        assert len(batch.tokens) == (microbatches or used)


def test_first_fit_decreasing_fills_rows():
    # Predictions 6, 5, 5, 4, 4 in rows of 12: {6, 5}, {5, 4}, with the last 4 no longer fitting the
    # first (1 left) nor the second (3 left).
    batch, used, index = pack_plain(
        [make(n + 1, n) for n in (4, 5, 6, 5, 4)], row_length=12, rows=1
    )
    assert used == 3
    assert [(s.microbatch, s.offset) for s in index] == [(1, 5), (0, 6), (0, 0), (1, 0), (2, 0)]


def test_unpack_undoes_pack_for_any_per_prediction_array(ragged):
    logprobs = [
        np.random.default_rng(i).normal(size=len(t.loss_mask)) for i, t in enumerate(ragged)
    ]
    routing = [
        np.random.default_rng(i).integers(0, 8, (len(t.loss_mask), 3, 2)).astype(np.int8)
        for i, t in enumerate(ragged)
    ]
    ragged = [
        t.replace(sampler_logprobs=lp.astype(np.float32), routing=r, advantage=float(i))
        for i, (t, lp, r) in enumerate(zip(ragged, logprobs, routing, strict=True))
    ]
    batch, _, index = pack_plain(
        ragged, routing_shape=(3, 2), with_advantages=True, with_sampler_logprobs=True
    )
    for i, (trajectory, lp, r, a) in enumerate(
        zip(
            ragged,
            unpack(batch.sampler_logprobs, index),
            unpack(batch.routing, index),
            unpack(batch.advantages, index),
            strict=True,
        )
    ):
        np.testing.assert_array_equal(lp, trajectory.sampler_logprobs)
        np.testing.assert_array_equal(r, trajectory.routing)
        np.testing.assert_array_equal(a, np.where(trajectory.loss_mask, np.float32(i), 0))
    assert batch.routing.dtype == np.int8
    assert (batch.routing[batch.segment_ids == 0] == -1).all()
    assert not batch.advantages[batch.segment_ids == 0].any()


def test_routing_is_unknown_for_trajectories_without_any():
    known = make(4, 0, routing=np.full((3, 2, 1), 200, np.int16))
    batch, _, index = pack_plain([known, make(3, 1)], routing_shape=(2, 1))
    assert batch.routing.dtype == np.int16 and batch.routing.shape == (1, 4, 32, 2, 1)
    assert [set(r.ravel().tolist()) for r in unpack(batch.routing, index)] == [{200}, {-1}]
    assert pack_plain([make(3, 1)], routing_shape=(2, 1)).batch.routing.dtype == np.int8


def test_a_pad_token_inside_a_trajectory_stays_a_trained_token():
    # GLM's pad token 7 is an eos token too: padding is known by length, not by id.
    ended = Trajectory(token_ids=np.array([5, 7, 7]), loss_mask=np.array([True, True]))
    batch, _, _ = pack_plain([ended], row_length=4, rows=1, pad_id=7)
    assert batch.targets.tolist() == [[[7, 7, 7, 7]]]
    assert batch.loss_mask.tolist() == [[[True, True, False, False]]]
    assert batch.segment_ids.tolist() == [[[1, 1, 0, 0]]]


@pytest.mark.parametrize("together", [2, 5])
def test_groups_kept_together_are_neighbours_in_order(ragged, together):
    trajectories = [make(len(t.token_ids) // together + 2, i) for i, t in enumerate(ragged)]
    batch, _, index = pack_plain(trajectories, row_length=64, together=together)
    for k in range(0, len(trajectories), together):
        group = index[k : k + together]
        assert len({(s.microbatch, s.row) for s in group}) == 1
        for one, two in zip(group, group[1:], strict=False):
            assert two.offset == one.offset + one.length
        first = [int(batch.segment_ids[s.microbatch, s.row, s.offset]) for s in group]
        assert first == list(range(first[0], first[0] + together)) and first[0] % together == 1


def test_rows_hold_at_most_max_segments(ragged):
    batch, used, _ = pack_plain(ragged, row_length=128, max_segments=3)
    assert batch.segment_ids.max() == 3
    free, used_freely, _ = pack_plain(ragged, row_length=128)
    assert free.segment_ids.max() > 3 and used_freely < used


@pytest.mark.parametrize(
    ("trajectories", "options", "said"),
    [
        ([make(40, 3)], {}, "'task-3' makes 39 predictions.*row_length=32"),
        ([make(1, 3)], {}, "'task-3' makes 0 predictions"),
        ([make(20, 3), make(20, 4)], {"together": 2}, "'task-3'.*38 predictions.*row_length=32"),
        ([make(20, 3)] * 3, {"together": 2}, "together=2"),
        ([make(20, 3)] * 9, {"rows": 2, "microbatches": 4}, "171.* need 5 .*microbatches=4"),
        ([make(20, 3)], {"with_advantages": True}, "'task-3' has no advantage"),
        ([make(20, 3)], {"with_sampler_logprobs": True}, "'task-3' has no sampler_logprobs"),
        (
            [make(3, 3, routing=np.zeros((2, 3, 1), np.int8))],
            {"routing_shape": (3, 2)},
            r"'task-3'.*\(3, 1\).*\(3, 2\)",
        ),
        ([make(20, 3)], {"weights": []}, "0 arrays of weights"),
        ([make(20, 3)], {"weights": [np.ones(20)]}, "20 weights"),
        ([], {}, "no trajectories"),
    ],
)
def test_what_does_not_fit_is_named(trajectories, options, said):
    with pytest.raises(ValueError, match=said):
        pack_plain(trajectories, **options)


def test_a_packed_batch_is_a_pytree_of_numpy_arrays(ragged):
    batch, used, _ = pack_plain(ragged, with_advantages=False)
    leaves = jax.tree.leaves(batch)
    assert len(leaves) == 7 and all(isinstance(leaf, np.ndarray) for leaf in leaves)
    assert all(leaf.shape[:2] == (used, 4) for leaf in leaves)
