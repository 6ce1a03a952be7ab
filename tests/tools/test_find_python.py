import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "tools" / "find_python"


@pytest.fixture
def machine(tmp_path):
    """A machine whose PATH holds nothing but a shell's needs and what a test installs."""

    class Machine:
        bin = tmp_path / "bin"

        def install(self, name: str, script: str) -> None:
            self.bin.mkdir(exist_ok=True)
            (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
            (self.bin / name).chmod(0o755)

        def find(self, **environment: str) -> subprocess.CompletedProcess:
            self.bin.mkdir(exist_ok=True)
            environment = {"PATH": str(self.bin), "HOME": str(tmp_path)} | environment
            return subprocess.run(
                ["/bin/sh", SCRIPT], env=environment, capture_output=True, text=True
            )

    return Machine()


GOOD = f'exec "{sys.executable}" "$@"'
REFUSES = 'echo "pyenv: command not found" >&2; exit 127'  # a shim without its version
OLD = "exit 1"  # what the probe's version check makes of Python 3.11
NO_VENV = "echo no-venv 3.12"  # what the probe prints without ensurepip
has_others = any(
    pathlib.Path(p).exists() for p in ("/usr/local/bin/python3.12", "/usr/local/bin/python3.13")
)
only_ours = pytest.mark.skipif(
    has_others, reason="looks into /usr/local/bin, which has a Python here"
)


def test_shims_that_do_not_run_and_old_pythons_are_passed_over(machine):
    machine.install("python3", OLD)
    machine.install("python3.13", REFUSES)
    machine.install("python3.12", GOOD)
    result = machine.find()
    assert result.returncode == 0, result.stderr
    assert os.path.samefile(result.stdout.strip(), sys.executable)


def test_a_named_python_is_used_or_refused_but_never_replaced(machine):
    machine.install("python3", GOOD)
    machine.install("old", OLD)
    result = machine.find(PYTHON=str(machine.bin / "old"))
    assert result.returncode == 1 and "not a Python 3.12 or newer that runs" in result.stderr
    assert machine.find(PYTHON=sys.executable).stdout.strip() == sys.executable


@only_ours
def test_a_machine_without_python_is_told_what_to_install(machine):
    machine.install("python3", REFUSES)
    result = machine.find()
    assert result.returncode == 1
    assert "No Python 3.12 or newer that runs" in result.stderr and result.stderr.count("\n") == 1


@only_ours
def test_a_python_without_venv_is_told_which_package_is_missing(machine):
    machine.install("python3", NO_VENV)
    result = machine.find()
    assert result.returncode == 1 and "apt-get install python3.12-venv" in result.stderr
