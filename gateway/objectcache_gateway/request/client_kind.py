"""What is known of a client by how it asks, where its answers must differ for that."""

from __future__ import annotations

import re

from objectcache_gateway.request.request_head import RequestHead

_CPP_AGENTS = ("aws-sdk-cpp/", "CRTS3NativeClient/")
# A read of the Common Runtime without a range of its caller's begins with its first part, which is
# at least 5 MiB and whole MiB, and with an object that is smaller it expects less.
_FIRST_PART = re.compile(r"bytes=0-([0-9]{7,18})")
_PART_BYTES_MIN = 5 << 20
_MIB = 1 << 20


def is_cpp_sdk(head: RequestHead) -> bool:
    """Whether AWS's SDK for C++ asks, with its own transport or with the Common Runtime."""
    agent = head.header("user-agent") or ""
    return agent.startswith(_CPP_AGENTS) and head.header("x-amz-api-version") is not None


def needs_whole_range(head: RequestHead, mode: str) -> bool:
    """Whether the client may take a part of its range for all of it.

    `mode` is `gateway.exact_ranges`. NIXL's OBJ plugin never looks at how much arrived, and nothing
    tells it from other programs on AWS's SDK for C++; those know an object's size before they read.
    """
    if mode != "aws-sdk-cpp":
        return mode == "all"
    return is_cpp_sdk(head) and not _is_first_part(head)


def _is_first_part(head: RequestHead) -> bool:
    """Whether this may be the Common Runtime's own range. It numbers no attempts, the SDK does."""
    match = _FIRST_PART.fullmatch(head.header("range") or "")
    if match is None or head.header("amz-sdk-invocation-id") is not None:
        return False
    length_bytes = int(match[1]) + 1
    return length_bytes >= _PART_BYTES_MIN and length_bytes % _MIB == 0
