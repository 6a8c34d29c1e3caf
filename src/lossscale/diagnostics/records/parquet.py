# SPDX-License-Identifier: Apache-2.0
"""Write the steps of a recorded run to a Parquet file.

Needs pyarrow, which is imported by the function that uses it. A few thousand steps are
in memory at a time.
"""

import importlib
import os
import secrets
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lossscale.diagnostics.records.layout import encode
from lossscale.diagnostics.records.reader import read_run
from lossscale.diagnostics.records.run_file import rollup_path
from lossscale.diagnostics.records.steps import StepRecord
from lossscale.diagnostics.report.wording import encodable
from lossscale.errors import MissingPackageError, SettingError

_ROWS = 16_384


def export_parquet(path: str | os.PathLike[str], output: str | os.PathLike[str]) -> int:
    """Write the steps of a run to a Parquet file, and return how many there are.

    The header of the run is kept as the file's metadata, under the key "lossscale".
    A file that exists is replaced when the new one is whole.

    Args:
        path: The file that a `Recorder` wrote.
        output: The Parquet file.

    Raises:
        MissingPackageError: If pyarrow is not installed.
        StateError: If `path` is not a recorded run.
        SettingError: If `output` is a folder, device or pipe, or belongs to the run.
        OSError: If `output` cannot be written.
    """
    run = read_run(path)
    arrow, parquet = _import("pyarrow"), _import("pyarrow.parquet")
    schema = _schema(arrow).with_metadata({"lossscale": encode(run.header)})
    target = Path(os.path.realpath(output))
    if target.exists() and not target.is_file():
        message = f"{output} is not a regular file; give the name of a Parquet file."
        raise SettingError(message)
    if any(target == Path(os.path.realpath(p)) for p in (path, rollup_path(path))):
        message = f"{output} belongs to the run; give another file."
        raise SettingError(message)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    count = 0
    try:
        with parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for records in _batches(run.records()):
                rows = [_as_row(record) for record in records]
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
                count += len(rows)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        message = (
            "A Parquet file needs the package pyarrow, which is not installed. Install "
            "it with: pip install 'lossscale[parquet]'"
        )
        raise MissingPackageError(message) from None


def _schema(arrow: Any) -> Any:
    text = arrow.dictionary(arrow.int32(), arrow.string())
    tensor = arrow.struct([("name", arrow.string()), ("cause", arrow.string())])
    floats = ("time", "scale", "norm", "clip", "amax", "loss", "lr")
    kinds = {name: arrow.float64() for name in floats} | {
        "step": arrow.int64(),
        "applied": arrow.bool_(),
        "cause": text,
        "nonfinite": arrow.list_(tensor),
        "nearest_finite": text,
    }
    return arrow.schema([(name, kinds[name]) for name in StepRecord._fields])


def _as_row(record: StepRecord) -> dict[str, Any]:
    nearest = record.nearest_finite
    return record._asdict() | {
        "nonfinite": [
            {"name": encodable(name), "cause": cause}
            for name, cause in record.nonfinite
        ],
        "nearest_finite": None if nearest is None else encodable(nearest),
    }


def _batches(records: Iterable[StepRecord]) -> Iterator[list[StepRecord]]:
    iterator = iter(records)
    while batch := list(islice(iterator, _ROWS)):
        yield batch
