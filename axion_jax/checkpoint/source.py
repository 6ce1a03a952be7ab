"""Opens a checkpoint on disk, whatever its kind, as one table: tensor name -> shape, dtype, bytes.

Kinds, recognised by their files:

    hf        Hugging Face: model.safetensors, or model.safetensors.index.json and its shards
    orbax     written by launch/convert.py: an uncompressed Orbax tree, one leaf for each layer and tensor
    training  a stage directory of a recipe run; see training_source.py

Names are always Hugging Face's, one tensor per expert. A tensor that is part of a stacked one (all
experts of a layer, gate and up side by side) is a byte range of it: nothing is read to split it, and a
conversion moves bytes without knowing what they mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from axion_jax.checkpoint import names
from axion_jax.checkpoint.hf_config import family_of, model_config
from axion_jax.checkpoint.safetensors_file import DTYPES, read_exactly, read_header
from axion_jax.models.config import ModelConfig

INDEX = "model.safetensors.index.json"
SIDE_FOLDER = "huggingface"
"""In an Orbax checkpoint: config, generation config, tokenizer and chat template."""
_NOT_CARRIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".partial")


@dataclasses.dataclass(frozen=True)
class Extent:
    """A run of bytes in a file."""

    path: pathlib.Path
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: np.dtype
    extents: tuple[Extent, ...] = ()
    """Its bytes in C order; empty if they must be computed (training checkpoints)."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def where(self) -> str:
        return str(self.extents[0].path) if self.extents else "training checkpoint"

    def part(self, start: int, shape: tuple[int, ...]) -> Tensor:
        """The contiguous tensor of this shape that begins at byte `start`."""
        left = math.prod(shape) * self.dtype.itemsize
        found = []
        for extent in self.extents:
            if left and start < extent.nbytes:
                count = min(left, extent.nbytes - start)
                found.append(Extent(extent.path, extent.start + start, count))
                left -= count
            start = max(0, start - extent.nbytes)
        assert not left, (self, shape)
        return Tensor(shape, self.dtype, tuple(found))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole, as far as names, shapes and file sizes tell."""

    kind: str
    directory: pathlib.Path
    hf_config: dict[str, Any]
    """The content of config.json."""
    family: str
    config: ModelConfig
    tensors: dict[str, Tensor]
    side_files: tuple[pathlib.Path, ...] = ()
    """Everything but weights and config.json: tokenizer, chat template, generation config."""
    trained: bool = False
    """Holds a trainer's own precision: exports round to the model's dtype, and quantise from here."""
    compute: Callable[[str], np.ndarray] | None = None
    """Produces a tensor that has no extents."""

    def read(self, name: str) -> np.ndarray:
        """One tensor, in memory of its own. Safe to call from many threads."""
        tensor = self.tensors[name]
        if self.compute is not None and not tensor.extents:
            return self.compute(name)
        if len(tensor.extents) == 1:
            data = _read_extent(tensor.extents[0], name)
        else:
            data = np.empty(tensor.nbytes, np.uint8)
            done = 0
            for extent in tensor.extents:
                data[done : done + extent.nbytes] = _read_extent(extent, name)
                done += extent.nbytes
        return data.view(tensor.dtype).reshape(tensor.shape)

    def pieces(self, name: str, buffer: np.ndarray) -> Iterator[memoryview]:
        """The bytes of a tensor that has extents, in runs that fit `buffer`; each is valid until the next."""
        for extent in self.tensors[name].extents:
            with extent.path.open("rb", buffering=0) as file:
                done = 0
                while done < extent.nbytes:
                    view = memoryview(buffer)[: extent.nbytes - done]
                    got = os.preadv(file.fileno(), [view], extent.start + done)
                    if not got:
                        raise ValueError(f"{extent.path}: ends within {name}; it was cut short.")
                    yield view[:got]
                    done += got

    def check(self) -> None:
        """Raises a ValueError unless the tensors are exactly those the config asks for."""
        for name, place in names.expected(self.config, self.family).items():
            tensor = self.tensors.get(name)
            if tensor is None:
                continue
            names.check_tensor(name, tensor.shape, tensor.dtype, place, tensor.where, self.config)
        missing, unexpected = names.compare(self.tensors, self.config, self.family)
        if missing:
            raise ValueError(
                f"{self.directory}: {_listed(missing)} missing, which config.json asks for."
                + (f" There are unexpected ones: {_listed(unexpected)}." if unexpected else "")
            )
        if unexpected:
            where = self.tensors[unexpected[0]].where
            raise ValueError(
                f"{self.directory}: {_listed(unexpected)} not expected by config.json ({where})."
            )


def _listed(found: list[str]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more + (" is" if len(found) == 1 else " are")


def _read_extent(extent: Extent, name: str) -> np.ndarray:
    with extent.path.open("rb", buffering=0) as file:
        return read_exactly(file.fileno(), extent.start, extent.nbytes, f"{extent.path}: {name}")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Recognises and opens the checkpoint at `path`.

    Raises:
      ValueError: there is none, its files are not whole, or its config is not one we implement. The
        message names file and tensor.
    """
    directory = pathlib.Path(path)
    if directory.is_file() and directory.suffix == ".safetensors":
        return _open_hf(directory.parent, [directory])
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such checkpoint directory.")
    if (directory / "convert.json").is_file():
        raise ValueError(
            f"{directory} is a conversion that did not finish; give the same command again."
        )
    if (directory / "_METADATA").is_file():
        return _open_orbax(directory)
    if (directory / INDEX).is_file() or list(directory.glob("*.safetensors")):
        return _open_hf(directory, None)
    if (directory / "checkpoints").is_dir() or directory.parent.name == "checkpoints":
        from axion_jax.checkpoint.training_source import open_training  # imports Orbax

        return open_training(directory)
    raise ValueError(
        f"{directory} holds no checkpoint: expected *.safetensors (Hugging Face), _METADATA (Orbax)"
        f" or checkpoints/ (a stage of a run)."
    )


