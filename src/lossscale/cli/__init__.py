# SPDX-License-Identifier: Apache-2.0
"""The command `lossscale`. One thin file per subcommand; the work is done elsewhere.

No command imports from the current folder, where a `torch.py` may be anything. This
file imports nothing that could come from there: `python -m` puts that folder first.
"""

import os
import site
import sys


def main() -> None:
    """Run the command; without its packages, say what to type."""
    _leave_out_current_folder()
    try:
        from lossscale.cli.application import application
    except ModuleNotFoundError as error:
        sys.stderr.write(f"Error: {what_is_missing(error)}\n")
        sys.exit(2)
    application()


def what_is_missing(error: ModuleNotFoundError) -> str:
    """Return what to type if a package of the command is not installed."""
    package = (error.name or "").partition(".")[0]
    if package == "lossscale":
        raise error
    return (
        f"The command lossscale needs the package {package}, which is not installed. "
        "Install it with: pip install 'lossscale[cli]'"
    )


def _leave_out_current_folder() -> None:
    """Take the current folder off the import path.

    Python puts it there for `python -m`, and an empty entry of PYTHONPATH means it. A
    folder of installed packages stays, also for those who are in it.
    """
    try:
        current = os.path.realpath(os.curdir)
    except OSError:  # it was deleted, so nothing can be imported from it
        return
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    sys.path[:] = [
        entry
        for entry in sys.path
        if entry in installed or os.path.realpath(entry) != current
    ]
