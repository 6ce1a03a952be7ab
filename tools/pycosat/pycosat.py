"""A stand-in for pycosat on machines without a C compiler: imports, and says so when called."""


def itersolve(*unused_args, **unused_kwargs):
    raise RuntimeError(
        "reasoning-gym's zebra puzzles need pycosat, which was not built because this machine had "
        "no C compiler or no Python headers. Install both, then run: make clean test"
    )


solve = itersolve
