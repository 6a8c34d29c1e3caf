# SPDX-License-Identifier: Apache-2.0
"""Examines one part of lossscale in a process of its own, for `lossscale doctor`.

This file is also that process's program. It runs in Python's isolated mode and in an
empty folder, so it imports what is installed and nothing from the user's folder.
A process each: importing TensorFlow and then Triton aborts the interpreter, and a
broken installation must not take the doctor down with it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_SECONDS = 600
"""Importing TensorFlow may take minutes on a busy machine with a slow disk."""


class Part(NamedTuple):
    """A package that lossscale uses."""

    name: str
    """Its name, which is that of the module and of the requirement."""
    extra: str
    """The extra of lossscale that declares and installs it."""
    adapter: str | None = None
    """The module of lossscale that is imported to see whether it works."""
    packages: tuple[str, ...] = ()
    """Other names under which it is distributed."""


PARTS = {
    part.name: part
    for part in (
        Part("numpy", "numpy", "lossscale.numpy"),
        Part("torch", "torch", "lossscale.torch"),
        Part("triton", "triton", "lossscale.torch"),
        Part("jax", "jax", "lossscale.jax"),
        Part("optax", "optax", "lossscale.optax"),
        Part(
            "tensorflow",
            "tensorflow",
            "lossscale.tensorflow",
            ("tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm", "tf-nightly"),
        ),
        Part("keras", "keras", "lossscale.keras"),
        Part("numba", "simulate"),
        Part("matplotlib", "plot"),
        Part("click", "cli"),
        Part("packaging", "cli"),
        Part("rich", "cli"),
        Part("uniplot", "cli"),
        Part("textual", "watch", "lossscale.cli.watch_app"),
        Part("pyarrow", "parquet"),
        Part("mlflow", "mlflow"),
        Part("tensorboard", "tensorboard"),
        Part("trackio", "trackio"),
        Part("wandb", "wandb"),
    )
}


class Answer(NamedTuple):
    """What the process found out about a part."""

    version: str | None = None
    """The version that is there, if one is."""
    problem: str | None = None
    """Why it cannot be imported."""
    unusable: str | None = None
    """Why it is of no effect here although it can be imported."""
    runs_on: tuple[str, ...] = ()
    """The devices that it sees; for Keras, its backend."""


def examine(part: Part) -> Answer:
    """Import a part in a process of its own and return what is known about it."""
    # What the parent imports from, less the current folder: the user's own path.
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = json.dumps([part.name, sys.path, str(answer)])
        try:
            result = subprocess.run(  # noqa: S603  # our own interpreter and program
                [sys.executable, "-I", __file__, request],
                cwd=folder,
                env=os.environ | _QUIET,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(problem=f"no answer within {LIMIT_SECONDS} s")
        if answer.exists():
            values = json.loads(answer.read_text(encoding="utf-8"))
            return Answer(**values | {"runs_on": tuple(values["runs_on"])})
    return Answer(problem=_describe_death(result.returncode, result.stderr))


_QUIET = {
    # Counting devices must not take a GPU's memory away from a training.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def _describe_death(status: int, errors: str) -> str:
    """Say how a process ended that gave no answer."""
    how = f"status {status}"
    if status < 0:
        how = f"signal {-status} ({signal.Signals(-status).name})"
    last = errors.strip().splitlines()[-1:]
    return ": ".join([f"the process ended with {how}", *last])


def _examine_here(part: Part) -> Answer:
    """Return what is known about a part; runs in the process of its own."""
    if find_spec(part.name) is None:
        return Answer()
    try:
        module = import_module(part.name)
        release = _installed_version(part) or getattr(module, "__version__", "unknown")
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is reported
        return Answer(_installed_version(part) or "unknown", _describe_error(error))
    try:
        if part.adapter is not None:
            import_module(part.adapter)
        devices = _DEVICES[part.name]() if part.name in _DEVICES else ()
    except BaseException as error:  # noqa: BLE001
        return Answer(release, _describe_error(error))
    if part.name == "triton" and not devices:
        return Answer(release, unusable="no CUDA device is visible")
    return Answer(release, runs_on=devices)


def _describe_error(error: BaseException) -> str:
    """Return an error in one paragraph; ours are sentences already."""
    text = " ".join(str(error).split())
    is_ours = type(error).__module__ == "lossscale.errors"
    return text if is_ours else f"{type(error).__name__}: {text}".rstrip(": ")


def _installed_version(part: Part) -> str | None:
    """Return the version of the first distribution that is there."""
    versions = map(_distribution_version, (part.name, *part.packages))
    return next(filter(None, versions), None)


def _distribution_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda_devices() -> tuple[str, ...]:
    torch = import_module("torch")
    if not torch.cuda.is_available():
        return ()
    indices = range(torch.cuda.device_count())
    return tuple(torch.cuda.get_device_name(index) for index in indices)


def _torch_devices() -> tuple[str, ...]:
    mps = import_module("torch").backends.mps.is_available()
    return ("cpu", *_cuda_devices(), *(["mps"] if mps else []))


def _jax_devices() -> tuple[str, ...]:
    return tuple(dict.fromkeys(x.device_kind for x in import_module("jax").devices()))


def _tensorflow_devices() -> tuple[str, ...]:
    tf = import_module("tensorflow")
    return tuple(x.name.split(":", 1)[1] for x in tf.config.list_physical_devices())


def _keras_backend() -> tuple[str, ...]:
    return (import_module("keras").backend.backend(),)


_DEVICES = {
    "torch": _torch_devices,
    "triton": _cuda_devices,
    "jax": _jax_devices,
    "tensorflow": _tensorflow_devices,
    "keras": _keras_backend,
}


def _answer(request: str) -> None:
    name, path, target = json.loads(request)
    sys.path[:0] = [entry for entry in path if entry not in sys.path]
    answer: dict[str, Any] = _examine_here(PARTS[name])._asdict()
    Path(target).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _answer(sys.argv[1])
