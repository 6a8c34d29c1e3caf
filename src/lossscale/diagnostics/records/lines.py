# SPDX-License-Identifier: Apache-2.0
"""Read JSON lines out of a part of a file, whatever the file holds.

A line that is not JSON is handed on as `MALFORMED`, so that one torn line costs itself
and nothing else. No more than a piece of the file is in memory. Imports the standard
library only.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from lossscale.diagnostics.records.layout import MOST_BYTES, parse_json

_PIECE = 2**20


class Malformed:
    """Represents a line that is not JSON, or is longer than any that is written."""


MALFORMED = Malformed()


class Line(NamedTuple):
    """One line of a file."""

    offset: int
    """Where it starts."""
    size: int
    """How many bytes it has, its end included."""
    value: Any
    """What it holds; `MALFORMED` if that cannot be read, `None` if it is empty."""


def read_lines(
    file: BinaryIO, start: int, end: int, *, prefix: bytes = b""
) -> Iterator[Line]:
    """Yield the lines of a part of a file.

    A last line without an end of line is one that is still being written, or that was
    torn: it is malformed unless it is whole.

    Args:
        file: Opened for reading bytes.
        start: Where the first line starts.
        end: Where the part ends.
        prefix: Parse only lines that start with this; the others have the value `None`.
    """
    file.seek(start)
    offset, rest, too_long = start, b"", 0
    left = end - start
    while left > 0:
        piece = file.read(min(_PIECE, left))
        if not piece:
            break
        left -= len(piece)
        if too_long:
            newline = piece.find(b"\n")
            if newline < 0:
                too_long += len(piece)
                continue
            yield Line(offset, too_long + newline + 1, MALFORMED)
            offset += too_long + newline + 1
            rest, too_long, piece = b"", 0, piece[newline + 1 :]
        *lines, rest = (rest + piece).split(b"\n")
        yield from _parse(lines, offset, prefix)
        offset += sum(map(len, lines)) + len(lines)
        if len(rest) > MOST_BYTES:
            rest, too_long = b"", len(rest)
    if too_long:
        yield Line(offset, too_long, MALFORMED)
    elif rest:
        (line,) = _parse([rest], offset, prefix)
        yield line._replace(size=len(rest))


def _parse(lines: list[bytes], offset: int, prefix: bytes) -> Iterator[Line]:
    """Parse lines together, which is faster, or one by one if some are malformed."""
    values = None if prefix else _parse_together(lines)
    if values is None:
        values = [
            _parse_one(line) if line.startswith(prefix) else None for line in lines
        ]
    for line, value in zip(lines, values, strict=True):
        size = len(line) + 1
        yield Line(offset, size, value)
        offset += size


def _parse_together(lines: list[bytes]) -> list[Any] | None:
    try:
        values = parse_json(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    # A torn line may have been completed by the next one.
    return values if len(values) == len(lines) else None


def _parse_one(line: bytes) -> Any:
    if not line.strip():
        return None
    try:
        return parse_json(line)
    except (ValueError, RecursionError):
        return MALFORMED
