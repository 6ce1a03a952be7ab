"""pass@k of a benchmark, and how far to trust a mean over its prompts.

The unit of chance is the prompt: samples of one prompt resemble each other, so 4 samples of 100
prompts say less than 400 prompts would. Intervals therefore start from one score a prompt, and what
surprises newcomers is only that more samples of the same prompts narrow them less than they hope.

    passed = np.array(...)                                # [P, n] bool: n samples of each prompt
    scores = passed.mean(axis=1)                          # pass@1 of each prompt
    scores.mean(), confidence_interval(scores)
    scores = per_prompt_pass_at_k(passed, 4)
"""

import math
import statistics

import numpy as np
import numpy.typing as npt
from scipy import special

Z = statistics.NormalDist().inv_cdf(0.975)  # 1.96: two sides of 95 %


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the chance that k samples, drawn without return from n with c correct, hold a correct one.

        pass@k = 1 - C(n - c, k) / C(n, k)                   (Chen et al. 2021, arXiv:2107.03374, Eq. 1)

    This is unbiased; 1 - (1 - c/n)^k is not.

    Raises:
      ValueError: n < k, where no unbiased estimate exists, or c outside 0..n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt and k >= 1; there are {n}.")
    if not 0 <= c <= n:
        raise ValueError(f"{c} correct of {n} samples is impossible.")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def per_prompt_pass_at_k(samples: npt.ArrayLike, k: int) -> np.ndarray:
    """Returns [P] float64, pass@k of each prompt of `samples` [P, n] bool."""
    samples = np.asarray(samples)
    if samples.ndim != 2 or 0 in samples.shape:
        raise ValueError(f"Expected samples [prompts, samples a prompt], got {samples.shape}.")
    n = samples.shape[1]
    of_count = [pass_at_k(n, c, k) for c in range(n + 1)]
    return np.array(of_count)[samples.astype(bool).sum(axis=1)]


def mean_pass_at_k(samples: npt.ArrayLike, k: int) -> float:
    """Returns pass@k averaged over the prompts of `samples` [P, n] bool."""
    return float(per_prompt_pass_at_k(samples, k).mean())


def confidence_interval(per_prompt_scores: npt.ArrayLike) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of scores in [0, 1]: pass rates, accuracies.

    Wilson's interval with the number of independent trials that the spread between prompts speaks of:

        m = p (1 - p) / (s^2 / P)       p mean, s^2 variance (divisor P) of the P scores

    With one sample a prompt s^2 = p (1 - p), so m = P and this is Wilson's interval itself. With
    several, s^2 is smaller and m grows towards the number of samples; for large P the interval is
    the normal one clustered by prompt, p -+ 1.96 s / sqrt(P). Unlike that one it stays inside
    [0, 1], and has a width where all scores agree: s = 0 says nothing of m, so m is P there.

    Raises:
      ValueError: no scores, or one outside [0, 1]; rewards have `mean_interval`.
    """
    scores = _one_per_prompt(per_prompt_scores)
    if scores.min() < 0.0 or scores.max() > 1.0:
        raise ValueError(
            f"Expected pass rates in [0, 1], got {scores.min():g} to {scores.max():g}. "
            "Use mean_interval for scores without bounds."
        )
    p, variance = scores.mean(), scores.var()
    m = max(len(scores), len(scores) * p * (1 - p) / variance if variance > 1e-12 else 0.0)
    centre = (p + Z**2 / (2 * m)) / (1 + Z**2 / m)
    half = Z / (1 + Z**2 / m) * math.sqrt(p * (1 - p) / m + Z**2 / (4 * m**2))
    # At p = 0 and 1 an end of the interval is p itself; rounding must not put p outside.
    return float(min(max(centre - half, 0.0), p)), float(max(min(centre + half, 1.0), p))


def mean_interval(per_prompt_scores: npt.ArrayLike) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of real-valued scores: rewards, lengths.

    Student's t with P - 1 degrees of freedom; (nan, nan) for a single prompt, whose spread is unknown.
    """
    scores = _one_per_prompt(per_prompt_scores)
    if len(scores) == 1:
        return math.nan, math.nan
    t = special.stdtrit(len(scores) - 1, 0.975)
    half = t * scores.std(ddof=1) / math.sqrt(len(scores))
    return float(scores.mean() - half), float(scores.mean() + half)


def _one_per_prompt(per_prompt_scores: npt.ArrayLike) -> np.ndarray:
    scores = np.asarray(per_prompt_scores, dtype=np.float64)
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"Expected one score for each prompt, got an array of {scores.shape}.")
    if not np.isfinite(scores).all():
        raise ValueError("A score is not finite. Leave unscorable prompts out before averaging.")
    return scores
