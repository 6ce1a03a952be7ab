"""Engines under test, each with the weights of one policy, and that policy's own forward."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from axion_jax.models.decoder import Decoder
from axion_jax.rollout.engine import Engine
from axion_jax.rollout.jax_engine import JaxEngine

ROW_LENGTH = 48
"""Longest prompt and continuation of these tests together."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The trainer's side: its decoder, its weights, and what they say of given tokens."""

    decoder: Decoder
    params: Any
    forward: Callable

    def logits(self, sequences) -> tuple[np.ndarray, np.ndarray]:
        """(logits, routing) of up to 16 token sequences, padded on the right."""
        tokens, positions, segment_ids = np.zeros((3, 16, ROW_LENGTH), np.int32)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)] = ids
            positions[row, : len(ids)] = np.arange(len(ids))
            segment_ids[row, : len(ids)] = 1
        found = self.forward(self.decoder, self.params, tokens, positions, segment_ids)
        return jax.device_get(found)

    def logprobs(self, prompts, generations, temperature=1.0):
        """By the trainer, for each generation: log-probs [G] and routing [P+G-1, L, K]."""
        whole = [
            np.concatenate([p, g.token_ids]) for p, g in zip(prompts, generations, strict=True)
        ]
        logits, routing = self.logits(whole)
        every = jax.nn.log_softmax(logits / temperature, axis=-1)
        found = []
        for row, (prompt, ids) in enumerate(zip(prompts, whole, strict=True)):
            at = np.arange(len(prompt) - 1, len(ids) - 1)
            found.append((np.asarray(every[row, at, ids[at + 1]]), routing[row, : len(ids) - 1]))
        return found


@pytest.fixture(scope="session")
def policy(tiny, random_params, forward):
    decoder = Decoder(dataclasses.replace(tiny, num_layers=2))
    return Policy(decoder, random_params(decoder, seed=5), forward)


@pytest.fixture(scope="session")
def prompts(policy):
    """Twelve prompts of 1 to 12 tokens."""
    rng = np.random.default_rng(0)
    vocab_size = policy.decoder.config.vocab_size
    return [rng.integers(0, vocab_size, n).astype(np.int32) for n in rng.permutation(12) + 1]


ENGINES: dict[str, Callable[[Decoder], Engine]] = {
    # Eight rows, so that twelve prompts already take two calls of the compiled program.
    "jax": lambda decoder: JaxEngine(decoder, max_batch=8, length_multiple=16),
}
"""Every engine that has to keep the contract; `make(decoder)` gives one without weights."""


@pytest.fixture(scope="session", params=ENGINES)
def warm_engine(request, policy):
    """One engine for the session: compiling is what takes time."""
    return ENGINES[request.param](policy.decoder)


@pytest.fixture
def engine(warm_engine, policy):
    """An engine that holds the policy's weights as version 7, whatever the last test did."""
    warm_engine.wake()
    warm_engine.update_weights(policy.params, 7)
    return warm_engine


@pytest.fixture(params=ENGINES)
def new_engine(request, policy):
    """An engine that nobody gave weights yet."""
    return ENGINES[request.param](policy.decoder)
