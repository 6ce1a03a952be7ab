"""The run directory: what a run writes, and how a killed one finds its place again.

    config.json      the resolved config; a directory belongs to one config
    metrics.jsonl    one line per step and stage; TensorBoard events in tensorboard/
    samples.jsonl    a few transcripts per evaluation
    tokenizer/       Hugging Face files
    <stage>/         checkpoints/, trajectories/, done.json
    summary.json, report.html

Lines written after the last checkpoint are dropped on resume, since their steps are taken again.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pathlib
import resource
import sys
import time
from typing import Any

from tensorboardX import SummaryWriter

from axion_jax.checkpoint.training import write_json

_BEFORE_CONFIG = (".lock", "config.json.partial")
"""What a run killed before it had a config leaves."""


class RunDirectory:
    """Opens (or creates) `path` for a config.

    Raises:
      ValueError: the directory cannot be written, belongs to another config, or is in use by
        another process.
    """

    def __init__(self, path: str | pathlib.Path, config: dict[str, Any]) -> None:
        if not str(path):
            raise ValueError("--workdir is empty: name a directory for the run.")
        self.path = pathlib.Path(path)
        try:
            self._refuse_foreign_directory()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115  held while the process lives
        except OSError as error:
            raise ValueError(
                f"--workdir={path} cannot be written: {error.strerror}. Choose another."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--workdir={path} is in use by another process. Wait for it or choose another."
            ) from None
        try:
            self._check_config(config)
        except ValueError:
            self._lock.close()
            raise
        self._writer: SummaryWriter | None = None

    def _check_config(self, config: dict[str, Any]) -> None:
        file = self.path / "config.json"
        config = json.loads(json.dumps(config))
        if file.exists():
            try:
                saved = json.loads(file.read_text())
            except json.JSONDecodeError:
                raise ValueError(
                    f"{file} is not JSON: the directory is damaged or not a run's. Choose another --workdir."
                ) from None
            different = sorted(_differences(saved, config))
            if different:
                shown = "; ".join(different[:5]) + ("; ..." if len(different) > 5 else "")
                raise ValueError(
                    f"--workdir={self.path} holds a run of another config ({shown}). Choose another --workdir, or the old"
                    " values to go on with it."
                )
        else:
            write_json(file, config)

    def _refuse_foreign_directory(self) -> None:
        """Before anything is created in it, the lock included."""
        if not self.path.is_dir() or (self.path / "config.json").exists():
            return
        if any(entry.name not in _BEFORE_CONFIG for entry in self.path.iterdir()):
            raise ValueError(
                f"--workdir={self.path} is not empty and holds no run (no config.json). Choose another."
            )

    def stage(self, name: str) -> pathlib.Path:
        directory = self.path / name
        directory.mkdir(exist_ok=True)
        return directory

    # -- metrics ----------------------------------------------------------------------------------

    def log(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        """Appends one line of metrics, and the same to TensorBoard.

        A value that is not finite is left out, as JSON has no word for it; `update_skipped` says so.
        """
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"stage": stage, "step": step} | metrics) + "\n")
        if self._writer is None:
            self._writer = SummaryWriter(str(self.path / "tensorboard"))
        for name, value in metrics.items():
            self._writer.add_scalar(f"{stage}/{name}", value, step)

    def forget_after(self, stage: str, step: int) -> None:
        """Drops metrics of `stage` after `step`: a resumed run writes them again."""
        self._keep_lines(
            "metrics.jsonl", lambda line: line["stage"] != stage or line["step"] <= step
        )

    def add_samples(self, stage: str, samples: list[dict[str, Any]]) -> None:
        """Replaces the transcripts kept for a stage."""
        self._keep_lines("samples.jsonl", lambda line: line["stage"] != stage)
        with open(self.path / "samples.jsonl", "a") as file:
            for sample in samples:
                file.write(json.dumps({"stage": stage} | sample) + "\n")

    def _keep_lines(self, name: str, keep) -> None:
        file = self.path / name
        if not file.exists():
            return
        lines = []
        for line in file.read_text().splitlines():
            try:
                if keep(json.loads(line)):
                    lines.append(line)
            except json.JSONDecodeError:
                continue  # cut short when the process was killed
        partial = file.with_name(name + ".partial")
        partial.write_text("".join(line + "\n" for line in lines))
        partial.replace(file)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._lock.close()


def _differences(saved: Any, now: Any, where: str = "") -> list[str]:
    """Dotted keys at which two JSON values differ, with both values."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = list(saved) + [key for key in now if key not in saved]
        missing = object()
        found = []
        for key in keys:
            inner = f"{where}.{key}" if where else str(key)
            a, b = saved.get(key, missing), now.get(key, missing)
            if a is missing or b is missing:
                found.append(f"{inner} is {'new' if a is missing else 'gone'}")
            else:
                found += _differences(a, b, inner)
        return found
    return [] if saved == now else [f"{where} was {saved!r}, now {now!r}"]


class Stopwatch:
    """Seconds spent on a piece of work over all its restarts."""

    def __init__(self, already: float = 0.0) -> None:
        self._already, self._start = already, time.monotonic()

    @property
    def seconds(self) -> float:
        return self._already + time.monotonic() - self._start


def peak_memory_gb() -> float:
    """Largest resident size of this process so far, in GB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def interactive() -> bool:
    """Whether progress bars make sense: somebody may be looking."""
    return sys.stderr.isatty() and os.environ.get("CI") is None
