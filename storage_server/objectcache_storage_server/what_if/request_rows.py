"""The file of requests: CSV with a header, one row a request."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import NUM_LAYERS_MAX
from objectcache_storage_server.input_files import read_text
from objectcache_storage_server.scheduling.demand import Demand

REQUIRED_COLUMNS = ("name", "bytes_per_layer", "compute_window_s", "num_layers")
OPTIONAL_COLUMNS = ("weight", "tenant")
ROWS_MAX = 10_000
FILE_BYTES_MAX = 16 << 20  # 1,600 bytes a row
NAME_CHARS_MAX = 128
LAYER_BYTES_MAX = 1 << 50
WINDOW_MAX_S = 1e6
WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0  # as of tenants

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Request(NamedTuple):
    """One row."""

    name: str
    demand: Demand


def read_requests(file: Path) -> list[Request]:
    """The requests of a file, one or more, with different names.

    A request without a tenant is its own. Raises `InvalidRequest` with the line that is wrong.
    """
    rows = csv.DictReader(read_text(file, FILE_BYTES_MAX).splitlines(keepends=True), strict=True)
    try:
        _check_columns(rows.fieldnames)
        requests = [_request(row) for row in _rows(rows)]
        if not requests:
            raise InvalidRequest("it has no requests: one row each, below the header")
        _check_tenants(requests)
    except csv.Error as error:
        raise InvalidRequest(f"{file}, line {rows.line_num}: {error}") from error
    except InvalidRequest as error:
        place = f"{file}, line {rows.line_num}" if rows.line_num > 1 else str(file)
        raise InvalidRequest(f"{place}: {error.message}") from None
    return requests


def _check_columns(names: object) -> None:
    """`names` is the header, changed in place: spaces around a column's name do not count."""
    expected = ", ".join(REQUIRED_COLUMNS) + "; optional: " + ", ".join(OPTIONAL_COLUMNS)
    if not isinstance(names, list):
        raise InvalidRequest(f"it is empty; its first line names the columns {expected}")
    names[:] = [str(name).strip() for name in names]
    for name in REQUIRED_COLUMNS:
        if name not in names:
            raise InvalidRequest(f"column {name} is missing; the columns are {expected}")
    for index, name in enumerate(names):
        if name not in REQUIRED_COLUMNS + OPTIONAL_COLUMNS:
            raise InvalidRequest(f"column {name!r} is unknown; the columns are {expected}")
        if name in names[:index]:
            raise InvalidRequest(f"column {name} is there twice")


def _rows(rows: csv.DictReader[str]) -> Iterator[dict[str, str]]:
    """The rows with a text in each cell, and names of their own."""
    names: set[str] = set()
    for row in rows:
        cells = dict[object, object](row)
        if None in cells or None in cells.values():
            raise InvalidRequest(
                f"a row has one value for each of {len(rows.fieldnames or ())} columns"
            )
        texts = {column: text.strip() for column, text in row.items()}
        for column, text in texts.items():
            if not text:
                raise InvalidRequest(f"{column} is empty")
        if texts["name"] in names:
            raise InvalidRequest(f"name {texts['name']!r} is there twice")
        names.add(texts["name"])
        if len(names) > ROWS_MAX:
            raise InvalidRequest(f"there are more than {ROWS_MAX:,} requests")
        yield texts


def _request(row: Mapping[str, str]) -> Request:
    name = _name(row, "name")
    weight = _number(row, "weight", WEIGHT_MIN, WEIGHT_MAX) if "weight" in row else 1.0
    demand = Demand(
        layer_bytes=_integer(row, "bytes_per_layer", LAYER_BYTES_MAX),
        compute_window_s=_number(row, "compute_window_s", 0.0, WINDOW_MAX_S),
        num_layers=_integer(row, "num_layers", NUM_LAYERS_MAX),
        weight=weight,
        tenant=_name(row, "tenant") if "tenant" in row else name,
    )
    return Request(name, demand)


def _name(row: Mapping[str, str], column: str) -> str:
    text = row[column]
    if len(text) > NAME_CHARS_MAX or not text.isprintable():
        raise InvalidRequest(f"{column} must be at most {NAME_CHARS_MAX} printable characters")
    return text


def _number(row: Mapping[str, str], column: str, least: float, most: float) -> float:
    text = row[column]
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not least <= number <= most:
        raise InvalidRequest(
            f"{column} must be a number from {least:g} to {most:g}, got {_shown(text)}"
        )
    return number


def _integer(row: Mapping[str, str], column: str, most: int) -> int:
    """A whole number, 1 or more, also where it is written as 4096.0 or 4.096e3."""
    text = row[column]
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not (1 <= number <= most and number.is_integer()):
        raise InvalidRequest(
            f"{column} must be a whole number from 1 to {most}, got {_shown(text)}"
        )
    return int(number)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _check_tenants(requests: list[Request]) -> None:
    """Weights are of tenants, as in a running server."""
    weights: dict[str, float] = {}
    for request in requests:
        demand = request.demand
        if weights.setdefault(demand.tenant, demand.weight) != demand.weight:
            raise InvalidRequest(f"the requests of tenant {demand.tenant!r} differ in weight")
