"""What every connector is told is checked when it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_schemas.errors import InvalidRequest

GIVEN = {
    "endpoint": "http://127.0.0.1:9000",
    "bucket": "kv-cache",
    "access_key": "key",
    "secret_key": "secret",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endpoint", "127.0.0.1:9000"),
        ("bucket", "kv"),
        ("bucket", "A_B"),
        ("transport", "rdma"),
        ("timeout_s", 0),
        ("load_bytes_max", 0),
        ("nixl_devices", 1),
        ("region", 7),
        ("revision", "main"),
        ("relays", 7),
        ("relays", ["b:7400"]),
        ("relays", [7]),
        ("route", "relay:b"),
        ("route", "sideways"),
        ("node", 3),
        ("relay_timeout_s", 0),
        ("relay_timeout_s", "3 s"),
        ("relay_timeout_s", True),
        ("dispatch", "http://d:9010"),
        ("dispatch_token_file", "/nowhere/token"),
        ("worker", "p0.0"),
        ("fetcher", "127.0.0.1:7410"),
        ("fetcher", 7410),
        ("encodings", "zstd"),
        ("encodings", ["auto", "planes-zstd"]),
        ("encodings", "planes-zstd, lz4"),
        ("encodings", 7),
        ("lossy", "lossless"),
        ("lossy", "lossy-q8"),
        ("lossy", True),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name):
        StoreConfiguration.from_mapping({**GIVEN, name: value}, {})


@pytest.mark.parametrize(
    ("transport", "remedy"),
    [
        ("nixl", "nixl_cu12 is not installed in this environment: pip install --no-deps nixl-cu12"),
        ("verbs", "pyverbs is not installed in this environment: install the system's package"),
    ],
)
def test_a_fabric_whose_library_is_missing_is_refused_at_the_start_with_the_remedy(
    transport: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=f"'transport' is '{transport}', and {remedy}") as told:
        StoreConfiguration.from_mapping({**GIVEN, "transport": transport}, {})
    assert "or set 'transport' to 'auto'" in told.value.message


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_what_is_missing_is_named_with_its_variable(name: str) -> None:
    rest = {key: value for key, value in GIVEN.items() if key != name}
    with pytest.raises(InvalidRequest, match=f"OBJECTCACHE_{name.upper()}"):
        StoreConfiguration.from_mapping(rest, {})


@pytest.mark.parametrize("name", ["credentials_file", "ca_file"])
def test_a_file_that_is_not_there_is_named_with_its_setting(name: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(InvalidRequest, match=rf"'{name}': .*{missing}: No such file"):
        StoreConfiguration.from_mapping({**GIVEN, name: str(missing)}, {}).connect()


def test_the_devices_of_a_fabric_are_the_clients() -> None:
    chosen = {"nixl_devices": "mlx5_0:1", "nixl_ucx": "TLS=rc", "verbs_device": "mlx5_1"}
    with StoreConfiguration.from_mapping({**GIVEN, **chosen}, {}).connect() as client:
        assert client._core.settings.fabric == FabricSettings(**chosen)
    with StoreConfiguration.from_mapping(GIVEN, {}).connect() as client:
        assert client._core.settings.fabric == FabricSettings()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", ("auto",)),
        ("planes-zstd", ("planes-zstd",)),
        ("planes-zstd, planes-deflate", ("planes-zstd", "planes-deflate")),
        (["planes-deflate"], ("planes-deflate",)),
        ("", ()),
        ([], ()),
    ],
)
def test_encodings_are_the_clients(given: object, expected: tuple[str, ...]) -> None:
    with StoreConfiguration.from_mapping({**GIVEN, "encodings": given}, {}).connect() as client:
        assert client._core.settings.encodings == expected
    with StoreConfiguration.from_mapping(GIVEN, {}).connect() as client:
        assert client._core.settings.encodings == ()


def test_the_environment_and_a_credentials_file_fill_in(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = s3cret\n")
    environment = {"OBJECTCACHE_ENDPOINT": "http://host:1", "OBJECTCACHE_BUCKET": "from-there"}
    read = StoreConfiguration.from_mapping({"credentials_file": str(file)}, environment)
    assert (read.endpoint, read.bucket) == ("http://host:1", "from-there")
    assert (read.access_key, read.secret_key) == ("a", "s3cret")
    assert "s3cret" not in repr(read)


@pytest.mark.parametrize(
    "relays", ["b=http://b:7400, http://c:7400", ["b=http://b:7400", "http://c:7400"]]
)
def test_a_connectors_client_has_the_routes_that_its_settings_say(
    relays: object, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-tests-alone")
    token.chmod(0o600)
    configuration = StoreConfiguration.from_mapping(
        {
            **GIVEN,
            "relays": relays,
            "route": "relay:b",
            "node": "a",
            "relay_timeout_s": 3,
            "dispatch": "http://127.0.0.1:9",
            "dispatch_token_file": str(token),
            "worker": "p0.0",
        },
        {},
    )
    with configuration.connect() as client:
        routes = client._routes
        assert routes is not None
        assert [line.address.node for line in routes.lines] == ["b", "c:7400"]
        assert (str(routes.settings.route), routes.settings.node) == ("relay:b", "a")
        assert routes.settings.timeout_s == 3
        assert routes.settings.dispatch is not None
        assert routes.settings.dispatch.worker == "p0.0"
        assert routes.settings.dispatch.token() == "a-token-of-the-tests-alone"
    with StoreConfiguration.from_mapping(GIVEN, {}).connect() as client:
        assert client._routes is None


@pytest.mark.parametrize("is_in_environment", [True, False])
def test_a_connectors_fetcher_is_its_route(is_in_environment: bool) -> None:
    url = "http://127.0.0.1:7410"
    given = {} if is_in_environment else {"fetcher": url}
    environment = {"OBJECTCACHE_FETCHER": url} if is_in_environment else {}
    configuration = StoreConfiguration.from_mapping({**GIVEN, **given}, environment)
    with configuration.connect() as client:
        routes = client._routes
        assert routes is not None
        assert str(routes.settings.route) == "relay:fetcher"
        assert routes.settings.relays[0].endpoint.url == url
