"""A stage of a recipe run as a checkpoint: its newest training step, parameters only, read piece by piece.

Stacked leaves are opened where Orbax put them and read one layer (and expert) at a time, so that the
optimizer's moments are never read and the parameters never held.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import tensorstore as ts

from axion_jax.checkpoint import names
from axion_jax.checkpoint.hf_config import GLM4_MOE, LLAMA, QWEN3, hf_config
from axion_jax.checkpoint.source import Checkpoint, Tensor, read_json
from axion_jax.models.config import ModelConfig


def open_training(directory: pathlib.Path) -> Checkpoint:
    """Opens `<run>/<stage>`, or one step of it, `<run>/<stage>/checkpoints/<step>`."""
    if directory.parent.name == "checkpoints":
        step, stage = directory, directory.parent.parent
    else:
        stage = directory
        steps = [p for p in (stage / "checkpoints").iterdir() if p.name.isdigit()]
        if not steps:
            raise ValueError(f"{stage / 'checkpoints'} holds no finished step.")
        step = max(steps, key=lambda p: int(p.name))
    run = stage.parent
    section = read_json(run / "config.json").get("model")
    if section is None:
        raise ValueError(f"{run / 'config.json'} has no model section; is {run} a recipe run?")
    try:
        config = ModelConfig(**section)
        family = GLM4_MOE if config.num_moe_layers else QWEN3 if config.qk_norm else LLAMA
        description = hf_config(config, family)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{run / 'config.json'}: {error}") from None
    tokenizer = run / "tokenizer"
    side = tuple(sorted(p for p in tokenizer.glob("*") if p.is_file() and p.name != "config.json"))
    arrays = _open_leaves(step / "state", names.leaves(config, family))
    expected = names.expected(config, family)

    def compute(name: str) -> np.ndarray:
        place = expected[name]
        array, leaf = arrays[place.leaf.path], place.leaf
        index = tuple(i for i in (place.index, place.expert) if i is not None)
        value = np.asarray(array[index].read().result() if index else array.read().result())
        return np.ascontiguousarray(leaf.to_tensor(leaf.part(value, place.part)))

    tensors = {
        name: Tensor(place.shape, arrays[place.leaf.path].dtype.numpy_dtype)
        for name, place in expected.items()
    }
    return Checkpoint(
        "training", step, description, family, config, tensors, side, trained=True, compute=compute
    )


def _open_leaves(state: pathlib.Path, leaves: dict[str, names.Leaf]) -> dict[str, Any]:
    """Every parameter leaf as a lazily read array, checked against the config."""
    metadata = read_json(state / "_METADATA")
    if metadata.get("use_zarr3"):
        raise ValueError(f"{state} is a zarr 3 checkpoint, which our training does not write.")
    found = {}
    for path, leaf in leaves.items():
        name = ".".join(["params", *path.split("/")])
        base = {"driver": "file", "path": f"{state.absolute()}/"}
        if metadata["use_ocdbt"]:
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        else:
            kvstore = {"driver": "file", "path": f"{state.absolute()}/{name}/"}
        try:
            array = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()
        except (ValueError, FileNotFoundError) as error:
            reason = str(error).splitlines()[0][:200]
            raise ValueError(f"{state}: parameter {path} cannot be read: {reason}") from None
        if array.shape != leaf.shape:
            raise ValueError(
                f"{state}: parameter {path} has shape {array.shape}, the run's config asks for"
                f" {leaf.shape}."
            )
        found[path] = array
    return found
