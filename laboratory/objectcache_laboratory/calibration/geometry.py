"""What is delivered: bytes and compute window of a layer. Pure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace

from objectcache_runtime.amounts import parse_duration_s, parse_size_bytes
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import KIB

SLICE_BYTES = 64 * KIB  # 16 tokens of Llama 3.1 8B
CHUNK_TOKENS = 16
DEFAULT_SCALE = 32
WINDOW_MAX_S = 60.0
GEOMETRIES_MAX = 64
FORM = "NAME=BYTES_PER_LAYER,WINDOW,LAYERS, such as 16K=56MiB,8.8ms,32"


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """`num_layers` layers of `layer_bytes`, each computed for `compute_window_s` (paper: L, s, c).

    Raises `InvalidRequest` that names the geometry.
    """

    name: str
    layer_bytes: int
    compute_window_s: float
    num_layers: int

    def __post_init__(self) -> None:
        if self.layer_bytes < 1:
            raise InvalidRequest(f"geometry {self.name}: a layer must have a byte at least")
        if not 0 < self.compute_window_s <= WINDOW_MAX_S:
            raise InvalidRequest(
                f"geometry {self.name}: the compute window must be above 0 and at most "
                f"{WINDOW_MAX_S:g} s"
            )
        try:
            _ = self.layout
        except InvalidRequest as error:
            raise InvalidRequest(f"geometry {self.name}: {error.message}") from error

    @property
    def chunk_count(self) -> int:
        """Chunks of a layer's bytes; their slices have about SLICE_BYTES."""
        return max(1, round(self.layer_bytes / SLICE_BYTES))

    @property
    def layout(self) -> KvLayout:
        """Of its chunks. What the division leaves of a layer is left off."""
        return KvLayout(
            num_layers=self.num_layers,
            chunk_tokens=CHUNK_TOKENS,
            per_layer_chunk_bytes=self.layer_bytes // self.chunk_count,
            dtype="uint8",
            fingerprint="calibration",
        )

    @property
    def delivered_layer_bytes(self) -> int:
        """Bytes of a layer as they are delivered."""
        return self.chunk_count * self.layout.per_layer_chunk_bytes

    @property
    def compute_s(self) -> float:
        """What the GPU needs for all layers; no TTFT is below it."""
        return self.num_layers * self.compute_window_s

    @property
    def zero_stall_rate(self) -> float:
        """Bytes per second from which no layer is late, in theory (paper: r*)."""
        return self.delivered_layer_bytes / self.compute_window_s

    def scaled(self, scale: float) -> ModelGeometry:
        """With its bytes divided by `scale`; times are not."""
        return replace(self, layer_bytes=max(1, round(self.layer_bytes / scale)))


# Table A8: Llama 3.1 8B on an A100, 4096 bytes per token and layer.
DEFAULT_GEOMETRIES = (
    ModelGeometry("4K, 50%", 2048 * 4096, 0.00579, 32),
    ModelGeometry("16K, 50%", 8192 * 4096, 0.02987, 32),
    ModelGeometry("16K, 87.5%", 14336 * 4096, 0.00880, 32),
    ModelGeometry("32K, 87.5%", 28672 * 4096, 0.02385, 32),
)


def parse_geometry(text: str) -> ModelGeometry:
    """A geometry of `FORM`; plain numbers are bytes and seconds. Raises `InvalidRequest`."""
    name, equals, values = text.partition("=")
    parts = [part.strip() for part in values.split(",")]
    if not (name.strip() and equals and len(parts) == 3):
        raise InvalidRequest(f"--geometry {text!r} is not {FORM}")
    try:
        size, window, layers = parts
        return ModelGeometry(
            name.strip(),
            parse_size_bytes(_with_unit(size, "B")),
            parse_duration_s(_with_unit(window, "s")),
            int(layers),
        )
    except ValueError as error:
        raise InvalidRequest(f"--geometry {text!r}: {error}; it must be {FORM}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"--geometry {text!r}: {error.message}") from error


def parse_geometries(profile: str) -> list[ModelGeometry]:
    """The rows of a compute profile, with the columns of the paper's table A8.

    Bytes and layers follow from its rounded figures: required rate times window, and total time
    over window. Raises `InvalidRequest` that names the line.
    """
    lines = profile.splitlines()
    geometries = [_of_row(row, number) for number, row in enumerate(csv.DictReader(lines), 2)]
    if not geometries:
        raise InvalidRequest("the profile holds no row")
    return geometries


def check_geometries(geometries: Sequence[ModelGeometry]) -> None:
    """Raise `InvalidRequest` where there are too many, or two of one name."""
    if len(geometries) > GEOMETRIES_MAX:
        raise InvalidRequest(f"{len(geometries)} geometries were given, at most {GEOMETRIES_MAX}")
    names = [geometry.name for geometry in geometries]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"two geometries are called {name!r}")


def _of_row(row: dict[str, str], number: int) -> ModelGeometry:
    try:
        window_s = float(row["t_layer_ms"]) / 1e3
        rate_bytes_per_s = float(row["required_gbytes_per_s"]) * 1e9
        name = f"{row['context']}, {100 * float(row['hit_rate']):g}%"
        layers = round(float(row["t_total_ms"]) / 1e3 / window_s)
        return ModelGeometry(name, round(rate_bytes_per_s * window_s), window_s, layers)
    except KeyError as error:
        raise InvalidRequest(f"the profile has no column {error.args[0]}") from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the profile's line {number}: {error}") from error


def _with_unit(text: str, unit: str) -> str:
    return text if text[-1:].isalpha() else text + unit
