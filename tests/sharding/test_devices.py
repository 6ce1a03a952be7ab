"""One device or eight, in any arrangement: the same curve, the same parameters, the same tokens."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from axion_jax.data.pack import pack
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn
from axion_jax.rl.losses import gspo_loss, sft_loss
from axion_jax.rl.reduce import each_sequence_alike, each_token_alike
from axion_jax.rl.update import make_update_step
from axion_jax.rollout.engine import Sampling
from axion_jax.rollout.jax_engine import JaxEngine
from axion_jax.sharding.rules import batch_sharding, param_shardings, state_shardings
from axion_jax.types import TrainState, Trajectory

pytestmark = pytest.mark.slow

MESHES = {"8x1": (8, 1), "1x8": (1, 8), "2x4": (2, 4)}
"""data x fsdp."""
# eps=1e-6: where a gradient is 0 up to rounding, Adam would make a full step of either sign of it.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95, eps=1e-6, weight_decay=0.1)
)


def mesh_of(data, fsdp):
    devices = jax.devices()[: data * fsdp]
    axes = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=axes, devices=devices)


@pytest.fixture(scope="module")
def config(tiny):
    return dataclasses.replace(tiny, num_layers=2)


@pytest.fixture(scope="module")
def params(config, random_params):
    return jax.device_get(random_params(Decoder(config), seed=2))


@pytest.fixture(scope="module")
def trajectories(config):
    """Rollouts of 5 to 12 tokens with recorded experts, a third of them unknown, and advantages."""
    rng = np.random.default_rng(4)
    found = []
    for i, n in enumerate(rng.integers(5, 13, 20)):
        mask = np.arange(n - 1) >= 2
        experts = rng.permuted(np.tile(np.arange(8, dtype=np.int8), (n - 1, 1, 1)), axis=-1)
        experts = experts[..., :2].copy()
        experts[rng.random(n - 1) < 1 / 3] = -1
        found.append(
            Trajectory(
                token_ids=rng.integers(0, config.vocab_size, n).astype(np.int32),
                loss_mask=mask,
                routing=experts,
                advantage=float(rng.normal()),
                rollout_id=i,
            )
        )
    return found


def packed(trajectories, config, reduction):
    """Two micro-batches of eight rows."""
    weights, denominator = reduction(trajectories)
    found = pack(
        trajectories,
        row_length=16,
        rows=8,
        pad_id=0,
        weights=weights,
        denominator=denominator,
        routing_shape=config.routing_shape,
        with_advantages=True,
        microbatches=3,
    )
    assert found.num_microbatches == 2
    return found.batch


@pytest.fixture(scope="module")
def sft_batch(trajectories, config):
    """Experts left to the router. Old log-probs are there for the one program that serves both."""
    batch = packed(trajectories, config, each_token_alike)
    no_replay = np.full_like(batch.routing, -1)
    old = np.zeros(batch.tokens.shape, np.float32)
    return dataclasses.replace(batch, routing=no_replay, old_logprobs=old)


@pytest.fixture(scope="module")
def gspo_batch(trajectories, config):
    """Old log-probs around -3: some sequences are clipped, others not."""
    batch = packed(trajectories, config, each_sequence_alike)
    old = np.random.default_rng(6).normal(-3, 0.5, batch.tokens.shape).astype(np.float32)
    return dataclasses.replace(batch, old_logprobs=old)


def train(config, params, sft_batch, gspo_batch, mesh):
    """Three SFT steps, then one GSPO step with replayed routing, laid out on `mesh`."""
    decoder = Decoder(config, mesh=mesh)
    layout = param_shardings(mesh, decoder.logical_axes(), decoder.abstract_params())

    def build(params):
        return TrainState(jnp.int32(0), params, OPTIMIZER.init(params), jnp.int32(0))

    layouts = state_shardings(mesh, layout, jax.eval_shape(build, params))
    state = jax.jit(build, out_shardings=layouts)(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, batch, is_gspo):
        """Either loss from one program, which halves the time to compile."""

        def loss_fn(scores, batch):
            gspo, metrics = gspo_loss(scores, batch, clip_low=0.2, clip_high=0.3)
            sft, _ = sft_loss(scores, batch)
            return jax.tree.map(lambda a, b: jnp.where(is_gspo, a, b), gspo, sft), metrics

        score_fn = make_score_fn(decoder, temperature=0.8, replay=True)
        return make_update_step(score_fn, loss_fn, OPTIMIZER)(state, batch, jnp.int32(2))

    history = []
    for batch, is_gspo in [(sft_batch, False)] * 3 + [(gspo_batch, True)]:
        on_devices = jax.device_put(batch, batch_sharding(mesh, leading=1))
        state, metrics = update(state, on_devices, is_gspo)
        history.append(jax.device_get(metrics))
    return SimpleNamespace(state=state, history=history)


@pytest.fixture(scope="module")
def one(config, params, sft_batch, gspo_batch):
    return train(config, params, sft_batch, gspo_batch, mesh_of(1, 1))


@pytest.fixture(scope="module", params=MESHES)
def eight(request, config, params, sft_batch, gspo_batch):
    mesh = mesh_of(*MESHES[request.param])
    return train(config, params, sft_batch, gspo_batch, mesh)


def test_the_loss_curve_is_that_of_one_device(one, eight):
    losses = [metrics["loss"] for metrics in one.history]
    # It is a curve, and the last step is GSPO on old log-probs that clip some sequences.
    assert losses[0] - losses[2] > 0.1
    assert 0 < one.history[3]["clip_frac"] < 1
    for got, expected in zip(eight.history, one.history, strict=True):
        assert got.keys() == expected.keys()
        for name in expected:
            assert got[name] == pytest.approx(float(expected[name]), abs=2e-5), name


def test_the_parameters_are_those_of_one_device(one, eight, params, config):
    got, expected = jax.device_get((eight.state.params, one.state.params))

    def largest_change(path, a, b):
        difference = np.abs(a - b)
        if path[-1].key == "k_bias":
            # Where nothing is rotated a key bias adds the same to the scores of all keys, and the
            # softmax takes it out. Its gradient is 0 up to rounding, which Adam makes a step of.
            assert difference.max() < 1e-3
            difference = difference[..., : config.rotary_dim]
        return float(difference.max())

    worst = jax.tree_util.tree_map_with_path(largest_change, got, expected)
    assert max(jax.tree.leaves(worst)) < 1e-5, worst
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), expected, params)
    del moved["moe"]["mlp"]["router_bias"]
    assert min(jax.tree.leaves(moved)) > 1e-2, moved


def test_the_router_is_replayed_on_every_device(one, eight):
    # Adam's second moment after four steps: gradients of experts that only replay reaches included.
    nu = [
        jax.device_get(run.state.opt_state[1][0].nu["moe"]["mlp"]["router"]) for run in (one, eight)
    ]
    assert np.all(nu[0] > 0)
    np.testing.assert_allclose(nu[1], nu[0], rtol=1e-3, atol=1e-9)


def test_parameters_and_moments_are_really_split_over_fsdp(eight, config):
    adam = eight.state.opt_state[1][0]
    mesh = jax.tree.leaves(eight.state.params)[0].sharding.mesh
    size = mesh.shape["fsdp"]
    d, e, f = config.hidden_size, config.num_experts, config.moe_intermediate_size
    for tree in (eight.state.params, adam.mu, adam.nu):
        shards = {
            "gate_up": tree["moe"]["mlp"]["gate_up"],
            "embed": tree["embed"],
            "o": tree["moe"]["attention"]["o"],
        }
        shapes = {name: {s.data.shape for s in x.addressable_shards} for name, x in shards.items()}
        assert shapes == {
            "gate_up": {(1, e, d // size, 2, f)},
            "embed": {(config.vocab_size, d // size)},
            "o": {(1, config.num_heads, config.head_dim, d // size)},
        }
        assert all(len(x.addressable_shards) == 8 for x in shards.values())


@pytest.mark.parametrize("shape", ["2x4"])
def test_the_engine_samples_the_same_tokens_on_eight_devices(config, params, shape):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in range(3, 9)]
    sampling = Sampling(max_new_tokens=8, stop_ids=(1, 2), seed=5)
    found = []
    for mesh in (mesh_of(1, 1), mesh_of(*MESHES[shape])):
        decoder = Decoder(config, mesh=mesh)
        layout = param_shardings(mesh, decoder.logical_axes(), decoder.abstract_params())
        engine = JaxEngine(decoder, max_batch=8, length_multiple=8)
        engine.update_weights(jax.device_put(params, layout), 1)
        found.append(engine.generate(prompts, sampling))
    for a, b in zip(*found, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason is b.finish_reason
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        np.testing.assert_array_equal(np.sort(a.routed_experts), np.sort(b.routed_experts))
