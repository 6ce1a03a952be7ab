"""Converts a checkpoint into another kind, streaming.

The target is written beside its final place, as `<target>.partial`, and renamed when it is whole: a
directory of the target's name is a finished conversion. Weights come first, the small files that make a
directory look like a checkpoint last.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from axion_jax.checkpoint import names
from axion_jax.checkpoint.export import Export, Plan, plan_export, released_dtype
from axion_jax.checkpoint.jobs import PIECE, Journal, Writer
from axion_jax.checkpoint.layouts import (
    orbax_layout,
    safetensors_layout,
    write_index,
    write_orbax_metadata,
)
from axion_jax.checkpoint.source import (
    SIDE_FOLDER,
    Checkpoint,
    open_checkpoint,
    open_tensors,
    read_json,
)

MANIFEST = "manifest.json"
"""In a finished target: what it was made of, and a checksum for every tensor in every file."""
SHARD_SIZE = 5 * 10**9

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion that was found possible; `run` does it."""

    source: Checkpoint
    target: pathlib.Path
    export: Export
    plan: Plan
    shard_size: int

    @property
    def total_bytes(self) -> int:
        outputs = [o for e in self.plan.encodings.values() for o in e.outputs]
        return sum(int(np.prod(shape)) * dtype.itemsize for _, shape, dtype in outputs)


def prepare(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    export: Export,
    *,
    shard_size: int = SHARD_SIZE,
) -> Conversion:
    """Everything that can be refused before a byte is written.

    Raises:
      ValueError: the source is not whole, the target exists, or the export is impossible.
    """
    target = pathlib.Path(target)
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} exists. Choose another target, or remove it first.")
    opened = open_checkpoint(source)
    opened.check()
    plan = plan_export(
        {name: (t.shape, t.dtype) for name, t in opened.tensors.items()},
        opened.config,
        export,
        trained=opened.trained,
        released_dtype=released_dtype(opened.hf_config),
    )
    return Conversion(opened, target, export, plan, shard_size)


def run(conversion: Conversion, *, threads: int = 0, progress: Progress | None = None) -> None:
    """Converts, or goes on converting after a kill; afterwards the target is there and whole.

    Args:
      threads: 0 takes twice the cores, at most 16.
      progress: called with bytes written, as tensors are done.
    """
    target = conversion.target
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Journal(partial, _identity(conversion))) as journal:
        _write(conversion, partial, journal, threads, progress)
        (partial / "convert.json").unlink()
        partial.rename(target)


def _write(
    conversion: Conversion,
    partial: pathlib.Path,
    journal: Journal,
    threads: int,
    progress: Progress | None,
) -> None:
    source = conversion.source
    if conversion.export.to == "orbax":
        jobs, files, leaves = orbax_layout(conversion.plan.encodings)
        for key in leaves:
            (partial / key).mkdir(exist_ok=True)
        index = {}
    else:
        jobs, files, index = safetensors_layout(conversion.plan.encodings, conversion.shard_size)
        leaves = {}
    _check_space(partial, sum(f.size for n, f in files.items() if n not in journal.finished))
    threads = threads or min(16, 2 * (os.cpu_count() or 1))
    Writer(source, partial, files, journal).run(jobs, threads=threads, progress=progress)
    side = partial
    if conversion.export.to == "orbax":
        write_orbax_metadata(partial, leaves, trained=source.trained)
        side = partial / SIDE_FOLDER
        side.mkdir(exist_ok=True)
    else:
        write_index(partial, index, conversion.total_bytes)
    for file in source.side_files:
        shutil.copyfile(file, side / file.name)
    text = json.dumps(_config_json(conversion), indent=2, ensure_ascii=False)
    (side / "config.json").write_text(text + "\n")
    manifest = {"made_by": _identity(conversion), "crc32": journal.finished}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _identity(conversion: Conversion) -> dict[str, Any]:
    """What two commands must share for one to go on with the files of the other."""
    source = conversion.source
    places = {extent.path for t in source.tensors.values() for extent in t.extents}
    newest = max((path.stat().st_mtime_ns for path in places), default=0)
    return {
        "source": str(source.directory.absolute()),
        "source_kind": source.kind,
        "source_tensors": len(source.tensors),
        "source_bytes": sum(t.nbytes for t in source.tensors.values()),
        "source_changed": newest,
        "shard_size": conversion.shard_size,
        **dataclasses.asdict(conversion.export),
    }


def _check_space(directory: pathlib.Path, needed: int) -> None:
    written = sum(f.stat().st_blocks * 512 for f in directory.rglob("*") if f.is_file())
    free = shutil.disk_usage(directory).free
    if needed > free + written:
        raise ValueError(
            f"{directory} needs {needed / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB free."
        )


def _config_json(conversion: Conversion) -> dict[str, Any]:
    """The source's config.json, as far as the target agrees with it."""
    result = copy.deepcopy(conversion.source.hf_config)
    if not conversion.export.to.startswith("sglang"):
        return result
    if conversion.plan.quantization_config is not None:
        result["quantization_config"] = conversion.plan.quantization_config
    elif "dtype" in result:
        result["dtype"] = "bfloat16"
    else:
        result["torch_dtype"] = "bfloat16"
    config = conversion.source.config
    if not any(names.is_mtp(name, config) for name in conversion.source.tensors):
        for field in ("num_nextn_predict_layers", "num_mtp_layers"):
            if field in result:
                result[field] = 0  # else a server that is asked for it looks for the layer
    return result


def written_bytes(target: str | os.PathLike[str]) -> int:
    """Bytes of tensors in a finished conversion."""
    return sum(tensor.nbytes for tensor in open_tensors(pathlib.Path(target)).values())


def verify(target: str | os.PathLike[str], *, progress: Progress | None = None) -> int:
    """Reads a finished conversion back from disk and compares checksums; returns bytes compared.

    Raises:
      ValueError: something is missing or differs; names file and tensor.
    """
    directory = pathlib.Path(target)
    manifest = read_json(directory / MANIFEST)["crc32"]
    total = 0
    buffer = np.empty(PIECE, np.uint8)
    seen: set[tuple[str, str]] = set()
    for name, tensor in open_tensors(directory).items():
        for extent in tensor.extents:
            file = str(extent.path.relative_to(directory))
            checksum, done = 0, 0
            with extent.path.open("rb", buffering=0) as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read the disk
                while done < extent.nbytes:
                    view = memoryview(buffer)[: extent.nbytes - done]
                    got = os.preadv(handle.fileno(), [view], extent.start + done)
                    if not got:
                        raise ValueError(f"{extent.path}: ends within {name}; it was cut short.")
                    checksum, done = zlib.crc32(view[:got], checksum), done + got
            if manifest.get(file, {}).get(name) != checksum:
                raise ValueError(
                    f"{extent.path}: {name} is not what was written (its checksum differs). Convert"
                    " again, and distrust the disk."
                )
            seen.add((file, name))
            total += extent.nbytes
            if progress is not None:
                progress(extent.nbytes)
    lost = [(f, n) for f, rows in manifest.items() for n in rows if (f, n) not in seen]
    if lost:
        raise ValueError(f"{directory / lost[0][0]}: {lost[0][1]} is missing.")
    return total
