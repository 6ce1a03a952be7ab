"""Which loss, which batch fields and which weighing make up "gspo".

A new algorithm is a function in rl/losses.py and a row in `ALGORITHMS`. Everything a config can get
wrong is answered here, before anything compiles: a misspelt name or option, a clip range out of
order, a weighing that makes the method a different one, a field the batch lacks.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from axion_jax.rl import losses, reduce
from axion_jax.rl.fields import require, require_names
from axion_jax.rl.reduce import Reduction
from axion_jax.rl.update import LossFn
from axion_jax.types import Batch


class Algorithm(NamedTuple):
    """One row of the table."""

    loss: Callable[..., Any]
    """`(Scores, Batch, **options) -> (Mean, metrics)`."""
    fields: tuple[str, ...]
    """What `Batch` must carry beyond what every batch has."""
    reductions: tuple[str, ...]
    """Names in rl/reduce.py that go with it; the first is the default."""
    ratio: str = ""
    """For a policy algorithm: whether pi/pi_old is taken of each "token" or of the "sequence"."""


ALGORITHMS = {
    "sft": Algorithm(
        loss=losses.sft_loss,
        fields=(),
        reductions=("each_token_alike", "each_sequence_alike"),
    ),
    # Dr. GRPO is this with the reduction constant_length and the baseline group_mean; PPO is this with
    # generalized_advantages (rl/gae.py) and value_loss (rl/terms.py) added.
    "grpo": Algorithm(
        loss=losses.grpo_loss,
        fields=("advantages", "old_logprobs"),
        reductions=("each_sequence_alike", "each_token_alike", "constant_length"),
        ratio="token",
    ),
    # A sequence-level loss summed over tokens would weigh sequences by their length: not GSPO.
    "gspo": Algorithm(
        loss=losses.gspo_loss,
        fields=("advantages", "old_logprobs"),
        reductions=("each_sequence_alike",),
        ratio="sequence",
    ),
    "gspo_token": Algorithm(
        loss=losses.gspo_token_loss,
        fields=("advantages", "old_logprobs"),
        reductions=("each_sequence_alike",),
        ratio="sequence",
    ),
    "cispo": Algorithm(
        loss=losses.cispo_loss,
        fields=("advantages", "old_logprobs"),
        reductions=("each_token_alike", "each_sequence_alike", "constant_length"),
        ratio="token",
    ),
    "preference": Algorithm(
        loss=losses.preference_loss,
        fields=("advantages",),
        reductions=("each_pair_alike",),
    ),
}


def make_loss(name: str, **options: Any) -> LossFn:
    """Returns the loss of algorithm `name` with its options bound.

    Raises:
      ValueError: an unknown algorithm or option (answers with the nearest name), one that is
        missing, or a value out of range.
    """
    loss = row(name).loss
    known = {
        parameter.name: parameter
        for parameter in inspect.signature(loss).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {nearest(option, known)}")
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"{name} needs a value for {' and '.join(missing)}.")
    _check_ranges(name, options)
    return functools.partial(loss, **options)


def make_reduction(name: str, reduction: str | None = None, **options: Any) -> Reduction:
    """Returns how algorithm `name` weighs predictions: its default, or the one asked for.

    Args:
      name: the algorithm.
      reduction: a name in rl/reduce.py, or None for the algorithm's default.
      **options: `length` for `constant_length`; the others have none.

    Raises:
      ValueError: an unknown reduction, one that does not go with the algorithm, or wrong options.
    """
    allowed = row(name).reductions
    reduction = allowed[0] if reduction is None else reduction
    every = {choice for row in ALGORITHMS.values() for choice in row.reductions}
    if reduction not in every:
        raise ValueError(f"There is no reduction {nearest(reduction, every)}")
    if reduction not in allowed:
        raise ValueError(
            f"{name} does not go with {reduction}: it would be a different method. "
            f"Use {' or '.join(allowed)}."
        )
    needed = {"length"} if reduction == "constant_length" else set()
    if options.keys() != needed:
        raise ValueError(
            f"{reduction} takes {sorted(needed) or 'no options'}, got {sorted(options)}."
        )
    return functools.partial(getattr(reduce, reduction), **options)


def check_batch(name: str, batch: Batch | Collection[str]) -> None:
    """Raises unless the batch has what algorithm `name` needs.

    Args:
      name: the algorithm.
      batch: the batch, or the names of the fields it will have.

    Raises:
      ValueError: names the missing field and the next move.
    """
    fields = row(name).fields
    if isinstance(batch, Batch):
        require(batch, *fields, who=name)
    else:
        require_names(batch, fields, who=name)


def row(name: str) -> Algorithm:
    """Returns the row of algorithm `name`; an unknown one is answered with the nearest."""
    if name not in ALGORITHMS:
        raise ValueError(f"There is no algorithm {nearest(name, ALGORITHMS)}")
    return ALGORITHMS[name]


def nearest(name: str, known: Collection[str]) -> str:
    """Returns the end of a sentence about a name that is not known."""
    close = difflib.get_close_matches(name, known, n=1)
    suggestion = f" Did you mean '{close[0]}'?" if close else ""
    return f"'{name}'; known: {', '.join(sorted(known)) or 'none'}.{suggestion}"


def _check_ranges(name: str, options: dict[str, Any]) -> None:
    low, high, dual = (options.get(key) for key in ("clip_low", "clip_high", "dual_clip"))
    # CISPO's weights may be open below: 1 - clip_low = 0.
    most = 1.0 if name == "cispo" else math.nextafter(1.0, 0.0)
    if low is not None and not 0 < low <= most:
        raise ValueError(f"{name}: clip_low={low} must lie between 0 and 1 (half-width below 1).")
    if high is not None and not high > 0:
        raise ValueError(f"{name}: clip_high={high} must be above 0 (half-width above 1).")
    if low is not None and high is not None and low > high:
        raise ValueError(
            f"{name}: clip_low={low} exceeds clip_high={high}. Both are half-widths around a ratio of "
            "1, and the upper side is the wider one; are they swapped?"
        )
    if dual is not None and not dual > 1:
        raise ValueError(f"{name}: dual_clip={dual} must be above 1; None turns it off.")
