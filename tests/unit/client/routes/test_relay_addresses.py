"""Relays as a caller writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache.routes.route_settings import RelayAddress, checked_dispatch, checked_routes
from objectcache_schemas.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "node", "url"),
    [
        ("http://h:7400", "h:7400", "http://h:7400"),
        ("d0=http://h:7400", "d0", "http://h:7400"),
        ("rack=1=https://h:7400", "rack=1", "https://h:7400"),
    ],
)
def test_a_relay_is_a_url_with_or_without_a_name(text: str, node: str, url: str) -> None:
    address = RelayAddress.parse(text)
    assert (address.node, address.endpoint.url) == (node, url)


@pytest.mark.parametrize(
    ("relays", "told"),
    [
        (["d0=http://h:7400/?a=b"], "must end after the port"),
        (["=http://h:7400"], "before its '='"),
        (["d\u00f6=http://h:7400"], "before its '='"),
        (["d0=h:7400"], "http://host:port"),
        (["http://h:0"], "port 0"),
        (["direct=http://h:7400"], "'direct' is the name of a route"),
        (["fetcher=http://h:7400"], "'fetcher' is the name of a route"),
        (["a=http://h:1", "b=http://h:1"], "http://h:1 is there under two names"),
        (["a=http://h:1", "a=http://h:2"], "'a' is there twice"),
    ],
)
def test_what_is_no_relay_is_refused(relays: list[str], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        checked_routes(relays, "auto", "", 0, None)


def test_a_token_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-the-tests-alone")
    file.chmod(0o644)
    with pytest.raises(InvalidRequest, match=r"dispatch_token: .* chmod 600"):
        checked_dispatch("http://d:9010", file, "")
    file.chmod(0o640)
    assert checked_dispatch("http://d:9010", file, "") is not None


def test_a_token_that_is_being_replaced_is_the_one_before_until_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    with pytest.raises(InvalidRequest, match="one line of visible ASCII"):
        checked_dispatch("http://d:9010", file, "")
    file.write_text("the-first-token")
    source = checked_dispatch("http://d:9010", file, "")
    assert source is not None
    file.write_text("")
    assert source.token() == "the-first-token"
    file.unlink()
    assert source.token() == "the-first-token"
    file.touch(0o600)
    file.write_text("the-second-token\n")
    assert source.token() == "the-second-token"
    file.chmod(0o604)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        source.token()
