"""Real clients, unmodified, against a real server: the same steps for each, bytes compared."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.clients.conftest import PAGES_BUCKET, PAGES_KEYS, Subject
from tests.clients.driver import NotOffered
from tests.clients.matrix import EVERYTHING
from tests.clients.remote import ClientRefused

MIB = 1 << 20
ODD_KEYS = (
    "model/llama 3.1+8b@rank0/50%/hash",
    "percent%2Fslash%25",
    "umlaut-\u00e4/\u65e5\u672c\u8a9e/\U0001f511",
    "a//b",
    "/leading/slash",
    "dots/../and/./more",
    "query?&=#;:,$'()!*~",
)


def asked(subject: Subject, method: str, *arguments: Any) -> Any:
    """One step; skips the test with the client's reason where it cannot say it."""
    try:
        return subject.call(method, *arguments)
    except NotOffered as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("size_bytes", [0, 1, 100_000])
def test_bytes_of_every_size_come_back_the_same(subject: Subject, size_bytes: int) -> None:
    key, data = f"sizes/{size_bytes}", os.urandom(size_bytes)
    asked(subject, "put", key, data)
    assert subject.call("get", key) == data
    assert subject.call("size_bytes", key) == size_bytes


def test_a_multipart_upload_comes_back_the_same(subject: Subject) -> None:
    data = os.urandom(16 * MIB + 12_345)
    asked(subject, "put_parts", "large/object", data)
    etag = subject.judge.head_object(Bucket=subject.bucket, Key="large/object")["ETag"]
    assert "-" in etag, "the client did not upload in parts"
    assert subject.call("get", "large/object") == data


def test_odd_keys_name_what_they_say(subject: Subject) -> None:
    sayable = [key for key in ODD_KEYS if key not in subject.driver.cannot_name]
    for number, key in enumerate(sayable):
        asked(subject, "put", key, f"{number}".encode())
    for number, key in enumerate(sayable):
        assert subject.call("get", key) == f"{number}".encode(), key
        stored = subject.judge.get_object(Bucket=subject.bucket, Key=key)["Body"].read()
        assert stored == f"{number}".encode(), f"{key} was stored under another name"
    listed = subject.call("keys", "")
    assert set(sayable) <= set(listed), (sorted(sayable), listed)
    for key in sayable:
        subject.call("delete", key)
    assert not set(sayable) & set(subject.call("keys", ""))


def test_a_range_has_its_bytes_and_no_other(subject: Subject) -> None:
    data = os.urandom(50_000)
    asked(subject, "put", "ranges/object", data)
    assert asked(subject, "get_range", "ranges/object", 10_000, 50_000) == data[10_000:]
    assert asked(subject, "get_range", "ranges/object", 1_000, 2_500) == data[1_000:2_500]


def test_a_listing_is_whole_and_keeps_to_its_prefix(subject: Subject) -> None:
    for key in ("list/a", "list/b/c", "list/b/d", "other"):
        asked(subject, "put", key, b"x")
    assert sorted(subject.call("keys", "list/")) == ["list/a", "list/b/c", "list/b/d"]
    assert sorted(subject.call("keys", "list/b/")) == ["list/b/c", "list/b/d"]


def test_a_listing_goes_over_several_pages(subject: Subject) -> None:
    listed = subject.driver.call("keys", PAGES_BUCKET, "many/")
    assert sorted(listed) == [f"many/{number:05}" for number in range(PAGES_KEYS)]


def test_a_copy_has_the_bytes_of_its_source(subject: Subject) -> None:
    data = os.urandom(70_000)
    source, target = "copy/source @+%.bin", "copy/target @+%.bin"
    asked(subject, "put", source, data)
    asked(subject, "copy", source, target)
    subject.call("delete", source)
    assert subject.call("get", target) == data


if EVERYTHING:

    def test_a_large_copy_has_the_bytes_of_its_source(subject: Subject) -> None:
        data = os.urandom(16 * MIB + 1)
        subject.judge.put_object(Bucket=subject.bucket, Key="copy/large", Body=data)
        asked(subject, "copy", "copy/large", "copy/large-copied")
        copied = subject.judge.get_object(Bucket=subject.bucket, Key="copy/large-copied")
        assert copied["Body"].read() == data


def test_what_was_deleted_is_missed(subject: Subject) -> None:
    asked(subject, "put", "gone", b"soon")
    subject.call("delete", "gone")
    assert subject.call("size_bytes", "gone") is None
    with pytest.raises(ClientRefused):
        subject.call("get", "gone")


def test_a_put_replaces_what_was_there(subject: Subject) -> None:
    asked(subject, "put", "twice", b"first")
    subject.call("put", "twice", b"second, and longer")
    assert subject.call("get", "twice") == b"second, and longer"
