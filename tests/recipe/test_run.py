"""The run directory: it belongs to one config and one process, and a killed run finds its place."""

import json
import subprocess
import sys

import pytest

from axion_jax.recipe.run import RunDirectory, Stopwatch

CONFIG = {"seed": 0, "sft": {"num_steps": 3, "mixture": {"a": 0.5}}, "axes": (1, 2)}


@pytest.fixture
def run(tmp_path):
    """A run directory that is open."""
    directory = RunDirectory(tmp_path / "run", CONFIG)
    yield directory
    directory.close()


def reopen(run, config=CONFIG):
    run.close()
    return RunDirectory(run.path, config)


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run.path / name).read_text().splitlines()]


def refusal(path, config=CONFIG):
    with pytest.raises(ValueError) as caught:
        RunDirectory(path, config)
    return str(caught.value)


def test_a_new_directory_is_made_and_says_what_config_it_belongs_to(tmp_path):
    run = RunDirectory(tmp_path / "some" / "where", CONFIG)
    assert json.loads((run.path / "config.json").read_text())["sft"]["num_steps"] == 3
    run.close()


def test_the_same_config_goes_on(run):
    reopen(run).close()
    reopen(run, json.loads(json.dumps(CONFIG))).close()  # tuples are lists by then


def test_another_config_is_refused_and_names_what_differs(run):
    run.close()
    other = {"seed": 1, "sft": {"num_steps": 3, "mixture": {"b": 0.5}}, "axes": [1, 2]}
    message = refusal(run.path, other)
    assert "holds a run of another config" in message
    assert "seed was 0, now 1" in message
    assert "sft.mixture.a is gone" in message and "sft.mixture.b is new" in message
    assert "num_steps" not in message and "axes" not in message
    reopen(run).close()  # nothing was changed, and the lock was given back


def test_many_differences_are_cut_short(run):
    run.close()
    message = refusal(run.path, CONFIG | {f"key{i}": i for i in range(9)})
    assert message.count("is new") == 5 and "; ...)" in message


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    assert "is not empty and holds no run" in refusal(tmp_path)
    assert not (tmp_path / ".lock").exists()
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("left", [[], [".lock"], [".lock", "config.json.partial"]])
def test_what_a_run_killed_before_it_had_a_config_leaves_is_no_hindrance(tmp_path, left):
    for name in left:
        (tmp_path / name).write_text("{")
    RunDirectory(tmp_path, CONFIG).close()
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0


def test_a_damaged_config_is_an_error_that_names_the_file(run):
    run.close()
    (run.path / "config.json").write_text('{"seed": 0, "sf')
    assert "config.json is not JSON" in refusal(run.path)


@pytest.mark.parametrize("below", ["file", "file/run"])
def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    message = refusal(tmp_path / below)
    assert message.startswith(f"--workdir={tmp_path / below} cannot be written:")


HOLD = """
import sys, json
from axion_jax.recipe.run import RunDirectory
run = RunDirectory(sys.argv[1], json.loads(sys.argv[2]))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_directory_in_use_by_another_process_is_refused_until_that_one_ends(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), json.dumps(CONFIG)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"open\n"
        assert "is in use by another process" in refusal(tmp_path)
    finally:
        holder.kill()  # the kernel gives the lock back, however the process ends
        holder.communicate()
    RunDirectory(tmp_path, CONFIG).close()


def test_metrics_are_one_line_a_step(run):
    run.log("sft", 1, {"loss": 2.0})
    run.log("sft", 2, {"loss": 1.5, "grad_norm": 0.1})
    assert lines(run) == [
        {"stage": "sft", "step": 1, "loss": 2.0},
        {"stage": "sft", "step": 2, "loss": 1.5, "grad_norm": 0.1},
    ]
    assert list((run.path / "tensorboard").iterdir())


def test_forgetting_drops_later_lines_of_that_stage_only(run):
    for stage, step in [("sft", 1), ("sft", 2), ("rl", 1), ("sft", 3), ("rl", 2)]:
        run.log(stage, step, {"loss": 0.0})
    run.forget_after("sft", 1)
    assert [(m["stage"], m["step"]) for m in lines(run)] == [("sft", 1), ("rl", 1), ("rl", 2)]
    run.forget_after("rl", -1)
    assert [(m["stage"], m["step"]) for m in lines(run)] == [("sft", 1)]


def test_a_line_half_written_when_the_process_was_killed_is_dropped(run):
    run.log("sft", 1, {"loss": 0.0})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"stage": "sft", "st')
    run.forget_after("sft", 5)
    run.log("sft", 2, {"loss": 0.0})
    assert [m["step"] for m in lines(run)] == [1, 2]


def test_forgetting_before_there_are_metrics_does_nothing(run):
    run.forget_after("sft", 0)
    assert not (run.path / "metrics.jsonl").exists()


def test_transcripts_of_a_stage_replace_its_older_ones(run):
    run.add_samples("sft", [{"text": "old"}])
    run.add_samples("rl", [{"text": "other"}])
    run.add_samples("sft", [{"text": "new"}, {"text": "newer"}])
    assert [(s["stage"], s["text"]) for s in lines(run, "samples.jsonl")] == [
        ("rl", "other"),
        ("sft", "new"),
        ("sft", "newer"),
    ]


def test_a_stopwatch_goes_on_from_what_was_spent_before():
    assert 100.0 <= Stopwatch(100.0).seconds < 101.0
