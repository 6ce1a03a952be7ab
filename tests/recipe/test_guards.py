"""When a stage is stopped: updates skipped in a row, a loss spike, an entropy collapse."""

import json

import pytest

from axion_jax.recipe.guards import WINDOW, Guard, GuardConfig


def guard(**bounds):
    return Guard(GuardConfig(**bounds))


def step(loss=1.0, *, skipped=0.0, **more):
    return {"loss": loss, "update_skipped": skipped} | more


SKIPPED = step(float("nan"), skipped=1.0)


def test_updates_skipped_in_a_row_stop_the_stage_and_others_do_not():
    watching = guard(max_skipped_in_a_row=3)
    assert [watching.check(SKIPPED) for _ in range(2)] == [None, None]
    assert watching.check(step()) is None  # starts counting again
    assert [watching.check(SKIPPED) for _ in range(2)] == [None, None]
    problem = watching.check(SKIPPED)
    assert problem.startswith("3 updates in a row had a loss or gradient that is not finite")


def test_a_loss_far_above_its_recent_median_stops_the_stage():
    watching = guard(max_loss_spike=3.0)
    for loss in range(1, WINDOW + 1):
        assert watching.check(step(float(loss))) is None
    # The median of 1..20 is 10.5.
    assert watching.check(step(31.4)) is None
    problem = watching.check(step(100.0))  # of 2..20 and 31.4 the median is 11.5
    assert problem.startswith("The loss 100 is 8.7 times the median 11.5 of the last 20 steps")


def test_a_spike_is_judged_once_there_is_a_window_of_losses():
    watching = guard(max_loss_spike=1.5)
    for _ in range(WINDOW - 1):
        assert watching.check(step(1.0)) is None
    assert watching.check(step(1000.0)) is None
    assert watching.check(step(1000.0)) is not None


def test_the_median_is_of_the_last_losses_only():
    watching = guard(max_loss_spike=2.0)
    for loss in [100.0] * WINDOW + [1.0] * WINDOW:
        assert watching.check(step(loss)) is None
    assert watching.check(step(3.0)) is not None


def test_losses_of_skipped_updates_do_not_enter_the_median():
    watching = guard(max_loss_spike=2.0, max_skipped_in_a_row=99)
    for _ in range(WINDOW):
        watching.check(step(1.0))
        watching.check(SKIPPED)
    assert watching.state["losses"] == [1.0] * WINDOW
    assert watching.check(step(2.5)) is not None


def test_losses_around_0_have_no_spikes():
    watching = guard(max_loss_spike=2.0)
    for _ in range(WINDOW + 1):
        assert watching.check(step(-0.01)) is None
    assert watching.check(step(5.0)) is None


def test_an_entropy_below_its_floor_stops_the_stage():
    watching = guard(min_entropy=0.1)
    assert watching.check(step(entropy=0.1)) is None
    problem = watching.check(step(entropy=0.05))
    assert problem.startswith("The policy's entropy fell to 0.05 nats per token")
    assert watching.check(step()) is None  # SFT has no entropy


def test_bounds_that_are_off_stop_nothing():
    watching = guard()
    for loss in [1.0] * WINDOW + [1e9]:
        assert watching.check(step(loss, entropy=0.0)) is None


def test_a_guard_goes_on_from_its_state_after_a_round_trip_through_json():
    bounds = {"max_loss_spike": 2.0, "max_skipped_in_a_row": 2}
    whole, first = guard(**bounds), guard(**bounds)
    steps = [step(1.0 + i / 10) for i in range(WINDOW)] + [SKIPPED]
    for metrics in steps:
        assert whole.check(metrics) is first.check(metrics) is None
    second = Guard(first.config, json.loads(json.dumps(first.state)))
    assert second.state == whole.state
    for metrics in (SKIPPED, step(9.0)):
        assert second.check(metrics) == whole.check(metrics) is not None


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_skipped_in_a_row": 0}, "max_skipped_in_a_row=0 must be at least 1"),
        ({"max_loss_spike": 1.0}, "max_loss_spike=1.0 must be above 1"),
    ],
)
def test_bounds_that_would_always_stop_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        GuardConfig(**bounds)
