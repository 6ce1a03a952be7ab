"""One policy loss from the sections of a config: a surrogate, what weighs it, what is added to it.

    loss = surrogate * correction * rejection * staleness  +  kl  -  entropy bonus

A section is a dict of a `name` and options, None for "without". Each part is a function that knows
nothing of the others; the tables here say which names there are. Every mistake is answered before
anything compiles.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from axion_jax.rl import corrections, staleness, terms
from axion_jax.rl.algorithms import ALGORITHMS, make_loss, nearest, row
from axion_jax.rl.update import LossFn

Section = Mapping[str, Any] | None

CORRECTIONS = {
    "tis": corrections.truncated_importance_sampling,
    "sequence_tis": corrections.sequence_truncated_importance_sampling,
    "icepop": corrections.icepop,
}
"""Importance weights of the trainer over the engine."""
REJECTIONS = {
    "sequence_mask": corrections.sequence_mask,
    "geometric_mask": corrections.geometric_mask,
    "veto": corrections.veto,
}
"""Sequences left out for how trainer and engine differ on them."""
STALENESS = {"truncated": staleness.truncated_staleness}
"""Importance weights of the current policy over the one that the step began with."""
KL = {
    name: functools.partial(terms.kl_to_reference, estimator=estimator)
    for name, estimator in (("k1", terms.k1), ("k2", terms.k2), ("k3", terms.k3))
}
"""Distances to the reference policy."""


def make_policy_loss(
    algorithm: Mapping[str, Any],
    *,
    correction: Section = None,
    rejection: Section = None,
    staleness: Section = None,
    kl: Section = None,
    entropy_bonus: float | None = None,
) -> LossFn:
    """Returns the loss of a policy algorithm with everything around it.

    Args:
      algorithm: a row of `ALGORITHMS` that has a ratio, with its options.
      correction, rejection: of engine against trainer; tables `CORRECTIONS` and `REJECTIONS`.
      staleness: of the policy against the one that the step began with; table `STALENESS`.
      kl: distance to the reference; table `KL`. Makes the loss need `Batch.ref_logprobs`.
      entropy_bonus: coefficient of the entropy.

    Raises:
      ValueError: a name or option that is unknown, missing or out of range, or parts that do not go
        together.
    """
    options = dict(algorithm)
    name = options.pop("name", "")
    policies = [known for known, entry in ALGORITHMS.items() if entry.ratio]
    if name not in policies:
        raise ValueError(f"There is no policy algorithm {nearest(name, policies)}")
    if staleness is not None and row(name).ratio == "token":
        raise ValueError(
            f"staleness does not go with {name}: the ratio of each token is in its loss already and "
            "would count twice. Leave staleness out, or use gspo."
        )
    weights = [
        _bind(table, what, section)
        for table, what, section in (
            (CORRECTIONS, "correction", correction),
            (REJECTIONS, "rejection", rejection),
            (STALENESS, "staleness", staleness),
        )
        if section is not None
    ]
    if weights:
        options["correction"] = corrections.product(*weights)
    added = [] if kl is None else [_bind(KL, "kl", kl)]
    if entropy_bonus is not None:
        _positive("entropy_bonus", entropy_bonus)
        added.append(functools.partial(terms.entropy_bonus, coefficient=entropy_bonus))
    return terms.add(make_loss(name, **options), *added)


def _bind(table: Mapping[str, Callable], what: str, section: Mapping[str, Any]) -> Callable:
    """Returns the function that a section names, with the section's options bound and checked."""
    options = dict(section)
    name = options.pop("name", "")
    if name not in table:
        raise ValueError(f"There is no {what} {nearest(name, table)}")
    bound = getattr(table[name], "keywords", {})
    known = {
        p.name: p
        for p in inspect.signature(table[name]).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in bound
    }
    for option in options:
        if option not in known:
            raise ValueError(f"{what} {name} has no option {nearest(option, known)}")
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"{what} {name} needs a value for {' and '.join(missing)}.")
    for option in ("cap", "low", "high", "threshold", "coefficient"):
        if option in options:
            _positive(f"{what}.{option}", options[option])
    if "low" in options and not options["low"] < options["high"]:
        raise ValueError(
            f"{what}.low={options['low']} must be below {what}.high={options['high']}."
        )
    return functools.partial(table[name], **options)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}={value} must be above 0; leave the section out to go without.")
