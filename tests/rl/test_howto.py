"""docs/howto/add-an-algorithm.md does what it says."""

import pathlib
import re

import numpy as np
import pytest

from axion_jax.rl.algorithms import ALGORITHMS, make_reduction
from axion_jax.rl.compose import make_policy_loss

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "howto" / "add-an-algorithm.md"


@pytest.fixture
def sapo():
    """The page's code blocks, run in order; the row is gone afterwards."""
    before = dict(ALGORITHMS)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    yield names["sapo_loss"]
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


def test_the_page_is_short():
    assert len(PAGE.read_text().splitlines()) < 40


def test_the_new_algorithm_composes_like_the_others(rows, sapo):
    # r = [1, 2], A = [1, -1], sharpness 2: gates 2 * sigmoid(0) = 1 and 2 * sigmoid(2) = 1.7615942;
    # (-1 + 1.7615942)/2, and .5 * .5 * .2^2 from the distance of the first token
    sequence = {
        "mask": [1, 1, 0],
        "logprobs": [0, np.log(2), np.nan],
        "old_logprobs": [0, 0, np.inf],
        "ref_logprobs": [-0.2, np.log(2), np.nan],
        "advantages": [1, -1, np.nan],
    }
    algorithm = {"name": "sapo", "sharpness": 2.0}
    loss_fn = make_policy_loss(algorithm, kl={"name": "k2", "coefficient": 0.5})
    loss, metrics = loss_fn(*rows([[sequence]]))
    np.testing.assert_allclose(loss.value, 0.7615942 / 2 + 0.005, rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio"].value, 1.5, rtol=1e-6)


def test_its_options_and_weighings_are_checked(sapo):
    with pytest.raises(ValueError, match="sapo needs a value for sharpness"):
        make_policy_loss({"name": "sapo"})
    with pytest.raises(ValueError, match="sapo does not go with constant_length"):
        make_reduction("sapo", "constant_length", length=4)
