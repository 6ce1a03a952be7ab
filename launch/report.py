"""Rewrites the report of a run and prints its tables.

    python launch/report.py --workdir=runs/demo

Works on a run that is under way or was killed: the report shows it as far as it has come.
"""

import sys

from absl import app, flags

from axion_jax.evaluation import report

WORKDIR = flags.DEFINE_string("workdir", None, "Run directory of the recipe.", required=True)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected argument {argv[1]!r}: the run is named by --workdir.")
    try:
        path = report.write_report(WORKDIR.value)
        report.print_tables(WORKDIR.value)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"Wrote {path}")


if __name__ == "__main__":
    app.run(main)
