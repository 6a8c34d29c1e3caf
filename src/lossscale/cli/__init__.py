# SPDX-License-Identifier: Apache-2.0
"""The command `lossscale`. One thin file per subcommand; the work is done elsewhere."""

import sys


def main() -> None:
    """Run the command; without its packages, say what to type."""
    try:
        from lossscale.cli.application import application
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"The command lossscale needs the package {error.name}, which is not "
            "installed.\nInstall it with: pip install 'lossscale[cli]'\n"
        )
        sys.exit(2)
    application()
