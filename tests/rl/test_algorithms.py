"""Mistakes in a config are answered before anything compiles."""

import inspect

import numpy as np
import pytest

from axion_jax.rl.algorithms import ALGORITHMS, check_batch, make_loss, make_reduction


def test_a_loss_comes_with_its_options_bound(rows):
    loss_fn = make_loss("grpo", clip_low=0.2, clip_high=0.28)
    sequence = {"mask": [1], "logprobs": [1.0], "old_logprobs": [0.0], "advantages": [1.0]}
    loss, _ = loss_fn(*rows([[sequence]]))
    np.testing.assert_allclose(loss.value, -1.28, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpso", {}, r"no algorithm 'gpso'.*Did you mean 'gspo'\?"),
        ("gspo", {"clip_hgih": 1e-4}, r"gspo has no option 'clip_hgih'.*Did you mean 'clip_high'"),
        ("gspo", {"clip_low": 3e-4}, "gspo needs a value for clip_high"),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 3.0}, "no option 'dual_clip'"),
        ("sft", {"clip_low": 0.2}, "sft has no option 'clip_low'; known: none"),
        ("grpo", {"clip_low": 0, "clip_high": 0.2}, "clip_low=0 must lie between 0 and 1"),
        ("grpo", {"clip_low": 1.0, "clip_high": 0.2}, "clip_low=1.0 must lie between 0 and 1"),
        ("cispo", {"clip_low": 1.1, "clip_high": 4.0}, "clip_low=1.1 must lie between 0 and 1"),
        ("gspo", {"clip_low": 4e-4, "clip_high": 3e-4}, "clip_low=0.0004 exceeds clip_high=0.0003"),
        ("grpo", {"clip_low": 0.2, "clip_high": -0.2}, "clip_high=-0.2 must be above 0"),
        ("grpo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1}, "dual_clip=1 must be above"),
    ],
)
def test_a_wrong_option_is_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_loss(name, **options)


def test_each_algorithm_has_a_default_reduction(trajectory):
    trajectories = [trajectory([1, 1], rollout_id=0), trajectory([0], rollout_id=1)]
    assert make_reduction("sft")(trajectories)[1] == 2
    assert make_reduction("gspo")(trajectories)[1] == 2
    assert make_reduction("grpo", "each_token_alike")(trajectories)[0][0].tolist() == [1, 1]
    weights, _ = make_reduction("grpo", "constant_length", length=4)(trajectories)
    assert weights[0].tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "reduction", "options", "message"),
    [
        ("gspo", "each_token_alike", {}, "gspo does not go with each_token_alike"),
        ("gspo_token", "each_token_alike", {}, "gspo_token does not go with each_token_alike"),
        ("gspo", "constant_length", {"length": 4}, "gspo does not go with constant_length"),
        ("preference", "each_sequence_alike", {}, "Use each_pair_alike"),
        ("grpo", "each_tokn_alike", {}, "Did you mean 'each_token_alike'"),
        ("grpo", "constant_length", {}, r"constant_length takes \['length'\], got \[\]"),
        ("grpo", None, {"length": 4}, r"each_sequence_alike takes no options, got \['length'\]"),
    ],
)
def test_a_reduction_that_does_not_go_with_the_algorithm_is_refused(
    name, reduction, options, message
):
    with pytest.raises(ValueError, match=message):
        make_reduction(name, reduction, **options)


def test_a_missing_field_is_reported_from_a_batch_or_from_names(rows):
    _, batch = rows([[{"mask": [1], "advantages": [1.0]}]])
    for present in (batch, ["advantages"]):
        with pytest.raises(ValueError, match=r"gspo needs Batch\.old_logprobs, which this batch"):
            check_batch("gspo", present)
    check_batch("gspo", ["advantages", "old_logprobs"])
    check_batch("sft", batch)


def test_every_row_is_a_loss_with_keyword_options_and_known_reductions():
    for name, row in ALGORITHMS.items():
        kinds = [p.kind for p in inspect.signature(row.loss).parameters.values()]
        assert kinds[2:] == [inspect.Parameter.KEYWORD_ONLY] * len(kinds[2:]), name
        options = {"length": 1} if "constant_length" in row.reductions[:1] else {}
        make_reduction(name, **options)
