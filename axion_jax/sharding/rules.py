"""Which mesh axis each logical axis is laid out over: one table, used for parameters, optimizer
state and batches.

A new strategy is a new table. Logical axes are named where a parameter is declared (models/), mesh
axes in mesh.py.
"""

from __future__ import annotations

from typing import Any

import jax

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
"""Devices, or only their number and arrangement: layouts of a pod can be worked out without one."""

RULES: dict[str, tuple[str, ...] | str | None] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "vocab": None,
    "heads": None,
    "kv_heads": None,
    "head_dim": None,
    "ffn": None,
    "experts": None,
    "layers": None,
}


def partition_spec(axes: tuple[str | None, ...]) -> jax.P:
    """The layout of an array whose dimensions have these logical axes (None: never sharded)."""
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(
                f"No sharding rule for logical axis {axis!r}; known: {', '.join(RULES)}. Add a row to sharding/rules.py."
            )
    return jax.P(*(None if axis is None else RULES[axis] for axis in axes))


def param_shardings(mesh: Mesh, logical_axes: Any, shapes: Any) -> Any:
    """NamedShardings for a tree of logical axes.

    Raises:
      ValueError: a sharded dimension is not divisible by its mesh axis; names the leaf.
    """

    def one(path, axes, leaf):
        spec = partition_spec(axes)
        for dim, mesh_axis in zip(leaf.shape, spec, strict=True):
            size = mesh.shape[mesh_axis] if mesh_axis else 1
            if dim % size:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)} has a dimension of {dim}, which mesh axis {mesh_axis}={size} does"
                    " not divide. Choose a mesh that does."
                )
        return jax.NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(
        one, logical_axes, shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def state_shardings(mesh: Mesh, params_sharding: Any, state: Any) -> Any:
    """Shardings of a train state: a leaf that mirrors a parameter (same path suffix: Adam moments)
    is laid out like it, counters and the rest are replicated."""
    by_path = {
        tuple(map(str, path)): sharding
        for path, sharding in jax.tree_util.tree_leaves_with_path(params_sharding)
    }

    def one(path, leaf):
        names = tuple(map(str, path))
        for start in range(len(names)):
            found = by_path.get(names[start:])
            if found is not None and leaf.ndim == len(found.spec):
                return found
        return jax.NamedSharding(mesh, jax.P())

    return jax.tree_util.tree_map_with_path(one, state)


def batch_sharding(mesh: Mesh, *, leading: int = 0) -> jax.NamedSharding:
    """Rows over every batch axis, after `leading` unsharded dimensions (stacked micro-batches)."""
    return jax.NamedSharding(mesh, jax.P(*(None,) * leading, RULES["batch"]))
