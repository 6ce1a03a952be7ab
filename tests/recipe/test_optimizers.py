"""Optimizers and schedules by name: mistakes are answered, and each touches what it should."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axion_jax.models.decoder import Decoder
from axion_jax.recipe.optimizers import bind, make_optimizer, make_schedule

ADAMW = {"name": "adamw", "b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "max_grad_norm": 1.0}
MUON = ADAMW | {"name": "muon", "muon_scale": 4.0, "beta": 0.95}
RATE = 0.01


@pytest.fixture(scope="module")
def params(tiny, random_params):
    """A model's parameters; of the dense layer, whose attention is like the others', the MLP only."""
    params = random_params(Decoder(tiny))
    return params | {"dense": {"mlp": params["dense"]["mlp"]}}


@pytest.fixture(scope="module")
def gradients(params):
    """Gradients whose matrices are well conditioned: singular values between 0.5 and 1."""
    rng = np.random.default_rng(1)

    def leaf(path, value):
        if not is_matrix(path):
            return jnp.asarray(rng.normal(size=value.shape), value.dtype)
        flat = as_matrices(path, value)
        u, s, vt = np.linalg.svd(rng.normal(size=flat.shape), full_matrices=False)
        made = (u * np.linspace(0.5, 1, s.shape[-1])) @ vt
        return jnp.asarray(made.reshape(value.shape), value.dtype)

    return jax.tree_util.tree_map_with_path(leaf, params)


def names(path):
    return [key.key for key in path]


AXES = {"q": (1, 2), "k": (1, 2), "v": (1, 2), "o": (2, 1), "gate_up": (1, 2), "down": (1, 1)}
"""How many of a matrix's last axes are its inputs and its outputs: what a token's vector is summed
over, and what comes out. Heads and their width go together, and so do gate and up."""


def is_matrix(path):
    return names(path)[0] in ("dense", "moe") and names(path)[-1] in AXES


def as_matrices(path, value):
    """[..., inputs, outputs]: a leaf with the axes of its matrix taken together."""
    inputs, outputs = AXES[names(path)[-1]]
    batch, matrix = value.shape[: -inputs - outputs], value.shape[-inputs - outputs :]
    return np.asarray(value).reshape(*batch, math.prod(matrix[:inputs]), -1)


def one_update(params, gradients, optimizer):
    return jax.jit(lambda p, g: optimizer.update(g, optimizer.init(p), p)[0])(params, gradients)


def leaves(*trees):
    """(path, one leaf of each tree) for every parameter."""
    first, *others = map(jax.tree_util.tree_leaves_with_path, trees)
    return [
        (path, value, *(other[i][1] for other in others)) for i, (path, value) in enumerate(first)
    ]


def named(**options):
    return make_optimizer(make_schedule("constant", learning_rate=RATE), **options)


@pytest.fixture(scope="module")
def updates(params, gradients):
    """One update by each optimizer, all with weight decay."""
    return {o["name"]: one_update(params, gradients, named(**o)) for o in (ADAMW, MUON)}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_routers_correction_bias_is_left_alone_and_everything_else_moves(updates, name):
    biases = 0
    for path, update in leaves(updates[name]):
        if names(path)[-1] == "router_bias":
            biases += 1
            assert not np.any(update)
        else:
            assert np.any(update), path
    assert biases == 1


def test_muon_makes_every_matrix_of_the_layers_nearly_orthogonal(params, gradients, updates):
    seen = set()
    for path, update, value, gradient in leaves(updates["muon"], params, gradients):
        if is_matrix(path):
            seen.add(names(path)[-1])
            rate = MUON["muon_scale"] * RATE
            moved = as_matrices(path, update + rate * MUON["weight_decay"] * value)
            assert np.sum(moved * as_matrices(path, gradient)) < 0
            # Five Newton-Schulz steps bring singular values of 0.5 to 1 to within 0.68 to 1.13;
            # matrices with more outputs than inputs are scaled up (optax's scale_by_shape).
            rows, columns = moved.shape[-2:]
            s = np.linalg.svd(moved, compute_uv=False) / (rate * max(1, columns / rows) ** 0.5)
            assert s.min() > 0.6 and s.max() < 1.25, path
    assert seen == set(AXES)


def test_muon_leaves_what_is_no_matrix_of_a_layer_to_adam_without_decay(params, gradients, updates):
    nadam = optax.chain(
        optax.masked(optax.set_to_zero(), lambda p: jax.tree_util.tree_map_with_path(is_bias, p)),
        optax.clip_by_global_norm(MUON["max_grad_norm"]),
        optax.adamw(RATE, b1=MUON["b1"], b2=MUON["b2"], weight_decay=0.0, nesterov=True),
    )
    compared = set()
    for path, by_muon, by_adam in leaves(updates["muon"], one_update(params, gradients, nadam)):
        if not is_matrix(path):
            compared.add(names(path)[-1])
            np.testing.assert_allclose(by_muon, by_adam, rtol=1e-4, atol=1e-8)
    assert {"embed", "head", "router", "final_norm"} <= compared


def is_bias(path, _):
    return names(path)[-1] == "router_bias"


def test_weight_decay_pulls_every_parameter_towards_0(params, updates):
    few = {name: params[name] for name in ("embed", "final_norm")}
    still = jax.tree.map(jnp.zeros_like, few)
    for path, update, value in leaves(one_update(few, still, named(**ADAMW)), few):
        expected = -RATE * ADAMW["weight_decay"] * value
        np.testing.assert_allclose(update, expected, rtol=1e-5, err_msg=str(path))


def test_gradients_are_clipped_together_to_the_largest_norm(params, gradients):
    """Adam's first step has no size, so its second moment is looked at."""
    few, of_few = ({name: tree[name] for name in ("embed", "head")} for tree in (params, gradients))
    optimizer = named(**ADAMW)
    _, state = jax.jit(optimizer.update)(of_few, optimizer.init(few), few)
    second = optax.tree.get(state, "nu")
    total = sum(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(second))
    assert total / (1 - ADAMW["b2"]) == pytest.approx(1.0, rel=1e-3)  # the squared norm


