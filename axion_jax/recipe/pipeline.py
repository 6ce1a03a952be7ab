"""The serial recipe: stages one after another, each from the checkpoint the one before produced,
each measured on every task when it is done.

A stage that is done has a `done.json` with its results; its parameters are in its last checkpoint.
Starting the same command again skips what is done and goes on where the run was killed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from transformers import PreTrainedTokenizerFast

from axion_jax.checkpoint.training import read_json, write_json
from axion_jax.data import preference, reasoning, writing
from axion_jax.data import tokenizer as tokenizers
from axion_jax.data.chat import encode_prompt
from axion_jax.evaluation.evaluate import EvaluationConfig, evaluate
from axion_jax.evaluation.report import write_report
from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Decoder
from axion_jax.recipe.config import parse
from axion_jax.recipe.mismatch import measure_mismatch
from axion_jax.recipe.reward_model import RewardModelConfig, train_reward_model
from axion_jax.recipe.rl import RLConfig, train_rl
from axion_jax.recipe.run import RunDirectory, Stopwatch, peak_memory_gb
from axion_jax.recipe.sft import Demonstrations, SFTConfig, train_sft
from axion_jax.recipe.stage import console, mesh_of
from axion_jax.rewards.base import Sample
from axion_jax.rewards.puzzles import PuzzleScorer
from axion_jax.rewards.reward_model import RewardModelScorer
from axion_jax.rewards.rubrics import RubricScorer
from axion_jax.rollout.collect import Task, enable_thinking, sample_and_score
from axion_jax.rollout.engine import Sampling
from axion_jax.rollout.jax_engine import JaxEngine
from axion_jax.sharding.mesh import MeshConfig, make_mesh
from axion_jax.sharding.rules import param_shardings

TASKS = ("reasoning", "instruction_following", "preference")
TITLES = {
    "sft": "SFT",
    "reasoning_rl": "Reasoning RL",
    "instruction_following_rl": "Instruction-Following RL",
    "rlhf": "RLHF",
}
SAMPLES_SHOWN = 6
MISMATCH_PROMPTS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    seed: int
    model: ModelConfig
    mesh: MeshConfig
    evaluation: EvaluationConfig
    engine_batch: int
    """Rows that the embedded engine samples at once."""
    sft: SFTConfig
    reward_model: RewardModelConfig
    reasoning_rl: RLConfig
    instruction_following_rl: RLConfig
    rlhf: RLConfig

    @property
    def rl_stages(self) -> dict[str, RLConfig]:
        return {
            "reasoning_rl": self.reasoning_rl,
            "instruction_following_rl": self.instruction_following_rl,
            "rlhf": self.rlhf,
        }

    def __post_init__(self) -> None:
        for name in self.sft.mixture:
            if name not in TASKS:
                raise ValueError(f"sft.mixture names the task {name!r}; known: {', '.join(TASKS)}.")
        if self.sft.router_bias_update_rate and not self.model.num_moe_layers:
            raise ValueError(
                f"sft.router_bias_update_rate={self.sft.router_bias_update_rate} balances experts, but"
                " the model has none (num_dense_layers=num_layers). Set it to 0."
            )
        for stage, rl in self.rl_stages.items():
            if rl.replay_routing and not self.model.num_moe_layers:
                raise ValueError(f"{stage}.replay_routing=True, but the model has no experts.")
            if rl.task not in TASKS:
                raise ValueError(f"{stage}.task={rl.task!r} is unknown; known: {', '.join(TASKS)}.")
            layers = rl.high_precision_layers
            if layers is not None and not 0 <= layers <= self.model.num_layers:
                raise ValueError(
                    f"{stage}.high_precision_layers={layers} must lie in 0..num_layers={self.model.num_layers}."
                )


def run_recipe(config: Mapping[str, Any], workdir: str | pathlib.Path) -> dict[str, Any]:
    """Runs (or goes on with) the whole recipe and returns its summary.

    Args:
      config: nested mapping; see configs/tiny/recipe.py.
      workdir: the run directory.

    Raises:
      ValueError: a mistake in the config or the directory, before anything compiles.
      StageStopped: a guard stopped a stage.
    """
    parsed = parse(RecipeConfig, config, "")
    mesh = make_mesh(parsed.mesh)
    _check_rows(parsed, mesh)
    tokenizer = build_tokenizer()
    if len(tokenizer) > parsed.model.vocab_size:
        raise ValueError(
            f"config.model.vocab_size={parsed.model.vocab_size} is smaller than the tokenizer's {len(tokenizer)} tokens."
        )
    prompts = {
        "reasoning": reasoning.ReasoningPrompts(seed=parsed.seed),
        "instruction_following": writing.WritingPrompts(seed=parsed.seed),
        "preference": preference.PreferencePrompts(seed=parsed.seed),
    }
    _check_lengths(parsed, prompts, tokenizer)
    run = RunDirectory(workdir, dict(config))
    try:
        if not (run.path / "tokenizer").exists():
            tokenizers.save(tokenizer, run.path / "tokenizer.partial")
            (run.path / "tokenizer.partial").rename(run.path / "tokenizer")
        return _Recipe(parsed, run, mesh, tokenizers.load(run.path / "tokenizer"), prompts).run()
    finally:
        run.close()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny recipe's byte-level tokenizer with GLM's special tokens and one token for each fixed
    phrase and word."""
    words = [form for word in writing.WORDS for form in (word, word.upper())]
    phrases = [*reasoning.PHRASES, *writing.PHRASES, *preference.PHRASES]
    return tokenizers.build_tokenizer(phrases, words)


