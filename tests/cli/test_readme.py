"""The commands that the README shows, run as they stand there."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lossscale import Dynamic, to_portable

README = Path(__file__).parent.parent.parent / "README.md"


def commands():
    """Return the lossscale commands of the README's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    found = [
        line[2:].partition("#")[0] for line in lines if line.startswith("$ lossscale")
    ]
    return [shlex.split(line)[1:] for line in found]


def test_the_readme_shows_every_command():
    names = {"demo", "simulate", "presets", "convert", "doctor"}
    assert names == {arguments[0] for arguments in commands()}


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_a_command_of_the_readme_works(arguments, tmp_path):
    state = to_portable(Dynamic(), Dynamic().init())
    (tmp_path / "scaler.json").write_text(json.dumps(state), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "lossscale", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == result.returncode, result.stderr
    assert result.stdout
