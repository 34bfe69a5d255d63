"""The buckets that a session may get from by itself: passes that a gateway has given it.

A gateway decides who may read what; the storage server looks whether anything that the decision
rests on has changed since. Any change of the accounts or of a bucket voids every pass, whosever it
is: the next get goes through a gateway, which may give another. Time is an argument.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from objectcache_schemas.errors import AccessDenied
from objectcache_schemas.messages.kv import ReadPass

PASSES_MAX = 64  # of one session; the oldest goes first


class Versions(NamedTuple):
    """What accounts and buckets are known by."""

    accounts: int
    buckets: int


class _Pass(NamedTuple):
    versions: Versions
    expires_s: float


class PassBook:
    """The passes of one session, which was opened with one access key."""

    def __init__(self, access_key: str) -> None:
        self._access_key = access_key
        self._passes: dict[str, _Pass] = {}  # by bucket

    def give(
        self, bucket: str, given: ReadPass, now: Versions | None, now_s: float, lives_s_max: float
    ) -> float:
        """Keep a pass; returns for how many seconds it holds, 0 where it is none for this session.

        It is none where another key signed than the one that opened the session, or where accounts
        or buckets have changed since; `now` is None where changes are not heard of.
        """
        versions = Versions(given.version, given.buckets_version)
        lives_s = min(lives_s_max, math.inf if given.lives_s is None else given.lives_s)
        is_own = bool(self._access_key) and given.access_key == self._access_key
        if lives_s <= 0 or versions != now or not is_own:
            return 0.0
        self._passes.pop(bucket, None)
        while len(self._passes) >= PASSES_MAX:
            del self._passes[next(iter(self._passes))]
        self._passes[bucket] = _Pass(versions, now_s + lives_s)
        return lives_s

    def check(self, bucket: str, now: Versions | None, now_s: float) -> None:
        """Raise `AccessDenied` unless a pass for the bucket is in force."""
        held = self._passes.get(bucket)
        if held is None or held.versions != now or held.expires_s <= now_s:
            self._passes.pop(bucket, None)
            raise AccessDenied("the session has no pass for this bucket; get over HTTP")

    def __repr__(self) -> str:
        return f"<PassBook {len(self._passes)}/{PASSES_MAX}>"
