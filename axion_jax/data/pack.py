"""Packing ragged trajectories into the fixed rows of an update, and taking results apart again.

Here, and only here, tokens are shifted: a trajectory of N tokens becomes N - 1 inputs with N - 1
targets, one segment of a row. What surprises newcomers: padding is told from text by its segment 0,
never by its id. GLM's pad token is also one of its stop tokens, and a stop token is trained on like
any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from axion_jax.types import Batch, Trajectory


class Slot(NamedTuple):
    """Where the predictions of one trajectory went."""

    microbatch: int
    row: int
    offset: int
    length: int


class Packed(NamedTuple):
    """One optimizer step's data."""

    batch: Batch
    """Numpy leaves [M, B, T, ...]; `denominator` is [M, B]."""
    num_microbatches: int
    """How many of the M micro-batches are used; those after it hold nothing but padding."""
    index: list[Slot]
    """One for each trajectory, in the order given."""


def pack(
    trajectories: Sequence[Trajectory],
    *,
    row_length: int,
    rows: int,
    pad_id: int,
    weights: Sequence[np.ndarray],
    denominator: float,
    routing_shape: tuple[int, int] | None = None,
    with_advantages: bool = False,
    with_sampler_logprobs: bool = False,
    with_returns: bool = False,
    microbatches: int | None = None,
    together: int = 1,
    max_segments: int | None = None,
) -> Packed:
    """Trajectories in rows: longest first, each in the first row with room (first-fit decreasing).

    Args:
      row_length: T, predictions a row holds.
      rows: B, rows of a micro-batch.
      pad_id: fills the tokens and targets of padding.
      weights: [N-1] float32 for each trajectory: what its predictions count in the loss
        (rl/reduce.py).
      denominator: of the whole step, counted before anything was cut. Each row of the used
        micro-batches, empty ones too, carries an equal share, so any number of them adds up to it.
      routing_shape: (L, K) if the batch is to carry recorded routing. A trajectory without any gets
        -1. The type is that of the trajectories' arrays, int8 where none has one.
      with_advantages: spread `Trajectory.advantage` over its trained predictions.
      with_sampler_logprobs: carry `Trajectory.sampler_logprobs`.
      with_returns: carry `Trajectory.returns` and `values`, for a value head.
      microbatches: M, storage to fill, so that steps of different size share one compiled shape.
        None: as many as needed.
      together: trajectories k * together, ... share a row, as neighbouring segments in the order
        given. With 2, the k-th pair of a row is its segments 2k-1 and 2k.
      max_segments: most segments of a row, where a loss needs a bound. None: no bound.

    Raises:
      ValueError: a trajectory does not fit a row or lacks what was asked for, or storage is too
        small.
    """
    lengths = _checked_lengths(
        trajectories, weights, row_length=row_length, together=together, max_segments=max_segments
    )
    row_of, offset_of, segment_of = _place(lengths, row_length, together, max_segments)
    num_microbatches = -(-(int(row_of.max()) + 1) // rows)
    stored = num_microbatches if microbatches is None else microbatches
    if num_microbatches > stored:
        raise ValueError(
            f"{len(trajectories)} trajectories of {lengths.sum()} predictions need "
            f"{num_microbatches} micro-batches of {rows} rows of {row_length}, but storage is for "
            f"microbatches={stored}."
        )

    def filled(value: float, dtype: DTypeLike, *shape: int) -> np.ndarray:
        return np.full((stored * rows, row_length, *shape), value, dtype)

    # Any: types.Batch says jax.Array, which is what the update turns these numpy arrays into.
    leaves: dict[str, Any] = {
        "tokens": filled(pad_id, np.int32),
        "targets": filled(pad_id, np.int32),
        "loss_mask": filled(False, np.bool_),
        "segment_ids": filled(0, np.int32),
        "positions": filled(0, np.int32),
        "weights": filled(0, np.float32),
    }
    if with_advantages:
        leaves["advantages"] = filled(0, np.float32)
    if with_sampler_logprobs:
        leaves["sampler_logprobs"] = filled(0, np.float32)
    if with_returns:
        leaves["returns"], leaves["old_values"] = filled(0, np.float32), filled(0, np.float32)
    if routing_shape is not None:
        recorded = [t.routing.dtype for t in trajectories if t.routing is not None]
        leaves["routing"] = filled(-1, np.result_type(np.int8, *recorded), *routing_shape)

    for i, trajectory in enumerate(trajectories):
        span = row_of[i], slice(offset_of[i], offset_of[i] + lengths[i])
        leaves["tokens"][span] = trajectory.token_ids[:-1]
        leaves["targets"][span] = trajectory.token_ids[1:]
        leaves["loss_mask"][span] = trajectory.loss_mask
        leaves["segment_ids"][span] = segment_of[i]
        leaves["positions"][span] = np.arange(lengths[i])
        leaves["weights"][span] = weights[i]
        if with_advantages:
            advantage = _needed(trajectory, "advantage", "with_advantages")
            leaves["advantages"][span] = np.where(trajectory.loss_mask, advantage, 0)
        if with_sampler_logprobs:
            logprobs = _needed(trajectory, "sampler_logprobs", "with_sampler_logprobs")
            leaves["sampler_logprobs"][span] = logprobs
        if with_returns:
            leaves["returns"][span] = _needed(trajectory, "returns", "with_returns")
            leaves["old_values"][span] = _needed(trajectory, "values", "with_returns")
        if routing_shape is not None and trajectory.routing is not None:
            if trajectory.routing.shape[1:] != tuple(routing_shape):
                raise ValueError(
                    f"{_name(trajectory)} has routing of {trajectory.routing.shape[1:]} (layers, "
                    f"experts per token), but routing_shape={routing_shape}."
                )
            leaves["routing"][span] = trajectory.routing

    share = np.zeros(stored * rows, np.float32)
    share[: num_microbatches * rows] = denominator / (num_microbatches * rows)
    leaves["denominator"] = share
    batch = Batch(
        **{name: leaf.reshape(stored, rows, *leaf.shape[1:]) for name, leaf in leaves.items()}
    )
    placed = zip(row_of.tolist(), offset_of.tolist(), lengths.tolist(), strict=True)
    index = [Slot(row // rows, row % rows, offset, length) for row, offset, length in placed]
    return Packed(batch, num_microbatches, index)


def unpack(array: ArrayLike, index: Sequence[Slot]) -> list[np.ndarray]:
    """The [N-1, ...] values of each trajectory in a packed [M, B, T, ...] array: undoes `pack`."""
    values = np.asarray(array)
    return [values[s.microbatch, s.row, s.offset : s.offset + s.length] for s in index]


def _checked_lengths(
    trajectories: Sequence[Trajectory],
    weights: Sequence[np.ndarray],
    *,
    row_length: int,
    together: int,
    max_segments: int | None,
) -> np.ndarray:
    """[trajectories] int64. Predictions of each; everything that goes by length is checked here."""
    if not trajectories:
        raise ValueError("There are no trajectories to pack.")
    if len(weights) != len(trajectories):
        raise ValueError(
            f"{len(weights)} arrays of weights came for {len(trajectories)} trajectories."
        )
    if len(trajectories) % together:
        raise ValueError(
            f"{len(trajectories)} trajectories do not divide into groups of together={together}."
        )
    if max_segments is not None and together > max_segments:
        raise ValueError(
            f"together={together} trajectories exceed max_segments={max_segments} of a row."
        )
    for trajectory, weight in zip(trajectories, weights, strict=True):
        length = len(trajectory.token_ids) - 1
        if not 0 < length <= row_length:
            raise ValueError(
                f"{_name(trajectory)} makes {length} predictions, but a row takes 1 to "
                f"row_length={row_length}."
            )
        if len(weight) != length:
            raise ValueError(
                f"{_name(trajectory)} makes {length} predictions, but has {len(weight)} weights."
            )
    lengths = np.array([len(t.token_ids) - 1 for t in trajectories])
    totals = lengths.reshape(-1, together).sum(axis=1)
    if totals.max() > row_length:
        first = int(totals.argmax()) * together
        raise ValueError(
            f"{_name(trajectories[first])} and the {together - 1} kept together with it make "
            f"{totals.max()} predictions, more than row_length={row_length}."
        )
    return lengths


def _place(
    lengths: np.ndarray, row_length: int, together: int, max_segments: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, offset and segment number of each trajectory; rows counted over all micro-batches."""
    grouped = lengths.reshape(-1, together)
    totals = grouped.sum(axis=1)
    most = len(lengths) if max_segments is None else max_segments
    room, segments = np.full(len(totals), row_length), np.zeros(len(totals), np.int64)
    row_of, offset_of, segment_of = (np.empty_like(grouped) for _ in range(3))
    for group in np.argsort(-totals, kind="stable"):
        row = int(np.argmax((room >= totals[group]) & (segments + together <= most)))
        row_of[group] = row
        offset_of[group] = row_length - room[row] + np.cumsum(grouped[group]) - grouped[group]
        segment_of[group] = segments[row] + 1 + np.arange(together)
        room[row] -= totals[group]
        segments[row] += together
    return row_of.ravel(), offset_of.ravel(), segment_of.ravel()


def _needed(trajectory: Trajectory, field: str, option: str) -> np.ndarray | float:
    value = getattr(trajectory, field)
    if value is None:
        raise ValueError(f"{_name(trajectory)} has no {field}, which {option}=True needs.")
    return value


def _name(trajectory: Trajectory) -> str:
    return f"Trajectory {trajectory.task_id!r}"
