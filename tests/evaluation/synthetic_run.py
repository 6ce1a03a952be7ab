"""Writes a run directory as the recipe leaves it, with made-up numbers of plausible shape."""

import json
import math
import pathlib
import random

STAGES = {
    "sft": ("SFT", "cross-entropy", 254.0),
    "reasoning_rl": ("Reasoning RL", "GSPO + R3 + TIS", 61.5),
    "if_rl": ("Instruction-Following RL", "GRPO", 70.2),
    "rlhf": ("RLHF", "GRPO", 58.0),
}
REASONING = {"chain_sum": (0.44, 0.71, 0.69, 0.68), "count": (0.61, 0.94, 0.90, 0.91)}
SCORES = {  # after each stage
    "reasoning": (0.525, 0.781, 0.742, 0.745),
    "instruction_following": (0.367, 0.352, 0.762, 0.746),
    "preference": (-0.31, -0.27, -0.22, 0.84),
}


def rate(value: float, n: int) -> dict:
    half = 1.96 * math.sqrt(value * (1 - value) / n)
    return {
        "pass@1": value,
        "pass@4": 1 - (1 - value) ** 3,
        "ci95": [value - half, value + half],
        "n": n,
    }


def evaluation(i: int) -> dict:
    reasoning = rate(SCORES["reasoning"][i], 256)
    reasoning["families"] = {name: rate(values[i], 128) for name, values in REASONING.items()}
    score = SCORES["preference"][i]
    preference = {
        "reward_score": score,
        "ci95": [score - 0.12, score + 0.12],
        "n": 128,
        "pass@1": 0.5,
    }
    return {
        "reasoning": reasoning,
        "instruction_following": rate(SCORES["instruction_following"][i], 128),
        "preference": preference,
    }


def metrics(stage: str, steps: int, rng: random.Random) -> list[dict]:
    records = []
    for step in range(1, steps + 1):
        done = step / steps
        noise = rng.gauss(0, 1)
        if stage == "sft":
            record = {
                "loss": 3.2 * math.exp(-5 * done) + 0.08 + 0.01 * noise,
                "learning_rate": 4e-3 * (1 - done),
            }
        else:
            reward = 0.35 + 0.4 * (1 - math.exp(-4 * done)) + 0.05 * noise
            record = {
                "loss": 0.02 * noise,
                "reward": reward - 0.03,
                "raw_reward": reward,
                "response_length": 14 + 11 * done + noise,
                "truncated_share": max(0.0, 0.06 * (1 - done) + 0.01 * noise),
                "entropy": 0.5 - 0.3 * done + 0.02 * noise,
                "logprob_abs_diff": 0.021 + 0.002 * noise,
                "k3": 0.0011 + 0.0002 * noise,
                "clip_frac": abs(0.1 * noise),
                "groups_kept": 32,
            }
            if step % 10 == 0 or step == 1:
                record["held_out"] = 0.37 + 0.35 * done
        record |= {"grad_norm": 0.4 + 0.1 * abs(noise), "tokens_per_second": 12000 + 300 * noise}
        records.append({"stage": stage, "step": step} | record)
    return records


def write(workdir: pathlib.Path, finished: int = 4, logged: int = 4) -> pathlib.Path:
    """Writes a run with `finished` evaluated stages and metrics of `logged` stages."""
    rng = random.Random(0)
    workdir.mkdir(parents=True, exist_ok=True)
    names = list(STAGES)
    stages = [
        {"stage": name, "title": STAGES[name][0], "algorithm": STAGES[name][1],
         "wall_seconds": STAGES[name][2], "eval": evaluation(i)}
        for i, name in enumerate(names[:finished])
    ]  # fmt: skip
    summary = {"seed": 0, "stages": stages}
    if finished == len(names):
        summary |= {
            "wall_seconds": 471.3,
            "peak_memory_gb": 3.42,
            "mismatch": {
                "with_replay": {"mean_abs_logprob_diff": 0.0183, "k3": 0.00092, "expert_disagreement": 0.0},
                "without_replay": {"mean_abs_logprob_diff": 0.0317, "k3": 0.00391, "expert_disagreement": 0.047},
            },
            "reward_model": {"accuracy": 0.914, "ci95": [0.868, 0.945], "n": 256},
        }  # fmt: skip
    (workdir / "summary.json").write_text(json.dumps(summary))
    with (workdir / "metrics.jsonl").open("w") as lines:
        for name in names[:logged]:
            for record in metrics(name, 700 if name == "sft" else 30, rng):
                lines.write(json.dumps(record) + "\n")
    samples = [
        {"stage": name, "task": task, "prompt": f"[gMASK]<sop><|user|>\n{question}<|assistant|>\n", "response": response, "reward": reward}
        for name in names[:logged]
        for task, question, response, reward in (
            ("chain_sum", "What is 48 + 37?", "<think>8 + 7 = 15, carry 1; 4 + 3 + 1 = 8</think>\n85<|user|>", 1.0),
            ("count", "How many a are in: b a a c a?", "<think></think>\n2<|user|>", 0.0),
            ("writing", "Write <b>three</b> words, all in upper case.", "<think>three words</think>\nRED OAK HILL<|user|>", 1.0),
        )
    ]  # fmt: skip
    (workdir / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    config = {
        "model": {"num_layers": 3, "num_experts": 8},
        "reasoning_rl": {"clip_low": 3e-3, "clip_high": 4e-3},
    }
    (workdir / "config.json").write_text(json.dumps(config))
    return workdir
