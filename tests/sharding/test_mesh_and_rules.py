"""From logical axes to layouts, and what is said when a mesh does not fit."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

from axion_jax.models.decoder import Decoder
from axion_jax.sharding.mesh import MeshConfig, make_mesh
from axion_jax.sharding.rules import (
    RULES,
    batch_sharding,
    param_shardings,
    partition_spec,
    state_shardings,
)
from axion_jax.types import TrainState

MESH = AbstractMesh((2, 4), ("data", "fsdp"))


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({}, (1, 8)),
        ({"data": 2}, (2, 4)),
        ({"data": -1, "fsdp": 1}, (8, 1)),
        ({"data": 4, "fsdp": 2}, (4, 2)),
    ],
)
def test_a_mesh_covers_all_devices_and_fills_in_one_size(sizes, expected):
    mesh = make_mesh(MeshConfig(**sizes))
    assert mesh.axis_names == ("data", "fsdp")
    assert mesh.devices.shape == expected
    assert mesh.devices.size == jax.device_count() == 8


@pytest.mark.parametrize(
    "sizes, message",
    [
        (
            {"data": 2, "fsdp": 2},
            r"data=2 x fsdp=2 asks for 4 devices, but there are 8\. Use fsdp=-1",
        ),
        ({"data": 16, "fsdp": 1}, r"data=16 x fsdp=1 asks for 16 devices, but there are 8"),
        ({"data": 3}, r"3 does not divide the 8 devices, so fsdp=-1 cannot be filled in"),
        ({"data": 16}, r"16 does not divide the 8 devices"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_says_by_how_much(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(MeshConfig(**sizes))


@pytest.mark.parametrize("sizes", [{"data": -1, "fsdp": -1}, {"data": 0}, {"fsdp": -2}])
def test_sizes_that_mean_nothing_are_refused(sizes):
    with pytest.raises(ValueError, match="sizes are at least 1, and at most one may be -1"):
        MeshConfig(**sizes)


def test_each_dimension_goes_where_the_table_says():
    assert partition_spec(("layers", "embed", "heads", None)) == jax.P(None, "fsdp", None, None)
    assert partition_spec(("batch", None)) == jax.P(("data", "fsdp"), None)


def test_an_unknown_logical_axis_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'heds'; known: batch, embed, .* Add a row to sharding/"):
        partition_spec(("embed", "heds"))


@pytest.fixture(scope="module")
def decoder(tiny):
    return Decoder(tiny)


def test_every_axis_a_parameter_names_has_a_rule_and_every_rule_is_used(decoder):
    leaves = jax.tree.leaves(decoder.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
    named = {axis for axes in leaves for axis in axes if axis is not None}
    assert named | {"batch"} == set(RULES)


def test_a_dimension_that_does_not_divide_is_named_with_its_leaf(decoder):
    mesh = AbstractMesh((1, 3), ("data", "fsdp"))
    axes, shapes = decoder.logical_axes(), decoder.abstract_params()
    with pytest.raises(ValueError, match=r"\['\w+'\].* dimension of 16, .* fsdp=3 does not divide"):
        param_shardings(mesh, axes, shapes)


def test_optimizer_moments_are_laid_out_like_their_parameters_and_counters_everywhere(decoder):
    params = decoder.abstract_params()
    shardings = param_shardings(MESH, decoder.logical_axes(), params)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = jax.eval_shape(
        lambda p: TrainState(jnp.int32(0), p, optimizer.init(p), jnp.int32(0)), params
    )
    found = state_shardings(MESH, shardings, state)
    adam = found.opt_state[1][0]
    assert found.params == adam.mu == adam.nu == shardings
    assert adam.count.spec == found.step.spec == found.skipped.spec == jax.P()


def test_rows_are_split_over_every_batch_axis_after_the_micro_batches():
    assert batch_sharding(MESH).spec == jax.P(("data", "fsdp"))
    assert batch_sharding(MESH, leading=1).spec == jax.P(None, ("data", "fsdp"))
    assert batch_sharding(MESH, leading=1).shard_shape((3, 16, 5)) == (3, 2, 5)
