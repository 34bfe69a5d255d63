"""A bucket's policy from what an operator wrote, and as it is shown. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from objectcache_operations.admin.accounts.quotas import amount_or_none
from objectcache_runtime.amounts import NONE, parse_size_bytes, parse_time_s, size_text, time_text
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.records import (
    BucketPolicy,
    Durability,
    Freshness,
    StoredEncoding,
    Verification,
)

BY_KIND = "auto"  # of `--reads`: as the bucket's kind has it

Choice = TypeVar("Choice", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class PolicyFlags:
    """The flags of `bucket policy`, as written; None was not given."""

    durability: str | None = None
    verification: str | None = None
    quota: str | None = None
    ttl: str | None = None
    reads: str | None = None
    encoding: str | None = None


def changes_of(flags: PolicyFlags) -> dict[str, Any]:
    """Values of the given flags by the policy's fields; raises `InvalidRequest` naming the flag."""
    changes: dict[str, Any] = {}
    if flags.durability is not None:
        changes["durability"] = _choice("--durability", Durability, flags.durability)
    if flags.verification is not None:
        changes["verification"] = _choice("--verification", Verification, flags.verification)
    if flags.quota is not None:
        changes["quota_bytes"] = amount_or_none("--quota", parse_size_bytes, flags.quota)
    if flags.ttl is not None:
        changes["ttl_s"] = amount_or_none("--ttl", parse_time_s, flags.ttl)
    if flags.reads is not None:
        by_kind = flags.reads == BY_KIND
        changes["reads"] = None if by_kind else _choice("--reads", Freshness, flags.reads, BY_KIND)
    if flags.encoding is not None:
        is_none = flags.encoding == NONE
        changes["encoding"] = (
            None if is_none else _choice("--encoding", StoredEncoding, flags.encoding, NONE)
        )
    return changes


def _choice(flag: str, choices: type[Choice], text: str, *others: str) -> Choice:
    for choice in choices:
        if choice.value == text:
            return choice
    known = ", ".join([*(str(choice.value) for choice in choices), *others])
    raise InvalidRequest(f"{flag}: {text!r} is not one of {known}")


def policy_lines(bucket: str, policy: BucketPolicy) -> list[str]:
    """The policy in words, with what each value means."""
    meanings = {
        Durability.SYNC: "acknowledged when no crash can lose it",
        Durability.ASYNC: "acknowledged when readable; a power loss may lose the last second",
        Verification.FULL: "every slice that is read",
        Verification.SAMPLED: "one slice of 16",
        Verification.OFF: "none; reads trust the device",
        Freshness.FRESH: "see what was stored through any server before",
        Freshness.INDEXED: "see what this server has replayed of others' writes",
        None: "fresh; indexed where the bucket has a KV layout",
    }
    reads = BY_KIND if policy.reads is None else policy.reads.value
    encoding = NONE if policy.encoding is None else policy.encoding.value
    quota = NONE if policy.quota_bytes is None else size_text(policy.quota_bytes)
    ttl = NONE if policy.ttl_s is None else time_text(policy.ttl_s)
    return [
        f"bucket        {bucket}",
        f"durability    {policy.durability.value:8} {meanings[policy.durability]}",
        f"verification  {policy.verification.value:8} {meanings[policy.verification]}",
        f"quota         {quota}",
        f"ttl           {ttl}",
        f"reads         {reads:8} {meanings[policy.reads]}",
        f"encoding      {encoding}",
    ]


def policy_document(bucket: str, policy: BucketPolicy) -> dict[str, Any]:
    """The policy for programs: every field, also those at their defaults."""
    return {"bucket": bucket, "policy": msgspec.structs.asdict(policy)}
