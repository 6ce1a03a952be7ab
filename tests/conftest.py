"""Every test sees eight CPU devices, strict ranks and annotated shapes checked as they run."""

import math
import os

# Before the first import of jax, which reads both once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# Not types.py: JAX rebuilds pytrees with leaves that are not arrays. An int is a float (PEP 484).
jaxtyping.install_import_hook(
    ["axion_jax.rl", "axion_jax.models", "axion_jax.sharding"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


@pytest.fixture(scope="session")
def tiny():
    """A GLM-4.5-type config with every part in it, small enough to compile in a second or two."""
    from axion_jax.models.config import ModelConfig

    return ModelConfig(
        vocab_size=48,
        hidden_size=16,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        num_dense_layers=1,
    )


FAN_IN = {"q": (-3,), "k": (-3,), "v": (-3,), "o": (-3, -2), "gate_up": (-3,)}
"""Axes that a weight sums over; the last but one where it is not listed."""


@pytest.fixture(scope="session")
def random_params():
    """`random_params(decoder, seed=0)`: parameters in which every tensor matters.

    Norm weights far from 1 and biases far from 0, unlike those of `Decoder.init`; no compiling.
    """

    def make(decoder, seed=0):
        rng = np.random.default_rng(seed)

        def leaf(path, like):
            name = path[-1].key
            noise = rng.normal(size=like.shape)
            axes = FAN_IN.get(name, (-2,))
            if name == "weight" or "norm" in name:
                value = 1 + 0.2 * noise
            elif name == "router_bias":
                value = 0.15 * noise
            elif name.endswith("bias"):
                value = 0.3 * noise
            elif name == "embed":
                value = noise
            else:
                value = noise * (2 / math.prod(like.shape[axis] for axis in axes)) ** 0.5
            return jnp.asarray(value, like.dtype)

        return jax.tree_util.tree_map_with_path(leaf, decoder.abstract_params())

    return make


@pytest.fixture(scope="session")
def forward():
    """`forward(decoder, params, *rows, routing=None) -> (logits, routing)`, jitted.

    `rows` are tokens, positions and segment ids.
    """

    def logits_and_routing(decoder, params, tokens, positions, segment_ids, routing=None):
        out = decoder(params, tokens, positions, segment_ids, routing)
        return decoder.logits(params, out.hidden), out.routing

    return jax.jit(logits_and_routing, static_argnums=0)


@pytest.fixture(scope="session")
def packed():
    """`packed([[5, 7], [4, 3]], 12) -> (positions, segment_ids)`: documents of these lengths."""

    def make(lengths, row_length):
        positions = np.zeros((len(lengths), row_length), np.int32)
        segment_ids = np.zeros((len(lengths), row_length), np.int32)
        for row, documents in enumerate(lengths):
            start = 0
            for number, length in enumerate(documents, start=1):
                positions[row, start : start + length] = np.arange(length)
                segment_ids[row, start : start + length] = number
                start += length
        return positions, segment_ids

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """The tiny recipe's byte-level tokenizer: one token for each word and fixed phrase."""
    from axion_jax.recipe.pipeline import build_tokenizer

    return build_tokenizer()


@pytest.fixture(scope="session")
def scripted_engine(tiny_tokenizer):
    """`scripted_engine(say)`: an engine whose model is the function `say(prompt text, request) -> text`.

    `request` is the place of the prompt in its call. A text without a stop marker is cut at
    `max_new_tokens`; None is an engine failure. `calls` keeps the prompts and sampling of each call.
    """
    from axion_jax.data.tokenizer import encode
    from axion_jax.rollout.engine import FinishReason, Generation

    class ScriptedEngine:
        def __init__(self, say):
            self.say, self.calls, self.version = say, [], 0

        def generate(self, prompts, sampling):
            self.calls.append((list(prompts), sampling))
            texts = tiny_tokenizer.batch_decode(prompts, skip_special_tokens=False)
            return [
                self._generation(prompt, self.say(text, request), sampling)
                for request, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
            ]

        def _generation(self, prompt, said, sampling):
            ids = np.array(encode(tiny_tokenizer, said or ""), np.int32)[: sampling.max_new_tokens]
            reason = FinishReason.LENGTH
            if len(ids) and ids[-1] in sampling.stop_ids:
                reason = FinishReason.STOP
            if said is None:
                reason = FinishReason.ABORT
            return Generation(
                token_ids=ids,
                logprobs=np.linspace(-1, 0, len(ids), dtype=np.float32),
                routed_experts=None,
                finish_reason=reason,
                weight_version=self.version,
            )

        def update_weights(self, params, version):
            self.version = version

        def abort(self): ...

        def flush(self): ...

        def sleep(self): ...

        def wake(self): ...

    return ScriptedEngine
