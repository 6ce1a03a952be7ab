"""The in-process reward model: a decoder with a scalar head, read at the last token of prompt and
response.

Scores are centred on the training pairs (0 is half-way between preferred and rejected answers), so
that "positive" means what the RLHF length penalty takes it to mean: an answer people would rather
have.
"""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import numpy as np

from axion_jax.data.pack import Packed, Slot, pack
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_value_fn
from axion_jax.rewards.base import Sample
from axion_jax.types import Reward, Trajectory


def judged(trajectory: Trajectory, *, end_id: int, advantage: float = 0.0) -> Trajectory:
    """The trajectory as the reward model reads it: all its tokens are inputs, and only the last
    position counts.

    `end_id` is appended as a target, so that the token that ended the response is among the inputs.
    """
    token_ids = np.append(trajectory.token_ids, np.int32(end_id))
    last = np.zeros(len(token_ids) - 1, bool)
    last[-1] = True
    return Trajectory(
        token_ids=token_ids,
        loss_mask=last,
        task_id=trajectory.task_id,
        advantage=advantage,
        rollout_id=trajectory.rollout_id,
    )


class RewardModel:
    """Scores token sequences in batches of a fixed shape.

    Args:
      decoder: has a value head.
      params: its parameters.
      offset: subtracted from the head's output.
      end_id: see `judged`.
      row_length, rows: shape of the packed rows that are scored at once.
      sharding: where a batch of rows goes.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Any,
        *,
        offset: float,
        end_id: int,
        row_length: int,
        rows: int,
        sharding: jax.sharding.Sharding,
    ) -> None:
        self.params, self.offset = params, offset
        self._end_id, self._row_length, self._rows = end_id, row_length, rows
        self._sharding = sharding
        self._values = jax.jit(make_value_fn(decoder))

    def score_trajectories(self, trajectories: list[Trajectory]) -> np.ndarray:
        """[N] float32: centred scores."""
        sequences = [judged(t, end_id=self._end_id) for t in trajectories]
        packed = pack_for_scoring(
            sequences, row_length=self._row_length, rows=self._rows, pad_id=self._end_id
        )
        values = np.stack(
            [
                np.asarray(
                    self._values(
                        self.params, jax.device_put(_microbatch(packed, m), self._sharding)
                    )
                )
                for m in range(packed.num_microbatches)
            ]
        )
        return np.array([last_value(values, slot) for slot in packed.index]) - self.offset


def pack_for_scoring(
    sequences: list[Trajectory], *, row_length: int, rows: int, pad_id: int
) -> Packed:
    return pack(
        sequences,
        row_length=row_length,
        rows=rows,
        pad_id=pad_id,
        weights=[np.zeros(len(s.loss_mask), np.float32) for s in sequences],
        denominator=1.0,
    )


def last_value(values: np.ndarray, slot: Slot) -> float:
    return float(values[slot.microbatch, slot.row, slot.offset + slot.length - 1])


def _microbatch(packed: Packed, m: int):
    return jax.tree.map(lambda x: x[m], packed.batch)


class RewardModelScorer:
    """`async score` over a `RewardModel`: what arrives in one turn of the event loop is scored as
    one batch."""

    def __init__(self, model: RewardModel) -> None:
        self.model = model
        self._waiting: list[tuple[Trajectory, asyncio.Future]] = []

    async def score(self, sample: Sample) -> Reward:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append((sample.trajectory, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._score_waiting)
        return await future

    def _score_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            scores = self.model.score_trajectories([trajectory for trajectory, _ in waiting])
        except Exception as error:
            for _, future in waiting:
                future.set_exception(error)
            return
        for (_, future), score in zip(waiting, scores, strict=True):
            future.set_result(Reward(float(score), {"reward_model": float(score)}))
