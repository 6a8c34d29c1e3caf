"""The wheel: built, installed elsewhere, and used without the source tree."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PIP = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q"]
PROGRAM = """
import lossscale, lossscale.core.classic, lossscale.core.converters
from pathlib import Path
policy = lossscale.Dynamic()
print(lossscale.__version__, policy.init().scale, Path(lossscale.__file__).parent)
try:
    import numpy
except ModuleNotFoundError:
    print("no numpy")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "-o",
            target,
            ROOT,
        ],
        check=True,
        capture_output=True,
    )
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_its_data_and_its_licences(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "lossscale/core/rule.py",
        "lossscale/py.typed",
        "lossscale/demo/digits.npz",
        "lossscale/demo/DIGITS-LICENCE.txt",
    ):
        assert name in names
    licences = [name for name in names if "/licenses/" in name]
    assert any(name.endswith("LICENSE") for name in licences)
    assert not any(name.startswith(("tests", "docs")) for name in names)


def test_the_adapter_the_demo_and_the_command_run_from_the_wheel(wheel, tmp_path):
    target = tmp_path / "installed"
    subprocess.run(
        [*PIP, "--target", target, wheel],
        check=True,
    )
    environment = os.environ | {"PYTHONPATH": str(target)}
    where = "import lossscale.numpy, lossscale.demo as d; print(d.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", where],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(target) in result.stdout
    result = subprocess.run(
        [sys.executable, "-m", "lossscale", "demo", "--steps", "1", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 4 == len(json.loads(result.stdout))


def test_the_wheel_works_where_nothing_else_is_installed(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", "--no-index", "-q", wheel],
        check=True,
    )
    result = subprocess.run(
        [python, "-I", "-c", PROGRAM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = result.stdout.splitlines()
    assert "65536.0" in first
    assert str(tmp_path) in first
    assert "no numpy" == second
    command = subprocess.run(
        [tmp_path / "venv" / "bin" / "lossscale"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 2 == command.returncode
    assert "pip install 'lossscale[cli]'" in command.stderr
