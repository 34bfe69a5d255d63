"""What a relay tells the dispatch service of itself, or why it does not start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from objectcache_relay.dispatch_report import DispatchTarget
from objectcache_runtime.networking.listening import HostPort
from objectcache_runtime.settings import RelaySettings
from objectcache_schemas.errors import InvalidRequest

LISTENING = HostPort("10.0.0.7", 7400)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("a-token-of-the-tests-alone\n")
    file.chmod(0o600)
    return file


def target(token_file: Path, listening: HostPort = LISTENING, **fields: Any) -> DispatchTarget:
    named: dict[str, Any] = {
        "dispatch": "http://dispatch:9010",
        "dispatch_token_file": str(token_file),
        "node": "d0",
        "storage_nic_gbps": 400.0,
        "compute_nic_gbps": 200.0,
    }
    found = DispatchTarget.of(RelaySettings(**{**named, **fields}), listening, "https")
    assert found is not None
    return found


def test_rates_are_bytes_and_the_address_is_where_it_listens(token_file: Path) -> None:
    found = target(token_file, compute_nics=8, landing_bytes=1 << 20)
    told = found.registration
    assert (told.storage_nic_bytes_per_s, told.compute_nic_bytes_per_s) == (50e9, 25e9)
    assert (told.compute_nics, told.landing_bytes) == (8, 1 << 20)
    assert (told.relay, found.node) == ("https://10.0.0.7:7400", "d0")
    assert target(token_file, HostPort("::1", 7)).registration.relay == "https://[::1]:7"
    named = target(token_file, HostPort("", 7), url="http://d0.cluster:7400")
    assert named.registration.relay == "http://d0.cluster:7400"


def test_replicas_stand_with_commas_between_them(token_file: Path) -> None:
    found = target(token_file, dispatch="http://a:1, https://b:2/")
    assert found.urls == ("http://a:1", "https://b:2")


def test_nobody_is_told_unless_it_is_set() -> None:
    assert DispatchTarget.of(RelaySettings(), LISTENING, "http") is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dispatch": "dispatch:9010"}, r"relay\.dispatch must be http://HOST:PORT"),
        ({"dispatch": "http://a:1,,http://b:2"}, r"relay\.dispatch must be"),
        ({"dispatch": "http://a:1/v1"}, r"relay\.dispatch must be"),
        ({"dispatch_token_file": ""}, r"relay\.dispatch_token_file must be"),
        ({"dispatch_token_file": "/none/at/all"}, r"relay\.dispatch_token_file /none/at/all"),
        ({"storage_nic_gbps": 0.0}, r"relay\.storage_nic_gbps must be"),
        ({"compute_nic_gbps": 0.0}, r"relay\.compute_nic_gbps must be"),
        ({"node": "a/b"}, r"relay\.node must be"),
        ({"url": "d0:7400"}, r"relay\.url must be"),
    ],
)
def test_what_is_wrong_names_the_setting(
    token_file: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        target(token_file, **fields)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_an_address_that_is_every_interface_is_no_address(token_file: Path, host: str) -> None:
    with pytest.raises(InvalidRequest, match=r"relay\.url must be set"):
        target(token_file, HostPort(host, 7400))
