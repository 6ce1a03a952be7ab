"""Parameters in memory as the tensors of an exported checkpoint, one after the other.

What a weight push sends to an inference engine. The bytes are those that the file path writes from a
checkpoint of the same parameters: both take what becomes of a tensor from `export.plan_export`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import numpy as np

from axion_jax.checkpoint import names
from axion_jax.checkpoint.export import BFLOAT16, Export, plan_export
from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Params


def hf_tensors(
    params: Params,
    config: ModelConfig,
    family: str,
    export: Export,
    *,
    released_dtype: np.dtype = BFLOAT16,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) in checkpoint order, scales right after their weights.

    One layer of one leaf is fetched from the devices at a time. Needs every shard in this process.

    Args:
      params: of `Decoder(config)`, the trainer's own: quantised as they are, or rounded to
        `released_dtype` where they are not quantised.
      export: `to` may be anything but orbax.
    """
    if export.to == "orbax":
        raise ValueError("to=orbax is no set of Hugging Face tensors; write it with convert.py.")
    by_path = {names.leaf_path(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}
    expected = names.expected(config, family)
    plan = plan_export(
        {n: (p.shape, np.dtype(by_path[p.leaf.path].dtype)) for n, p in expected.items()},
        config,
        export,
        trained=True,
        released_dtype=released_dtype,
    )
    by_layer = itertools.groupby(expected.items(), key=lambda item: names.layer_index(item[0]))
    for _, group in by_layer:
        fetched: dict[str, np.ndarray] = {}
        for name, place in group:
            path = place.leaf.path
            if path not in fetched:
                leaf = by_path[path]
                fetched[path] = np.asarray(leaf if place.index is None else leaf[place.index])
            value = fetched[path] if place.expert is None else fetched[path][place.expert]
            array = place.leaf.to_tensor(place.leaf.part(value, place.part))
            encoding = plan.encodings[name]
            arrays = (array,) if encoding.encode is None else encoding.encode(array)
            for (output, _, _), out in zip(encoding.outputs, arrays, strict=True):
                yield output, np.ascontiguousarray(out)
