"""The command line of the recipe: a mistake is answered in one sentence before anything compiles.

Starting Python and importing JAX takes seconds, so one process does it once and forks for each case.
"""

import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
GOOD = ["--config=configs/tiny/recipe.py:smoke", "--workdir={tmp}/run"]

FORKS = """
import json, os, sys, tempfile
import jax
from absl import app
sys.path.insert(0, "launch")
import recipe

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
)
for arguments in json.load(sys.stdin):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        sys.argv = ["recipe.py", *arguments]  # where ml_collections looks for overrides
        os.dup2(write, 1), os.dup2(write, 2)
        status = 0
        try:
            app.run(recipe.main, ["recipe.py", *arguments], recipe.parse_flags)
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            import traceback
            traceback.print_exc()
            status = 1
        print(f"compiled {len(compiled)} programs")
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    os.close(write)
    with open(read) as pipe:
        output = pipe.read()
    _, status = os.waitpid(pid, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), output]), flush=True)
"""

MISTAKES = {
    "dashes forgotten": ([*GOOD, "config.seed=1"], "Unexpected argument 'config.seed=1'"),
    "an empty workdir": ([GOOD[0], "--workdir="], "--workdir is empty"),
    "a misspelt override": (
        [*GOOD, "--config.sft.num_stepz=1"],
        "Error: No such config key: 'num_stepz'. Did you mean \"num_steps\"",
    ),
    "a misspelt section": (
        [*GOOD, "--config.sftt.num_steps=1"],
        "Error: No such config key: 'sftt'. Did you mean \"sft\"",
    ),
    "an override of nothing": (
        [*GOOD, "--config.rlhf.filter.low=0.1"],
        "Error: No such config key: 'filter'",
    ),
    "an override of the wrong type": (
        [*GOOD, "--config.sft.num_steps=many"],
        "Error: flag --config.sft.num_steps=many: invalid literal for int() with base 10: 'many'",
    ),
    "a number for a section": ([*GOOD, "--config.model=3"], "`3` is not a dict."),
    "an unknown flag": ([*GOOD, "--confog=1"], "Error: Unknown command line flag 'confog'."),
    "no workdir": (GOOD[:1], "Error: flag --workdir=None: Flag --workdir must have a value"),
    "no config": (GOOD[1:], "Error: flag --config=None: Flag --config must have a value"),
    "an unknown variant": (
        ["--config=configs/tiny/recipe.py:smok", GOOD[1]],
        "configs/tiny/recipe.py has the variants full and smoke, not 'smok'.",
    ),
    "a config that is not there": (
        ["--config=configs/tiny/recip.py", GOOD[1]],
        "Error: [Errno 2] No such file or directory: 'configs/tiny/recip.py'",
    ),
    "a mesh that does not fit": (
        [*GOOD, "--config.mesh.fsdp=3"],
        "Error: mesh data=1 x fsdp=3 asks for 3 devices, but there are 8.",
    ),
    "heads that do not divide": (
        [*GOOD, "--config.model.num_kv_heads=3"],
        "Error: config.model: num_heads=2 must be a multiple of num_kv_heads=3.",
    ),
    "a path that is no directory": (
        [GOOD[0], "--workdir={tmp}/file/run"],
        "file/run cannot be written: Not a directory. Choose another.",
    ),
    "a directory of other things": (
        [GOOD[0], "--workdir={tmp}"],
        "holds no run (no config.json). Choose another.",
    ),
    "a directory of another config": (
        [GOOD[0], "--workdir={tmp}/other", "--config.seed=5"],
        "/other holds a run of another config (seed was 4, now 5).",
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the command line says to each of the mistakes: exit code and output."""
    tmp = tmp_path_factory.mktemp("runs")
    (tmp / "file").write_text("")
    (tmp / "other").mkdir()
    config = runpy.run_path(str(ROOT / "configs" / "tiny" / "recipe.py"))["get_config"]("smoke")
    other = json.dumps(config.to_dict() | {"seed": 4})
    (tmp / "other" / "config.json").write_text(other)
    commands = [[a.replace("{tmp}", str(tmp)) for a in given] for given, _ in MISTAKES.values()]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    process = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(commands),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert not (tmp / "run").exists()
    assert (tmp / "other" / "config.json").read_text() == other
    return dict(zip(MISTAKES, map(json.loads, process.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_one_sentence_before_anything_compiles(answers, mistake):
    code, output = answers[mistake]
    *sentences, compiled = output.splitlines()
    assert MISTAKES[mistake][1] in output
    assert code == 1
    assert len(sentences) == 1 and sentences[0].startswith("Error: ")
    # At most a random key, which comparing shapes takes before the directory is looked at.
    assert compiled in ("compiled 0 programs", "compiled 2 programs")
