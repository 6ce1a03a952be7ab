"""The decoder against Hugging Face's; tests/golden/make_hf_golden.py wrote what it computes."""

import functools
import json
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.models import moe
from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import token_logprobs
from axion_jax.types import Batch

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "hf"
VARIANTS = sorted(path.stem for path in FOLDER.glob("*.npz"))

OUR_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_dense_layers": "first_k_dense_replace",
    "num_groups": "n_group",
    "topk_groups": "topk_group",
    "norm_topk_prob": "norm_topk_prob",
    "routed_scaling_factor": "routed_scaling_factor",
    "attention_bias": "attention_bias",
    "qk_norm": "use_qk_norm",
    "rope_theta": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rms_norm_eps": "rms_norm_eps",
}


def stack_layers(tensors, c: ModelConfig):
    """Our parameters from tensors with a checkpoint's names. Linear, so gradients map alike."""

    def heads(name, count):  # [count * H, D] -> [D, count, H]
        return tensors[f"{name}.weight"].T.reshape(c.hidden_size, count, c.head_dim)

    def gated(name):
        gate, up = (tensors[f"{name}.{part}_proj.weight"].T for part in ("gate", "up"))
        return {"gate_up": np.stack([gate, up], 1), "down": tensors[f"{name}.down_proj.weight"].T}

    def attention(name):
        sizes = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        found = {part: heads(f"{name}.{part}_proj", n) for part, n in sizes.items()}
        found["o"] = tensors[f"{name}.o_proj.weight"].T.reshape(c.num_heads, c.head_dim, -1)
        if c.attention_bias:
            for part, n in sizes.items():
                found[f"{part}_bias"] = tensors[f"{name}.{part}_proj.bias"].reshape(n, c.head_dim)
        if c.qk_norm:
            found |= {f"{part}_norm": tensors[f"{name}.{part}_norm.weight"] for part in "qk"}
        return found

    def mixture(name):
        experts = [gated(f"{name}.experts.{e}") for e in range(c.num_experts)]
        bias = tensors.get(f"{name}.gate.e_score_correction_bias", np.zeros(c.num_experts))
        return jax.tree.map(lambda *x: np.stack(x), *experts) | {
            "router": tensors[f"{name}.gate.weight"].T,
            "router_bias": bias.astype(np.float32),
            "shared": gated(f"{name}.shared_experts"),
        }

    def layer(i):
        name = f"model.layers.{i}"
        return {
            "attention_norm": {"weight": tensors[f"{name}.input_layernorm.weight"]},
            "attention": attention(f"{name}.self_attn"),
            "mlp_norm": {"weight": tensors[f"{name}.post_attention_layernorm.weight"]},
            "mlp": (gated if i < c.num_dense_layers else mixture)(f"{name}.mlp"),
        }

    layers = [layer(i) for i in range(c.num_layers)]
    stack = lambda some: jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *some)  # noqa: E731
    return {
        "embed": jnp.asarray(tensors["model.embed_tokens.weight"]),
        "final_norm": jnp.asarray(tensors["model.norm.weight"]),
        "head": jnp.asarray(tensors["lm_head.weight"].T),
        "dense": stack(layers[: c.num_dense_layers]),
        "moe": stack(layers[c.num_dense_layers :]),
    }


