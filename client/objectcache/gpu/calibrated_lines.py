"""How a device's copies are best cut, as `objectcache gpu calibrate` measured and wrote it down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from objectcache.gpu.device import Device, Direction, Way
from objectcache.gpu.line import LineSettings
from objectcache.gpu.links.checked_links import CheckedLinks, checked_links
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.pull_settings import OURS
from objectcache_schemas.errors import InvalidRequest

_VERSION = 2
_NODE = 0  # of host memory: a copier does not tell them apart


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    way: Way
    task_bytes: int
    depth: int
    ways: tuple[tuple[int, Way], ...] = ()  # of pieces of at most so many bytes


class _Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chunk_bytes: int
    depth: int
    fallback_bytes: int
    bytes_per_s: dict[str, dict[str, float]]  # by direction and the device's place, the own one too


class _Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    piece_bytes: int  # of the pieces with which micro-tasks and depth were measured
    lines: dict[str, _Line]  # by direction
    links: _Links | None = None  # where more than the own one is worth using


class _Version(msgspec.Struct, frozen=True):
    version: int


class _Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    gpus: dict[str, _Gpu]  # by place: a machine's GPUs, and the ranks on them, share a file


def write_lines(
    file: Path,
    device: Device,
    piece_bytes: int,
    lines: Mapping[Direction, LineSettings],
    links: CheckedLinks | None = None,
) -> None:
    """Write what `read_lines` and `read_links` read: JSON. Other devices that the file has stay
    in it; a file that is no calibration is written over. Raises `InvalidRequest` where it cannot
    be written.
    """
    try:
        before = _read_all(file).gpus
    except InvalidRequest:
        before = {}
    mine = _Gpu(
        device.kind,
        piece_bytes,
        {
            direction.value: _Line(line.way, line.task_bytes, line.depth, line.ways)
            for direction, line in lines.items()
        },
        None if links is None else _links_of(links),
    )
    _write(file, before | {device.place: mine})


def read_lines(file: Path, device: Device) -> dict[Direction, LineSettings]:
    """What a `Copier` of the device is given as `loads` and `saves`.

    Raises `InvalidRequest` for a file that is not there, is none of these, or has no such device at
    the place of this: it is to be measured then.
    """
    gpu = _read(file, device)
    missing = {direction.value for direction in Direction} - gpu.lines.keys()
    if missing:
        raise InvalidRequest(f"{file} has no line for {', '.join(sorted(missing))}")
    return {
        direction: LineSettings(line.way, line.task_bytes, line.depth, ways=line.ways)
        for direction in Direction
        if (line := gpu.lines[direction.value])
    }


def read_links(file: Path, device: Device, neighbours: Sequence[Device]) -> CheckedLinks | None:
    """What a `Copier` of the device is given as `links`, with the rates that are in the file: those
    of the neighbours that were worth using, each tried again (`checked_links`). None where more
    than the device's own link was not worth using.

    Raises as `read_lines` does, for links that the neighbours do not have, and `Unavailable`.
    """
    links = _read(file, device).links
    if links is None:
        return None
    if any(not 0 < rate < math.inf for by in links.bytes_per_s.values() for rate in by.values()):
        raise InvalidRequest(f"{file} has a bytes_per_s that is not above 0")
    settings = replace(
        OURS,
        chunk_bytes=links.chunk_bytes,
        depth=links.depth,
        fallback_bytes=links.fallback_bytes,
    )
    at_place = {each.place: each for each in neighbours}
    every = {place: None for rates in links.bytes_per_s.values() for place in rates}
    relays = [place for place in every if place != device.place]
    if absent := [place for place in relays if place not in at_place]:
        raise InvalidRequest(f"{file} has links of {', '.join(absent)}, which are not there")
    checked = checked_links(device, [at_place[place] for place in relays], settings)
    numbers = {each.place: number for number, each in enumerate((device, *checked.relays))}
    rates = {
        direction: LinkRates(
            checked.rates[direction].first_bytes_per_s,
            {
                (numbers[place], _NODE): rate
                for place, rate in links.bytes_per_s.get(direction.value, {}).items()
                if place in numbers
            },
        )
        for direction in Direction
    }
    return replace(checked, rates=rates)


def write_links(file: Path, links: CheckedLinks) -> None:
    """Write down what was learned of the links since; all else stays. Raises as `read_lines`."""
    learned = msgspec.structs.replace(_read(file, links.device), links=_links_of(links))
    _write(file, _read_all(file).gpus | {links.device.place: learned})


def _links_of(links: CheckedLinks) -> _Links:
    places = [each.place for each in (links.device, *links.relays)]
    settings = links.settings
    return _Links(
        settings.chunk_bytes,
        settings.depth,
        settings.fallback_bytes,
        {
            direction.value: {
                places[number]: rate
                for (number, node), rate in sorted(rates.known.items())
                if node == _NODE
            }
            for direction, rates in links.rates.items()
        },
    )


def _write(file: Path, gpus: dict[str, _Gpu]) -> None:
    content = _Calibration(_VERSION, gpus)
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {error.strerror}") from error


def _read(file: Path, device: Device) -> _Gpu:
    gpus = _read_all(file).gpus
    if (gpu := gpus.get(device.place)) is None:
        raise InvalidRequest(
            f"{file} has no device at {device.place}, only at {', '.join(sorted(gpus))}: measure "
            "it with 'objectcache gpu calibrate --write', which leaves the others in the file"
        )
    if gpu.kind != device.kind:
        raise InvalidRequest(
            f"{file} was measured on {gpu.kind}; at {device.place} is {device.kind}"
        )
    return gpu


def _read_all(file: Path) -> _Calibration:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
    try:
        if (version := msgspec.json.decode(content, type=_Version).version) != _VERSION:
            raise InvalidRequest(
                f"{file} has version {version}, not {_VERSION}: measure again with 'objectcache "
                "gpu calibrate --write'"
            )
        return msgspec.json.decode(content, type=_Calibration)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{file} is no calibration of a GPU: {error}") from error
