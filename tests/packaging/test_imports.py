"""What an import loads, seen from a fresh interpreter."""

import pkgutil
import subprocess
import sys

import pytest

LISTING = """
import sys
before = set(sys.modules)
import {module}
for name in sorted(set(sys.modules) - before):
    file = getattr(sys.modules[name], "__file__", None) or ""
    third_party = "site-packages" in file or "dist-packages" in file
    if third_party and not name.startswith("lossscale"):
        print(name)
"""


def third_party_modules(module):
    """Return the modules outside the standard library that an import loads."""
    result = subprocess.run(
        [sys.executable, "-c", LISTING.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split()


def core_modules():
    import lossscale.core

    found = pkgutil.walk_packages(lossscale.core.__path__, "lossscale.core.")
    return [module.name for module in found]


def test_every_module_of_the_core_is_found():
    assert "lossscale.core.classic.binding" in core_modules()
    assert len(core_modules()) > 12


@pytest.mark.parametrize(
    "module",
    ["lossscale", "lossscale.cli", "lossscale.diagnostics", *core_modules()],
)
def test_an_import_without_a_framework_loads_the_standard_library_alone(module):
    assert [] == third_party_modules(module)


def test_the_check_can_fail():
    assert "numpy" in third_party_modules("lossscale.numpy")


def test_the_numpy_adapter_loads_numpy_alone():
    roots = {name.partition(".")[0] for name in third_party_modules("lossscale.numpy")}
    assert {"numpy"} == roots


def test_every_exported_name_exists_and_is_sorted():
    import lossscale
    import lossscale.diagnostics
    import lossscale.numpy

    for module in (lossscale, lossscale.numpy, lossscale.diagnostics):
        assert sorted(module.__all__) == module.__all__
        for name in module.__all__:
            assert getattr(module, name) is not None


def test_errors_presets_and_convert_are_modules_of_their_own():
    from lossscale.convert import from_library
    from lossscale.errors import StateError
    from lossscale.presets import get

    modules = [value.__module__ for value in (from_library, StateError, get)]
    assert ["lossscale.convert", "lossscale.errors", "lossscale.presets"] == modules


def test_the_version_is_the_packages():
    from importlib.metadata import version

    import lossscale

    assert version("lossscale") == lossscale.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lossscale.nothing


FRAMEWORKS = ["jax", "keras", "numpy", "optax", "tensorflow", "torch"]


@pytest.mark.parametrize(
    ("statement", "framework"),
    [
        *((f"import lossscale.{name}", name) for name in FRAMEWORKS),
        ("from lossscale.diagnostics import simulate", "numpy"),
        ("from lossscale.diagnostics import measure_tensors", "numpy"),
        ("import lossscale.demo", "numpy"),
    ],
)
def test_a_module_without_its_framework_says_what_to_install(statement, framework):
    lines = (
        "import sys",
        f"sys.modules['{framework}'] = None  # as if it were not installed",
        "from lossscale.errors import MissingPackageError",
        "try:",
        f"    {statement}",
        "except MissingPackageError as error:",
        "    print(error)",
    )
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"pip install 'lossscale[{framework}]'" in result.stdout
