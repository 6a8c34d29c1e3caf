# SPDX-License-Identifier: Apache-2.0
"""Fail if a public name or a source file is not in the documentation.

    python docs/check_documented.py docs/_build/html

Public names are looked for in the inventory of the built pages, source files in the
tree on the architecture page.
"""

import ast
import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from sphinx.util.inventory import InventoryFile

# Modules that say in __all__ what is public.
MODULES = (
    "lossscale",
    "lossscale.convert",
    "lossscale.numpy",
    "lossscale.torch",
    "lossscale.torch.optim",
    "lossscale.jax",
    "lossscale.jax.compat.jmp",
    "lossscale.jax.compat.flax",
    "lossscale.optax",
    "lossscale.tensorflow",
    "lossscale.keras",
    "lossscale.diagnostics",
    "lossscale.diagnostics.loggers",
)

# Public names of modules that have no __all__.
OTHERS = {
    "lossscale.presets": ("PRESETS", "Preset", "get"),
    "lossscale.core.rule": ("transition",),
    "lossscale.testing.torch": ("inject", "Injection"),
    "lossscale.testing.keras": ("inject", "Injection"),
    "lossscale.testing.jax": ("inject",),
    "lossscale.testing.tensorflow": ("inject",),
    "lossscale.testing.numpy": ("inject",),
}


def public_names():
    """Return every public name, with its module."""
    names = {f"{module}.{name}" for module, known in OTHERS.items() for name in known}
    for module in MODULES:
        names |= {f"{module}.{name}" for name in exported(module)}
    errors = vars(importlib.import_module("lossscale.errors"))
    names |= {
        f"lossscale.errors.{name}"
        for name, value in errors.items()
        if isinstance(value, type)
    }
    return names


def exported(module):
    """Return `__all__` as it is written: the module's framework may be missing."""
    # Not find_spec of the module itself: that imports the packages above it.
    package, *folders = module.split(".")
    path = Path(find_spec(package).origin).parent.joinpath(*folders)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    message = f"{module} has no __all__."
    raise SystemExit(message)


def documented_names(inventory):
    """Return the Python names that the built pages describe."""
    objects = InventoryFile.loads(inventory.read_bytes(), uri="").data
    return {
        name
        for kind, entries in objects.items()
        if kind.startswith("py:")
        for name in entries
    }


def drawn_files(page):
    """Return the files of the tree on the architecture page."""
    tree = page.read_text(encoding="utf-8").split("```text\n", 1)[1].split("```")[0]
    folders, files = [], set()
    for line in tree.splitlines()[1:]:
        entry = re.match(r"([│├└─\s]*)(\S+)", line)
        depth = len(entry[1]) // 4
        folders[depth - 1 :] = [entry[2]]
        if not entry[2].endswith("/"):
            files.add("".join(folders[: depth - 1]) + entry[2])
    return files


def real_files():
    """Return the files of the package."""
    root = Path(importlib.import_module("lossscale").__file__).parent
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def main():
    html = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/_build/html")
    page = Path(__file__).parent / "architecture.md"
    drawn, real = drawn_files(page), real_files()
    complaints = [
        *(
            f"not documented: {name}"
            for name in sorted(public_names() - documented_names(html / "objects.inv"))
        ),
        *(f"not in the tree of {page.name}: {name}" for name in sorted(real - drawn)),
        *(f"only in the tree of {page.name}: {name}" for name in sorted(drawn - real)),
    ]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
