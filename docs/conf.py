# SPDX-License-Identifier: Apache-2.0
"""How Sphinx builds these pages.

    sphinx-build -W -n --keep-going -b html docs docs/_build/html

needs no network: nothing is looked up in other projects' documentation, so the names
that they own are listed at the end of this file.
"""

from importlib.metadata import version as installed_version
from types import SimpleNamespace

from sphinx.ext.autodoc.mock import mock

# The adapters for torch, JAX and optax are imported with their frameworks. The others
# are mocked: TensorFlow cannot be in one process with Triton, which torch imports. A
# mock is enough for everything but base classes, decorators, and a version that is
# compared.
with mock(["tensorflow", "keras", "tf_keras", "lightning", "transformers"]):
    import keras
    import lightning.pytorch
    import tensorflow as tf
    import transformers

    tf.Module = type("Module", (), {})
    optimizers = SimpleNamespace(Optimizer=type("Optimizer", (), {}))
    tf.compat = SimpleNamespace(v1=SimpleNamespace(train=optimizers))
    decorators = SimpleNamespace(do_not_convert=lambda decorated: decorated)
    tf.autograph = SimpleNamespace(experimental=decorators)
    keras.__version__ = "3.14"
    keras.optimizers = SimpleNamespace(LossScaleOptimizer=type("Optimizer", (), {}))
    keras.callbacks = SimpleNamespace(Callback=type("Callback", (), {}))
    keras.saving = SimpleNamespace(
        register_keras_serializable=lambda **_: lambda decorated: decorated
    )
    lightning.pytorch.Callback = type("Callback", (), {})
    transformers.TrainerCallback = type("TrainerCallback", (), {})
    import lossscale.diagnostics.loggers.keras
    import lossscale.diagnostics.loggers.lightning
    import lossscale.diagnostics.loggers.transformers
    import lossscale.keras
    import lossscale.tensorflow

import lossscale.jax.compat.flax
import lossscale.jax.compat.jmp
import lossscale.optax
import lossscale.torch.classic  # noqa: F401

project = "lossscale"
author = "The lossscale developers"
version = release = installed_version("lossscale")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
nitpicky = True

html_theme = "furo"
html_title = f"lossscale {version}"

# Headings get anchors, so that pages can point at each other's sections.
myst_heading_anchors = 3

# The glossary is a list of definitions.
myst_enable_extensions = ["deflist"]

# Docstrings write `name` for code, as Markdown does.
default_role = "code"

napoleon_google_docstring = True
napoleon_numpy_docstring = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# Names in annotations that no page of ours documents.
nitpick_ignore_regex = [
    # The rule quotes its annotations and imports nothing: Triton parses the file.
    (r"py:class", r"Array|Where"),
    # Aliases of the core: Any, a select function, a mapping, a policy with its state.
    (r"py:class", r"(lossscale\.core\.(state|libraries|portable)\.)?(Array|Where)"),
    (r"py:class", r"(lossscale\.core\.\w+\.)?(Values|Pair|Portable)"),
    # A private type variable: "the class this was called on".
    (r"py:(class|obj)", r"(lossscale\.core\.classic\.loss_scales\.)?Self"),
    # A type variable: a tensor, or an iterable of tensors.
    (r"py:(class|obj)", r"(lossscale\.torch\.grad_scaler\.)?Outputs"),
    # Type variables: a train state, an optimizer state.
    (r"py:(class|obj)", r"lossscale\.(jax\.functional|optax\.state)\.State"),
    # torch's process groups and meshes, and what is like them.
    (r"py:class", r"ProcessGroup|DeviceMesh|GroupLike"),
    # What an optimizer must have; described in the text of LossScaleOptimizer.
    (r"py:class", r"(lossscale\.core\.classic\.optimizer\.)?Optimizer"),
    # Parts of a run's file, and writers of steps, under the names of their own modules.
    (r"py:class", r"lossscale\.diagnostics\.(records|backtests\.steps)\..*"),
    # Parts of an explanation, and what a test injects, described where they are used.
    (r"py:class", r"lossscale\.diagnostics\.explanation\.evidence\..*"),
    (r"py:class", r"lossscale\.testing\.faults\.Fault"),
    (r"py:class", r"lossscale\.diagnostics\.loggers\.base\..*"),
    # The standard library and NumPy: no inventory is downloaded.
    (
        r"py:class",
        r"(collections\.abc\.)?(Callable|Hashable|Iterable|Iterator|Mapping|Sequence)",
    ),
    (r"py:class", r"(os\.)?PathLike|(pathlib\.)?Path"),
    (r"py:class", r"(numpy\.|np\.|npt\.|numpy\.typing\.).*"),
    (r"py:class", r"ndarray|dtype|bool_|bool|int64|float32|ArrayLike|NDArray"),
    (r"py:class", r"Flags|Steps|Scales|optional|abc\..*"),
    (r"py:class", r"(torch|optax|jax|jaxlib)\..*|ArrayTree"),
    (r"py:class", r"Callback|TrainerCallback|(logging\.)?Logger"),
    # Bases of the abstract classes.
    (r"py:class", r"ABCMeta|Protocol|typing\..*"),
]


# Napoleon reads "The floor: no back-off goes below it." below an attribute as a type
# and its description. Ours are sentences, so attributes keep the text that they have.
_sentences = {}


def _keep(_app, what, name, _obj, _options, lines):
    if what in {"attribute", "property"}:
        _sentences[name] = list(lines)


def _restore(_app, _what, name, _obj, _options, lines):
    if name in _sentences:
        lines[:] = _sentences.pop(name)


def setup(app):
    app.connect("autodoc-process-docstring", _keep, priority=100)
    app.connect("autodoc-process-docstring", _restore, priority=900)
