"""From sections to one loss: the parts go together, and mistakes are answered before anything compiles."""

import numpy as np
import pytest

from axion_jax.rl.advantages import group_advantages
from axion_jax.rl.compose import make_policy_loss
from axion_jax.rl.reduce import constant_length

GRPO = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28}
GSPO = {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}


def test_every_part_takes_its_place(rows):
    # One token, ratio 1, A 2. Engine: r = e^1, capped to 2. Staleness: pi/pi_old = 1.
    # -2 * 2 = -4; k2 of log pi/pi_ref = .2: .02 * .5 = .01; entropy 3 * .1 = .3.
    sequence = {
        "mask": [1],
        "logprobs": [-1.0],
        "old_logprobs": [-1.0],
        "sampler_logprobs": [-2.0],
        "ref_logprobs": [-1.2],
        "advantages": [2.0],
        "entropy": [3.0],
    }
    sections = {
        "correction": {"name": "tis", "cap": 2.0},
        "rejection": {"name": "geometric_mask", "low": 0.5, "high": 3.0},
        "staleness": {"name": "truncated", "cap": 2.0},
        "kl": {"name": "k2", "coefficient": 0.5},
        "entropy_bonus": 0.1,
    }
    loss, metrics = make_policy_loss(GSPO, **sections)(*rows([[sequence]]))
    np.testing.assert_allclose(loss.value, -4 + 0.01 - 0.3, rtol=1e-6)
    assert metrics.keys() >= {
        "tis_weight",
        "geometric_masked_frac",
        "staleness_weight",
        "kl_loss",
        "pg_loss",
        "entropy",
    }
    sections["rejection"] = {"name": "geometric_mask", "low": 0.5, "high": 2.0}
    loss, _ = make_policy_loss(GSPO, **sections)(*rows([[sequence]]))
    np.testing.assert_allclose(loss.value, 0.01 - 0.3, rtol=1e-6)


def test_a_rejection_changes_the_numerator_and_not_the_denominator(rows):
    def sequence(sampler):
        return {
            "mask": [1],
            "logprobs": [-1.0],
            "old_logprobs": [-1.0],
            "sampler_logprobs": [sampler],
            "advantages": [1.0],
        }

    loss_fn = make_policy_loss(GSPO, rejection={"name": "veto", "threshold": 1e-4})
    loss, _ = loss_fn(*rows([[sequence(-1.0), sequence(19.0)]]))
    assert (loss.weight, loss.value) == (2, -0.5)  # over the kept alone it would be -1


def test_icepop_shows_in_a_sequence_level_loss(rows):
    # Two tokens of one sequence, s = 1, A = 1; the second token's ratio e^-3 leaves the band:
    # -(1 + 0)/2, not -1
    sequence = {
        "mask": [1, 1],
        "logprobs": [-1.0, -4.0],
        "old_logprobs": [-1.0, -4.0],
        "sampler_logprobs": [-1.0, -1.0],
        "advantages": [1.0, 1.0],
    }
    loss_fn = make_policy_loss(GSPO, correction={"name": "icepop", "low": 0.5, "high": 2.0})
    np.testing.assert_allclose(loss_fn(*rows([[sequence]]))[0].value, -0.5, rtol=1e-6)


def test_dr_grpo_is_the_group_mean_with_a_constant_length(rows, trajectory):
    # rewards 1, 0: A = +-.5. Lengths 1 and 3 at ratio 1, constant 4: (-.5*1 + .5*3)/4 over 2
    # rollouts = .125; per-sequence means would cancel to 0.
    a, b = group_advantages([1.0, 0.0], [0, 0], baseline="group_mean")
    weights, denominator = constant_length(
        [trajectory([1], rollout_id=0), trajectory([1, 1, 1], rollout_id=1)], 4
    )
    sequences = [
        {
            "mask": np.ones(len(w)),
            "logprobs": np.full(len(w), -1.0),
            "old_logprobs": np.full(len(w), -1.0),
            "advantages": np.full(len(w), x),
            "weights": w,
        }
        for x, w in zip((a, b), weights, strict=True)
    ]
    loss, _ = make_policy_loss(GRPO)(*rows([sequences], denominator=denominator))
    np.testing.assert_allclose(loss.value, 0.125, rtol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "sections", "message"),
    [
        ({"name": "gsop"}, {}, r"no policy algorithm 'gsop'.*Did you mean 'gspo'\?"),
        ({"name": "sft"}, {}, "no policy algorithm 'sft'; known: cispo, grpo, gspo, gspo_token"),
        ({}, {}, "no policy algorithm ''"),
        (GRPO, {"correction": {"name": "tsi"}}, r"no correction 'tsi'.*Did you mean 'tis'\?"),
        (GRPO, {"correction": {"name": "tis"}}, "correction tis needs a value for cap"),
        (GRPO, {"correction": {"name": "tis", "cpa": 2}}, r"no option 'cpa'.*Did you mean 'cap'"),
        (GRPO, {"correction": {"name": "tis", "cap": 0}}, "correction.cap=0 must be above 0"),
        (
            GRPO,
            {"correction": {"name": "icepop", "low": 2.0, "high": 0.5}},
            "correction.low=2.0 must be below correction.high=0.5",
        ),
        (
            GRPO,
            {"rejection": {"name": "veto", "threshold": 0.0}},
            "rejection.threshold=0.0 must be above 0",
        ),
        (GRPO, {"kl": {"name": "k4", "coefficient": 1.0}}, "no kl 'k4'; known: k1, k2, k3"),
        (GRPO, {"kl": {"name": "k3"}}, "kl k3 needs a value for coefficient"),
        (GRPO, {"kl": {"name": "k3", "coefficient": 0}}, "leave the section out to go without"),
        (
            GRPO,
            {"kl": {"name": "k3", "coefficient": 1.0, "estimator": 1}},
            "kl k3 has no option 'estimator'; known: coefficient, unbiased",
        ),
        (GRPO, {"entropy_bonus": -0.1}, "entropy_bonus=-0.1 must be above 0"),
        (
            GRPO,
            {"staleness": {"name": "truncated", "cap": 2.0}},
            "staleness does not go with grpo: the ratio of each token .* twice",
        ),
        (GRPO | {"clip_low": 0.3}, {}, "clip_low=0.3 exceeds clip_high=0.28.*swapped"),
    ],
)
def test_a_mistake_in_a_section_is_named(algorithm, sections, message):
    with pytest.raises(ValueError, match=message):
        make_policy_loss(algorithm, **sections)
