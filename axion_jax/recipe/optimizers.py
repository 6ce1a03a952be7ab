"""Optimizers and schedules by name: a plain dict each, options checked against the function's own
signature."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from optax import contrib

Schedule = Callable[[Any], Any]


def constant(*, learning_rate: float, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up over `warmup_steps`, then constant."""
    if warmup_steps < 0:
        raise ValueError(f"schedule.warmup_steps={warmup_steps} must be at least 0.")
    if not warmup_steps:
        return optax.constant_schedule(learning_rate)
    return optax.warmup_constant_schedule(
        learning_rate / (warmup_steps + 1), learning_rate, warmup_steps
    )


def cosine(
    *, learning_rate: float, final_learning_rate: float, warmup_steps: int, num_steps: int
) -> Schedule:
    """Linear warm-up from 0, then a cosine down to `final_learning_rate` at `num_steps`."""
    if not 0 <= warmup_steps < num_steps:
        raise ValueError(
            f"schedule.warmup_steps={warmup_steps} must be below num_steps={num_steps}."
        )
    return optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps, num_steps, final_learning_rate
    )


def adamw(
    schedule: Schedule,
    *,
    b1: float,
    b2: float,
    weight_decay: float,
    max_grad_norm: float,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """AdamW on every parameter (Loshchilov and Hutter 2019, arXiv:1711.05101)."""
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
    )


def muon(
    schedule: Schedule,
    *,
    muon_scale: float,
    beta: float,
    b1: float,
    b2: float,
    weight_decay: float,
    max_grad_norm: float,
) -> optax.GradientTransformation:
    """Muon with weight decay on the weight matrices of the layers; on embeddings, heads, router,
    norms and biases Adam (b1, b2) with Nesterov momentum and without decay."""

    def dimension_numbers(params):
        def leaf(path, value):
            names = [key.key for key in path]
            if names[0] not in ("dense", "moe") or names[-1] not in MATRICES:
                return None
            inputs, outputs = MATRICES[names[-1]]
            return contrib.MuonDimensionNumbers(
                reduction_axis=tuple(value.ndim + axis for axis in inputs),
                output_axis=tuple(value.ndim + axis for axis in outputs),
            )

        return jax.tree_util.tree_map_with_path(leaf, params)

    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        contrib.muon(
            lambda step: muon_scale * schedule(step),
            adam_learning_rate=schedule,
            beta=beta,
            weight_decay=weight_decay,
            adam_b1=b1,
            adam_b2=b2,
            muon_weight_dimension_numbers=dimension_numbers,
        ),
    )


MATRICES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "q": ((-3,), (-2, -1)),
    "k": ((-3,), (-2, -1)),
    "v": ((-3,), (-2, -1)),
    "o": ((-3, -2), (-1,)),
    "gate_up": ((-3,), (-2, -1)),
    "down": ((-2,), (-1,)),
}
"""Which axes of a leaf, from the end, are a matrix's input and output; axes before them are a batch
of matrices."""

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {"adamw": adamw, "muon": muon}
SCHEDULES: dict[str, Callable[..., Schedule]] = {"constant": constant, "cosine": cosine}


def make_schedule(name: str = "", **options: Any) -> Schedule:
    """The learning rate as a function of the optimizer step."""
    make = bind(SCHEDULES, "schedule", name, options)
    if options["learning_rate"] <= 0:
        raise ValueError(f"schedule.learning_rate={options['learning_rate']} must be above 0.")
    if options.get("final_learning_rate", 0.0) < 0:
        raise ValueError("schedule.final_learning_rate must be 0 or more.")
    return make(**options)


def make_optimizer(
    schedule: Schedule, name: str = "", **options: Any
) -> optax.GradientTransformation:
    """An optimizer that leaves the router's correction bias alone: no gradient and no decay reaches
    it."""
    make = bind(OPTIMIZERS, "optimizer", name, options)
    for option in ("max_grad_norm", "muon_scale"):
        if options.get(option, 1.0) <= 0:
            raise ValueError(
                f"optimizer.{option}={options[option]} must be above 0, or nothing would learn."
            )
    for option in ("b1", "b2", "beta"):
        if not 0 <= options.get(option, 0.0) < 1:
            raise ValueError(f"optimizer.{option}={options[option]} must lie in [0, 1).")
    if options["weight_decay"] < 0:
        raise ValueError(f"optimizer.weight_decay={options['weight_decay']} must be 0 or more.")
    inner = make(schedule, **options)

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "frozen" if path[-1].key == "router_bias" else "trained", params
        )

    return optax.multi_transform({"trained": inner, "frozen": optax.set_to_zero()}, labels)


def bind(
    table: Mapping[str, Callable], what: str, name: str, options: Mapping[str, Any]
) -> Callable:
    """`table[name]`, after checking that it takes exactly these options.

    Raises:
      ValueError: an unknown name or option, answered with the nearest, or a missing option.
    """
    if name not in table:
        raise ValueError(f"There is no {what} {name!r}{_nearest(name, table)}")
    known = {
        p.name: p
        for p in inspect.signature(table[name]).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for option in options:
        if option not in known:
            raise ValueError(f"{what} {name} has no option {option!r}{_nearest(option, known)}")
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"{what} {name} needs {', '.join(missing)}.")
    return table[name]


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}."
