"""What must change nothing, over random groups: order, micro-batches, padding, packing, devices, masked junk.

Groups go the whole way: advantages, weighing, packing, old and reference log-probs, one update of a
bigram model by a loss with a correction, a distance to a reference and an entropy bonus.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axion_jax.data.pack import pack
from axion_jax.rl.advantages import assign_advantages
from axion_jax.rl.algorithms import make_reduction
from axion_jax.rl.compose import make_policy_loss
from axion_jax.rl.update import make_score_step, make_update_step
from axion_jax.types import Reward, Scores, TrainState, Trajectory

V = 8
MOST, LONGEST = 8, 8
"""Trajectories of an example, predictions of a trajectory."""

ADDED = {"kl": {"name": "k3", "coefficient": 0.1}, "entropy_bonus": 0.01}
LOSSES = {
    "gspo": functools.partial(
        make_policy_loss,
        {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2},
        correction={"name": "tis", "cap": 1.5},
        rejection={"name": "sequence_mask", "low": 0.2, "high": 5.0},
        **ADDED,
    ),
    "grpo": functools.partial(
        make_policy_loss,
        {"name": "grpo", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.5},
        correction={"name": "icepop", "low": 0.5, "high": 2.0},
        **ADDED,
    ),
    "gspo_token": functools.partial(
        make_policy_loss,
        {"name": "gspo_token", "clip_low": 0.1, "clip_high": 0.2},
        correction={"name": "sequence_tis", "cap": 1.5},
        staleness={"name": "truncated", "cap": 1.5},
        **ADDED,
    ),
    "cispo": functools.partial(
        make_policy_loss,
        {"name": "cispo", "clip_low": 0.5, "clip_high": 1.0},
        rejection={"name": "veto", "threshold": 0.2},
        **ADDED,
    ),
}
LAYOUTS = {
    "one micro-batch": (8, 8, 1),
    "many micro-batches": (2, 8, 4),
    "long rows": (2, 32, 1),
    "padding": (4, 11, 3),
}
"""Rows, row length, micro-batches stored: always the same, so that each compiles once."""

few = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def score(table, batch):
    logprobs_BTV = jax.nn.log_softmax(table[batch.tokens])
    return Scores(
        logprobs=jnp.take_along_axis(logprobs_BTV, batch.targets[..., None], axis=-1)[..., 0],
        entropy=-jnp.sum(jnp.exp(logprobs_BTV) * logprobs_BTV, axis=-1),
    )


def table(seed):
    return jnp.asarray(0.3 * np.random.default_rng(seed).normal(size=(V, V)), jnp.float32)


@functools.cache
def programs(name):
    """(update, score), jitted once for each loss."""
    update = make_update_step(score, LOSSES[name](), optax.sgd(1.0))
    return jax.jit(update), jax.jit(make_score_step(score))


def step(name, trajectories, layout, *, mesh=None, junk=0.0):
    """(parameters, metrics) after one update; masked positions of every input hold `junk`."""
    rows, row_length, stored = LAYOUTS[layout]
    update, rescore = programs(name)
    reduction = make_reduction(name)
    kept, _ = assign_advantages(trajectories, baseline="group_std")
    weights, denominator = reduction(kept)
    packed = pack(
        kept,
        row_length=row_length,
        rows=rows,
        pad_id=0,
        weights=weights,
        denominator=denominator,
        with_advantages=True,
        with_sampler_logprobs=True,
        microbatches=stored,
    )
    used = np.int32(packed.num_microbatches)
    old, ref = (np.asarray(rescore(table(seed), packed.batch, used)["logprobs"]) for seed in (1, 2))
    batch = dataclasses.replace(packed.batch, old_logprobs=old, ref_logprobs=ref)
    fields = ("old_logprobs", "ref_logprobs", "sampler_logprobs", "advantages")
    batch = dataclasses.replace(
        batch,
        **{f: np.where(batch.loss_mask, getattr(batch, f), np.float32(junk)) for f in fields},
    )
    if mesh is not None:
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, "data")))
    optimizer = optax.sgd(1.0)
    params = table(0)
    state = TrainState(jnp.int32(0), params, optimizer.init(params), jnp.int32(0))
    state, metrics = update(state, batch, used)
    return np.asarray(state.params), {k: float(v) for k, v in metrics.items()}


def assert_same(a, b):
    np.testing.assert_allclose(a[0], b[0], rtol=0, atol=1e-6)
    assert a[1].keys() == b[1].keys()
    for key, value in a[1].items():
        np.testing.assert_allclose(b[1][key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@st.composite
def groups(draw):
    """2 to 8 trajectories of up to three groups: uneven, interleaved, some of them fully masked."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = []
    for i in range(draw(st.integers(2, MOST))):
        n = draw(st.integers(1, LONGEST))
        sampled = rng.random(n) < draw(st.sampled_from([0.0, 0.6, 1.0]))
        made.append(
            Trajectory(
                token_ids=rng.integers(0, V, n + 1).astype(np.int32),
                loss_mask=sampled,
                sampler_logprobs=np.where(sampled, -2 + 0.5 * rng.normal(size=n), 0).astype(
                    np.float32
                ),
                reward=Reward(draw(st.sampled_from([0.0, 0.35, 1.0]))),
                group_id=draw(st.integers(0, 2)) if i > 1 else 0,
                rollout_id=i,
            )
        )
    return made


