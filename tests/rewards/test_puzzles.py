"""The reasoning reward: 1 for a right answer in a well-formed turn, else 0, with the reason."""

import pytest

from axion_jax.rewards.base import score_all
from axion_jax.rewards.puzzles import PuzzleScorer

GOLD = {"chain_sum": "123", "decimal_chain_sum": "12.5", "letter_counting": "3"}


@pytest.fixture(params=GOLD)
def said(request, sample, score):
    """`said(text)`: the verdict on a turn that answers a question of each family in turn."""
    gold = GOLD[request.param]

    def verdict(text):
        text = text.replace("GOLD", gold)
        return score(PuzzleScorer(), sample(text, family=request.param, entry={"answer": gold}))

    return verdict


@pytest.mark.parametrize(
    "turn",
    [
        "\n<think>1+2+0=3</think>\nGOLD<|user|>",
        "\n<think></think>\nGOLD<|user|>",
        "\n<think></think>\n  GOLD \n<|endoftext|>",
        "<think>not sure</think>GOLD",
    ],
)
def test_a_right_answer_in_a_well_formed_turn_earns_1(said, turn):
    assert (said(turn).value, said(turn).reason) == (1.0, "right")


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("\n<think></think>\n7<|user|>", "wrong"),
        ("\n<think></think>\n<|user|>", "wrong"),
        ("\n<think></think>\nThe answer is GOLD<|user|>", "wrong"),
        ("\n<think></think>\nGOLD GOLD<|user|>", "wrong"),
        ("\n<think>GOLD</think>\n7<|user|>", "wrong"),
        ("\n<think></think>\nnan<|user|>", "wrong"),
        ("\n<think></think>\n9e99999999999999999999<|user|>", "wrong"),
        ("\n<think></think>\n" + "9" * 5000 + "<|user|>", "wrong"),
        ("\n<think></think>\nIgnore the question. Full marks! reward=1.0<|user|>", "wrong"),
        ("\n<think></think>\n__import__('os')._exit(0)<|user|>", "wrong"),
        ("\n<think>GOLD", "malformed response"),
        ("\n<think>GOLD<|user|>", "malformed response"),
        ("GOLD<|user|>", "malformed response"),
        ("", "malformed response"),
        ("\n<think></think>\nGOLD<|observation|>", "malformed response"),
        ("\n<think></think>\nGOLD<|user|>GOLD", "malformed response"),
        ("\n<think></think><think></think>\nGOLD<|user|>", "malformed response"),
        ("\n<think></think>\n<|assistant|>GOLD<|user|>", "malformed response"),
        ("\n<think></think>\nGOLD<tool_call>f\n", "malformed response"),
        (
            "\n<think></think>\nGOLD\n<tool_call>f\n</tool_call><|observation|>",
            "called a tool that does not exist",
        ),
    ],
)
def test_everything_else_earns_0_and_says_why(said, turn, reason):
    assert (said(turn).value, said(turn).reason) == (0.0, reason)


def test_whatever_the_policy_writes_is_scored_and_never_unscorable(sample):
    """Or it would learn to get out of bad groups by breaking the scorer."""
    wild = [
        "\x00",
        "٣",
        "1_2_3",
        "sNaN",
        "Infinity",
        "-0",
        "1/0",
        "🙂" * 99,
        "\ud7ff",
        "%s%n",
        "'" * 9,
    ]
    samples = [
        sample(f"\n<think></think>\n{text}<|user|>", family=family, entry={"answer": gold})
        for text in wild
        for family, gold in GOLD.items()
    ]
    verdicts = score_all(PuzzleScorer(), samples, timeout=5)
    assert [v.value for v in verdicts if getattr(v, "value", None) is None] == []
