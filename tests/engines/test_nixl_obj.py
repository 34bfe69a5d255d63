"""NIXL's OBJ plugin, unmodified, against the gateway: what it writes it reads, and what it cannot
have whole is an error to it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from botocore.config import Config
from prometheus_client.parser import text_string_to_metric_families

from tests.certificates import Authority
from tests.engines.nixl_obj import Bytes, NixlError, NixlObj
from tests.processes_http import ask
from tests.servers import RunningServer, start_server

pytest.importorskip("nixl")

MIB = 1 << 20
BUCKET = "nixl-objects"
CLIENTS: dict[str, dict[str, str]] = {
    "default": {},
    "crt": {"crtMinLimit": "1"},
    "crt-above-5-MiB": {"crtMinLimit": str(5 * MIB)},
}
SCHEMES = ("http", "https")
MODES = ("required", "supported")
SIZES_BYTES = (1, 65_537, 20 * MIB + 3)  # in parts of 8 MiB: one, and three


@dataclass(frozen=True, slots=True)
class Place:
    """A server, what its clients must trust, and a client that judges what is stored."""

    server: RunningServer
    parameters: dict[str, str]
    s3: Any

    def nixl(self, more: dict[str, str]) -> NixlObj:
        return NixlObj(self.server, BUCKET, {**self.parameters, **more})

    def stored(self, key: str) -> bytes:
        body: bytes = self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return body

    def gets(self) -> dict[str, float]:
        """GetObject requests that ended, by status."""
        status, page = ask(self.server.run_dir / "gateway-0.sock", "GET", "/metrics")
        assert status == 200
        return {
            sample.labels["status"]: sample.value
            for family in text_string_to_metric_families(page.decode())
            for sample in family.samples
            if sample.name == "objectcache_requests_total"
            and sample.labels["operation"] == "GetObject"
        }


def placed(server: RunningServer, authority: Path | None = None) -> Place:
    pair = server.credentials
    make_client: Any = boto3.client
    s3 = make_client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=pair.access_key,
        aws_secret_access_key=pair.secret_key,
        region_name="us-east-1",
        verify=str(authority) if authority else None,
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )
    s3.create_bucket(Bucket=BUCKET)
    return Place(server, {"ca_bundle": str(authority)} if authority else {}, s3)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    directory = tmp_path_factory.mktemp("nixl-obj")
    authority = Authority(directory / "tls")
    pair = authority.pair("server")
    tls = (f"gateway.tls_certificate={pair.certificate}", f"gateway.tls_key={pair.key}")
    with (
        start_server(directory / "http") as plain,
        start_server(directory / "https", *tls) as secured,
    ):
        yield {"http": placed(plain), "https": placed(secured, authority.file)}


@pytest.fixture(params=SCHEMES)
def place(request: pytest.FixtureRequest, places: dict[str, Place]) -> Place:
    return places[request.param]


@pytest.fixture
def plain(places: dict[str, Place]) -> Place:
    """Over HTTP alone, for what no encryption changes."""
    return places["http"]


@pytest.fixture(params=list(CLIENTS))
def parameters(request: pytest.FixtureRequest) -> dict[str, str]:
    return CLIENTS[request.param]


def random_bytes(count: int) -> Bytes:
    return np.frombuffer(bytearray(secrets.token_bytes(count)), dtype=np.uint8)


def empty(count: int) -> Bytes:
    return np.zeros(count, dtype=np.uint8)


@pytest.mark.parametrize("mode", MODES)
def test_what_nixl_writes_it_reads_whole_and_in_ranges(
    place: Place, parameters: dict[str, str], mode: str
) -> None:
    nixl = place.nixl({**parameters, "req_checksum": mode, "resp_checksum": mode})
    for size_bytes in SIZES_BYTES:
        key, data = f"kv/{secrets.token_hex(8)}", random_bytes(size_bytes)
        nixl.write({key: data})
        assert place.stored(key) == data.tobytes()
        whole = empty(size_bytes)
        nixl.read(key, whole)
        assert np.array_equal(whole, data)
        first = size_bytes // 3
        part = empty(max(1, size_bytes // 2))
        nixl.read(key, part, first)
        assert np.array_equal(part, data[first : first + part.nbytes])
        last = empty(1)
        nixl.read(key, last, size_bytes - 1)
        assert last[0] == data[-1]


def test_an_object_that_another_client_stored_with_its_checksum_is_read_in_ranges(
    place: Place, parameters: dict[str, str]
) -> None:
    data = random_bytes(300_000)
    place.s3.put_object(
        Bucket=BUCKET, Key="theirs", Body=data.tobytes(), ChecksumAlgorithm="CRC64NVME"
    )
    nixl = place.nixl({**parameters, "resp_checksum": "supported"})
    part = empty(200_000)
    nixl.read("theirs", part, 50_000)
    assert np.array_equal(part, data[50_000:250_000])


def test_a_query_tells_what_is_stored_from_what_is_not(
    place: Place, parameters: dict[str, str]
) -> None:
    nixl = place.nixl(parameters)
    nixl.write({"query/a": random_bytes(10), "query/c": random_bytes(10)})
    assert nixl.is_stored(["query/a", "query/b", "query/c", "query"]) == [True, False, True, False]


def test_a_query_that_is_not_allowed_is_no_miss(plain: Place) -> None:
    stranger = plain.nixl({"secret_key": "s" * 40})
    with pytest.raises(NixlError):
        stranger.is_stored(["query/a"])


@pytest.mark.parametrize(
    ("size_bytes", "offset_bytes", "count"),
    [
        (65_536, 65_000, 2000),
        (65_536, 0, 65_537),
        (65_536, 0, 6 * MIB + 1),
        (10 * MIB, 5 * MIB, 8 * MIB),
        (65_536, 65_536, 10),
        (65_536, 10 * MIB, 10),
        (0, 0, 10),
    ],
)
def test_a_range_that_is_not_there_whole_is_an_error_and_not_a_short_read(
    plain: Place, parameters: dict[str, str], size_bytes: int, offset_bytes: int, count: int
) -> None:
    key = f"short/{size_bytes}"
    plain.s3.put_object(Bucket=BUCKET, Key=key, Body=b"\x07" * size_bytes)
    with pytest.raises(NixlError):
        plain.nixl(parameters).read(key, empty(count), offset_bytes)


def test_a_long_range_past_the_end_is_an_error_to_the_default_client(place: Place) -> None:
    place.s3.put_object(Bucket=BUCKET, Key="short/long", Body=b"\x07" * (10 * MIB))
    nixl = place.nixl({})
    for count in (10 * MIB + 1, 16 * MIB, 20 * MIB):
        with pytest.raises(NixlError):
            nixl.read("short/long", empty(count))


@pytest.mark.parametrize(
    ("size_bytes", "count"), [(10 * MIB, 16 * MIB), (3 * MIB, 6 * MIB), (3 * MIB, 8 * MIB)]
)
def test_the_common_runtime_hides_from_the_server_where_its_callers_range_ends(
    plain: Place, size_bytes: int, count: int
) -> None:
    plain.s3.put_object(Bucket=BUCKET, Key="hidden", Body=b"\x07" * size_bytes)
    buffer = empty(count)
    plain.nixl(CLIENTS["crt"]).read("hidden", buffer)  # docs/s3.md says so
    assert (buffer[:size_bytes] == 7).all()
    assert not buffer[size_bytes:].any()


def test_one_short_object_fails_the_transfer_of_many(plain: Place) -> None:
    nixl = plain.nixl({"num_threads": "4"})
    data = {f"many/{n}": random_bytes(4096) for n in range(16)}
    nixl.write(data)
    buffers = {key: empty(4096) for key in data}
    nixl.read_many([(key, buffer, 0) for key, buffer in buffers.items()])
    assert all(np.array_equal(buffers[key], data[key]) for key in data)
    plain.s3.put_object(Bucket=BUCKET, Key="many/7", Body=b"cut")
    with pytest.raises(NixlError):
        nixl.read_many([(key, buffer, 0) for key, buffer in buffers.items()])


def test_a_miss_is_one_request_that_is_answered_with_a_404(
    place: Place, parameters: dict[str, str]
) -> None:
    nixl = place.nixl(parameters)
    before = place.gets()
    with pytest.raises(NixlError):
        nixl.read("absent", empty(10))
    after = place.gets()
    assert after["404"] - before.get("404", 0) == 1
    assert "503" not in after
    assert sum(after.values()) - sum(before.values()) == 1


@pytest.mark.parametrize(
    "key", ["a b+c", "model%2Frank=0@1", "üñ/…", "a/b/c/", "k" * 1000, "~(x)!*'"]
)
def test_an_odd_key_names_its_object_and_no_other(
    plain: Place, parameters: dict[str, str], key: str
) -> None:
    nixl, data, found = plain.nixl(parameters), random_bytes(100), empty(100)
    nixl.write({key: data})
    assert plain.stored(key) == data.tobytes()
    assert nixl.is_stored([key]) == [True]
    nixl.read(key, found)
    assert np.array_equal(found, data)


def test_an_object_is_overwritten_whole(plain: Place, parameters: dict[str, str]) -> None:
    nixl = plain.nixl(parameters)
    for size_bytes in (9 * MIB, 100, 6 * MIB):
        data = random_bytes(size_bytes)
        nixl.write({"again": data})
        assert plain.stored("again") == data.tobytes()


def test_virtual_hosts_and_any_region_name_the_same_objects(plain: Place) -> None:
    endpoint = plain.server.endpoint.replace("127.0.0.1", "localhost")
    nixl = plain.nixl(
        {"endpoint_override": endpoint, "use_virtual_addressing": "true", "region": "auto"}
    )
    data, found = random_bytes(100_000), empty(100_000)
    nixl.write({"virtual": data})
    assert plain.stored("virtual") == data.tobytes()
    nixl.read("virtual", found)
    assert np.array_equal(found, data)


def test_a_write_that_may_not_be_is_an_error(plain: Place, parameters: dict[str, str]) -> None:
    for more in ({"bucket": "no-such-bucket"}, {"secret_key": "s" * 40}):
        with pytest.raises(NixlError):
            plain.nixl({**parameters, **more}).write({"k": random_bytes(100_000)})


def test_without_the_protection_a_short_read_is_silent(tmp_path: Path) -> None:
    with start_server(tmp_path / "data", "gateway.exact_ranges=none") as server:
        place = placed(server)
        place.s3.put_object(Bucket=BUCKET, Key="k", Body=b"\x07" * 1000)
        for parameters in CLIENTS.values():
            buffer = empty(1500)
            place.nixl(parameters).read("k", buffer)
            assert (buffer[:1000] == 7).all()
            assert not buffer[1000:].any()
