"""Around the steps of a stage: checkpoints, resuming, guards, the log."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.recipe.guards import GuardConfig, StageStopped
from axion_jax.recipe.run import RunDirectory
from axion_jax.recipe.stage import Stage
from axion_jax.types import TrainState

FINE = {"loss": 1.0, "update_skipped": 0.0}
BROKEN = {"loss": float("nan"), "update_skipped": 1.0}


@pytest.fixture
def open_stage(tmp_path):
    """`open_stage(...)`: the stage as a process that starts, or starts again, opens it."""
    opened = []

    def start(num_steps=6, checkpoint_every=2, **guards):
        if opened:
            opened[-1].checkpoints.close()
            opened[-1].run.close()
        run = RunDirectory(tmp_path / "run", {"seed": 0})
        stage = Stage(
            run,
            "sft",
            num_steps=num_steps,
            checkpoint_every=checkpoint_every,
            guards=GuardConfig(**guards),
            shown=("loss",),
        )
        opened.append(stage)
        return stage

    yield start
    opened[-1].checkpoints.close()
    opened[-1].run.close()


def state_at(step):
    w = jnp.arange(4.0) * step
    return TrainState(jnp.int32(step), {"w": w}, {"mu": w + 1}, jnp.int32(0))


def take(stage, steps, metrics=FINE):
    for _ in range(steps):
        state = state_at(stage.step + 1)
        stage.finish_step(state, metrics, {"cursor": 10 * (stage.step + 1)})


def logged(stage):
    lines = (stage.run.path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_fresh_stage_starts_from_the_state_it_was_given(open_stage):
    stage = open_stage()
    given = state_at(0)
    state, host = stage.resume(given)
    assert state is given and host == {} and stage.step == 0


def test_a_stage_goes_on_from_its_last_checkpoint_and_forgets_what_came_after(open_stage):
    stage = open_stage()
    stage.resume(state_at(0))
    take(stage, 5)
    stage.checkpoints.wait()
    assert logged(stage) == [1, 2, 3, 4, 5]
    again = open_stage()
    state, host = again.resume(state_at(0))
    assert again.step == 4 and int(state.step) == 4
    np.testing.assert_array_equal(state.params["w"], state_at(4).params["w"])
    assert host["cursor"] == 40
    assert logged(again) == [1, 2, 3, 4]
    take(again, 2)
    assert logged(again) == [1, 2, 3, 4, 5, 6]


def test_the_last_step_has_a_checkpoint_whether_or_not_one_is_due(open_stage):
    stage = open_stage(num_steps=5, checkpoint_every=3)
    stage.resume(state_at(0))
    take(stage, 5)
    stage.close()
    assert open_stage(num_steps=5, checkpoint_every=3).checkpoints.steps() == [3, 5]


def test_seconds_go_on_from_the_checkpoint(open_stage):
    stage = open_stage()
    stage.resume(state_at(0))
    stage._clock._already = 100.0
    take(stage, 2)
    stage.close()
    again = open_stage()
    again.resume(state_at(0))
    assert 100 <= again.seconds < 160


def test_a_guard_stops_the_stage_with_a_checkpoint_and_a_sentence(open_stage):
    stage = open_stage(num_steps=100, checkpoint_every=100, max_skipped_in_a_row=3)
    stage.resume(state_at(0))
    take(stage, 4)
    with pytest.raises(StageStopped) as stopped:
        take(stage, 3, BROKEN)
    message = str(stopped.value)
    assert message.startswith("Stage sft stopped at step 7: 3 updates in a row had a loss")
    assert message.endswith(f"The checkpoint is in {stage.checkpoints.directory / '7'}.")
    assert (stage.checkpoints.directory / "7" / "state").is_dir()
    assert logged(stage) == [1, 2, 3, 4, 5, 6, 7]


def test_a_stopped_stage_stays_stopped_until_its_note_is_deleted(open_stage):
    bounds = {"num_steps": 3, "checkpoint_every": 100, "max_skipped_in_a_row": 3}
    stage = open_stage(**bounds)
    stage.resume(state_at(0))
    with pytest.raises(StageStopped):
        take(stage, 3, BROKEN)  # on the last step: a restart would take the stage for finished
    for _ in range(2):
        with pytest.raises(StageStopped, match="stopped at step 3.*delete .*stopped.txt"):
            open_stage(**bounds).resume(state_at(0))
    (stage.directory / "stopped.txt").unlink()
    again = open_stage(**bounds)
    again.resume(state_at(0))
    assert again.step == 3


def test_a_guard_remembers_across_a_restart(open_stage):
    stage = open_stage(max_skipped_in_a_row=3)
    stage.resume(state_at(0))
    take(stage, 2, BROKEN)
    stage.checkpoints.wait()
    again = open_stage(max_skipped_in_a_row=3)
    again.resume(state_at(0))
    with pytest.raises(StageStopped, match="step 3: 3 updates in a row"):
        take(again, 1, BROKEN)


def test_a_guard_sees_every_update_of_a_step_and_not_their_mean(open_stage):
    stage = open_stage(max_skipped_in_a_row=2)
    stage.resume(state_at(0))
    with pytest.raises(StageStopped, match="step 1: 2 updates in a row"):
        stage.finish_step(state_at(1), {"loss": 0.0}, {}, [FINE, BROKEN, BROKEN, FINE])


def test_a_step_without_any_update_stops_nothing(open_stage):
    stage = open_stage(max_skipped_in_a_row=1)
    stage.resume(state_at(0))
    stage.finish_step(state_at(0), {"updates": 0.0}, {}, [])
    assert stage.step == 1
