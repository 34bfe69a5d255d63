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


def test_the_environment_and_a_credentials_file_fill_in(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = s3cret\n")
    environment = {"OBJECTCACHE_ENDPOINT": "http://host:1", "OBJECTCACHE_BUCKET": "from-there"}
    read = StoreConfiguration.from_mapping({"credentials_file": str(file)}, environment)
    assert (read.endpoint, read.bucket) == ("http://host:1", "from-there")
    assert (read.access_key, read.secret_key) == ("a", "s3cret")
    assert "s3cret" not in repr(read)