def test_constant_schedule_warms_up_from_a_first_step_that_is_not_0():
    rate = make_schedule("constant", learning_rate=1.0, warmup_steps=4)
    assert [float(rate(i)) for i in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert float(make_schedule("constant", learning_rate=0.5)(0)) == 0.5


def test_cosine_schedule_goes_up_and_down():
    rate = make_schedule(
        "cosine", learning_rate=1.0, final_learning_rate=0.2, warmup_steps=2, num_steps=12
    )
    # Half-way between 2 and 12 the cosine is half-way between 1 and 0.2.
    assert [float(rate(i)) for i in (0, 1, 2, 7, 12, 20)] == pytest.approx(
        [0, 0.5, 1, 0.6, 0.2, 0.2]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_schedule("cosin", learning_rate=1.0), "There is no schedule 'cosin'; did you mean 'cosine'"),
        (lambda: make_schedule(learning_rate=1.0), "There is no schedule ''; known: constant, cosine."),
        (lambda: make_schedule("constant"), "schedule constant needs learning_rate."),
        (
            lambda: make_schedule("constant", learning_rate=1.0, warmup_step=1),
            "schedule constant has no option 'warmup_step'; did you mean 'warmup_steps'?",
        ),
        (
            lambda: make_schedule("constant", learning_rate=1.0, warmup_steps=-1),
            "warmup_steps=-1 must be at least 0",
        ),
        (
            lambda: make_schedule(
                "cosine", learning_rate=1.0, final_learning_rate=0.1, warmup_steps=5, num_steps=5
            ),
            "warmup_steps=5 must be below num_steps=5",
        ),
        (lambda: make_optimizer(None, **ADAMW | {"name": "adam"}), "no optimizer 'adam'; did you mean 'adamw'"),
        (lambda: make_optimizer(None, **ADAMW | {"beta": 0.9}), "adamw has no option 'beta'"),
        (lambda: make_optimizer(None, name="adamw", b1=0.9), "needs b2, weight_decay, max_grad_norm."),
        (lambda: make_optimizer(None, **ADAMW | {"max_grad_norm": 0.0}), "max_grad_norm=0.0 must be above 0"),
        (lambda: make_optimizer(None, **MUON | {"muon_scale": -1.0}), "muon_scale=-1.0 must be above 0"),
    ],
)  # fmt: skip
def test_what_a_table_does_not_have_is_answered_before_anything_is_built(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


def test_an_option_with_a_default_may_be_left_out():
    def f(x, *, needed, optional=1): ...

    assert bind({"f": f}, "thing", "f", {"needed": 1}) is f
    with pytest.raises(ValueError, match="thing f has no option 'x'"):
        bind({"f": f}, "thing", "f", {"needed": 1, "x": 2})
