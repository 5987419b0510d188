"""Rows from anywhere: jsonl, parquet and csv files (local, s3:// and other fsspec URLs), and data sets of the Hugging Face hub."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import fsspec

Row = dict[str, Any]


class SourceError(ValueError):
    """Data that can't be used: names the file or data set, the field, and the way out."""


def read_file(path: str) -> list[Row]:
    """All rows of a file; the format follows from its ending. Raises SourceError where it is missing or broken."""
    suffix = PurePosixPath(path).suffix.lower()
    if suffix not in _READERS:
        raise SourceError(f"{path}: can't tell the format from '{suffix}'; the name must end in one of {', '.join(_READERS)}")
    try:
        with fsspec.open(path, "rb") as file:
            return _READERS[suffix](file)
    except FileNotFoundError:
        raise SourceError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise SourceError(f"{path}: can't be read as {suffix}: {error}") from error


def _read_jsonl(file: BinaryIO) -> list[Row]:
    rows = []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: a row is an object, this is {type(row).__name__}")
        rows.append(row)
    return rows


def _read_parquet(file: BinaryIO) -> list[Row]:
    import pyarrow.parquet  # takes a quarter of a second to load, and most runs read no parquet

    return pyarrow.parquet.read_table(file).to_pylist()


def _read_csv(file: BinaryIO) -> list[Row]:
    return list(csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline="")))


_READERS: dict[str, Callable[[BinaryIO], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def read_hub(name: str, config: str | None, split: str, revision: str | None) -> Iterable[Row]:
    """Rows of a hub data set, or of a local folder in a hub layout. Raises SourceError where it can't be had."""
    import datasets  # takes seconds to import, and only this source needs it

    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except (ValueError, OSError) as error:
        raise SourceError(f"hub data set {name}, config {config}, split {split}: {type(error).__name__}: {error}") from error


def cell(row: Row, column: str, where: str) -> Any:
    """The value under a column path: `prompt.0.content` reaches into lists and structs.

    Raises SourceError, beginning with `where`, that names the columns there are.
    """
    value: Any = row
    parts = [column] if column in row else column.split(".")
    for part in parts:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise SourceError(f"{where}: no column '{column}'; there are: {', '.join(_paths(row))}")
    return value


def _paths(value: Any, prefix: str = "") -> list[str]:
    if isinstance(value, dict) and value:
        return [path for key, inner in value.items() for path in _paths(inner, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, list) and value:
        return _paths(value[0], f"{prefix}.0")
    return [prefix]
