"""Every family against Hugging Face, from checkpoint files to gradients, on stored answers.

tools/parity/reference.py --golden wrote tests/golden/families; `make parity` does the same live, on
more shapes and fresh weights.
"""

import functools
import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.checkpoint.load import load_params
from axion_jax.checkpoint.source import open_checkpoint
from axion_jax.models.decoder import Decoder

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "golden" / "families"
VARIANTS = sorted(path.name for path in FOLDER.iterdir())
CAUSAL = {"logits", "log-probs", "loss", "gradients"}
QUANTITIES = {"glm": CAUSAL | {"experts", "gates"}, "qwen3": CAUSAL, "llama": CAUSAL}


def _load_tool():
    spec = importlib.util.spec_from_file_location(
        "parity", ROOT / "tools" / "parity" / "compare.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity"] = module
    spec.loader.exec_module(module)
    return module


parity = _load_tool()


@functools.cache
def checks(variant):
    return {check.quantity: check for check in parity.checks(FOLDER / variant)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_equals_hugging_faces(variant):
    found = checks(variant)
    wanted = QUANTITIES[variant.split("_")[0]]
    if variant.endswith("classifier"):
        wanted = {"scores", "scores, padded left", "loss", "gradients"}
    assert set(found) == wanted
    outside = {name: check.value for name, check in found.items() if not check.holds}
    assert not outside, outside


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_gradient_is_far_above_what_is_tolerated(variant):
    # Else equality would say little. 1e-5 is tolerated.
    from safetensors.numpy import load_file

    largest = {
        k: np.abs(v).max() for k, v in load_file(FOLDER / variant / "grads.safetensors").items()
    }
    experts = [k for k in largest if ".experts." in k]
    largest = {k: v for k, v in largest.items() if "e_score" not in k and k not in experts}
    assert min(largest.values()) > 1e-4, largest


def test_goldens_notice_a_router_without_its_correction_bias():
    checkpoint = open_checkpoint(FOLDER / "glm_one_group" / "model.safetensors")
    params = load_params(checkpoint)
    with np.load(FOLDER / "glm_one_group" / "expected.npz") as file:
        expected = dict(file)
    mlp = params["moe"]["mlp"] | {
        "router_bias": jnp.zeros_like(params["moe"]["mlp"]["router_bias"])
    }
    without = params | {"moe": params["moe"] | {"mlp": mlp}}
    batch = parity.batch_of(expected)
    out = jax.jit(Decoder(checkpoint.config))(
        without, batch.tokens, batch.positions, batch.segment_ids
    )
    different = parity.experts_differ(checkpoint.config, out.routing, expected, "router")
    assert different.mean() > 0.2


def test_all_committed_goldens_together_stay_small():
    files = [path for path in FOLDER.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5_000_000
