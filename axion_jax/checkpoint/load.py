"""Parameters from a checkpoint on disk, straight onto a mesh.

A stacked leaf is filled layer by layer: one layer is read, laid out over the devices and written into
the leaf, whose buffer is donated from step to step. A host holds the tensors of one layer of one leaf
that its own devices need, never the model. Which mesh wrote the checkpoint plays no part.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axion_jax.checkpoint import names
from axion_jax.checkpoint.source import Checkpoint, open_checkpoint
from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Decoder, Params

FLOAT32_LEAVES = ("router", "router_bias")
"""Always float32: a correction bias in bfloat16 changes which experts are chosen."""


def load_params(
    source: Checkpoint | str | os.PathLike[str],
    config: ModelConfig | None = None,
    *,
    dtype: Any = jnp.float32,
    shardings: Params | None = None,
) -> Params:
    """Parameters of `Decoder(config)` from a checkpoint of any kind (`open_checkpoint`).

    Args:
      source: an opened checkpoint, or its path.
      config: what the caller means to run; None takes the checkpoint's own.
      dtype: of every leaf except router and router bias, which are float32.
      shardings: a tree like the parameters (`sharding.rules.param_shardings`); None puts everything on
        the first device.

    Raises:
      ValueError: a tensor is missing, unexpected or has another shape than `config` says; names it.
    """
    if not isinstance(source, Checkpoint):
        source = open_checkpoint(source)
    if config is not None:
        source = _as(source, config)
    source.check()
    abstract = Decoder(source.config).abstract_params()
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if shardings is None:
        shardings = jax.tree.map(lambda _: one_device, abstract)
    table = names.leaves(source.config, source.family)

    def one(path, sharding):
        leaf = table[names.leaf_path(path)]
        float32 = path[-1].key in FLOAT32_LEAVES
        return _load_leaf(source, leaf, np.dtype(jnp.float32 if float32 else dtype), sharding)

    return jax.tree_util.tree_map_with_path(one, shardings)


def _as(source: Checkpoint, config: ModelConfig) -> Checkpoint:
    """The same tensors, held against the caller's config."""
    return Checkpoint(**{**source.__dict__, "config": config})


def _load_leaf(
    source: Checkpoint, leaf: names.Leaf, dtype: np.dtype, sharding: jax.sharding.Sharding
) -> jax.Array:
    if not leaf.layers:
        return _one_layer(source, leaf, None, leaf.shape, dtype, sharding)
    layer_sharding = _without_first_axis(sharding)
    stack = _zeros(leaf.shape, dtype, sharding)
    for index, layer in enumerate(leaf.layers):
        value = _one_layer(source, leaf, layer, leaf.shape[1:], dtype, layer_sharding)
        stack = _put(stack, value, index)
    return stack


def _without_first_axis(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if not isinstance(sharding, jax.NamedSharding):
        return sharding
    if len(sharding.spec) and sharding.spec[0] is not None:
        raise ValueError(
            f"{sharding.spec} cuts the stacked layers, which loading does not support."
        )
    return jax.NamedSharding(sharding.mesh, jax.P(*sharding.spec[1:]))


def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, layer: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, index, axis=0)


def _one_layer(
    source: Checkpoint,
    leaf: names.Leaf,
    layer: int | None,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    """One layer of a leaf. Every tensor that a device of this host needs is read once."""
    needed = sharding.addressable_devices_indices_map(shape).values()
    experts = sorted({e for index in needed for e in _experts(leaf, index)})
    wanted = [
        (expert, name)
        for expert in experts or (None,)
        for name in leaf.checkpoint_names(layer, expert)
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        read = dict(zip(wanted, pool.map(lambda key: source.read(key[1]), wanted), strict=True))

        def block(index):
            """What one device holds, copied out of views of the checkpoint's tensors."""
            out = np.empty(
                [len(range(*i.indices(n))) for i, n in zip(index, shape, strict=True)], dtype
            )
            inner = index[1:] if leaf.names.per_expert else index
            chosen = _experts(leaf, index) or (None,)
            parts = out if leaf.names.per_expert else [out]

            def fill(part, expert):
                tensors = leaf.checkpoint_names(layer, expert)
                _fill(part, [leaf.to_piece(read[expert, name]) for name in tensors], inner)

            list(pool.map(fill, parts, chosen))
            return out

        return jax.make_array_from_callback(shape, sharding, block)


def _experts(leaf: names.Leaf, index: Any) -> range | tuple[()]:
    return range(*index[0].indices(leaf.num_experts)) if leaf.names.per_expert else ()


def _fill(out: np.ndarray, pieces: list[np.ndarray], index: tuple[slice, ...]) -> None:
    """Copies `index` of one layer and expert into `out`; two pieces are gate and up, on axis 1."""
    if len(pieces) == 1:
        out[...] = pieces[0][index]
        return
    first, which, *rest = index
    for i, piece in enumerate(pieces[which]):
        out[:, i] = piece[(first, *rest)]