def _check_rows(config: RecipeConfig, mesh: jax.sharding.Mesh) -> None:
    stages = {"sft": config.sft, "reward_model": config.reward_model, **config.rl_stages}
    for name, stage in stages.items():
        if stage.rows % mesh.size:
            raise ValueError(
                f"config.{name}.rows={stage.rows} must be a multiple of the {mesh.size} devices, which share the rows."
            )
    if config.engine_batch < 1 or config.engine_batch % mesh.size:
        raise ValueError(
            f"config.engine_batch={config.engine_batch} must be a positive multiple of the {mesh.size} devices."
        )
    decoder = Decoder(config.model)
    param_shardings(mesh, decoder.logical_axes(), decoder.abstract_params())


def _check_lengths(config: RecipeConfig, prompts, tokenizer: PreTrainedTokenizerFast) -> None:
    """Rows must hold the longest prompt with the longest response; the longest of many prompts
    stands for all."""
    longest = {
        task: max(
            len(encode_prompt(tokenizer, p.messages, enable_thinking=enable_thinking(p)))
            for p in map(prompt_set.train, range(500))
        )
        for task, prompt_set in prompts.items()
    }

    def check(task: str, response: str, max_response_length: int, row: str, row_length: int):
        if longest[task] + max_response_length > row_length:
            raise ValueError(
                f"config.{row}.row_length={row_length} cannot hold a prompt of {longest[task]} tokens and"
                f" {response}.max_response_length={max_response_length}."
            )

    judge = "reward_model", config.reward_model.row_length  # reads what answers to "preference"
    check("preference", "evaluation", config.evaluation.max_response_length, *judge)
    for name, stage in config.rl_stages.items():
        check(stage.task, name, stage.max_response_length, name, stage.row_length)
        if stage.task == "preference":
            check(stage.task, name, stage.max_response_length, *judge)
    demonstrations = Demonstrations(prompts, config.sft.mixture, tokenizer, seed=config.seed)
    example = max(len(demonstrations.example(i).loss_mask) for i in range(500))
    if example > config.sft.row_length:
        raise ValueError(
            f"config.sft.row_length={config.sft.row_length} cannot hold an example of {example} predictions."
        )


