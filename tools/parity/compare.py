"""Our half of the parity check: the same checkpoints through the decoder, and the largest differences.

    python tools/parity/compare.py DIR           # DIR as tools/parity/reference.py left it

Prints a table variant x quantity and exits with 1 if any bound is exceeded. In float32: logits,
log-probs, loss, gate weights on the same inputs and every gradient by their largest absolute
difference, the experts of every layer as sets by how many tokens differ. In bfloat16, where a
rounding may turn a near-tie, statistically: with Hugging Face's experts replayed, the mean difference
of log-probs to its own bfloat16, and our mean error against float32 as a multiple of its error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from axion_jax.checkpoint.load import load_params
from axion_jax.checkpoint.source import open_checkpoint
from axion_jax.models import moe
from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn, make_value_fn, token_logprobs
from axion_jax.types import Batch

BOUNDS = {
    "logits": 5e-5,
    "log-probs": 5e-5,
    "experts": 0,
    "gates": 5e-6,
    "loss": 1e-5,
    "gradients": 1e-5,
    "scores": 5e-5,
    "scores, padded left": 5e-5,
    "bf16 log-probs, mean": 0.03,
    "bf16 error / theirs": 1.3,
    "bf16 experts, share": 0.05,
}
"""Largest allowed. Absolute, in nats where that applies; experts count tokens, or are a share of
them."""


@dataclasses.dataclass(frozen=True)
class Check:
    variant: str
    quantity: str
    value: float

    @property
    def bound(self) -> float:
        return BOUNDS[self.quantity]

    @property
    def holds(self) -> bool:
        return self.value <= self.bound  # and so a NaN does not


def checks(folder: pathlib.Path) -> list[Check]:
    """Everything there is to compare of one variant."""
    config = open_checkpoint(folder / "model.safetensors").config
    params = load_params(folder / "model.safetensors")
    with np.load(folder / "expected.npz") as file:
        expected = dict(file)
    if "num_tokens" in expected:
        found = _classifier(config, params, expected)
    elif "bf16_logprobs" in expected:
        found = _bfloat16(config, params, expected)
    else:
        found = _causal(config, params, expected)
    if (gradients := folder / "grads.safetensors").exists():
        wanted = load_params(gradients)  # linear, so gradients map as parameters do
        apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), found.pop("grads"), wanted)
        found["gradients"] = max(jax.tree.leaves(apart))
    return [Check(folder.name, quantity, float(value)) for quantity, value in found.items()]


def batch_of(expected: dict[str, Any]) -> Batch:
    lengths, mask = json.loads(str(expected["lengths"])), expected["loss_mask"]
    rows = len(lengths)
    return Batch(
        tokens=jnp.asarray(expected["tokens"][:, :-1]),
        targets=jnp.asarray(expected["tokens"][:, 1:]),
        loss_mask=jnp.asarray(mask),
        segment_ids=jnp.array([np.repeat(np.arange(len(d)) + 1, d) for d in lengths], jnp.int32),
        positions=jnp.array([np.concatenate([*map(np.arange, d)]) for d in lengths], jnp.int32),
        weights=jnp.asarray(mask, jnp.float32),
        denominator=jnp.full(rows, mask.sum() / rows, jnp.float32),
    )


@functools.partial(jax.jit, static_argnums=0)
def _forward_and_backward(decoder: Decoder, params: Any, batch: Batch):
    def loss(params):
        out = decoder(params, batch.tokens, batch.positions, batch.segment_ids)
        logprobs, _ = token_logprobs(
            decoder, params, out.hidden, batch.targets, temperature=1.0, entropy=False, chunk=4096
        )
        value = -jnp.sum(logprobs * batch.weights) / jnp.sum(batch.denominator)
        return value, (decoder.logits(params, out.hidden), logprobs, out.routing)

    return jax.value_and_grad(loss, has_aux=True)(params)


def _causal(config: ModelConfig, params: Any, expected: dict[str, Any]) -> dict[str, Any]:
    (loss, ours), grads = _forward_and_backward(Decoder(config), params, batch_of(expected))
    logits, logprobs, routing = ours
    found = {
        "logits": np.abs(logits - expected["logits"]).max(),
        "log-probs": np.abs(logprobs - expected["logprobs"]).max(),
        "loss": abs(float(loss) - float(expected["loss"])),
        "grads": grads,
    }
    if config.num_moe_layers:
        found["experts"] = np.sum(experts_differ(config, routing, expected, "router"))
        found["gates"] = max(
            _gates_apart(config, params, expected, layer) for layer in range(config.num_moe_layers)
        )
    return found


def experts_differ(config: ModelConfig, routing, expected, prefix: str) -> np.ndarray:
    """[tokens, layers] True where the sets of experts differ."""
    ours = np.sort(np.asarray(routing).reshape(-1, *config.routing_shape))
    return np.any(ours != np.sort(_recorded(config, expected, prefix)), axis=-1)


def _recorded(config: ModelConfig, expected, prefix: str) -> np.ndarray:
    """[tokens, layers, K] Hugging Face's experts."""
    layers = range(config.num_dense_layers, config.num_layers)
    return np.stack([expected[f"{prefix}:{i}:ids"] for i in layers], axis=1)


