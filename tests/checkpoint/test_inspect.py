"""What --inspect says, against the data sheet of GLM-4.5-Air and damaged checkpoints."""

import ml_dtypes
import numpy as np
import pytest

from axion_jax.checkpoint import names
from axion_jax.checkpoint.hf_config import GLM4_MOE
from axion_jax.checkpoint.inspect import lines, summarise
from axion_jax.checkpoint.source import Checkpoint, Tensor, open_checkpoint
from axion_jax.models.config import GLM_45_AIR

from .conftest import GLM, write_hf


def air_with_its_prediction_layer():
    """Shapes only, as the release has them."""
    tensors = {}
    for name, place in names.expected(GLM_45_AIR, GLM4_MOE).items():
        bias = name.endswith("e_score_correction_bias")
        dtype = np.dtype(np.float32 if bias else ml_dtypes.bfloat16)
        tensors[name] = Tensor(place.shape, dtype)
        if ".layers.45." in name:
            tensors[name.replace(".layers.45.", ".layers.46.")] = tensors[name]
    wide = np.dtype(ml_dtypes.bfloat16)
    for name, shape in {
        "eh_proj": (4096, 8192),
        "enorm": (4096,),
        "hnorm": (4096,),
        "shared_head.norm": (4096,),
        "shared_head.head": (151_552, 4096),
        "embed_tokens": (151_552, 4096),
    }.items():
        tensors[f"model.layers.46.{name}.weight"] = Tensor(shape, wide)
    return Checkpoint("hf", None, {}, GLM4_MOE, GLM_45_AIR, tensors)


def test_glm_45_air_counts_to_the_parameter():
    summary = summarise(air_with_its_prediction_layer())
    assert summary.total == 106_852_245_504
    assert summary.active == 13_424_129_664
    assert summary.active_in_layers == 12_182_615_680  # "12B active"
    assert summary.stored == 110_468_824_832  # with the prediction layer and 46 correction biases
    assert summary.nbytes == 220_937_661_440
    assert sum(count for count, _ in summary.dtypes.values()) == 18_329
    assert not summary.missing and not summary.unexpected and not summary.wrong


@pytest.fixture
def damaged(glm_tensors, tmp_path):
    tensors = dict(glm_tensors)
    tensors["model.layers.1.mlp.spare.weight"] = tensors.pop("model.layers.1.mlp.gate.weight")
    tensors["model.norm.weight"] = np.ones(17, np.float32)
    return open_checkpoint(write_hf(tmp_path / "hf", GLM, tensors))


def test_what_is_missing_unexpected_or_wrong_is_listed_by_name(damaged):
    summary = summarise(damaged)
    assert summary.missing == ["model.layers.1.mlp.gate.weight"]
    assert summary.unexpected == ["model.layers.1.mlp.spare.weight"]
    (sentence,) = summary.wrong
    assert sentence.startswith("model.norm.weight: checkpoint has (17,), config asks for (16,).")
    rows = dict(lines(summary))
    assert rows["missing"] == "model.layers.1.mlp.gate.weight"
