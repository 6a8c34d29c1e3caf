# SPDX-License-Identifier: Apache-2.0
"""A file that is only ever appended to, by one process at a time.

Imports the standard library only.
"""

import os
import time
from pathlib import Path
from weakref import WeakSet

from lossscale.errors import SettingError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


_LOCK_SECONDS = 0.25
"""How long to try to lock a file: `is_being_written` has it locked for a moment."""

_PAUSE_SECONDS = 0.01


class AppendOnlyFile:
    """A file that is open for appending, and locked against a second writer.

    A process that was forked from its own, as data loaders do, does not have it open.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and make it if it is missing.

        Raises:
            SettingError: If it cannot be written, or another process is writing it.
        """
        self._descriptor = -1
        self._is_locked = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        try:
            self.is_new = not path.exists()
            """Whether this made the file."""
            if self.is_new or path.is_file():  # to open a device may do something
                self._descriptor = os.open(
                    path, flags | getattr(os, "O_NONBLOCK", 0), 0o666
                )
        except (OSError, ValueError) as error:
            raise cannot_be_written(path, error) from None
        if self._descriptor < 0:
            kind = "a directory" if path.is_dir() else "not a regular file"
            message = f"{path} cannot be written: it is {kind}."
            raise SettingError(message)
        _open_files.add(self)
        if not self._lock():
            self.close()
            message = (
                f"{path} is being written by another Recorder. Give each its own path; "
                "on several ranks, pass every_rank=True or record rank 0 alone."
            )
            raise SettingError(message)

    def _lock(self) -> bool:
        """Lock the file; False if another process has it locked, and keeps it so."""
        if fcntl is None:
            return True
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
            except OSError:  # a file system without locks
                return True
            else:
                self._is_locked = True
                return True
            time.sleep(_PAUSE_SECONDS)

    @property
    def size(self) -> int:
        """How many bytes the file has."""
        return os.fstat(self._descriptor).st_size

    def append(self, data: bytes) -> None:
        """Append by one write; if the system takes a part of it only, by several.

        Raises:
            OSError: If it cannot be written.
        """
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def truncate(self) -> None:
        """Make the file empty."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Close the file, and release its lock."""
        if self._is_locked:
            # A process that was forked out of Python's sight has the file open as well,
            # and would keep the lock that closing it here leaves.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the file in a forked process; its lock is left to the one before."""
        descriptor, self._descriptor = self._descriptor, -1
        self._is_locked = False
        if descriptor >= 0:
            os.close(descriptor)


_open_files: "WeakSet[AppendOnlyFile]" = WeakSet()


def _close_in_child() -> None:
    for file in list(_open_files):
        file.close_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def cannot_be_written(path: Path, error: Exception) -> SettingError:
    """Return what to raise if a file cannot be written."""
    reason = getattr(error, "strerror", None) or error
    found: SettingError = SettingError(f"{path} cannot be written: {reason}.")
    return found


def is_being_written(path: Path) -> bool:
    """Whether a process has the file open for recording; False if it is not known."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
