"""`lossscale doctor`: what works here, what is supported, and what to type."""

import json
import os
import platform
import sys
from importlib.metadata import requires, version

import pytest
from helpers.processes import run_process
from helpers.terminals import seen_on_a_terminal
from packaging.requirements import Requirement

from lossscale.cli.doctor import _judge
from lossscale.cli.probe import PARTS, Part, _examine_here

COMMAND = [sys.executable, "-m", "lossscale", "doctor"]


def run(*arguments, path=None, variables=None):
    """Run the doctor, with a folder of packages before the installed ones."""
    environment = os.environ | (variables or {})
    if path is not None:
        paths = filter(None, (str(path), os.environ.get("PYTHONPATH")))
        environment |= {"PYTHONPATH": os.pathsep.join(paths)}
    return run_process(
        [*COMMAND, *arguments],
        env=environment,
    )


def examined(name, **keywords):
    """Return the exit status and what was said about one part."""
    result = run(name, "--json", **keywords)
    (part,) = json.loads(result.stdout)["parts"]
    return result.returncode, part


def install(folder, name, release, source):
    """Write a package as pip would: a module and its metadata."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    metadata = folder / f"{name}-{release}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
    metadata.write_text(text, encoding="utf-8")


def test_every_part_works_where_the_tests_run_or_says_why_not():
    result = run("--json")
    report = json.loads(result.stdout)
    assert list(PARTS) == [part["part"] for part in report["parts"]]
    for part in report["parts"]:
        assert part["status"] in {"works", "not installed", "not usable"}, part
        assert "works" == part["status"] or part["advice"] or part["problem"]
    assert (0, True) == (result.returncode, report["ok"])


def test_every_package_that_an_extra_declares_is_a_part():
    assert {Requirement(line).name for line in requires("lossscale")} == set(PARTS)


def test_a_live_view_that_cannot_be_imported_is_trouble(tmp_path):
    install(tmp_path, "textual", "8.0", "")
    status, part = examined("textual", path=tmp_path)
    assert (1, "broken") == (status, part["status"])
    assert "python -I -c 'import lossscale.cli.watch_app'" in part["advice"]


def test_the_report_has_what_an_issue_needs():
    report = json.loads(run("numpy", "--json", variables={"XLA_FLAGS": ""}).stdout)
    assert version("lossscale") == report["lossscale"]
    assert report["python"].startswith(platform.python_version())
    assert platform.platform() == report["platform"]
    assert "" == report["environment"]["XLA_FLAGS"]
    (part,) = report["parts"]
    assert version("numpy") == part["version"]
    assert f"numpy{part['required']}; extra == 'numpy'" in requires("lossscale")


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_devices_of_a_framework_are_named(name):
    pytest.importorskip(name, reason=f"{name} is not installed")
    assert examined(name)[1]["runs_on"]


def test_the_adapter_is_imported_and_not_the_framework_alone(tmp_path):
    install(tmp_path, "numpy", "2.4.0", "__version__ = '2.4.0'\n")
    status, part = examined("numpy", path=tmp_path)
    assert (1, "broken") == (status, part["status"])
    assert part["problem"]
    assert "python -I -c 'import lossscale.numpy'" in part["advice"]


def test_a_version_below_the_declared_range_is_trouble(tmp_path):
    install(tmp_path, "uniplot", "0.1", "")
    status, part = examined("uniplot", path=tmp_path)
    assert (1, "unsupported", "0.1") == (status, part["status"], part["version"])
    assert part["required"] in part["problem"]
    assert "pip install 'lossscale[cli]'" == part["advice"]


@pytest.mark.parametrize(
    ("release", "expected"),
    [("0.100", "works"), ("0.21rc1", "unsupported"), ("1.0.dev0+local", "works")],
)
def test_versions_are_compared_as_numbers(tmp_path, release, expected):
    install(tmp_path, "uniplot", release, "")
    assert expected == examined("uniplot", path=tmp_path)[1]["status"]


def test_an_adapter_that_refuses_a_version_is_quoted(tmp_path):
    source = "__version__ = '2.15.0'\n"
    install(tmp_path, "keras", "2.15.0", source)
    _, part = examined("keras", path=tmp_path)
    assert "unsupported" == part["status"]
    assert "needs Keras 3.14 or newer, this is 2.15.0" in part["problem"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise OSError('libcudart.so.13: no such file')", "OSError: libcudart.so.13"),
        ("raise SystemExit('torn')", "SystemExit: torn"),
        ("import os; os.abort()", "signal 6 (SIGABRT)"),
        ("import os; os.write(2, b'bye'); os._exit(3)", "status 3: bye"),
        ("print('noise'); import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_broken_installation_is_trouble_and_says_why(tmp_path, source, expected):
    install(tmp_path, "uniplot", "1.0", source)
    status, part = examined("uniplot", path=tmp_path)
    assert (1, "broken") == (status, part["status"])
    assert expected in part["problem"]


def test_a_package_that_is_missing_is_no_trouble():
    absent = _examine_here(Part("no_such_module", "optax"))
    finding = _judge(PARTS["optax"], absent, {("optax", "optax"): ">=0.2.5"})
    assert ("not installed", None) == (finding.status, finding.problem)
    assert "pip install 'lossscale[optax]'" == finding.advice


def test_a_name_that_is_nearly_right_is_asked_about():
    result = run("pytorch")
    assert 2 == result.returncode
    assert "Did you mean 'torch'?" in result.stderr


def test_the_report_is_readable_at_40_columns(tmp_path):
    install(tmp_path, "uniplot", "0.1", "")
    arguments = ("doctor", "numpy", "uniplot", "click")
    path = {"PYTHONPATH": str(tmp_path)}
    lines = seen_on_a_terminal(40, *arguments, variables=path)
    text = " ".join(" ".join(lines).split())
    # A path or a platform is one long word, which a terminal breaks by itself.
    assert 40 >= max(len(line) for line in lines if len(line.split()) > 1)
    for words in ("uniplot unsupported 0.1", "pip install 'lossscale[cli]'", "click"):
        assert words in text
    assert "…" not in text
