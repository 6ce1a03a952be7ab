"""Recorded routing at the door: what is refused, and what is forgotten."""

import numpy as np
import pytest

from axion_jax.rl.routing import forget_recomputed_rows, prepare_routing, smallest_dtype

E, SHAPE = 8, (2, 2)


def prepare(trajectory, routing, **fields):
    made = trajectory(np.ones(len(routing)), routing=np.asarray(routing), task_id="t", **fields)
    return prepare_routing([made], num_experts=E, routing_shape=SHAPE)[0]


def rows_of(n, dtype=np.int8):
    rng = np.random.default_rng(0)
    return np.argsort(rng.random((n, SHAPE[0], E)))[..., : SHAPE[1]].astype(dtype)


def test_good_routing_passes_unchanged(trajectory):
    routing = rows_of(5)
    routing[2, 1] = -1  # unknown: the trainer's own choice
    np.testing.assert_array_equal(prepare(trajectory, routing).routing, routing)


def test_a_trajectory_without_routing_stays_so(trajectory):
    made = trajectory([1])
    assert prepare_routing([made], num_experts=E, routing_shape=SHAPE) == [made]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([3, 8], r"an id outside 0..7 in the routing of token 1, MoE layer 1: \[3, 8\]"),
        ([-2, 3], "an id outside 0..7"),
        ([-1, 3], "an id outside 0..7"),  # half unknown
        ([4, 4], r"an expert twice in the routing of token 1, MoE layer 1: \[4, 4\]"),
        ([0, 0], "an expert twice"),  # zero padding, stale rows of a captured graph
    ],
)
def test_a_row_that_no_router_can_have_chosen_is_named(trajectory, row, message):
    routing = rows_of(3)
    routing[1, 1] = row
    with pytest.raises(ValueError, match=message):
        prepare(trajectory, routing)


def test_dense_layers_and_other_layouts_are_named(trajectory):
    three = np.concatenate([rows_of(3), rows_of(3)[:, :1]], axis=1)
    with pytest.raises(ValueError, match=r"\(3, 2\).*has \(2, 2\)\. Dense layers are not recorded"):
        prepare(trajectory, three)


def test_rows_are_tokens_minus_1(trajectory):
    # what concatenating instead of replacing the rows of a resumed turn looks like: 4 + 7 rows
    with pytest.raises(ValueError, match="routing has 11 entries, but 8 tokens make 7 predictions"):
        trajectory(np.ones(7), routing=rows_of(11))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int16])
def test_another_type_than_the_smallest_signed_one_is_named(trajectory, dtype):
    with pytest.raises(ValueError, match=f"type {np.dtype(dtype)}; 8 experts are stored as int8"):
        prepare(trajectory, rows_of(3, dtype))


def test_storage_is_int8_to_128_experts_and_int16_above():
    assert smallest_dtype(128) == np.int8 and smallest_dtype(129) == np.int16
    # 131,072 tokens, 46 layers, 8 experts: 48 MB
    assert np.empty((131_072, 46, 8), smallest_dtype(128)).nbytes == 131_072 * 46 * 8


def test_rows_recomputed_under_newer_weights_are_forgotten(trajectory):
    # Inputs: prompt p0 p1, then a b sampled by version 3, a tool token, then c d by version 4.
    # The engine prefilled everything again before c, so all rows are version 4's.
    sampled = np.array([-1, 3, 3, -1, 4, 4], np.int32)
    routing = rows_of(6)
    done = prepare(trajectory, routing, policy_version=sampled, routing_version=np.full(6, 4))
    # p0 and p1 were first attended to by the forward that sampled a; the tool token by c's.
    assert (done.routing[:3] == -1).all()
    np.testing.assert_array_equal(done.routing[3:], routing[3:])
    assert done.routing.dtype == np.int8


def test_rows_of_the_version_that_sampled_stay(trajectory):
    sampled = np.array([-1, 3, 4, -1], np.int32)
    routing = rows_of(4)
    done = prepare(
        trajectory, routing, policy_version=sampled, routing_version=np.array([3, 3, 4, 4])
    )
    np.testing.assert_array_equal(done.routing, routing)


def test_a_routing_version_without_a_policy_version_is_refused(trajectory):
    made = trajectory([1], routing=rows_of(1), routing_version=np.array([0]))
    with pytest.raises(ValueError, match="no policy_version to compare it with"):
        forget_recomputed_rows(made)
