"""The whole recipe, two steps a stage: what it leaves behind, and that a broken-off run ends the same.

One run is made for all these tests; each works on a copy of its directory.
"""

import json
import pathlib
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pyarrow.parquet as pq
import pytest

from axion_jax.data import tokenizer as tokenizers

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]

STAGES = ("sft", "reasoning_rl", "instruction_following_rl", "rlhf")
RL_STAGES = STAGES[1:]
TASKS = ("reasoning", "instruction_following", "preference")


@pytest.fixture
def copy(smoke_run, tmp_path):
    """A copy of the finished run's directory."""
    return shutil.copytree(smoke_run.directory, tmp_path / "run")


def lines(directory, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def final_state(directory, stage="rlhf"):
    """Parameters, optimizer state and counters of a stage's newest checkpoint."""
    newest = max((directory / stage / "checkpoints").glob("[0-9]"), key=lambda p: int(p.name))
    return jax.tree.leaves(ocp.StandardCheckpointer().restore(newest / "state"))


def assert_same_run(directory, other):
    """The same parameters bit for bit, the same table, the same curves, the same transcripts."""
    for stage in (*STAGES, "reward_model"):
        for ours, theirs in zip(
            final_state(directory, stage), final_state(other, stage), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    assert untimed(table(directory)) == untimed(table(other))
    assert untimed(lines(directory)) == untimed(lines(other))
    assert lines(directory, "samples.jsonl") == lines(other, "samples.jsonl")


def table(directory):
    return json.loads((directory / "summary.json").read_text())


def untimed(value):
    """Without what depends on the clock and on the machine's memory."""
    if isinstance(value, list):
        return [untimed(item) for item in value]
    if isinstance(value, dict):
        return {
            key: untimed(item)
            for key, item in value.items()
            if not any(word in key for word in ("seconds", "per_second", "memory"))
        }
    return value


def test_the_summary_has_a_row_for_every_stage_with_every_benchmark(smoke_run):
    summary = table(smoke_run.directory)
    assert summary == json.loads(json.dumps(smoke_run.summary))
    assert [row["stage"] for row in summary["stages"]] == list(STAGES)
    for row in summary["stages"]:
        assert row["title"] and row["algorithm"] and row["wall_seconds"] > 0
        assert list(row["eval"]) == list(TASKS)
        for task, result in row["eval"].items():
            assert 0 <= result["pass@1"] <= 1 and 0 <= result["pass@2"] <= 1
            low, high = result["ci95"]
            assert low <= result["reward_score" if task == "preference" else "pass@1"] <= high
            assert (result["n"], result["samples_per_prompt"]) == (16, 2)
            assert result["unscorable"] == 0 and result["response_length"] > 0
        assert list(row["eval"]["reasoning"]["families"]) == [
            "chain_sum",
            "decimal_chain_sum",
            "letter_counting",
        ]
    assert summary["wall_seconds"] == pytest.approx(
        sum(row["wall_seconds"] for row in summary["stages"]) + summary["reward_model"]["seconds"]
    )
    assert 0 <= summary["reward_model"]["accuracy"] <= 1
    assert summary["peak_memory_gb"] > 0


def test_replayed_routing_brings_trainer_and_sampler_closer_on_the_same_rollouts(smoke_run):
    mismatch = table(smoke_run.directory)["mismatch"]
    replayed, own = mismatch["with_replay"], mismatch["without_replay"]
    assert replayed["expert_disagreement"] == 0 < own["expert_disagreement"] < 1
    assert 0 < replayed["mean_abs_logprob_diff"] < own["mean_abs_logprob_diff"]
    assert 0 < replayed["k3"] < own["k3"]
    assert replayed["tokens"] == own["tokens"] > 1000


def test_every_step_of_every_stage_has_a_line_of_metrics(smoke_run):
    steps = [(line["stage"], line["step"]) for line in lines(smoke_run.directory)]
    # An RL stage's curve of held-out scores begins before its first step, at 0.
    expected = [(stage, step) for stage in ("sft", "reward_model") for step in (1, 2)]
    expected += [(stage, step) for stage in RL_STAGES for step in (0, 1, 2)]
    assert steps == expected


def test_metrics_hold_what_the_curves_of_the_report_show(smoke_run):
    always = {"loss", "grad_norm", "update_skipped", "learning_rate", "seconds"}
    of_rl = {
        *("raw_reward", "reward", "response_length", "truncated_share", "malformed_share"),
        *("entropy", "logprob_abs_diff", "k3", "held_out", "tokens_per_second", "updates"),
        *("groups_kept", "groups_filtered", "rollout_rounds", "unscorable_share"),
    }
    seconds = {}
    for line in lines(smoke_run.directory):
        if line["step"] == 0:
            assert "held_out" in line
            continue
        wanted = always | (of_rl if line["stage"] in RL_STAGES else set())
        assert not wanted - line.keys()
        assert all(np.isfinite(v) for k, v in line.items() if k != "stage")
        assert line["update_skipped"] == 0
        assert line["seconds"] > seconds.get(line["stage"], 0)
        seconds[line["stage"]] = line["seconds"]
    reasoning = [m for m in lines(smoke_run.directory) if m["stage"] == "reasoning_rl"]
    assert "tis_clip_frac" in reasoning[-1] and reasoning[-1]["updates"] == 2


@pytest.mark.parametrize("stage", RL_STAGES)
def test_everything_that_was_sampled_is_kept_with_its_alignment(smoke_run, stage):
    config = smoke_run.config[stage]
    tokenizer = tokenizers.load(smoke_run.directory / "tokenizer")
    for step in (1, 2):
        rows = trajectories(smoke_run, stage, step)
        assert len(rows) == config["prompts_per_step"] * config["samples_per_prompt"]
        assert [row["rollout_id"] for row in rows] == list(range(len(rows)))
        assert len({row["group_id"] for row in rows}) == config["prompts_per_step"]
        first = config["prompts_per_step"] * (step - 1)  # the streams of prompts go on
        assert min(row["group_id"] for row in rows) == first
        for row in rows:
            mask = np.array(row["loss_mask"])
            assert len(row["token_ids"]) == len(mask) + 1 == len(row["sampler_logprobs"]) + 1
            sampled = np.array(row["token_ids"])[1:][mask]
            assert tokenizer.decode(sampled, skip_special_tokens=False) == row["response"]
            assert np.all(np.array(row["sampler_logprobs"])[~mask] == 0)
            assert row["stop_reason"] in ("answered", "generation_limit")
            assert len(sampled) <= config["max_response_length"]
            assert row["policy_version"] == config["updates_per_step"] * (step - 1)
            assert row["reward"] is not None


def test_the_directory_holds_what_people_and_other_programs_look_at(smoke_run):
    directory = smoke_run.directory
    assert json.loads((directory / "config.json").read_text()) == json.loads(
        json.dumps(smoke_run.config)
    )
    report = (directory / "report.html").read_text()
    assert "Instruction-Following RL" in report and "http://" not in report.split("<body")[0]
    assert len(tokenizers.load(directory / "tokenizer")) <= smoke_run.config["model"]["vocab_size"]
    assert any((directory / "tensorboard").iterdir())
    shown = lines(directory, "samples.jsonl")
    assert {(s["stage"], s["task"]) for s in shown} == {(s, t) for s in STAGES for t in TASKS}
    assert all(s["prompt"] and s["response"] and s["reason"] is not None for s in shown)


def test_a_stage_moves_the_parameters_where_one_answer_was_better_than_another(smoke_run):
    def params(stage):
        newest = smoke_run.directory / stage / "checkpoints" / "2" / "state"
        return ocp.StandardCheckpointer().restore(newest)["params"]

    spread = {
        stage: max(
            np.ptp([r["reward"] for r in rows if r["group_id"] == group])
            for step in (1, 2)
            for rows in [trajectories(smoke_run, stage, step)]
            for group in {r["group_id"] for r in rows}
        )
        for stage in RL_STAGES
    }
    assert spread["reasoning_rl"] > 0 and spread["rlhf"] > 0
    before = params("sft")
    for stage in RL_STAGES:
        after = params(stage)
        same = jax.tree.map(np.array_equal, before, after)
        assert same["moe"]["mlp"]["router_bias"]  # selection only: no RL stage touches it
        assert same["embed"] == same["head"] == same["moe"]["mlp"]["down"] == (spread[stage] == 0)
        before = after


def trajectories(run, stage, step):
    return pq.read_table(run.directory / stage / "trajectories" / f"{step:06d}.parquet").to_pylist()


def test_starting_a_finished_run_again_changes_nothing(smoke_run, copy):
    def contents():
        return {
            file.relative_to(copy): file.read_bytes()
            for file in copy.rglob("*")
            if file.is_file() and file.name != "report.html"
        }

    before = contents()
    summary = smoke_run.again(copy)
    assert summary == smoke_run.summary
    assert contents() == before


def test_a_run_killed_in_its_last_stage_ends_with_the_same_bits_and_table(smoke_run, copy):
    # As a kill leaves it: step 2 was logged, half a line more was written, its checkpoint was not.
    shutil.rmtree(copy / "rlhf" / "checkpoints" / "2")
    (copy / "rlhf" / "done.json").unlink()
    transcripts = lines(copy, "samples.jsonl")
    (copy / "samples.jsonl").write_text(
        "".join(json.dumps(s) + "\n" for s in transcripts if s["stage"] != "rlhf")
    )
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"stage": "rlhf", "st')
    smoke_run.again(copy)
    assert_same_run(copy, smoke_run.directory)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's own
def test_from_a_damaged_last_checkpoint_it_goes_back_one_and_ends_with_the_same_bits(
    smoke_run, copy, caplog
):
    for file in (copy / "rlhf" / "checkpoints" / "2" / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    smoke_run.again(copy)
    assert "falling back to an older one" in caplog.text
    assert (copy / "rlhf" / "checkpoints-unreadable-2").is_dir()
    assert_same_run(copy, smoke_run.directory)


def test_a_run_killed_again_and_again_ends_with_the_same_bits_and_table(smoke_run, tmp_path):
    """The command line, killed while it logs, checkpoints, samples; and run to its end."""
    directory = tmp_path / "run"
    command, environment = smoke_run.command(directory)
    log = tmp_path / "log"

    def start():
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log.open("ab"), stderr=subprocess.STDOUT
        )

    for reached in (("sft", 1), ("instruction_following_rl", 1)):
        process = start()
        try:
            wait_for(directory / "metrics.jsonl", *reached, process, log)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not (directory / "rlhf").exists()
    assert start().wait(timeout=600) == 0, log.read_text()
    assert_same_run(directory, smoke_run.directory)
    assert "Report: " in log.read_text()


def wait_for(metrics, stage, step, process, log):
    """Returns as soon as a step is in the metrics."""
    for _ in range(6000):
        if metrics.exists() and f'{{"stage": "{stage}", "step": {step},' in metrics.read_text():
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"No {stage} {step} after ten minutes:\n{log.read_text()}")
