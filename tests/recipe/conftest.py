"""The tiny recipe's config, and one run of its smoke variant for every test that looks at a run."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def recipe_config():
    """`recipe_config({"sft.rows": 3}, variant="smoke")`: the tiny recipe as a plain dict."""
    file = ROOT / "configs" / "tiny" / "recipe.py"
    spec = importlib.util.spec_from_file_location("tiny_recipe", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(overrides=None, *, variant="smoke"):
        config = module.get_config(variant).to_dict()
        for place, value in (overrides or {}).items():
            *sections, key = place.split(".")
            section = config
            for name in sections:
                section = section[name]
            section[key] = value
        return config

    return make
