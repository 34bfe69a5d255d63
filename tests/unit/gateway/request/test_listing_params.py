"""Parameters and markers of listings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.request.listing_params import (
    encoding_type,
    key_to_token,
    listing_params,
    page_size,
    token_to_key,
    v2_start_after,
)
from objectcache_schemas.errors import InvalidRequest


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_token_gives_its_key_back_and_does_not_show_it(key: str) -> None:
    token = key_to_token(key)
    assert token_to_key(token) == key
    assert token.isascii()


@pytest.mark.parametrize("token", ["!", "a", "_/8=", "ü"])
def test_a_token_of_somebody_else_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest):
        token_to_key(token)


def test_the_token_outranks_start_after() -> None:
    assert v2_start_after({}) == ""
    assert v2_start_after({"start-after": "a"}) == "a"
    assert v2_start_after({"start-after": "a", "continuation-token": key_to_token("b")}) == "b"


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("7", 7), ("1000", 1000), ("5000", 1000), ("", 1000)]
)
def test_a_page_holds_at_most_a_thousand(text: str, size: int) -> None:
    assert page_size({"max-keys": text}, "max-keys") == size


@pytest.mark.parametrize("text", ["-1", "x", "1.5", "²", "9" * 11])
def test_a_page_size_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="max-keys"):
        page_size({"max-keys": text}, "max-keys")


def test_only_url_is_an_encoding() -> None:
    assert encoding_type({"encoding-type": "url"}) == "url"
    assert encoding_type({}) is None
    with pytest.raises(InvalidRequest):
        encoding_type({"encoding-type": "base64"})


def test_keys_are_encoded_only_when_asked() -> None:
    assert listing_params({"encoding-type": "url"}, "").encoded("a b") == "a%20b"
    assert listing_params({}, "").encoded("a b") == "a b"