def _gates_apart(config: ModelConfig, params: Any, expected, layer: int) -> float:
    """Largest difference of any expert's weight, on the input that Hugging Face's router had."""
    mlp = params["moe"]["mlp"]
    at = f"router:{config.num_dense_layers + layer}"
    x = jnp.asarray(expected[f"{at}:input"])
    ours = moe.route(x, mlp["router"][layer], mlp["router_bias"][layer], config)
    weights = np.zeros((2, len(x), config.num_experts), np.float32)
    theirs = expected[f"{at}:ids"], expected[f"{at}:gates"]
    for row, (ids, gates) in zip(weights, (ours, theirs), strict=True):
        np.put_along_axis(row, np.asarray(ids), np.asarray(gates), axis=-1)
    return np.abs(weights[0] - weights[1]).max()


def _classifier(config: ModelConfig, params: Any, expected: dict[str, Any]) -> dict[str, Any]:
    num_tokens, tokens = expected["num_tokens"], expected["tokens"]
    rows, width = tokens.shape
    column = np.broadcast_to(np.arange(width), tokens.shape)
    values = make_value_fn(Decoder(config))

    def run(params, tokens, first):
        """Scores of rows whose real tokens begin at `first`."""
        real = (column >= first[:, None]) & (column < (first + num_tokens)[:, None])
        nothing = jnp.zeros(tokens.shape, jnp.int32)
        batch = Batch(
            tokens=jnp.asarray(tokens),
            targets=nothing,
            loss_mask=nothing > 0,
            segment_ids=jnp.asarray(real, jnp.int32),
            positions=jnp.asarray(np.maximum(column - first[:, None], 0), jnp.int32),
            weights=jnp.zeros(tokens.shape),
            denominator=jnp.zeros(rows),
        )
        return values(params, batch)[jnp.arange(rows), first + num_tokens - 1]

    def loss(params):
        scores = run(params, tokens, np.zeros(rows, np.int32))
        return -jnp.mean(jax.nn.log_sigmoid(scores[0::2] - scores[1::2])), scores

    (value, scores), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    left = np.stack([np.roll(row, width - n) for row, n in zip(tokens, num_tokens, strict=True)])
    from_left = jax.jit(lambda p: run(p, left, width - num_tokens))(params)
    return {
        "scores": np.abs(scores - expected["scores"]).max(),
        "scores, padded left": np.abs(from_left - expected["scores_left"]).max(),
        "loss": abs(float(value) - float(expected["loss"])),
        "grads": grads,
    }


def _bfloat16(config: ModelConfig, params: Any, expected: dict[str, Any]) -> dict[str, Any]:
    batch = batch_of(expected)
    half = Decoder(config, dtype=jnp.bfloat16)
    own = jax.jit(make_score_fn(half, entropy=False))(params, batch)
    scores, found = own, {}
    if config.num_moe_layers:
        ids = _recorded(config, expected, "bf16:router").reshape(*batch.tokens.shape, -1)
        ids = jnp.asarray(ids.reshape(*batch.tokens.shape, *config.routing_shape), jnp.int8)
        replay = jax.jit(make_score_fn(half, entropy=False, replay=True))
        scores = replay(params, dataclasses.replace(batch, routing=ids))
        different = experts_differ(config, own.routing, expected, "bf16:router")
        found["bf16 experts, share"] = different.mean()
    theirs, exact = expected["bf16_logprobs"], expected["logprobs"]
    error = lambda x: np.abs(np.asarray(x) - exact).mean()  # noqa: E731
    return found | {
        "bf16 log-probs, mean": np.abs(scores.logprobs - theirs).mean(),
        "bf16 error / theirs": error(own.logprobs) / error(theirs),
    }


def main(directory: str) -> int:
    folders = sorted(path.parent for path in pathlib.Path(directory).glob("*/expected.npz"))
    if not folders:
        sys.exit(f"{directory} holds no variants. Run tools/parity/reference.py first.")
    found = [check for folder in folders for check in checks(folder)]
    console = rich.console.Console(width=120, highlight=False)
    for title, half in (("float32: largest difference", False), ("bfloat16", True)):
        some = [c for c in found if c.quantity.startswith("bf16") is half]
        if not some:
            continue
        quantities = [q for q in BOUNDS if any(c.quantity == q for c in some)]
        table = rich.table.Table("variant", *quantities, title=title)
        table.add_row("(bound)", *(f"{BOUNDS[q]:g}" for q in quantities), end_section=True)
        for variant in dict.fromkeys(c.variant for c in some):
            cells = {c.quantity: c for c in some if c.variant == variant}
            table.add_row(variant, *(_cell(cells.get(q)) for q in quantities))
        console.print(table)
    failed = [c for c in found if not c.holds]
    for c in failed:
        console.print(f"{c.variant}: {c.quantity} is {c.value:.3g}, allowed {c.bound:g}.")
    console.print(
        f"{len(found) - len(failed)} of {len(found)} comparisons within bounds, "
        f"{len(folders)} variants."
    )
    return 1 if failed else 0


def _cell(check: Check | None) -> str:
    if check is None:
        return ""
    text = f"{check.value:.1e}" if 0 < check.value < 1e-3 else f"{check.value:.3g}"
    return text if check.holds else f"[bold red]{text}[/]"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