def read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _side_files(directory: pathlib.Path) -> tuple[pathlib.Path, ...]:
    return tuple(
        sorted(
            file
            for file in directory.iterdir()
            if file.is_file()
            and not file.name.endswith(_NOT_CARRIED)
            and not file.name.startswith(".")
            and file.name not in ("config.json", "manifest.json", "convert.json")
        )
    )


def _open_hf(directory: pathlib.Path, files: list[pathlib.Path] | None) -> Checkpoint:
    config = read_json(directory / "config.json")
    tensors = _hf_tensors(directory, files)
    return _checkpoint("hf", directory, config, tensors, _side_files(directory))


def _hf_tensors(directory: pathlib.Path, files: list[pathlib.Path] | None) -> dict[str, Tensor]:
    """What the given files hold, or those of the directory's index."""
    promised: dict[str, str] = {}
    if files is None:
        if (directory / INDEX).is_file():
            promised = read_json(directory / INDEX)["weight_map"]
            files = [directory / name for name in sorted(set(promised.values()))]
        else:
            files = sorted(directory.glob("*.safetensors"))
            if len(files) > 1:
                raise ValueError(
                    f"{directory} has {len(files)} *.safetensors but no {INDEX} to say which belong"
                    " together."
                )
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            lost = [name for name, where in promised.items() if where == file.name]
            raise ValueError(
                f"{file}: missing shard; {INDEX} says it holds {_listed(lost).rsplit(' ', 1)[0]}."
            )
        for name, entry in read_header(file)[0].items():
            if name in tensors:
                raise ValueError(f"{name} is in both {tensors[name].where} and {file}.")
            extent = Extent(file, entry.start, entry.nbytes)
            tensors[name] = Tensor(entry.shape, entry.dtype, (extent,))
    for name, where in promised.items():
        if name not in tensors or tensors[name].where != str(directory / where):
            raise ValueError(f"{INDEX} says {name} is in {directory / where}, which lacks it.")
    return tensors


