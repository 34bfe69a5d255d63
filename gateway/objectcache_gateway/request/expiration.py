"""When a lifecycle rule will expire an object, as x-amz-expiration says it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from email.utils import formatdate
from urllib.parse import quote

from objectcache_schemas.records import LifecycleRule, ObjectInfo

LAST_DATE_S = 253402300799  # the year 9999 ends, and the header's form of a date with it


def expiration_headers(
    rules: Sequence[LifecycleRule], info: ObjectInfo, day_s: float
) -> dict[str, str]:
    """The header of an object that a rule covers: of the rule that expires it first."""
    covering = [
        (rule.expiration_days, rule.rule_id)
        for rule in rules
        if rule.expiration_days is not None and rule.covers(info.key)
    ]
    if not covering:
        return {}
    days, rule_id = min(covering)
    expires_s = min(math.ceil(info.modified_s + days * day_s), LAST_DATE_S)
    date, name = formatdate(expires_s, usegmt=True), quote(rule_id, safe="")
    return {"x-amz-expiration": f'expiry-date="{date}", rule-id="{name}"'}