every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
@few
@given(trajectories=groups(), data=st.data())
def test_order_micro_batches_padding_and_packing_change_nothing(name, trajectories, data):
    expected = step(name, trajectories, "one micro-batch")
    assert np.isfinite(expected[1]["loss"])
    for layout in LAYOUTS:
        shuffled = data.draw(st.permutations(trajectories))
        assert_same(expected, step(name, shuffled, layout))


@pytest.mark.parametrize("name", ["gspo"])
@few
@given(trajectories=groups())
def test_eight_devices_change_nothing(name, trajectories):
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    expected = step(name, trajectories, "one micro-batch")
    assert_same(expected, step(name, trajectories, "one micro-batch", mesh=mesh))


@every_loss
@few
@given(trajectories=groups(), junk=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_junk_in_masked_inputs_changes_nothing_at_all(name, trajectories, junk):
    expected = step(name, trajectories, "padding")
    params, metrics = step(name, trajectories, "padding", junk=junk)
    np.testing.assert_array_equal(params, expected[0])
    assert metrics == expected[1]


@every_loss
@few
@given(trajectories=groups(), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_masked_logprob_of_nan_reaches_neither_loss_nor_gradient(name, trajectories, bad):
    kept, _ = assign_advantages(trajectories, baseline="group_mean")
    weights, denominator = make_reduction(name)(kept)
    packed = pack(
        kept,
        row_length=LONGEST,
        rows=MOST,
        pad_id=0,
        weights=weights,
        denominator=denominator,
        with_advantages=True,
        with_sampler_logprobs=True,
        microbatches=1,
    )
    row = jax.tree.map(lambda x: x[0], packed.batch)
    noise = np.random.default_rng(0).normal(-2, 0.3, (4, *row.tokens.shape)).astype(np.float32)
    row = dataclasses.replace(row, old_logprobs=noise[0], ref_logprobs=noise[1])
    outcomes = []
    for junk in (0.0, bad):
        logprobs, entropy = (
            np.where(row.loss_mask, x, np.float32(junk)) for x in (noise[2], -noise[3])
        )
        loss, grad = gradient(name)(logprobs, entropy, row)
        outcomes.append([float(loss), *np.ravel(grad).tolist()])
    assert outcomes[0] == outcomes[1]
    assert not np.asarray(grad)[~row.loss_mask].any()


@functools.cache
def gradient(name):
    loss_fn = LOSSES[name]()

    def total(logprobs, entropy, batch):
        return loss_fn(Scores(logprobs=logprobs, entropy=entropy), batch)[0].value

    return jax.jit(jax.value_and_grad(total))