class _Recipe:
    """One run of the recipe: what all stages share."""

    def __init__(self, config: RecipeConfig, run: RunDirectory, mesh, tokenizer, prompts) -> None:
        self.config, self.run_dir, self.tokenizer, self.prompts = config, run, tokenizer, prompts
        self.decoder = Decoder(config.model, mesh=mesh)
        self.stop_ids = tokenizers.stop_ids(tokenizer)
        self.pad_id = int(tokenizer.pad_token_id)
        self.tasks = {
            "reasoning": Task("reasoning", prompts["reasoning"], PuzzleScorer()),
            "instruction_following": Task(
                "instruction_following", prompts["instruction_following"], RubricScorer()
            ),
        }
        self._engines: dict[int | None, JaxEngine] = {}

    def run(self) -> dict[str, Any]:
        config = self.config
        key = jax.random.key(config.seed)
        shardings = param_shardings(
            mesh_of(self.decoder), self.decoder.logical_axes(), self.decoder.abstract_params()
        )
        params = jax.jit(self.decoder.init, out_shardings=shardings)(key)
        demonstrations = Demonstrations(
            self.prompts, config.sft.mixture, self.tokenizer, seed=config.seed
        )
        params = train_sft(
            config.sft,
            self.run_dir,
            self.decoder,
            params,
            demonstrations,
            pad_id=self.pad_id,
            seed=config.seed,
        )
        model = train_reward_model(
            config.reward_model,
            self.run_dir,
            self.decoder,
            params,
            self.prompts["preference"],
            self.tokenizer,
            pad_id=self.pad_id,
            seed=config.seed,
        )
        self.tasks["preference"] = Task(
            "preference", self.prompts["preference"], RewardModelScorer(model)
        )
        self._finish("sft", params, "cross-entropy")
        for name, rl in config.rl_stages.items():
            params = self._train_rl(name, rl, params)
            self._finish(name, params, rl.algorithm["name"].upper())
        return self._summarize()

    def engine(self, high_precision_layers: int | None) -> JaxEngine:
        """The embedded engine of a precision; stages share it, and with it what it compiled."""
        if high_precision_layers not in self._engines:
            self._engines[high_precision_layers] = JaxEngine(
                self.decoder,
                high_precision_layers=high_precision_layers,
                max_batch=self.config.engine_batch,
            )
        return self._engines[high_precision_layers]

    def _train_rl(self, name: str, rl: RLConfig, params: Any) -> Any:
        def held_out_score(params: Any, version: int) -> float:
            result, _ = self._evaluate(rl.task, params, version)
            return result["reward_score" if rl.task == "preference" else "pass@1"]

        return train_rl(
            name,
            rl,
            self.run_dir,
            self.decoder,
            params,
            self.tasks[rl.task],
            self.engine(rl.high_precision_layers),
            self.tokenizer,
            held_out_score,
            stop_ids=self.stop_ids,
            pad_id=self.pad_id,
            seed=self.config.seed,
        )

    def _evaluate(
        self, task: str, params: Any, version: int
    ) -> tuple[dict[str, Any], list[Sample]]:
        """Held-out results under full-precision sampling."""
        engine = self.engine(None)
        engine.update_weights(params, version)
        return evaluate(
            engine,
            self.tokenizer,
            self.tasks[task],
            self.config.evaluation,
            stop_ids=self.stop_ids,
            real_valued=task == "preference",
        )

    def _finish(self, name: str, params: Any, algorithm: str) -> None:
        """Measures a finished stage on every task, once."""
        file = self.run_dir.stage(name) / "done.json"
        if file.exists():
            return
        clock = Stopwatch()
        results, shown = {}, []
        for task in TASKS:
            console.print(f"{name}: measuring {task}", highlight=False)
            results[task], samples = self._evaluate(task, params, 0)
            step = max(1, len(samples) // SAMPLES_SHOWN)
            shown += [_transcript(task, sample) for sample in samples[::step][:SAMPLES_SHOWN]]
        self.run_dir.add_samples(name, shown)
        done = {"stage": name, "title": TITLES[name], "algorithm": algorithm, "eval": results}
        if name == "sft":
            done["mismatch"] = self._mismatch(params)
        done |= {"evaluation_seconds": clock.seconds, "peak_memory_gb": peak_memory_gb()}
        write_json(file, done)
        self._summarize()

    def _mismatch(self, params: Any) -> dict[str, Any]:
        """Trainer against FP8 sampler on training prompts of the first RL stage, before it
        begins."""
        rl = self.config.reasoning_rl
        engine = self.engine(rl.high_precision_layers)
        engine.update_weights(params, 0)
        task = self.tasks[rl.task]
        samples = sample_and_score(
            engine,
            self.tokenizer,
            task,
            [task.prompts.train(i) for i in range(MISMATCH_PROMPTS)],
            Sampling(
                max_new_tokens=rl.max_response_length,
                stop_ids=self.stop_ids,
                temperature=rl.temperature,
                seed=self.config.seed,
            ),
            samples_per_prompt=1,
        )
        return measure_mismatch(
            self.decoder,
            params,
            [dataclasses.replace(s.trajectory, rollout_id=i) for i, s in enumerate(samples)],
            temperature=rl.temperature,
            rows=rl.rows,
            row_length=rl.row_length,
            pad_id=self.pad_id,
        )

    def _summarize(self) -> dict[str, Any]:
        """Writes summary.json and report.html from the stages that are done."""
        stages = []
        for name in ("sft", *self.config.rl_stages):
            file = self.run_dir.path / name / "done.json"
            if file.exists():
                done = read_json(file)
                done["wall_seconds"] = self._stage_seconds(name) + done.pop("evaluation_seconds")
                stages.append(done)
        model = read_json(self.run_dir.path / "reward_model" / "done.json")
        summary = {
            "wall_seconds": sum(s["wall_seconds"] for s in stages) + model["seconds"],
            "seed": self.config.seed,
            "stages": stages,
            "mismatch": stages[0].pop("mismatch"),
            "reward_model": model,
            "peak_memory_gb": max(s["peak_memory_gb"] for s in stages),
        }
        write_json(self.run_dir.path / "summary.json", summary)
        write_report(self.run_dir.path)
        return summary

    def _stage_seconds(self, name: str) -> float:
        """Seconds spent training a stage, from its last line of metrics."""
        lines = map(json.loads, (self.run_dir.path / "metrics.jsonl").read_text().splitlines())
        return max((line["seconds"] for line in lines if line["stage"] == name), default=0.0)


def _transcript(task: str, sample: Sample) -> dict[str, Any]:
    reward = sample.trajectory.reward
    return {
        "task": task,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "reward": None if reward is None else reward.value,
        "reason": "unscorable" if reward is None else reward.reason,
    }
