"""What a relay does with its settings, in this process."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import aiohttp
import pytest

from objectcache.channel.access_key import SigningKey
from objectcache_relay.__main__ import main
from objectcache_relay.relay_fabrics import RelayFabrics
from objectcache_relay.relay_process import (
    check_endpoint,
    check_landing_memory,
    job_key,
    set_without_effect,
)
from objectcache_relay.server import Relay
from objectcache_relay.watch_upstream import UpstreamWatch, serves
from objectcache_runtime.networking.listening import HostPort
from objectcache_runtime.settings import FetcherSettings, RelaySettings, Settings, StorageSettings
from objectcache_schemas.errors import (
    AccessDenied,
    Busy,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unavailable,
    Unsupported,
)

KEY = SigningKey("KEY", "secret", None)


def of_accepted(relay: Relay, option: int) -> list[int]:
    assert relay._http is not None
    transports = [one.transport for one in relay._http.connections]
    sockets = [one.get_extra_info("socket") for one in transports if one is not None]
    return [connected.getsockopt(socket.IPPROTO_IP, option) for connected in sockets]


@pytest.mark.asyncio
@pytest.mark.parametrize("ip_dscp", [0, 8])
async def test_what_is_sent_over_tcp_has_the_dscp_of_the_setting(ip_dscp: int) -> None:
    relay_settings = RelaySettings(endpoint="http://127.0.0.1:1", ip_dscp=ip_dscp)
    relay = Relay(Settings(relay=relay_settings), KEY)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    await relay.start([listener])
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/healthz") as answer:
                assert answer.status == 200
            assert of_accepted(relay, socket.IP_TOS) == [ip_dscp << 2]
            async with session.get(f"http://127.0.0.1:{port}/relay/report") as answer:
                assert answer.status == 403
            async with session.post(f"http://127.0.0.1:{port}/bucket?kv-get") as answer:
                assert answer.status == 403
    finally:
        await relay.drain(1.0)
    assert relay.report().is_draining
    await asyncio.sleep(0)


def test_classes_of_traffic_become_ucxs_words() -> None:
    fabrics = RelayFabrics(
        Settings(
            storage=StorageSettings(nixl_ucx="TLS=tcp"),
            relay=RelaySettings(ib_traffic_class=32, ib_service_level=3),
        )
    )
    assert fabrics._storage.nixl_ucx == "TLS=tcp,IB_TRAFFIC_CLASS=32,IB_SL=3"
    assert RelayFabrics(Settings())._storage.nixl_ucx == ""


def test_verbs_without_a_device_are_refused_with_the_setting() -> None:
    with pytest.raises(Unsupported, match=r"storage\.verbs_device names no device"):
        RelayFabrics(Settings()).open("verbs", b"", "anybody")


def test_a_relay_without_a_key_or_an_endpoint_says_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIXL_LOG_LEVEL", "FATAL")  # as main sets it, for good
    with pytest.raises(InvalidRequest, match="OBJECTCACHE_ACCESS_KEY"):
        job_key(Settings(), {})
    named = {"OBJECTCACHE_ACCESS_KEY": "A", "OBJECTCACHE_SECRET_KEY": "B"}
    assert job_key(Settings(), named).access_key == "A"
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = C\naws_secret_access_key = D\n")
    relay_settings = RelaySettings(credentials=str(file))
    file.chmod(0o644)
    with pytest.raises(InvalidRequest, match=r"relay\.credentials: .* chmod 600"):
        job_key(Settings(relay=relay_settings), named)
    file.chmod(0o600)
    assert job_key(Settings(relay=relay_settings), named).access_key == "C"
    assert main(["--set", "relay.listen=127.0.0.1:0"]) == 2
    assert "relay.endpoint" in capsys.readouterr().err


@pytest.mark.parametrize("node", ["auto", "direct", "split", "fetcher"])
def test_a_relay_has_no_name_that_is_a_word_of_routes(
    node: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIXL_LOG_LEVEL", "FATAL")
    settings = ("relay.endpoint=http://h:1", f"relay.node={node}")
    assert main([part for one in settings for part in ("--set", one)]) == 2
    assert f"relay.node must not be '{node}'" in capsys.readouterr().err


def test_settings_without_effect_are_found_by_section_and_by_name() -> None:
    settings = Settings(
        relay=RelaySettings(listen="h:1", url="http://h:1"), fetcher=FetcherSettings(workers=3)
    )
    assert set_without_effect(settings, ("fetcher", "relay.url", "relay.node")) == [
        "relay.url",
        "fetcher.workers",
    ]


def test_more_landing_memory_than_the_machine_has_is_refused() -> None:
    check_landing_memory(1 << 20)
    with pytest.raises(InvalidRequest, match=r"relay\.landing_bytes is 1125899906842624, and this"):
        check_landing_memory(1 << 50)


@pytest.mark.parametrize(
    ("endpoint", "listening"),
    [
        ("http://127.0.0.1:7400", HostPort("127.0.0.1", 7400)),
        ("http://localhost:7400", HostPort("127.0.0.1", 7400)),
        ("http://localhost:7400", HostPort("", 7400)),
        ("http://[::1]:7400", HostPort("0.0.0.0", 7400)),
        ("http://10.0.0.7:7400", HostPort("10.0.0.7", 7400)),
    ],
)
def test_a_relay_is_not_its_own_upstream(endpoint: str, listening: HostPort) -> None:
    with pytest.raises(InvalidRequest, match=r"relay\.endpoint .* own relay\.listen"):
        check_endpoint(endpoint, listening)
    check_endpoint(endpoint, listening.with_port(7401))
    check_endpoint("http://10.0.0.8:7400", listening)


@pytest.mark.parametrize(
    ("refusal", "serves_gets"),
    [
        (NotFound("", code="NoSuchBucket"), True),
        (AccessDenied("", code="AccessDenied"), True),
        (Busy(""), True),
        (AccessDenied("", code="SignatureDoesNotMatch"), False),
        (AccessDenied("", code="InvalidAccessKeyId"), False),
        (Unavailable(""), False),
        (InvalidRequest(""), False),
    ],
)
def test_a_gateway_serves_unless_it_refuses_the_key_or_is_away(
    refusal: ObjectCacheError, serves_gets: bool
) -> None:
    assert serves(refusal) is serves_gets


@pytest.mark.asyncio
async def test_an_upstream_that_refuses_is_logged_every_30_s_and_another_refusal_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [0.0]
    refusal: ObjectCacheError | None = Unavailable("nobody listens")

    def ask() -> None:
        if refusal is not None:
            raise refusal

    watch = UpstreamWatch(ask, "http://h:1", lambda: now_s[0], "fetcher")
    for now_s[0] in (0.0, 10.0, 29.0, 30.0):
        await watch.look()
        assert not watch.is_answering
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warned) == 2
    assert "this fetcher can serve nobody: relay.endpoint http://h:1: " in warned[0]
    assert "nobody listens" in warned[0]
    refusal = Unsupported("it is a relay")
    for now_s[0] in (31.0, 32.0):
        await watch.look()
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warned) == 3
    assert "it is a relay" in warned[2]
    refusal = NotFound("", code="NoSuchBucket")
    await watch.look()
    assert watch.is_answering