@functools.cache
def golden(variant):
    """The stored arrays, and our config, parameters, expected gradient and batch made from them."""
    with np.load(FOLDER / f"{variant}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    fields = json.loads(str(arrays["config"]))
    config = ModelConfig(**{ours: fields[theirs] for ours, theirs in OUR_NAMES.items()})

    def tensors(kind):
        return {n.removeprefix(kind): x for n, x in arrays.items() if n.startswith(kind)}

    lengths = json.loads(str(arrays["lengths"]))
    mask = arrays["loss_mask"]
    batch = Batch(
        tokens=arrays["tokens"][:, :-1],
        targets=arrays["tokens"][:, 1:],
        loss_mask=mask,
        segment_ids=np.array([np.repeat(np.arange(len(d)) + 1, d) for d in lengths], np.int32),
        positions=np.array([np.concatenate([*map(np.arange, d)]) for d in lengths], np.int32),
        weights=mask.astype(np.float32),
        denominator=np.array([mask.sum(), 0], np.float32),
    )
    return SimpleNamespace(
        arrays=arrays,
        config=config,
        params=stack_layers(tensors("weight:"), config),
        grads=stack_layers(tensors("grad:"), config),
        batch=jax.tree.map(jnp.asarray, batch),
    )


@functools.partial(jax.jit, static_argnames="decoder")
def everything(params, batch, *, decoder):
    def loss(params):
        out = decoder(params, batch.tokens, batch.positions, batch.segment_ids)
        logprobs, _ = token_logprobs(
            decoder,
            params,
            out.hidden,
            batch.targets,
            temperature=1.0,
            entropy=False,
            chunk=batch.tokens.size,
        )
        found = {
            "logits": decoder.logits(params, out.hidden),
            "logprobs": logprobs,
            "routing": out.routing,
        }
        return -jnp.sum(logprobs * batch.weights) / jnp.sum(batch.weights), found

    (value, found), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return found | {"loss": value, "grads": grads}


@functools.cache
def ours(variant, scan_layers):
    """Logits, log-probs, routing, loss and gradient of our decoder on the variant's weights."""
    g = golden(variant)
    decoder = Decoder(g.config, scan_layers=scan_layers)
    return SimpleNamespace(**everything(g.params, g.batch, decoder=decoder))


# Variants of one config share a compilation; what differs in the others is inside a layer.
SCANNED = ["air", "air_packed", "bias_offset"]
RUNS = [(v, False) for v in VARIANTS] + [(v, True) for v in SCANNED]


@pytest.fixture(params=RUNS, ids=lambda run: f"{run[0]}-{'scanned' if run[1] else 'unrolled'}")
def both(request):
    """(golden, ours) of one variant, layers unrolled or scanned."""
    return golden(request.param[0]), ours(*request.param)


def test_there_are_goldens_of_every_variant():
    assert VARIANTS == ["air", "air_packed", "bias_offset", "groups", "qknorm"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_have_the_shapes_that_the_checkpoint_gives(variant):
    g = golden(variant)
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), Decoder(g.config).abstract_params())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), g.params) == expected


def test_logits_equal_hugging_faces(both):
    expected, got = both
    assert np.abs(expected.arrays["logits"]).max() > 3
    np.testing.assert_allclose(got.logits, expected.arrays["logits"], rtol=0, atol=2e-5)


def test_logprobs_equal_hugging_faces(both):
    expected, got = both
    np.testing.assert_allclose(got.logprobs, expected.arrays["logprobs"], rtol=0, atol=2e-5)


def test_every_layer_uses_the_experts_that_hugging_face_uses(both):
    expected, got = both
    c = expected.config
    routing = np.asarray(got.routing).reshape(-1, *c.routing_shape)
    for layer in range(c.num_moe_layers):
        ids = expected.arrays[f"router:{c.num_dense_layers + layer}:ids"]
        np.testing.assert_array_equal(np.sort(routing[:, layer]), np.sort(ids))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gates_equal_hugging_faces_on_the_same_input(variant):
    g = golden(variant)
    mlp = g.params["moe"]["mlp"]
    for layer in range(g.config.num_moe_layers):
        name = f"router:{g.config.num_dense_layers + layer}"
        x, ids, gates = (g.arrays[f"{name}:{part}"] for part in ("input", "ids", "gates"))
        found = moe.route(jnp.asarray(x), mlp["router"][layer], mlp["router_bias"][layer], g.config)
        by_expert = np.zeros((2, len(x), g.config.num_experts), np.float32)
        for dense, (some_ids, some_gates) in zip(by_expert, [found, (ids, gates)], strict=True):
            np.put_along_axis(dense, np.asarray(some_ids), np.asarray(some_gates), axis=-1)
        assert np.count_nonzero(by_expert[1]) == gates.size
        np.testing.assert_allclose(by_expert[0], by_expert[1], rtol=0, atol=1e-6)


def test_the_loss_equals_hugging_faces(both):
    expected, got = both
    np.testing.assert_allclose(got.loss, expected.arrays["loss"], rtol=0, atol=5e-6)


def test_every_gradient_equals_hugging_faces(both):
    expected, got = both
    worst = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), got.grads, expected.grads)
    assert max(jax.tree.leaves(worst)) < 1e-5, worst
    assert not np.any(got.grads["moe"]["mlp"]["router_bias"])
    # Each far above the tolerance, else equality would say little.
    largest = jax.tree.map(lambda x: float(np.abs(x).max()), expected.grads)
    del largest["moe"]["mlp"]["router_bias"]
    assert min(jax.tree.leaves(largest)) > 1e-3, largest
