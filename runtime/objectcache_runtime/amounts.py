"""Sizes, times and rates as people write them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import GIB, KIB, MIB, TIB

NONE = "none"
AMOUNT_MAX = 1 << 60  # bytes, or seconds; far above any device or life

_SIZES = {
    "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1}
_BITS_PER_S = {"bps": 1, "kbps": 10**3, "Mbps": 10**6, "Gbps": 10**9, "Tbps": 10**12}
_RATES = _BITS_PER_S | {f"{unit}/s": 8 * unit_bytes for unit, unit_bytes in _SIZES.items()}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]*)")
_SHOWN_SIZES = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))


def parse_size_bytes(text: str) -> int:
    """Bytes of "10GiB"; a part of a byte is left off.

    Raises `InvalidRequest` for what is no number above 0 with a unit.
    """
    size_bytes = int(_parse(text, _SIZES))
    if size_bytes < 1:
        raise InvalidRequest(f"{text!r} is less than a byte")
    return size_bytes


def parse_time_s(text: str) -> float:
    """Seconds of "7d". Raises `InvalidRequest` for what is no number above 0 with a unit."""
    return _parse(text, _TIMES)


def parse_lifetime_s(text: str) -> float | None:
    """Seconds of "7d"; None of "none". Raises `InvalidRequest` that names that word, too."""
    if text.lower() == NONE:
        return None
    try:
        return parse_time_s(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.message}, or {NONE}") from error


def parse_duration_s(text: str) -> float:
    """Seconds of "10ms". Raises `InvalidRequest` for what is no number above 0 with a unit."""
    return _parse(text, _DURATIONS)


def parse_rate_gbps(text: str) -> float:
    """10^9 bits a second of "50Gbps" or "6GB/s".

    Raises `InvalidRequest` for what is no number above 0 with a unit.
    """
    if re.search("Bps", text):
        raise InvalidRequest(f"{text!r} may mean bits or bytes; write Gbps or GB/s")
    return _parse(text, _RATES) / 10**9


def _parse(text: str, units: Mapping[str, float]) -> float:
    """The amount in the smallest of the units, which are taken in any case."""
    examples = ", ".join(units)
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is not a number above 0 with one of the units {examples}")
    number, unit = match.groups()
    factor = {name.lower(): factor for name, factor in units.items()}.get(unit.lower())
    if factor is None:
        problem = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise InvalidRequest(f"{text!r} {problem}; give one of {examples}")
    amount = float(number) * factor
    if not 0 < amount < math.inf:
        raise InvalidRequest(f"{text!r} is not an amount above 0")
    if amount > AMOUNT_MAX:
        raise InvalidRequest(f"{text!r} is too large; give none for no bound")
    return amount


def size_text(size_bytes: float) -> str:
    """Such as "1.5 GiB"."""
    for unit, unit_bytes in _SHOWN_SIZES:
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def time_text(time_s: float) -> str:
    """Such as "7d": in the largest unit of which it is a whole number."""
    for unit in ("d", "h", "m"):
        if time_s % _TIMES[unit] == 0:
            return f"{time_s / _TIMES[unit]:.0f}{unit}"
    return f"{time_s:.3f}".rstrip("0").rstrip(".") + "s"


def duration_text(duration_s: float) -> str:
    """Such as "10ms": in seconds from one up, else in the unit below."""
    unit = next((unit for unit in ("s", "ms") if duration_s >= _DURATIONS[unit]), "us")
    return f"{_short(duration_s / _DURATIONS[unit])}{unit}"


def gbps_text(rate_gbps: float) -> str:
    """Such as "50 Gbps", or "500 Mbps"."""
    rate_bits_per_s = rate_gbps * 10**9
    for unit in ("Gbps", "Mbps", "kbps"):
        if rate_bits_per_s >= _BITS_PER_S[unit]:
            return f"{_short(rate_bits_per_s / _BITS_PER_S[unit])} {unit}"
    return f"{_short(rate_bits_per_s)} bps"


def _short(number: float) -> str:
    """With two digits after the point, where they say something."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


def rate_text(rate_bytes_per_s: float | None) -> str:
    """Such as "1.5 GiB/s"; a dash for what was not measured."""
    return "-" if rate_bytes_per_s is None else f"{size_text(rate_bytes_per_s)}/s"


def payload_text(payload_bytes: int, decoded_bytes: int) -> str:
    """The bytes of a payload, and what they are once they are decoded, where that is more."""
    text = size_text(payload_bytes)
    return f"{text} for {size_text(decoded_bytes)}" if decoded_bytes > payload_bytes else text


def share_text(part: float, whole: float) -> str:
    """Such as "97 %"; a dash of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"