def open_tensors(directory: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face or Orbax checkpoint, whatever its config says; one per expert."""
    if (directory / "_METADATA").is_file():
        return _split_experts(_orbax_tensors(directory))
    return _split_experts(_hf_tensors(directory, None))


def _checkpoint(
    kind: str,
    directory: pathlib.Path,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    side_files: tuple[pathlib.Path, ...],
    trained: bool = False,
) -> Checkpoint:
    try:
        family, model = family_of(config), model_config(config)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    per_expert = dict(
        sorted(_split_experts(tensors).items(), key=lambda item: names.sort_key(item[0]))
    )
    return Checkpoint(kind, directory, config, family, model, per_expert, side_files, trained)


_STACKED = re.compile(r"^(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?$")


def _split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor per expert, from whichever of the layouts a checkpoint has.

    transformers 5 in memory: experts.gate_up_proj [E, 2F, D], experts.down_proj [E, D, F]. Our Orbax
    leaves: experts.{gate,up,down}_proj.weight [E, ...].
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _STACKED.match(name)
        if match is None or len(tensor.shape) != 3:
            result[name] = tensor
            continue
        prefix, which, _ = match.groups()
        num_experts, rows, cols = tensor.shape
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,)
        shape = (rows // len(parts), cols)
        size = math.prod(shape) * tensor.dtype.itemsize
        for expert in range(num_experts):
            for i, part in enumerate(parts):
                start = (expert * len(parts) + i) * size
                result[f"{prefix}.{expert}.{part}.weight"] = tensor.part(start, shape)
    return result


def _open_orbax(directory: pathlib.Path) -> Checkpoint:
    side = directory / SIDE_FOLDER
    if not (side / "config.json").is_file():
        raise ValueError(
            f"{directory} is an Orbax tree that launch/convert.py did not write: it lacks"
            f" {SIDE_FOLDER}/config.json."
        )
    metadata = read_json(directory / "_METADATA")
    trained = bool((metadata.get("custom_metadata") or {}).get("trained"))
    config = read_json(side / "config.json")
    tensors = _orbax_tensors(directory)
    return _checkpoint("orbax", directory, config, tensors, _side_files(side), trained)


def _orbax_tensors(directory: pathlib.Path) -> dict[str, Tensor]:
    tensors = {}
    for row in read_json(directory / "_METADATA")["tree_metadata"].values():
        key = ".".join(str(k["key"]) for k in row["key_metadata"])
        tensors[key] = _open_zarr(directory / key, key)
    return tensors


def zarr_dtype(name: str) -> np.dtype:
    """numpy dtype of a name in .zarray, where extension types have plain names."""
    extended = {dtype.name: dtype for dtype in DTYPES.values()}
    return extended[name] if name in extended else np.dtype(name)


def _open_zarr(folder: pathlib.Path, name: str) -> Tensor:
    """An uncompressed array that is cut along its first axis only: its chunks are its bytes."""
    info = read_json(folder / ".zarray")
    shape, chunks = tuple(info["shape"]), tuple(info["chunks"])
    if info["compressor"] is not None or chunks[1:] != shape[1:]:
        raise ValueError(f"{folder}: compressed, or cut along an inner axis; not ours to read.")
    dtype = zarr_dtype(info["dtype"])
    whole = math.prod(chunks) * dtype.itemsize
    left, extents = math.prod(shape) * dtype.itemsize, []
    for i in range(-(-shape[0] // chunks[0]) if shape else 1):
        path = folder / ".".join([str(i)] + ["0"] * (len(shape) - 1))
        size = path.stat().st_size if path.is_file() else 0
        if size != whole:
            state = f"has {size} bytes instead of {whole}" if size else "is missing"
            raise ValueError(f"{path}, a part of {name}, {state}.")
        extents.append(Extent(path, 0, min(whole, left)))
        left -= whole
    return Tensor(shape, dtype, tuple(extents))
