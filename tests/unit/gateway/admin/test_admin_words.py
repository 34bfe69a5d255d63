"""What operators' commands take and say: names, numbers, lifetimes and where to look."""

from __future__ import annotations

import pytest

from objectcache_gateway.admin.api import ROUTES
from objectcache_gateway.request.routes import UNCONFIGURED, Operation, s3_name
from objectcache_operations.admin.accounts.grants import access_of, grant_of
from objectcache_operations.admin.accounts.quotas import QuotaFlags, quota_change, quota_lines
from objectcache_runtime.amounts import parse_lifetime_s
from objectcache_runtime.settings import load_settings
from objectcache_schemas.accounts import Access
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.admin_api import SCOPE_ADMIN, SCOPE_READ, SCOPES
from objectcache_schemas.records import Quota


def test_counts_are_shown_in_full() -> None:
    lines = quota_lines(Quota(object_count=1_000_000, requests_per_s=2_500_000.5, deliveries=10))
    assert "objects       1,000,000" in lines
    assert "requests      2,500,000.5/s" in lines
    assert "deliveries    10" in lines
    assert "requests      100/s" in quota_lines(Quota(requests_per_s=100.0))


def test_an_unknown_unit_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(InvalidRequest, match=r"--stored: '500G' has the unknown unit 'G'.*GB, TB"):
        quota_change(QuotaFlags(stored="500G"))
    assert quota_change(QuotaFlags(stored="500GB")).stored_bytes == 500 * 10**9


def test_accesses_are_given_one_by_one_or_between_commas() -> None:
    assert access_of(["read,write"]) == access_of(["read", "write"]) == (Access.READ, Access.WRITE)
    assert access_of(["read,write", "admin"]) == tuple(Access)
    assert grant_of("b/p=read,write").access == (Access.READ, Access.WRITE)
    for wrong in (["read,"], ["read write"], [""]):
        with pytest.raises(InvalidRequest, match="is no access; give some of read, write, admin"):
            access_of(wrong)


def test_a_lifetime_is_a_time_or_none_and_the_error_says_both() -> None:
    assert parse_lifetime_s("12h") == 12 * 3600
    assert parse_lifetime_s("None") is None
    for wrong in ("never", "0d", "5"):
        with pytest.raises(InvalidRequest, match=", or none"):
            parse_lifetime_s(wrong)


def test_an_unknown_setting_says_where_all_are() -> None:
    with pytest.raises(
        InvalidRequest, match=r"called x\.y, in a flag; `objectcache settings` prints all"
    ):
        load_settings(None, {}, ["x.y=1"])


def test_a_configuration_that_no_bucket_has_goes_by_its_name_in_s3() -> None:
    names = {s3_name(Operation.GET_UNCONFIGURED, {name: ""}) for name in UNCONFIGURED}
    assert len(names) == len(UNCONFIGURED)
    assert s3_name(Operation.GET_UNCONFIGURED, {"policy": ""}) == "GetBucketPolicy"
    assert s3_name(Operation.PUT_OBJECT, {}) == "PutObject"


def test_every_scope_that_a_token_may_have_opens_some_path() -> None:
    used = {route.scope for route in ROUTES}
    assert set(SCOPES) - used <= {SCOPE_ADMIN, SCOPE_READ}
