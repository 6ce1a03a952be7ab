"""The real GLM-4.5-Air, traced without a byte of its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axion_jax.models.config import GLM_45_AIR
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn
from axion_jax.rl.losses import gspo_loss
from axion_jax.rl.update import make_update_step
from axion_jax.sharding.rules import param_shardings
from axion_jax.types import Batch, TrainState

M, B, T = 2, 8, 4096


def test_a_training_step_of_glm_45_air_traces_in_seconds():
    decoder = Decoder(GLM_45_AIR, dtype=jnp.bfloat16, scan_layers=True, remat=True)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))
    step = make_update_step(
        make_score_fn(decoder, temperature=0.8, replay=True),
        functools.partial(gspo_loss, clip_low=3e-4, clip_high=4e-4),
        optimizer,
    )
    params = decoder.abstract_params()
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=params,
        opt_state=jax.eval_shape(optimizer.init, params),
        skipped=jax.ShapeDtypeStruct((), jnp.int32),
    )
    like = functools.partial(jax.ShapeDtypeStruct, (M, B, T))
    batch = Batch(
        tokens=like(jnp.int32),
        targets=like(jnp.int32),
        loss_mask=like(jnp.bool_),
        segment_ids=like(jnp.int32),
        positions=like(jnp.int32),
        weights=like(jnp.float32),
        denominator=jax.ShapeDtypeStruct((M, B), jnp.float32),
        advantages=like(jnp.float32),
        old_logprobs=like(jnp.float32),
        routing=jax.ShapeDtypeStruct((M, B, T, 45, 8), jnp.int8),
    )
    new_state, metrics = jax.eval_shape(step, state, batch, jnp.int32(M))
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), new_state, state)
    assert all(jax.tree.leaves(same))
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32
    # Float32 parameters with both Adam moments and the correction biases: 12 bytes each.
    size = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(new_state))
    assert 12 * 106_852_245_504 < size < 12.001 * 106_852_245_504


def test_every_dimension_that_is_sharded_divides_over_a_pod():
    # hidden_size 4096 over 512 devices of `fsdp`.
    mesh = jax.sharding.AbstractMesh((1, 512), ("data", "fsdp"))
    decoder = Decoder(GLM_45_AIR)
    shardings = param_shardings(mesh, decoder.logical_axes(), decoder.abstract_params())
    experts = decoder.abstract_params()["moe"]["mlp"]["gate_up"]
    assert shardings["moe"]["mlp"]["gate_up"].shard_shape(experts.shape) == (45, 128, 8, 2, 1408)
