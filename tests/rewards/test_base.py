"""A scorer that fails is our failure: its sample is Unscorable, never a 0, and its siblings go on."""

import asyncio
import time

import pytest

from axion_jax.rewards.base import score_all
from axion_jax.types import Reward, StopReason, Unscorable


class Scripted:
    """Scores a sample by what its text says."""

    def __init__(self):
        self.running = self.most_running = 0

    async def score(self, sample):
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(0.001)
            if sample.text == "raise":
                raise RuntimeError("the judge is down")
            if sample.text == "hang":
                await asyncio.sleep(60)
            if sample.text == "unscorable":
                return Unscorable("no verdict")
            return Reward(float(sample.text))
        finally:
            self.running -= 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "scorer failed: RuntimeError: the judge is down"),
        ("hang", "scorer exceeded 0.1 s"),
        ("unscorable", "no verdict"),
        ("nan", "scorer gave nan"),
        ("-inf", "scorer gave -inf"),
    ],
)
def test_a_failing_scorer_makes_its_sample_unscorable_and_leaves_its_siblings_alone(
    sample, text, reason
):
    start = time.monotonic()
    verdicts = score_all(
        Scripted(), [sample("0.25"), sample(text), sample("1"), sample(text)], timeout=0.1
    )
    assert time.monotonic() - start < 10
    assert verdicts == [Reward(0.25), Unscorable(reason), Reward(1.0), Unscorable(reason)]


def test_verdicts_come_in_the_order_of_the_samples_however_long_each_takes(sample):
    class SlowFirst:
        async def score(self, sample):
            await asyncio.sleep(0.02 / (1 + float(sample.text)))
            return Reward(float(sample.text))

    verdicts = score_all(SlowFirst(), [sample(str(i)) for i in range(8)], timeout=5)
    assert [v.value for v in verdicts] == list(range(8))


def test_samples_are_scored_at_the_same_time(sample):
    scorer = Scripted()
    score_all(scorer, [sample("1")] * 16, timeout=5)
    assert scorer.most_running == 16


def test_a_sample_that_we_aborted_is_unscorable_and_not_shown_to_the_scorer(sample):
    scorer = Scripted()
    samples = [sample("1", stop_reason=StopReason.ABORTED), sample("1")]
    assert score_all(scorer, samples, timeout=5) == [
        Unscorable("the sample was aborted"),
        Reward(1.0),
    ]
    assert scorer.most_running == 1


def test_no_samples_have_no_verdicts():
    assert score_all(Scripted(), [], timeout=1) == []
