"""Where the tensors of a conversion go: safetensors shards, or the arrays of an Orbax tree.

An Orbax tree on disk is a folder for each leaf, with its description in `.zarray` and its chunks as raw
bytes, and `_METADATA` for the tree. Leaves keep the checkpoint's own orientation and are cut along the
first axis only: converting to and from Hugging Face moves bytes, nothing is transposed or computed, and
Orbax restores the tree like any other. Experts of a layer are one leaf, [E, ...].
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from axion_jax.checkpoint import names
from axion_jax.checkpoint.export import Encoding
from axion_jax.checkpoint.jobs import File, Job, Output, Run
from axion_jax.checkpoint.safetensors_file import layout
from axion_jax.checkpoint.source import INDEX

CHUNK = 64 * 2**20
"""Bytes of an Orbax chunk, at most, unless one row is larger."""

Spec = tuple[tuple[int, ...], np.dtype]


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def safetensors_layout(
    encodings: Mapping[str, Encoding], shard_size: int
) -> tuple[list[Job], dict[str, File], dict[str, str]]:
    """(jobs, files, index: tensor -> file), in checkpoint order, shards of at most `shard_size` bytes.

    A tensor and its scales stay together.
    """
    shards: list[dict[str, Spec]] = []
    used = shard_size + 1
    for encoding in encodings.values():
        size = sum(_nbytes(shape, dtype) for _, shape, dtype in encoding.outputs)
        if used + size > shard_size:
            shards.append({})
            used = 0
        used += size
        shards[-1] |= {name: (shape, dtype) for name, shape, dtype in encoding.outputs}
    files: dict[str, File] = {}
    runs: dict[str, Run] = {}
    index: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        header, entries, size = layout(tensors, {"format": "pt"})
        files[file] = File(header, size)
        runs |= {name: Run(file, entry.start, entry.nbytes) for name, entry in entries.items()}
        index |= dict.fromkeys(tensors, file)
    jobs = [
        Job(source, tuple(Output(name, (runs[name],)) for name, _, _ in e.outputs), e.encode)
        for source, e in encodings.items()
    ]
    return jobs, files, index


def write_index(directory: pathlib.Path, index: Mapping[str, str], total_size: int) -> None:
    """The index of a checkpoint in shards; a single file needs none."""
    if len(set(index.values())) > 1:
        content = {
            "metadata": {"total_size": total_size},
            "weight_map": dict(sorted(index.items())),
        }
        (directory / INDEX).write_text(json.dumps(content, indent=2) + "\n")


_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+_proj\.weight)$")


def orbax_layout(
    encodings: Mapping[str, Encoding],
) -> tuple[list[Job], dict[str, File], dict[str, Spec]]:
    """(jobs, files, leaves)."""
    members: dict[str, list[str]] = {}
    for name in encodings:
        match = _EXPERT.match(name)
        members.setdefault(f"{match[1]}.{match[3]}" if match else name, []).append(name)
    jobs: list[Job] = []
    files: dict[str, File] = {}
    leaves: dict[str, Spec] = {}
    for key, tensors in members.items():
        _, shape, dtype = encodings[tensors[0]].outputs[0]
        different = [n for n in tensors if encodings[n].outputs[0][1:] != (shape, dtype)]
        if different:
            raise ValueError(f"{different[0]} differs in shape or dtype from {tensors[0]}.")
        stacked = _EXPERT.match(tensors[0]) is not None
        whole = (len(tensors), *shape) if stacked else shape
        leaves[key] = (whole, dtype)
        rows = chunk_rows(whole, dtype)
        row = _nbytes(whole[1:], dtype)
        for i in range(-(-whole[0] // rows) if whole else 1):
            files[chunk_file(key, i, len(whole))] = File(b"", rows * row if whole else row)
        size = _nbytes(shape, dtype)
        for number, name in enumerate(tensors):
            runs = _runs(key, number * size, size, rows * row or size, len(whole))
            jobs.append(Job(name, (Output(name, runs),), encodings[name].encode))
    return jobs, files, leaves


def chunk_file(key: str, number: int, rank: int) -> str:
    return f"{key}/" + ".".join([str(number)] + ["0"] * max(0, rank - 1))


def chunk_rows(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Rows of the first axis in a chunk: a divisor of it where one exists near the limit."""
    if not shape:
        return 0
    most = max(1, min(shape[0], CHUNK // max(1, _nbytes(shape[1:], dtype))))
    divisors = [n for n in range(1, most + 1) if shape[0] % n == 0]
    return divisors[-1] if divisors[-1] * 4 >= most else most


def _runs(key: str, start: int, size: int, chunk: int, rank: int) -> tuple[Run, ...]:
    """Bytes [start, start + size) of a leaf, cut at chunks."""
    runs = []
    end = start + size
    while start < end:
        number, offset = divmod(start, chunk)
        count = min(end - start, chunk - offset)
        runs.append(Run(chunk_file(key, number, rank), offset, count))
        start += count
    return tuple(runs)


def write_orbax_metadata(
    directory: pathlib.Path, leaves: Mapping[str, Spec], *, trained: bool
) -> None:
    """What Orbax wants to find beside the chunks."""
    tree: dict[str, Any] = {}
    for key, (shape, dtype) in leaves.items():
        rows = chunk_rows(shape, dtype)
        description = {
            "chunks": [rows, *shape[1:]] if shape else [],
            "compressor": None,
            "dimension_separator": ".",
            "dtype": dtype.name if dtype.kind == "V" else dtype.str,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(shape),
            "zarr_format": 2,
        }
        (directory / key / ".zarray").write_text(json.dumps(description))
        tree[str((key,))] = {
            "key_metadata": [{"key": key, "key_type": 2}],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(shape),
            },
        }
    metadata = {
        "tree_metadata": dict(sorted(tree.items(), key=lambda item: names.sort_key(item[0]))),
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {"trained": trained},
    }
    (directory / "_METADATA").write_text(json.dumps(metadata))
    now = time.time_ns()
    handler = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    checkpoint = {
        "item_handlers": handler,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    (directory / "_CHECKPOINT_METADATA").write_text(json.dumps(checkpoint))
