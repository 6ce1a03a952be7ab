"""Reading and writing one safetensors file tensor by tensor, in any order and from many threads.

The format: 8 bytes with the length of a JSON header, the header (name -> dtype, shape, byte range),
then the bytes. The safetensors package writes a file only from tensors that are all in memory, and maps
files whole; here memory holds the tensors in flight and nothing else. The files are the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "BOOL": np.dtype(np.bool_),
    **{f"F{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    """Byte offset in the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: pathlib.Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """(tensors, metadata) of a file.

    Raises:
      ValueError: the file is not whole; names the file and, where it can, the tensor.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file.") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: truncated, or not a safetensors file ({size} bytes).")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ValueError(f"{path}: its header is not JSON; not a safetensors file.") from None
    metadata = header.pop("__metadata__", {})
    entries = {name: _entry(path, name, raw, 8 + length, size) for name, raw in header.items()}
    end = max((e.start + e.nbytes for e in entries.values()), default=8 + length)
    if end != size:
        raise ValueError(f"{path}: {size} bytes, but its header describes {end}.")
    return entries, metadata


def _entry(path: pathlib.Path, name: str, raw: Mapping[str, Any], base: int, size: int) -> Entry:
    if raw["dtype"] not in DTYPES:
        raise ValueError(f"{path}: {name} has dtype {raw['dtype']}, which is not supported.")
    first, last = raw["data_offsets"]
    entry = Entry(tuple(raw["shape"]), DTYPES[raw["dtype"]], base + first)
    if last - first != entry.nbytes:
        raise ValueError(
            f"{path}: {name} has {last - first} bytes, but {raw['dtype']} {entry.shape} takes"
            f" {entry.nbytes}."
        )
    if base + last > size:
        raise ValueError(
            f"{path}: truncated: {name} ends at byte {base + last}, the file has {size}."
        )
    return entry


def read_exactly(descriptor: int, start: int, count: int, where: str) -> np.ndarray:
    """`count` bytes from offset `start`, as uint8."""
    buffer = np.empty(count, np.uint8)
    view, done = memoryview(buffer), 0
    while done < count:
        got = os.preadv(descriptor, [view[done:]], start + done)
        if not got:
            raise ValueError(f"{where}: the file ends {count - done} bytes too early.")
        done += got
    return buffer


def write_exactly(descriptor: int, start: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in C order, as uint8; no copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def layout(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry], int]:
    """(everything before the data, place of each tensor, size of the file)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset, offsets = 0, {}
    for name, (shape, dtype) in tensors.items():
        offsets[name] = offset
        end = offset + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {
            "dtype": NAMES[np.dtype(dtype)],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    entries = {
        name: Entry(tuple(shape), np.dtype(dtype), base + offsets[name])
        for name, (shape, dtype) in tensors.items()
    }
    return len(text).to_bytes(8, "little") + text, entries, base + offset
