"""Files that are written piece by piece, from many threads, and can be taken up again after a kill.

A job reads one source tensor and writes its outputs, each to one or several runs of bytes in target
files. A file whose runs are all written is finished: its bytes are flushed to disk and its checksums
appended to a journal. Started again, a conversion does the jobs that still owe bytes to some file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from axion_jax.checkpoint.safetensors_file import as_bytes, write_exactly
from axion_jax.checkpoint.source import Checkpoint

PIECE = 2**18
"""Bytes that a thread moves at a time: small enough to stay in its cache between read and write."""
IN_FLIGHT = 2**30
"""Source bytes of tensors that are held whole at the same time, unless a single one is larger."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Part of an output tensor, in its place in a file."""

    file: str
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Output:
    name: str
    runs: tuple[Run, ...]


@dataclasses.dataclass(frozen=True)
class Job:
    source: str
    outputs: tuple[Output, ...]
    encode: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None
    """None: one output with the source's bytes."""


@dataclasses.dataclass(frozen=True)
class File:
    header: bytes
    """Written when everything else is there, so that an unfinished file does not look like one."""
    size: int


class Journal:
    """`<directory>/convert.json`: one line for what is converted, then one for every finished file."""

    def __init__(self, directory: pathlib.Path, identity: dict[str, Any]) -> None:
        self.finished: dict[str, dict[str, int]] = {}
        """File -> {tensor: CRC-32 of its bytes in that file}."""
        path = directory / "convert.json"
        self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"Another conversion is writing to {directory}.") from None
        self._lock = threading.Lock()
        self._file.seek(0)
        lines = self._file.read().split("\n")
        whole = lines[:-1]  # what follows the last newline was cut off by a kill
        if whole:
            if json.loads(whole[0]) != identity:
                raise ValueError(
                    f"{directory} was begun by another conversion (source, target or options differ)."
                    " Remove it, or give the same command."
                )
            self.finished = {row["file"]: row["crc32"] for row in map(json.loads, whole[1:])}
        self._file.truncate(sum(len(line.encode()) + 1 for line in whole))
        if not whole:
            self._append(identity)

    def add(self, file: str, checksums: dict[str, int]) -> None:
        with self._lock:
            self._append({"file": file, "crc32": checksums})
            self.finished[file] = checksums

    def _append(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Budget:
    """Bytes that may be held at once; a request larger than all of it waits until it is alone."""

    def __init__(self, total: int) -> None:
        self._total, self._used = total, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + count <= self._total)
            self._used += count
        try:
            yield
        finally:
            with self._changed:
                self._used -= count
                self._changed.notify_all()


class Writer:
    """Does jobs into `directory`."""

    def __init__(
        self, source: Checkpoint, directory: pathlib.Path, files: dict[str, File], journal: Journal
    ) -> None:
        self._source, self._directory, self._files, self._journal = (
            source,
            directory,
            files,
            journal,
        )
        self._lock = threading.Lock()
        self._budget = _Budget(IN_FLIGHT)
        self._local = threading.local()
        self._owed: dict[str, int] = {}
        self._checksums: dict[str, dict[str, int]] = {}

    def run(
        self, jobs: Sequence[Job], *, threads: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Does what the journal does not have yet; the first failure stops the rest."""
        done = set(self._journal.finished)
        for job in jobs:
            for run in _runs(job):
                self._owed[run.file] = self._owed.get(run.file, 0) + run.nbytes
        left = [job for job in jobs if any(run.file not in done for run in _runs(job))]
        if progress is not None:
            progress(sum(r.nbytes for job in jobs for r in _runs(job) if r.file in done))
        pool = concurrent.futures.ThreadPoolExecutor(threads)
        try:
            futures = [pool.submit(self._do, job) for job in left]
            for future, job in zip(futures, left, strict=True):
                future.result()
                if progress is not None:
                    progress(sum(r.nbytes for r in _runs(job) if r.file not in done))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _do(self, job: Job) -> None:
        try:
            tensor = self._source.tensors[job.source]
            if job.encode is None and tensor.extents:
                pieces = self._source.pieces(job.source, self._buffer())
                self._write(job.outputs[0], pieces)
                return
            with self._budget.take(tensor.nbytes):
                array = self._source.read(job.source)
                arrays = (array,) if job.encode is None else job.encode(array)
                for output, value in zip(job.outputs, arrays, strict=True):
                    self._write(output, [memoryview(as_bytes(value))])
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            files = ", ".join(sorted({run.file for run in _runs(job)}))
            raise ValueError(
                f"The disk is full: could not write {job.source} to {self._directory} ({files})."
                " What is finished is kept: make room and give the same command again."
            ) from None

    def _buffer(self) -> np.ndarray:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.empty(PIECE, np.uint8)
        return self._local.buffer

    def _write(self, output: Output, pieces: Iterable[memoryview]) -> None:
        """Lays a stream of bytes into the output's runs."""
        stream = iter(pieces)
        piece = memoryview(b"")
        for run in output.runs:
            finished = run.file in self._journal.finished  # skipped, but its bytes must pass by
            checksum, done = 0, 0
            with contextlib.ExitStack() as stack:
                descriptor = None if finished else self._open(run.file, stack)
                while done < run.nbytes:
                    piece = piece or next(stream)
                    part, piece = piece[: run.nbytes - done], piece[run.nbytes - done :]
                    if descriptor is not None:
                        write_exactly(descriptor, run.start + done, part)
                        checksum = zlib.crc32(part, checksum)
                    done += len(part)
            if not finished:
                self._account(run, output.name, checksum)

    def _open(self, file: str, stack: contextlib.ExitStack) -> int:
        descriptor = os.open(self._directory / file, os.O_WRONLY | os.O_CREAT, 0o644)
        stack.callback(os.close, descriptor)
        return descriptor

    def _account(self, run: Run, name: str, checksum: int) -> None:
        with self._lock:
            self._checksums.setdefault(run.file, {})[name] = checksum
            self._owed[run.file] -= run.nbytes
            complete = not self._owed[run.file]
        if not complete:
            return
        file = self._files[run.file]
        with contextlib.ExitStack() as stack:
            descriptor = self._open(run.file, stack)
            write_exactly(descriptor, 0, memoryview(file.header))
            os.ftruncate(descriptor, file.size)
            os.fsync(descriptor)
        self._journal.add(run.file, self._checksums.pop(run.file))


def _runs(job: Job) -> Iterator[Run]:
    for output in job.outputs:
        yield from output.runs
