# SPDX-License-Identifier: Apache-2.0
"""A file that is only ever appended to, by one process at a time.

Imports the standard library only.
"""

import os
from pathlib import Path

from lossscale.errors import SettingError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class AppendOnlyFile:
    """A file that is open for appending, and locked against a second writer."""

    def __init__(self, path: Path) -> None:
        """Open the file, and make it if it is missing.

        Raises:
            SettingError: If it cannot be written, or another process is writing it.
        """
        self._descriptor = -1
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
        self._lock(path)

    def _lock(self, path: Path) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            message = (
                f"{path} is being written by another Recorder. Give each its own path; "
                "on several ranks, pass every_rank=True or record rank 0 alone."
            )
            raise SettingError(message) from None
        except OSError:  # a file system without locks
            pass

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
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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
