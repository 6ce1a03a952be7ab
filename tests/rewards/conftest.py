"""Hand-made samples, as scorers see them."""

import asyncio

import numpy as np
import pytest

from axion_jax.data.chat import parse_response
from axion_jax.data.prompts import make_prompt
from axion_jax.rewards.base import Sample
from axion_jax.types import StopReason, Trajectory


def make_sample(
    text,
    *,
    family="f",
    entry=None,
    thinking=True,
    token_ids=(1, 2),
    stop_reason=StopReason.ANSWERED,
):
    """What a policy that was asked something and said `text` is scored on."""
    trajectory = Trajectory(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=np.ones(len(token_ids) - 1, bool),
        stop_reason=stop_reason,
    )
    prompt = make_prompt(family, "a question", thinking=thinking, entry=entry)
    response = parse_response(text, enable_thinking=None if thinking else False)
    return Sample(prompt, text, response, trajectory)


@pytest.fixture(scope="session")
def sample():
    return make_sample


@pytest.fixture(scope="session")
def score():
    """`score(scorer, sample)`: what the scorer says of one sample."""
    return lambda scorer, sample: asyncio.run(scorer.score(sample))
