"""Runs a command in a process of its own."""

import subprocess

from helpers.limits import HANG_SECONDS


def run_process(command, *, check=False, text=True, **options):
    """Return a finished process, and what it printed."""
    return subprocess.run(
        [str(word) for word in command],
        check=check,
        text=text,
        capture_output=True,
        timeout=HANG_SECONDS,
        **options,
    )
