r"""Runs a recipe: every stage in order, resumable, measured after each stage.

    python launch/recipe.py --config=configs/tiny/recipe.py --workdir=runs/demo
    python launch/recipe.py --config=configs/tiny/recipe.py --workdir=runs/seed1 --config.seed=1

Kill it at any time and start it again with the same command: it goes on where it was.
"""

from __future__ import annotations

import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from axion_jax.evaluation import report
from axion_jax.recipe.guards import StageStopped
from axion_jax.recipe.pipeline import run_recipe

CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe config, FILE or FILE:variant.")
WORKDIR = flags.DEFINE_string("workdir", None, "Run directory; created if absent.")
flags.mark_flags_as_required(["config", "workdir"])


def main(_) -> None:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax reports every file at INFO
    try:
        run_recipe(CONFIG.value.to_dict(), str(WORKDIR.value))
    except (ValueError, StageStopped) as error:
        sys.exit(f"Error: {error}")
    report.print_tables(str(WORKDIR.value))
    print(f"Report: {pathlib.Path(str(WORKDIR.value)) / 'report.html'}")


if __name__ == "__main__":
    app.run(main)
