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
        text = json.dumps(host)  # now: Orbax writes in the background while the caller goes on
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
                host = json.loads(text)
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


def abstract_like(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays, for `restore_latest`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes JSON so that a reader sees the old file or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, sort_keys=False) + "\n")
    partial.replace(path)
