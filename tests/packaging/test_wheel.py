"""The wheel: built, installed elsewhere, and used without the source tree."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from email.policy import default
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
PIP = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q"]
PROGRAM = """
import lossscale, lossscale.core.classic, lossscale.convert
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
        "lossscale/torch/native/native.c",
        "lossscale/demo/DIGITS-LICENCE.txt",
    ):
        assert name in names
    licences = [name for name in names if "/licenses/" in name]
    assert any(name.endswith("LICENSE") for name in licences)
    assert not any(name.startswith(("tests", "docs")) for name in names)


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [x for x in archive.namelist() if x.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name), policy=default)


def needed(metadata, extra):
    """Return the requirements of an extra, by package."""
    lines = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    return {
        line.name: line.specifier
        for line in lines
        if line.marker and line.marker.evaluate({"extra": extra})
    }


def test_the_command_does_not_bring_a_compiler(metadata):
    assert {"click", "numpy", "packaging", "rich", "uniplot"} == set(
        needed(metadata, "cli")
    )
    assert "numba" in needed(metadata, "simulate")


def test_no_matplotlib_is_allowed_that_wants_numpy_1(metadata):
    assert "3.8.3" not in needed(metadata, "plot")["matplotlib"]
    assert "3.8.4" in needed(metadata, "plot")["matplotlib"]


def test_the_metadata_name_an_author(metadata):
    assert "The lossscale developers" == metadata["Author"]


def test_the_description_has_no_link_into_the_repository(metadata):
    text = metadata.get_content()
    assert "lossscale" in text
    for link in re.findall(r"\]\(([^)]*)\)|<img|src=", text):
        assert link.startswith("https://"), link


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
