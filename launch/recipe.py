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


def parse_flags(argv: list[str]) -> list[str]:
    """absl's own parsing, with a mistake answered in a sentence instead of a traceback."""
    try:
        rest = flags.FLAGS(argv)
        _ = CONFIG.value.seed  # a config that could not be loaded says so only when it is read
        return rest
    except flags.UnrecognizedFlagError as error:
        sys.exit(f"Error: {error}")
    except (flags.Error, OSError) as error:
        sys.exit(f"Error: {str(error).strip().splitlines()[-1].strip()}")
    except (AttributeError, KeyError) as error:  # an override of what the config does not have
        while isinstance(error.args[0], Exception):
            error = error.args[0]
        sys.exit(
            f"Error: No such config key: {'. '.join(str(error.args[0]).splitlines())} (an override"
            " changes a key that the config file has; to add a section, write it into the file)"
        )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(
            f"Error: Unexpected argument {argv[1]!r}. Overrides are written --config.key=value."
        )
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax reports every file at INFO
    try:
        run_recipe(CONFIG.value.to_dict(), str(WORKDIR.value))
    except (ValueError, StageStopped) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped. The same command goes on from the last checkpoint.")
    report.print_tables(str(WORKDIR.value))
    print(f"Report: {pathlib.Path(str(WORKDIR.value)) / 'report.html'}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
