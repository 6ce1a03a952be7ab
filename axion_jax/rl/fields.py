"""What a loss needs from its inputs, reported by name before anything compiles.

A `Batch` field that nobody filled is None, and arithmetic with None fails deep inside a trace with
a message about types. `require` says instead which field is missing and what fills it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jaxtyping import Array

from axion_jax.types import Batch, Scores

NEXT_MOVE = {
    "advantages": "Call assign_advantages (rl/advantages.py) before packing.",
    "old_logprobs": "Score the batch with make_score_step (rl/update.py) before its first update.",
    "sampler_logprobs": "Record Trajectory.sampler_logprobs from the engine's generations.",
    "ref_logprobs": "Score the batch with make_score_step and the reference's parameters.",
    "returns": "Call generalized_advantages (rl/gae.py) before packing with_returns.",
    "old_values": "Call generalized_advantages (rl/gae.py) before packing with_returns.",
    "entropy": "Build the score function with entropy=True.",
    "values": "Use a model with a scalar head.",
}


def require(holder: Batch | Scores, *fields: str, who: str) -> tuple[Array, ...]:
    """Returns the named fields, none of them None.

    Args:
      holder: the batch or the scores.
      *fields: the names needed.
      who: the algorithm or function that needs them, for the message.

    Raises:
      ValueError: names each missing field and the next move.
    """
    arrays = {name: getattr(holder, name) for name in fields}
    present = [name for name, array in arrays.items() if array is not None]
    require_names(present, fields, who=who, kind=type(holder).__name__)
    return tuple(arrays.values())


def require_names(
    present: Collection[str], fields: Iterable[str], *, who: str, kind: str = "Batch"
) -> None:
    """Raises unless `fields` are all among the names that a batch has, or will have.

    A recipe can ask so before it spends an hour on rollouts.

    Raises:
      ValueError: names each missing field and the next move.
    """
    missing = [name for name in fields if name not in present]
    if missing:
        names = " and ".join(f"{kind}.{name}" for name in missing)
        moves = " ".join(NEXT_MOVE[name] for name in missing if name in NEXT_MOVE)
        which = "this batch lacks" if kind == "Batch" else "the model did not return"
        raise ValueError(f"{who} needs {names}, which {which}. {moves}".rstrip())
