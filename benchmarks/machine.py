# SPDX-License-Identifier: Apache-2.0
"""What a result must carry to mean anything: machine and versions."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def describe(*packages: str) -> dict[str, str]:
    """Return the machine and the versions of the packages that were measured."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    found = {name: _version(name) for name in ("lossscale", *packages)}
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **found,
    }


def _version(name: str) -> str:
    """Return the version of a package; where it runs from its source it has none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "from source"
