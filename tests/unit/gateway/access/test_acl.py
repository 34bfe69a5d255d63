"""What access control lists allow, and how their XML is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.access.acl import (
    ALL_USERS,
    AUTHENTICATED_USERS,
    CANNED,
    NEEDED,
    allows,
    canned,
)
from objectcache_gateway.access.acl_xml import acl_document, parse_acl
from objectcache_gateway.request.routes import Operation
from objectcache_schemas.errors import InvalidRequest, Unsupported
from objectcache_schemas.records import AclGrant, AclPermission

NOBODY = ""
READ, WRITE, FULL = AclPermission.READ, AclPermission.WRITE, AclPermission.FULL_CONTROL

grants = st.lists(
    st.builds(
        AclGrant,
        st.sampled_from([ALL_USERS, AUTHENTICATED_USERS, "alice", "bob"]),
        st.sampled_from(AclPermission),
    ),
    max_size=6,
    unique=True,
).map(tuple)


@pytest.mark.parametrize(
    ("name", "identity", "permission", "allowed"),
    [
        ("private", "alice", READ, False),
        ("public-read", NOBODY, READ, True),
        ("public-read", NOBODY, WRITE, False),
        ("public-read-write", NOBODY, WRITE, True),
        ("authenticated-read", NOBODY, READ, False),
        ("authenticated-read", "alice", READ, True),
        ("bucket-owner-read", "owner", READ, True),
        ("bucket-owner-read", "owner", WRITE, False),
        ("bucket-owner-full-control", "owner", WRITE, True),
        ("bucket-owner-full-control", "alice", READ, False),
    ],
)
def test_a_canned_list_lets_in_whom_its_name_says(
    name: str, identity: str, permission: AclPermission, allowed: bool
) -> None:
    assert allows(canned(name, "writer", "owner"), identity, permission) is allowed


def test_a_bucket_owner_is_not_listed_for_what_is_its_own() -> None:
    assert canned("bucket-owner-full-control", "owner", "owner") == ()
    with pytest.raises(InvalidRequest, match="public-read"):
        canned("public-ready", "owner", "owner")


@given(grants, st.sampled_from([NOBODY, "alice", "carol"]), st.sampled_from(AclPermission))
def test_nobody_is_allowed_what_no_grant_names(
    listed: tuple[AclGrant, ...], identity: str, permission: AclPermission
) -> None:
    groups = {ALL_USERS} | ({AUTHENTICATED_USERS, identity} if identity else set())
    named = [grant for grant in listed if grant.grantee in groups]
    assert allows(listed, identity, permission) is any(
        grant.permission in (permission, FULL) for grant in named
    )


@given(grants)
def test_a_list_reads_as_it_was_written(listed: tuple[AclGrant, ...]) -> None:
    assert set(parse_acl(acl_document("owner", listed), "owner")) == set(listed)


def test_a_grantee_by_mail_is_not_implemented() -> None:
    grantee = "<Grantee><EmailAddress>a@example.com</EmailAddress></Grantee>"
    grant = f"<Grant>{grantee}<Permission>READ</Permission></Grant>"
    body = f"<AccessControlPolicy><AccessControlList>{grant}</AccessControlList>"
    with pytest.raises(Unsupported):
        parse_acl(f"{body}</AccessControlPolicy>".encode(), "owner")


def test_more_grants_than_s3_takes_are_refused() -> None:
    many = [AclGrant(f"user-{number}", READ) for number in range(101)]
    assert len(parse_acl(acl_document("owner", many[:99]), "owner")) == 99
    with pytest.raises(InvalidRequest, match="100"):
        parse_acl(acl_document("owner", many), "owner")


def test_no_list_opens_what_configures_a_bucket_or_delivers_chunks() -> None:
    closed = {
        Operation.DELETE_BUCKET,
        Operation.DELETE_OBJECTS,
        Operation.PUT_BUCKET_LIFECYCLE,
        Operation.PUT_BUCKET_TAGGING,
        Operation.PUT_KV_LAYOUT,
        Operation.KV_GET,
        Operation.KV_MATCH,
        Operation.KV_PUT,
        Operation.LIST_BUCKETS,
    }
    assert not closed & set(NEEDED)
    assert "private" in CANNED
