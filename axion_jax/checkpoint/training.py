"""Training checkpoints: train state and host state in one atomic Orbax step, written in the
background.

A step either is there in full or is not there: Orbax writes aside and renames. A step that turns
out unreadable (a disk that lied, a truncated copy) is set aside with a sentence, and the last whole
one is used.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging


class TrainingCheckpoints:
    """Checkpoints of one stage, `<directory>/<step>/{state,host}`.

    `state` is a pytree of arrays, `host` a JSON-able dict (data cursor, guard history, seconds
    spent).
    """

    def __init__(self, directory: pathlib.Path, *, keep: int = 2) -> None:
        self.directory = directory.absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=True, create=True
            ),
            item_names=("state", "host"),
        )

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts writing `state` and `host`; returns once the arrays were copied off the
        devices."""
        if step in self._manager.all_steps():
            return  # a resumed run reached a step that is already there, with the same content
        # Now: Orbax writes in the background while the caller goes on.
        text = json.dumps({"host": host, "arrays_crc32": _checksum(state)})
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                host=ocp.args.JsonSave({"json": text, "crc32": zlib.crc32(text.encode())}),
            ),
        )

    def restore_latest(self, abstract_state: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """(step, state, host) of the newest whole checkpoint, laid out as `abstract_state` says;
        None if there is none.

        Raises:
          ValueError: there are checkpoints, but none of them can be read.
        """
        problems = []
        for step in reversed(self.steps()):
            try:
                restored = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(abstract_state), host=ocp.args.JsonRestore()
                    ),
                )
                text = restored["host"]["json"]
                if zlib.crc32(text.encode()) != restored["host"]["crc32"]:
                    raise ValueError("the host state is damaged: its checksum differs")
                saved = json.loads(text)
                if saved["arrays_crc32"] != _checksum(restored["state"]):
                    raise ValueError("the arrays are damaged: their checksum differs")
                host = saved["host"]
            except Exception as error:  # Orbax raises many kinds; every one means "not this step"
                problems.append(
                    f"step {step}: {type(error).__name__}: {str(error).partition('\n')[0][:200]}"
                )
                logging.warning(
                    "Checkpoint %s/%d cannot be read (%s); falling back to an older one.",
                    self.directory, step, problems[-1],
                )  # fmt: skip
                continue
            for bad in self.steps():
                if bad > step:
                    self._set_aside(bad)
            return step, restored["state"], host
        if problems:
            raise ValueError(
                f"None of the checkpoints in {self.directory} can be read ({'; '.join(problems)}). Remove the directory"
                " to train this stage again."
            )
        return None

    def _set_aside(self, step: int) -> None:
        """Renames an unreadable step, so that training can write that step again and nothing is
        deleted."""
        source = self.directory / str(step)
        target = self.directory.parent / f"{self.directory.name}-unreadable-{step}"
        number = 0
        while target.exists():
            number += 1
            target = target.with_name(f"{self.directory.name}-unreadable-{step}-{number}")
        source.rename(target)
        self._manager.reload()

    def wait(self) -> None:
        """Blocks until everything is on disk; raises what went wrong while writing."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _checksum(state: Any) -> int:
    """CRC-32 over all arrays that this process holds in full, in the order of the tree.

    Orbax compresses without checksums of the values, so a flipped bit would be loaded as another
    number. Arrays spread over hosts are left out: no process has their bytes.
    """
    crc = 0
    for leaf in jax.tree.leaves(state):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            crc = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8), crc)
    return crc


def abstract_like(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays, for `restore_latest`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes JSON so that a reader sees the old file or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, sort_keys=False) + "\n")
    partial.replace(path)


def read_json(path: pathlib.Path) -> Any:
    """What `write_json` wrote.

    Raises:
      ValueError: the file is damaged; names it.
    """
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it and it is made again.") from None
