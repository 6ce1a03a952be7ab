"""A recipe that cannot work is answered in one sentence, before anything compiles or is written."""

import ast

import pytest

from axion_jax.recipe import pipeline

CANNOT = {
    # model and mesh
    "model.num_kv_heads=3": "config.model: num_heads=2 must be a multiple of num_kv_heads=3.",
    "model.vocab_size=400": "config.model.vocab_size=400 is smaller than the tokenizer's",
    "model.hidden_size=100": "has a dimension of 100, which mesh axis fsdp=8 does not divide",
    "mesh.fsdp=3": "asks for 3 devices, but there are 8",
    "mesh.data=3": "3 does not divide the 8 devices, so fsdp=-1 cannot be filled in",
    # rows that the devices share
    "sft.rows=12": "config.sft.rows=12 must be a multiple of the 8 devices",
    "reward_model.rows=4": "config.reward_model.rows=4 must be a multiple of the 8 devices",
    "rlhf.rows=9": "config.rlhf.rows=9 must be a multiple of the 8 devices",
    "engine_batch=12": "config.engine_batch=12 must be a positive multiple of the 8 devices",
    "engine_batch=0": "config.engine_batch=0 must be a positive multiple",
    # rows that are too short
    "sft.row_length=32": "config.sft.row_length=32 cannot hold an example of",
    "rlhf.row_length=48": "config.rlhf.row_length=48 cannot hold a prompt of",
    "reward_model.row_length=48": "config.reward_model.row_length=48 cannot hold a prompt of",
    "evaluation.max_response_length=120": "tokens and evaluation.max_response_length=120.",
    # tasks
    "reasoning_rl.task='maths'": "reasoning_rl.task='maths' is unknown; known: reasoning,",
    "sft.mixture={'maths': 1.0}": "sft.mixture names the task 'maths'; known: reasoning,",
    "sft.mixture={'reasoning': 0.0}": "config.sft: mixture shares must be above 0",
    "sft.mixture={}": "config.sft: mixture is empty",
    # numbers that leave nothing to do
    "sft.num_steps=0": "config.sft: num_steps, examples_per_step",
    "sft.checkpoint_every=0": "and checkpoint_every must be at least 1.",
    "reward_model.num_held_out_pairs=0": "config.reward_model: num_held_out_pairs=0 must be",
    "reward_model.checkpoint_every=0": "config.reward_model: checkpoint_every=0 must be",
    "rlhf.checkpoint_every=0": "config.rlhf: checkpoint_every=0 must be at least 1.",
    "rlhf.max_response_length=0": "config.rlhf: max_response_length=0 must be at least 1.",
    "rlhf.samples_per_prompt=1": "samples_per_prompt=1: a group needs at least 2",
    "rlhf.updates_per_step=9": "updates_per_step=9 exceeds prompts_per_step=8",
    "rlhf.temperature=0.0": "temperature=0.0 must be above 0",
    "evaluation.max_response_length=0": "config.evaluation: max_response_length=0 must be",
    "evaluation.num_prompts=1": "num_prompts=1 must be at least 2",
    # options of a stage's parts
    "rlhf.high_precision_layers=9": "rlhf.high_precision_layers=9 must lie in 0..num_layers=3",
    "reasoning_rl.filter.low=0.9": "config.reasoning_rl.filter: filter.low=0.9 must be below",
    "reasoning_rl.filter.max_oversampling=0": "filter.max_oversampling=0 must be at least 1",
    "reasoning_rl.shaping.coefficient=-1.0": "coefficient=-1.0 must not be negative",
    "rlhf.shaping.free_length=99": "free_length=99 must lie in 0..max_length - 1",
    "rlhf.shaping.name='linear_length'": "did you mean 'linear_length_penalty'?",
    "reasoning_rl.correction.cap=0.0": "correction.cap=0.0 must be above 0",
    "reasoning_rl.correction.cup=2.0": "correction tis has no option 'cup'; known: cap. Did you mean 'cap'?",
    "reasoning_rl.algorithm.name='sft'": "There is no policy algorithm 'sft'; known: cispo, grpo, gspo",
    "reasoning_rl.algorithm={'clip_low': 0.1}": "There is no policy algorithm ''",
    "reasoning_rl.algorithm.clip_low=2.0": "clip_low=2.0 must lie between 0 and 1",
    "reasoning_rl.algorithm.clip_hihg=2.0": "no option 'clip_hihg'",
    "sft.schedule.name='cosin'": "There is no schedule 'cosin'; did you mean 'cosine'?",
    "sft.optimizer.max_grad_norm=0.0": "optimizer.max_grad_norm=0.0 must be above 0",
    "sft.optimizer.betta=0.0": "optimizer muon has no option 'betta'; did you mean 'beta'?",
    "sft.guards.max_loss_spike=0.5": "config.sft.guards: max_loss_spike=0.5 must be above 1",
    "sft.schedule.learning_rate=-1.0": "schedule.learning_rate=-1.0 must be above 0",
    "sft.optimizer.beta=1.5": "optimizer.beta=1.5 must lie in [0, 1)",
    "rlhf.optimizer.weight_decay=-1.0": "optimizer.weight_decay=-1.0 must be 0 or more",
    "sft.num_steps=3": "config.sft: schedule.num_steps=2 must be num_steps=3",
    "reasoning_rl.temperature=float('nan')": "config.reasoning_rl.temperature=nan must be a finite",
    "sft.schedule.learning_rate=float('inf')": "config.sft.schedule.learning_rate=inf must be a",
    "model.num_dense_layers=3": "sft.router_bias_update_rate=0.004 balances experts",
    # keys
    "sft.num_stepz=1": "config.sft.num_stepz is not an option here. Did you mean 'num_steps'?",
    "rhlf=1": "config.rhlf is not an option here. Did you mean 'rlhf'?",
    "sft.num_steps='3'": "config.sft.num_steps must be int, not '3'.",
    "sft.schedule=3": "config.sft.schedule must be a section, not 3.",
}  # fmt: skip


