from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.request.ranges import (
    content_range,
    resolve_copy_range,
    resolve_range,
    unsatisfied_content_range,
)
from objectcache_schemas.errors import InvalidRequest


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-9", (0, 10)),
        ("bytes=5-5", (5, 1)),
        ("bytes=90-", (90, 10)),
        ("bytes=-10", (90, 10)),
        ("bytes=-1000", (0, 100)),
        ("bytes=0-8388607", (0, 100)),
        ("bytes=99-100", (99, 1)),
        ("Bytes= 0-9 ", (0, 10)),
        ("bytes=0-" + "9" * 5000, (0, 100)),
        ("bytes=-" + "9" * 5000, (0, 100)),
        ("bytes=" + "0" * 5000 + "-9", (0, 10)),
        ("bytes=9-5", None),
        ("bytes=-", None),
        ("bytes=", None),
        ("bytes=a-b", None),
        ("bytes=1.5-2", None),
        ("bytes=+1-2", None),
        ("bytes=0-1,5-6", None),
        ("items=0-1", None),
        ("0-1", None),
        ("bytes=\u0661-2", None),
        ("", None),
    ],
)
def test_a_range_of_a_hundred_bytes(header: str | None, expected: tuple[int, int] | None) -> None:
    assert resolve_range(header, 100) == expected


@pytest.mark.parametrize(
    ("header", "size_bytes"),
    [
        ("bytes=100-", 100),
        ("bytes=100-200", 100),
        ("bytes=" + "9" * 5000 + "-", 100),
        ("bytes=-0", 100),
        ("bytes=0-0", 0),
        ("bytes=0-", 0),
        ("bytes=-5", 0),
    ],
)
def test_a_range_without_any_byte_is_refused(header: str, size_bytes: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve_range(header, size_bytes)
    assert refused.value.code == "InvalidRange"


@given(st.binary(max_size=30), st.integers(0, 40), st.integers(0, 40))
def test_ranges_name_the_bytes_that_a_slice_does(data: bytes, first: int, last: int) -> None:
    expected = data[first : last + 1]
    if last < first:
        assert resolve_range(f"bytes={first}-{last}", len(data)) is None
    elif expected:
        resolved = resolve_range(f"bytes={first}-{last}", len(data))
        assert resolved is not None
        offset, length = resolved
        assert data[offset : offset + length] == expected
        assert content_range(offset, length, len(data)) == (
            f"bytes {first}-{first + len(expected) - 1}/{len(data)}"
        )
    else:
        with pytest.raises(InvalidRequest):
            resolve_range(f"bytes={first}-{last}", len(data))


@given(st.text(max_size=30), st.integers(0, 100))
def test_any_header_gives_a_range_inside_the_object_or_none(text: str, size_bytes: int) -> None:
    try:
        resolved = resolve_range("bytes=" + text, size_bytes)
    except InvalidRequest:
        return
    if resolved is not None:
        offset, length = resolved
        assert 0 <= offset < offset + length <= size_bytes


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-99", (0, 100)),
        ("bytes=99-99", (99, 1)),
        ("bytes=50-", (50, 50)),
        ("bytes=-500", (0, 100)),
        ("bytes=0-1,5-200", None),
        (None, None),
    ],
)
def test_an_exact_range_that_is_there_is_as_any_other(
    header: str | None, expected: tuple[int, int] | None
) -> None:
    assert resolve_range(header, 100, exact=True) == expected
    assert resolve_range(header, 100) == expected


@pytest.mark.parametrize("last", [100, 101, 10**30])
def test_an_exact_range_that_ends_past_the_object_is_refused_and_not_as_its_end(last: int) -> None:
    assert resolve_range(f"bytes=60-{last}", 100) == (60, 40)
    with pytest.raises(InvalidRequest, match="100 bytes") as caught:
        resolve_range(f"bytes=60-{last}", 100, exact=True)
    assert (caught.value.code, caught.value.row.http_status) == ("InvalidRequest", 400)
    with pytest.raises(InvalidRequest) as outside:
        resolve_range(f"bytes=100-{last + 1}", 100, exact=True)
    assert outside.value.code == "InvalidRange"


def test_the_content_range_of_a_refused_range_names_the_size() -> None:
    assert unsatisfied_content_range(100) == "bytes */100"


def test_a_copy_range_must_lie_in_its_source() -> None:
    assert resolve_copy_range("bytes=0-99", 100) == (0, 100)
    assert resolve_copy_range("bytes=7-7", 100) == (7, 1)
    for header, code in [
        ("bytes=0-100", "InvalidRange"),
        ("bytes=5-4", "InvalidArgument"),
        ("bytes=0-", "InvalidArgument"),
        ("bytes=-5", "InvalidArgument"),
        ("0-5", "InvalidArgument"),
        ("bytes=0-1,3-4", "InvalidArgument"),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            resolve_copy_range(header, 100)
        assert refused.value.code == code, header
