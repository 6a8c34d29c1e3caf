"""No command imports from the current folder, whatever files are there."""

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.processes import run_process

SCRIPT = [str(Path(sys.executable).with_name("lossscale"))]
MODULE = [sys.executable, "-m", "lossscale"]
EXAMPLES = Path(__file__).parents[2] / "examples"
THIRD_PARTY = {
    "click", "jax", "keras", "llvmlite", "matplotlib", "numba", "numpy", "optax",
    "packaging", "rich", "tensorflow", "torch", "triton", "uniplot",
}  # fmt: skip
STANDARD = {name for name in sys.stdlib_module_names if find_spec(name) is not None}
COMMANDS = [
    ["--help"],
    ["--version"],
    ["demo", "--steps", "1", "--json"],
    ["demo", "--steps", "1", "-o", "{outside}/demo.png"],
    ["simulate", "--steps", "200000"],
    ["simulate", "--steps", "50", "--chart"],
    ["presets"],
    ["convert", "{outside}/state.json", "--to", "torch"],
    ["convert", "{outside}/state.pt", "--to", "keras"],
    ["doctor", "numpy", "torch", "jax"],
]


def loaded_before_the_command():
    """Return what `python -m lossscale` has loaded before a line of the command runs.

    Python puts the current folder first for `-m`, so these names can be taken over.
    """
    program = "import runpy, pkgutil, sys, lossscale.cli; print(*sys.modules)"
    listed = run_process(
        [sys.executable, "-I", "-c", program],
        check=True,
    )
    return set(listed.stdout.split())


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Return a folder with a state, in which an import leaves its mark."""
    import torch

    folder = tmp_path_factory.mktemp("outside")
    state = torch.amp.GradScaler("cpu").state_dict()
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    torch.save(state, folder / "state.pt")
    return folder


def run_among(names, command, arguments, outside, environment=None):
    """Run a command among modules of such names; return which were imported."""
    mark = outside / "mark"
    mark.write_text("", encoding="utf-8")
    with tempfile.TemporaryDirectory() as hostile:
        for name in names:
            text = f"open({str(mark)!r}, 'a').write(__name__ + ' ')\n"
            (Path(hostile) / f"{name}.py").write_text(text, encoding="utf-8")
        finished = run_process(
            [*command, *(part.format(outside=outside) for part in arguments)],
            cwd=hostile,
            env=os.environ | (environment or {}),
        )
    if finished.returncode:
        raise AssertionError(finished.stderr)
    return mark.read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_command_imports_nothing_from_the_current_folder(arguments, outside):
    names = THIRD_PARTY | STANDARD | {"lossscale"}
    assert "" == run_among(names, SCRIPT, arguments, outside)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_module_imports_nothing_from_the_current_folder(arguments, outside):
    names = (THIRD_PARTY | STANDARD) - loaded_before_the_command()
    assert "" == run_among(names, MODULE, arguments, outside)


def test_a_path_with_an_empty_entry_does_not_name_the_current_folder(outside):
    names = (THIRD_PARTY | STANDARD) - loaded_before_the_command()
    path = {"PYTHONPATH": f"{os.pathsep}{outside}"}
    arguments = ["doctor", "numpy", "torch"]
    assert "" == run_among(names, SCRIPT, arguments, outside, path)


def test_a_package_on_the_python_path_is_found_by_the_doctor(tmp_path):
    """What a training would import is examined: PYTHONPATH is a choice of the user."""
    (tmp_path / "numba.py").write_text("raise RuntimeError('the one on the path')")
    finished = run_process(
        [*SCRIPT, "doctor", "numba"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert 1 == finished.returncode
    assert "the one on the path" in finished.stdout


@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["script", "module"])
def test_in_the_folder_of_examples_torch_works(command):
    finished = run_process(
        [*command, "doctor", "torch", "--json"],
        cwd=EXAMPLES,
        check=True,
    )
    (part,) = json.loads(finished.stdout)["parts"]
    assert "works" == part["status"]


def test_a_folder_that_was_deleted_is_no_obstacle(tmp_path):
    program = (
        "import os, sys; os.rmdir(os.getcwd()); sys.argv[1:] = ['presets', '--json']; "
        "from lossscale.cli import main; main()"
    )
    gone = tmp_path / "gone"
    gone.mkdir()
    finished = run_process(
        [sys.executable, "-c", program],
        cwd=gone,
    )
    assert 0 == finished.returncode, finished.stderr