def evaluated(value: str):
    """A literal, or a float that has none."""
    return float(value[7:-2]) if value.startswith("float(") else ast.literal_eval(value)


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts a recipe; returns True where it would begin to compile."""
    monkeypatch.setattr(pipeline, "_Recipe", lambda *_: Begun())

    class Begun:
        def run(self):
            return True

    return lambda config: pipeline.run_recipe(config, tmp_path / "run")


@pytest.mark.parametrize("change", CANNOT)
def test_it_is_answered_in_a_sentence_and_nothing_is_written(
    change, start, recipe_config, tmp_path
):
    place, _, value = change.partition("=")
    with pytest.raises(ValueError) as caught:
        start(recipe_config({place: evaluated(value)}))
    message = str(caught.value)
    assert CANNOT[change] in message
    assert "\n" not in message and message.endswith((".", "?"))
    assert not (tmp_path / "run").exists()


def test_a_missing_section_or_key_is_named(start, recipe_config):
    config = recipe_config()
    del config["rlhf"]
    with pytest.raises(ValueError, match="^config lacks rlhf.$"):
        start(config)
    config = recipe_config()
    del config["rlhf"]["rows"], config["rlhf"]["task"]
    with pytest.raises(ValueError, match="^config.rlhf lacks task, rows.$"):
        start(config)


@pytest.mark.parametrize("variant", ["full", "smoke"])
def test_the_config_as_it_stands_begins_and_its_directory_goes_on_with_it_only(
    variant, start, recipe_config, tmp_path
):
    config = recipe_config(variant=variant)
    assert start(config) is True
    assert start(config) is True
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        ".lock",
        "config.json",
        "tokenizer",
    ]
    with pytest.raises(ValueError, match=r"another config \(seed was 0, now 1\)"):
        start(recipe_config({"seed": 1}, variant=variant))


def test_a_tokenizer_half_written_when_the_run_was_killed_is_written_again(
    start, recipe_config, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.tokenizers, "save", killed_while_saving)
        with pytest.raises(KeyboardInterrupt):
            start(recipe_config())
    assert start(recipe_config()) is True
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").stat().st_size > 1000


def killed_while_saving(tokenizer, directory):
    directory.mkdir()
    (directory / "tokenizer.json").write_text("{")
    raise KeyboardInterrupt
