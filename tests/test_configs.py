"""Every config file: it can be loaded, is locked, and each variant is a recipe that parses."""

import pathlib
import runpy

import pytest
from ml_collections import ConfigDict

from axion_jax.recipe.config import parse
from axion_jax.recipe.pipeline import RecipeConfig

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "configs").rglob("*.py"))


@pytest.fixture(params=FILES)
def get_config(request):
    return runpy.run_path(str(ROOT / request.param))["get_config"]


def test_there_are_configs():
    assert "configs/tiny/recipe.py" in FILES


@pytest.mark.parametrize("variant", ["full", "smoke"])
def test_a_config_is_locked_and_every_variant_parses(get_config, variant):
    config = get_config(variant)
    assert isinstance(config, ConfigDict) and config.is_locked
    with pytest.raises(AttributeError):
        config.sft.num_stepz = 1
    parse(RecipeConfig, config.to_dict(), "")


def test_the_smoke_variant_takes_two_steps_a_stage_and_has_the_keys_of_the_full_one(get_config):
    full, smoke = get_config("full").to_dict(), get_config("smoke").to_dict()

    def keys(section, where=""):
        for key, value in section.items():
            yield f"{where}{key}"
            if isinstance(value, dict):
                yield from keys(value, f"{where}{key}.")

    assert list(keys(full)) == list(keys(smoke))
    steps = [s["num_steps"] for s in smoke.values() if isinstance(s, dict) and "num_steps" in s]
    assert set(steps) == {2}


def test_get_config_without_a_variant_is_the_full_run_and_an_unknown_one_is_refused(get_config):
    assert get_config().to_dict() == get_config("full").to_dict()
    with pytest.raises(ValueError, match="variants full and smoke, not 'big'"):
        get_config("big")
