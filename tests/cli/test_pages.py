"""The commands that the README and the pages show, run as they are written there.

In a console block a line `$ lossscale ...` is run, and what follows it is compared with
what the command prints: on stdout and stderr together, without spaces at the ends of
lines. As in doctests `...` matches anything, such as versions and figures that
depend on the machine. A command that shows nothing must only succeed. A file that a
block shows with `$ cat NAME` is made of what it shows. Other commands are not run.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from doctest import ELLIPSIS, OutputChecker
from functools import cache
from importlib.metadata import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.limits import HANG_SECONDS
from helpers.processes import run_process
from helpers.runs import record_run

from lossscale import Dynamic, to_portable
from lossscale.cli.application import application

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SCRIPTS = Path(sys.executable).parent
ERROR = "Error: "
DEMO = re.compile(r"^```text\nrun +test accuracy.*?\n```", re.DOTALL | re.MULTILINE)


class Shown(NamedTuple):
    """A command, as a page shows it."""

    command: list[str]
    output: str


def shown_in(page):
    """Return the commands of a page's console blocks."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            yield Shown(shlex.split(line, comments=True), output)


def run(command, folder):
    """Return what a command prints, and raise if it fails without an error."""
    finished = subprocess.run(
        [SCRIPTS / command[0], *command[1:]],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    if finished.returncode and ERROR not in finished.stdout:
        raise AssertionError(finished.stdout)
    return finished


@cache
def run_doctor(folder):
    """Return what `lossscale doctor` prints, once: it imports every framework."""
    return run(["lossscale", "doctor"], folder)


def stripped(text):
    return "".join(f"{line.rstrip()}\n" for line in text.strip().splitlines())


def compare(shown, finished):
    """Raise unless a command printed what the page shows."""
    if shown.output.strip():
        expected, found = stripped(shown.output), stripped(finished.stdout)
        if not OutputChecker().check_output(expected, found, ELLIPSIS):
            message = f"{shlex.join(shown.command)} prints:\n{found}"
            raise AssertionError(message)
    elif finished.returncode:
        raise AssertionError(finished.stdout)


def pages_with_commands():
    return [
        page
        for page in PAGES
        if any(x.command[0] == "lossscale" for x in shown_in(page))
    ]


def test_the_pages_with_commands_are_found():
    names = {page.name for page in pages_with_commands()}
    assert {"README.md", "command-line.md", "choosing-a-policy.md"} <= names


@pytest.mark.parametrize("page", pages_with_commands(), ids=lambda page: page.name)
def test_the_commands_of_a_page_print_what_it_shows(page, tmp_path, tmp_path_factory):
    # The pages convert and report on files that their reader has.
    record_run(tmp_path / "run.jsonl", 200)
    state = to_portable(Dynamic(), Dynamic().init())
    (tmp_path / "scaler.json").write_text(json.dumps(state), encoding="utf-8")
    for shown in shown_in(page):
        if shown.command[0] == "cat":
            (tmp_path / shown.command[1]).write_text(shown.output, encoding="utf-8")
        elif shown.command == ["lossscale", "doctor"]:
            compare(shown, run_doctor(tmp_path_factory.getbasetemp()))
        elif shown.command[0] == "lossscale":
            compare(shown, run(shown.command, tmp_path))


def test_the_readme_shows_every_command():
    commands = [shown.command for shown in shown_in(ROOT / "README.md")]
    names = {words[1] for words in commands if words[0] == "lossscale"}
    assert set(application.commands) == names


def test_the_package_page_names_every_command_and_every_extra():
    page = (ROOT / "PACKAGE.md").read_text(encoding="utf-8")
    extras = re.findall(r"lossscale\[([a-z,]+)\]", page)
    assert set(metadata("lossscale").get_all("Provides-Extra")) == {
        name for names in extras for name in names.split(",")
    }
    (row,) = [line for line in page.splitlines() if "the command `lossscale`" in line]
    names = re.findall(r"`([a-z]+)`", row.partition("the command `lossscale`")[2])
    assert list(application.commands) == names


def test_the_architecture_page_shows_what_the_import_contracts_print():
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    (shown,) = shown_in(ROOT / "docs" / "architecture.md")
    assert "lint-imports" == shown.command[0]
    compare(shown, run(shown.command, ROOT))


def table_of_the_demo(page):
    """Return the rows that a page shows, by the name of the run."""
    (block,) = DEMO.findall(page.read_text(encoding="utf-8"))
    rows = [re.split(r" {2,}", line) for line in block.splitlines()[3:-1]]
    return {name: [number(cell) for cell in cells] for name, *cells in rows}


def number(cell):
    return float(cell.strip("%").replace(",", ""))


def test_every_page_shows_the_same_table_of_the_demo():
    first, *others = [
        DEMO.findall(page.read_text(encoding="utf-8"))
        for page in PAGES
        if DEMO.search(page.read_text(encoding="utf-8"))
    ]
    assert [first] * 2 == others


def can_run(instructions):
    facts = Path("/proc/cpuinfo")
    return facts.exists() and instructions in facts.read_text(encoding="utf-8").split()


@pytest.mark.parametrize(
    "kernel",
    [
        "",
        "Prescott",  # without AVX, as Nehalem's
        pytest.param(
            "Haswell",
            marks=pytest.mark.skipif(not can_run("avx2"), reason="no AVX2 here"),
        ),
    ],
)
def test_the_table_of_the_demo_holds_with_every_blas_kernel(kernel):
    """OpenBLAS takes its kernels from the variable; other libraries do not read it."""
    finished = run_process(
        [SCRIPTS / "lossscale", "demo", "--json"],
        env=os.environ | {"OPENBLAS_CORETYPE": kernel},
        check=True,
    )
    found = {run["run"]: run for run in json.loads(finished.stdout)}
    for name, shown in table_of_the_demo(ROOT / "README.md").items():
        accuracy, _, lost, skipped, scale = shown
        run = found.pop(name)
        # What the page claims: alike, to within what ten seeds differ by.
        assert abs(accuracy - 100 * run["accuracy"]) <= 3, name
        assert abs(lost - 100 * run["flushed"]) <= 0.5, name
        assert abs(skipped - run["skipped"]) <= 5, name
        assert 1 / 8 <= scale / run["final_scale"] <= 8, name
    assert {} == found


def test_the_rows_without_a_dynamic_scale_are_exact_about_it():
    rows = table_of_the_demo(ROOT / "README.md")
    assert [10.8, 2.3026, 100.0, 0.0, 1.0] == rows["float16, no scaling"]
    assert [0.0, 0.0, 1.0] == rows["float32"][2:]
    assert [0.0, 4096.0] == rows["float16, fixed scale"][3:]
