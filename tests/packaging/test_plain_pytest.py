"""What a newcomer types first: plain `pytest`."""

import sys
from pathlib import Path

import pytest
from helpers.processes import run_process

ROOT = Path(__file__).parents[2]
USAGE_ERROR = 4


def run_pytest(*arguments):
    return run_process([sys.executable, "-m", "pytest", *arguments], cwd=ROOT)


@pytest.mark.parametrize("arguments", [[], ["tests"], ["tests/adapters"], ["."]])
def test_suites_of_several_frameworks_are_refused_in_one_sentence(arguments):
    finished = run_pytest(*arguments)
    assert USAGE_ERROR == finished.returncode
    (line,) = finished.stderr.strip().splitlines()
    assert "make test" in line
    assert "tools/run_tests.py" in line


def test_one_folder_is_collected():
    finished = run_pytest("--collect-only", "-q", "tests/demo")
    assert 0 == finished.returncode
