"""The tiny recipe's config, and one run of its smoke variant for every test that looks at a run."""

import contextlib
import dataclasses
import os
import pathlib
import runpy
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from axion_jax.recipe.pipeline import run_recipe

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def recipe_config():
    """`recipe_config({"sft.rows": 3}, variant="smoke")`: the tiny recipe as a plain dict."""
    get_config = runpy.run_path(str(ROOT / "configs" / "tiny" / "recipe.py"))["get_config"]

    def make(overrides=None, *, variant="smoke"):
        config = get_config(variant).to_dict()
        for place, value in (overrides or {}).items():
            *sections, key = place.split(".")
            section = config
            for name in sections:
                section = section[name]
            section[key] = value
        return config

    return make


SMALLER = {
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.head_dim": 16,
    "model.intermediate_size": 32,
    "model.moe_intermediate_size": 16,
    "evaluation.max_response_length": 16,
    "reasoning_rl.max_response_length": 16,
    "instruction_following_rl.max_response_length": 16,
    "rlhf.max_response_length": 16,
    "rlhf.shaping.free_length": 8,
    # An untrained model never solves a puzzle, and would learn nothing; a reward model likes one
    # answer better than another. The stage for instructions stays: there every answer is wrong.
    "reasoning_rl.task": "preference",
}
"""The smoke variant on a model that compiles in half the time, and with something to learn."""

COMPILE_ONCE = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_disable_most_optimizations": True,
}
"""Compile quickly, and what was compiled before not at all: steps are few here, programs many."""


@dataclasses.dataclass(frozen=True)
class SmokeRun:
    """A finished run of the smoke variant on this process's eight devices."""

    config: dict
    directory: pathlib.Path
    summary: dict
    compiled: pathlib.Path
    """Where its compiled programs are."""

    def again(self, directory):
        """Starts the same run on another directory, in this process; its summary."""
        with compile_once(self.compiled):
            return run_recipe(self.config, directory)

    def command(self, directory):
        """The command line that starts the same run on another directory, and its environment."""
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(self.compiled)}
        environment |= {name.upper(): str(value) for name, value in COMPILE_ONCE.items()}
        arguments = ["--config=configs/tiny/recipe.py:smoke", f"--workdir={directory}"]
        arguments += [f"--config.{place}={value}" for place, value in SMALLER.items()]
        return [sys.executable, "launch/recipe.py", *arguments], environment


@contextlib.contextmanager
def compile_once(directory):
    """Keeps compiled programs in `directory`."""
    settings = COMPILE_ONCE | {"jax_compilation_cache_dir": str(directory)}
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # whether there is a cache is asked once, at the first program
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def smoke_run(recipe_config, tmp_path_factory):
    """The tiny recipe's smoke variant, run once from start to end."""
    config = recipe_config(SMALLER)
    directory = tmp_path_factory.mktemp("smoke") / "run"
    compiled = tmp_path_factory.mktemp("compiled")
    with compile_once(compiled):
        summary = run_recipe(config, directory)
    return SmokeRun(config, directory, summary, compiled)
