"""No test depends on speed: whatever waits, waits until something hangs."""

import ast
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))


def short_limits(tree):
    """Yield the lines of a file that set a limit of their own."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        values = [key.value for key in call.keywords if "timeout" in (key.arg or "")]
        if name == "timedelta":
            values += [*call.args, *(key.value for key in call.keywords)]
        parts = [part for value in values for part in ast.walk(value)]
        if any(isinstance(part, ast.Constant) and part.value for part in parts):
            yield call.lineno


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TESTS)))
def test_no_test_has_a_limit_of_its_own(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert [] == list(short_limits(tree)), "use helpers.limits"


def unchanged_defaults(tree):
    """Yield the lines that take Playwright's own limit, which is 30 s."""
    calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
    names = [getattr(call.func, "attr", "") for call in calls]
    for call, name in zip(calls, names, strict=True):
        launches = name == "launch" and "chromium" in ast.unparse(call.func)
        if launches and "timeout" not in {key.arg for key in call.keywords}:
            yield call.lineno
        if name == "new_page" and "set_default_timeout" not in names:
            yield call.lineno


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TESTS)))
def test_no_browser_has_the_limit_of_its_library(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert [] == list(unchanged_defaults(tree)), "use helpers.browser"


def test_hypothesis_does_not_measure():
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check


def test_the_check_can_fail():
    found = short_limits(
        ast.parse("run(x, timeout=60 * MINUTES)\ntimedelta(seconds=9)")
    )
    assert [1, 2] == sorted(found)
    found = unchanged_defaults(ast.parse("x.chromium.launch()\nx.new_page()"))
    assert [1, 2] == sorted(found)
