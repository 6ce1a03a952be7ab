"""What every stage does around its steps: resume, checkpoint, guard, log, show progress.

A stage's loop reads

    state, host = stage.resume(state)
    while stage.step < stage.num_steps:
        ... one step ...
        stage.finish_step(state, metrics, host)
    stage.close()

and is a pure function of (config, checkpoint): killed anywhere and started again, it ends with the
same bits.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from axion_jax.checkpoint.training import TrainingCheckpoints, abstract_like
from axion_jax.models.decoder import Decoder
from axion_jax.recipe.guards import Guard, GuardConfig, StageStopped
from axion_jax.recipe.run import RunDirectory, Stopwatch, interactive
from axion_jax.sharding.rules import batch_sharding, param_shardings, state_shardings
from axion_jax.types import TrainState

console = Console(stderr=True)

LINES = 10
"""Progress lines a stage prints where nobody watches a bar."""


class Stage:
    """One stage of a run.

    Args:
      run: the run directory.
      name: of the stage; its files are in `<workdir>/<name>/`.
      num_steps: where it ends.
      checkpoint_every: steps between checkpoints; the last step always has one.
      guards: when to stop.
      shown: metrics that the progress line shows.
    """

    def __init__(
        self,
        run: RunDirectory,
        name: str,
        *,
        num_steps: int,
        checkpoint_every: int,
        guards: GuardConfig,
        shown: tuple[str, ...],
    ) -> None:
        self.run, self.name, self.num_steps = run, name, num_steps
        self.checkpoint_every, self.shown = checkpoint_every, shown
        self.directory: pathlib.Path = run.stage(name)
        self.checkpoints = TrainingCheckpoints(self.directory / "checkpoints")
        self.step = 0
        self._stopped = self.directory / "stopped.txt"
        self._guards = guards
        self._guard = Guard(guards)
        self._clock = Stopwatch()
        self._progress: Progress | None = None

    def resume(self, state: Any) -> tuple[Any, dict[str, Any]]:
        """The newest checkpoint's state and host state, or `state` and {} where there is none."""
        if self._stopped.exists():
            raise StageStopped(
                f"{self._stopped.read_text().strip()} Look at its metrics; to go on from there all the"
                f" same, delete {self._stopped}."
            )
        found = self.checkpoints.restore_latest(abstract_like(state))
        if found is None:
            self.run.forget_after(self.name, -1)
            return state, {}
        self.step, state, host = found
        self.run.forget_after(self.name, self.step)
        self._guard = Guard(self._guards, host["guard"])
        self._clock = Stopwatch(host["seconds"])
        if self.step < self.num_steps:
            console.print(f"{self.name}: going on from step {self.step} of {self.num_steps}")
        return state, host

    @property
    def seconds(self) -> float:
        return self._clock.seconds

    def finish_step(
        self,
        state: Any,
        metrics: dict[str, float],
        host: dict[str, Any],
        updates: list[dict] | None = None,
    ) -> None:
        """Counts a step, logs it, and writes a checkpoint where one is due.

        Args:
          updates: metrics of each optimizer step, for the guard; default: `metrics` is the one
            update's.

        Raises:
          StageStopped: a guard found something wrong; a checkpoint was written, and `stopped.txt`,
            which keeps the stage from going on until it is deleted.
        """
        self.step += 1
        self.run.log(self.name, self.step, metrics | {"seconds": self.seconds})
        problem = None
        for update in [metrics] if updates is None else updates:
            problem = problem or self._guard.check(update)
        if problem or self.step % self.checkpoint_every == 0 or self.step == self.num_steps:
            self.checkpoints.save(
                self.step, state, host | {"guard": self._guard.state, "seconds": self.seconds}
            )
        if problem:
            self.close()
            sentence = (
                f"Stage {self.name} stopped at step {self.step}: {problem}"
                f" The checkpoint is in {self.checkpoints.directory / str(self.step)}."
            )
            self._stopped.write_text(sentence + "\n")  # a restart must not walk past it
            raise StageStopped(sentence)
        self._show(metrics)

    def _show(self, metrics: dict[str, float]) -> None:
        text = "  ".join(f"{name} {metrics[name]:.4g}" for name in self.shown if name in metrics)
        if interactive():
            if self._progress is None:
                self._progress = Progress(
                    TextColumn("[bold]{task.description}"),
                    BarColumn(bar_width=24),
                    MofNCompleteColumn(),
                    TimeRemainingColumn(),
                    TextColumn("{task.fields[text]}"),
                    console=console,
                )
                self._progress.start()
                self._progress.add_task(
                    self.name, total=self.num_steps, completed=self.step, text=text
                )
            self._progress.update(self._progress.task_ids[0], completed=self.step, text=text)
        elif self.step % max(1, self.num_steps // LINES) == 0 or self.step == self.num_steps:
            left = self.seconds / self.step * (self.num_steps - self.step)
            console.print(
                f"{self.name} {self.step}/{self.num_steps}  {text}  {left:.0f} s left",
                highlight=False, soft_wrap=True,
            )  # fmt: skip

    def close(self) -> None:
        """Waits until checkpoints are on disk."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self.checkpoints.close()


def mesh_of(decoder: Decoder) -> jax.sharding.Mesh:
    """The mesh a recipe's decoder runs on; a recipe always has one, if only of one device."""
    assert decoder.mesh is not None
    return decoder.mesh


def init_state(
    params: Any, optimizer: optax.GradientTransformation, decoder: Decoder
) -> TrainState:
    """A fresh train state around `params`, laid out by the sharding rules on the decoder's mesh."""
    mesh = mesh_of(decoder)
    shardings = param_shardings(mesh, decoder.logical_axes(), decoder.abstract_params())

    def build(params):
        return TrainState(jnp.int32(0), params, optimizer.init(params), jnp.int32(0))

    abstract = jax.eval_shape(build, params)
    return jax.jit(build, out_shardings=state_shardings(mesh, shardings, abstract))(params)


def put_microbatches(batch: Any, decoder: Decoder) -> Any:
    """Stacked micro-batches [M, B, ...] on the devices, rows over the batch axes."""
    return jax.device_put(batch, batch_sharding(mesh_of(decoder), leading=1))


def to_floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(metrics).items()}
