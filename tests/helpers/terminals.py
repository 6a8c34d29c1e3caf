"""The command on a terminal: a pseudo-terminal of a given width."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from helpers.limits import HANG_SECONDS


def seen_on_a_terminal(columns, *arguments, variables=None):
    """Return the lines that the command shows on stdout, without colours."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lossscale", *arguments],
        stdout=follower,
        stderr=subprocess.DEVNULL,
        env=environment | {"TERM": "xterm"} | (variables or {}),
    )
    os.close(follower)
    shown = read_all(leader)
    process.wait(timeout=HANG_SECONDS)
    return re.sub(r"\x1b\[[\d;?]*\w", "", shown.decode()).splitlines()


def read_all(leader):
    """Return what is written to a pseudo-terminal until its other side is closed."""
    shown = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # how a pseudo-terminal says that the other side has closed
            break
        if not piece:
            break
        shown += piece
    os.close(leader)
    return shown
