"""Small batches and trajectories, written as the numbers a test is about."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.types import Batch, Reward, Scores, Trajectory


def make_rows(rows, *, length=None, denominator=None, dtype=jnp.float32, **fields):
    """Returns (Scores, Batch) from rows of sequences.

    Args:
      rows: per row, a list of sequences; each a dict with `mask` and any [N] entries named like
        Batch or Scores fields. Missing `weights` are 1/|mask| (each sequence alike).
      length: T; longer rows are padded, the padding filled with `fill`.
      denominator: of the whole step; by default the number of sequences. The first row carries it.
    """
    fill = fields.pop("fill", 0.0)
    assert not fields
    num_tokens = max(sum(len(s["mask"]) for s in row) for row in rows)
    shape = (len(rows), length or num_tokens)
    names = {name for row in rows for sequence in row for name in sequence} - {"mask"}
    arrays = {name: np.full(shape, fill) for name in names | {"weights"}}
    arrays["weights"][:] = 0
    mask = np.zeros(shape, bool)
    segment_ids = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    for b, row in enumerate(rows):
        start = 0
        for k, sequence in enumerate(row):
            m = np.asarray(sequence["mask"], bool)
            span = slice(start, start + len(m))
            mask[b, span] = m
            segment_ids[b, span] = k + 1
            positions[b, span] = np.arange(len(m))
            arrays["weights"][b, span] = m / max(m.sum(), 1)
            for name, values in sequence.items():
                if name != "mask":
                    arrays[name][b, span] = values
            start = span.stop
    share = np.zeros(len(rows))
    share[0] = sum(map(len, rows)) if denominator is None else denominator
    cast = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    scores = {name: cast.pop(name) for name in ("logprobs", "entropy", "values") if name in cast}
    scores.setdefault("logprobs", jnp.zeros(shape, dtype))
    batch = Batch(
        tokens=jnp.zeros(shape, jnp.int32),
        targets=jnp.zeros(shape, jnp.int32),
        loss_mask=jnp.asarray(mask),
        segment_ids=jnp.asarray(segment_ids),
        positions=jnp.asarray(positions),
        denominator=jnp.asarray(share, dtype),
        **cast,
    )
    return Scores(**scores), batch


def make_trajectory(mask, *, reward=None, **fields):
    """Returns a Trajectory with this loss mask and reward."""
    return Trajectory(
        token_ids=np.zeros(len(mask) + 1, np.int32),
        loss_mask=np.asarray(mask, bool),
        reward=None if reward is None else Reward(reward),
        **fields,
    )


@pytest.fixture
def rows():
    return make_rows


@pytest.fixture
def trajectory():
    return make_trajectory


@pytest.fixture
def double():
    """float64 inside the test, for vectors printed to more digits than float32 holds."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict():
    """Mixing dtypes is an error inside the test."""
    with jax.numpy_dtype_promotion("strict"):
        yield
