"""Scores token sequences with a checkpoint: log-probs, entropy, experts, or a reward model's scores.

    python launch/score.py --model=DIR --input=tokens.jsonl --output=scores.jsonl [--entropy] [--routed_experts]

DIR is a Hugging Face or Orbax checkpoint (or a stage of a run). Rows are {"input_ids": [...]} or
{"messages": [...]}; row i of the output is about row i of the input: axion_jax/evaluation/score.py.
Kill it at any time and give the same command again: it goes on where it was.
"""

from __future__ import annotations

import os
import sys

import rich.console
import rich.progress
from absl import app, flags, logging

from axion_jax.evaluation.score import ScoreConfig, score_file
from axion_jax.sharding.mesh import MeshConfig

MODEL = flags.DEFINE_string("model", None, "Checkpoint directory.", required=True)
INPUT = flags.DEFINE_string("input", None, "JSON Lines file of rows.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "JSON Lines file to write.", required=True)
ENTROPY = flags.DEFINE_bool("entropy", False, "Also the entropy of every prediction.")
EXPERTS = flags.DEFINE_bool("routed_experts", False, "Also the experts of every token and layer.")
DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "Of parameters and activations. Default: the model's."
)
TOKENS = flags.DEFINE_integer("tokens_per_batch", 16_384, "Of one batch, over all devices.")
DATA = flags.DEFINE_integer("data", 1, "Replicas of the parameters.")
FSDP = flags.DEFINE_integer("fsdp", -1, "Devices that parameters are cut over; -1: all others.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected argument {argv[1]!r}; see --help.")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    columns = (
        "[progress.description]{task.description}",
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeRemainingColumn(),
        "{task.fields[rows]} rows, {task.fields[tokens]} tokens",
    )
    try:
        config = ScoreConfig(
            entropy=ENTROPY.value,
            routed_experts=EXPERTS.value,
            dtype=DTYPE.value,
            tokens_per_batch=TOKENS.value,
            mesh=MeshConfig(data=DATA.value, fsdp=FSDP.value),
        )
        with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
            size = os.path.getsize(INPUT.value) if os.path.isfile(INPUT.value) else None
            task = bar.add_task("Scoring", total=size, rows=0, tokens=0)

            def progress(rows: int, tokens: int, nbytes: int) -> None:
                fields = bar.tasks[0].fields
                rows, tokens = rows + fields["rows"], tokens + fields["tokens"]
                bar.update(task, advance=nbytes, rows=rows, tokens=tokens)

            written = score_file(MODEL.value, INPUT.value, OUTPUT.value, config, progress=progress)
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
    print(f"{OUTPUT.value}: {written} rows.")


if __name__ == "__main__":
    app.run(main)
