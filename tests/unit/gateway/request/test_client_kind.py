"""Who would take a part of a range for all of it, by what such clients were seen to send."""

from __future__ import annotations

import pytest

from objectcache_gateway.request.client_kind import is_cpp_sdk, needs_whole_range
from objectcache_gateway.request.request_head import RequestHead

VERSION = ("x-amz-api-version", "2006-03-01")
ATTEMPT = ("amz-sdk-invocation-id", "8F24CB29-3972-4C7A-A5DA-1437BB225BF3")
CPP = ("user-agent", "aws-sdk-cpp/1.11.760 ua/2.1 api/S3 os/Linux#6.18 lang/c++#C++11")
CRT = ("user-agent", "CRTS3NativeClient/0.1.x platform/unknown")
MIB = 1 << 20


def head(*headers: tuple[str, str], length_bytes: int = 1000, first: int = 0) -> RequestHead:
    span = ("range", f"bytes={first}-{first + length_bytes - 1}")
    return RequestHead("GET", "/b/k", "", (*headers, span))


def test_the_sdk_for_cpp_is_known_with_either_transport() -> None:
    assert is_cpp_sdk(head(CPP, VERSION, ATTEMPT))
    assert is_cpp_sdk(head(CRT, VERSION))


@pytest.mark.parametrize(
    "headers",
    [
        [CRT],  # the Common Runtime below Python or the aws command line
        [CPP],
        [VERSION],
        [VERSION, ("user-agent", "aws-sdk-dotnet-coreclr/3.7")],
        [("user-agent", "Boto3/1.40 md/Botocore#1.40")],
    ],
)
def test_other_clients_are_not(headers: list[tuple[str, str]]) -> None:
    assert not is_cpp_sdk(head(*headers))
    assert not needs_whole_range(head(*headers), "aws-sdk-cpp")


def test_the_common_runtimes_own_first_part_may_be_more_than_there_is() -> None:
    for length_bytes in (5 * MIB, 8 * MIB, 64 * MIB):
        assert not needs_whole_range(head(CRT, VERSION, length_bytes=length_bytes), "aws-sdk-cpp")


@pytest.mark.parametrize(
    ("length_bytes", "first"), [(4 * MIB, 0), (8 * MIB - 1, 0), (8 * MIB, 1), (8 * MIB, 8 * MIB)]
)
def test_any_other_range_of_the_common_runtime_is_its_callers(
    length_bytes: int, first: int
) -> None:
    asked = head(CRT, VERSION, length_bytes=length_bytes, first=first)
    assert needs_whole_range(asked, "aws-sdk-cpp")


def test_a_range_of_the_sdks_own_transport_is_always_its_callers() -> None:
    assert needs_whole_range(head(CPP, VERSION, ATTEMPT, length_bytes=8 * MIB), "aws-sdk-cpp")


def test_the_setting_may_say_everybody_or_nobody() -> None:
    boto3 = head(("user-agent", "Boto3/1.40"))
    assert needs_whole_range(boto3, "all")
    assert not needs_whole_range(head(CPP, VERSION, ATTEMPT), "none")
