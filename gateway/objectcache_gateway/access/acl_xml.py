"""Access control lists as S3's XML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree.ElementTree import Element

from objectcache_gateway.access.acl import GROUPS
from objectcache_gateway.xml.xml_render import document, element, escape, parent
from objectcache_gateway.xml.xml_render import owner as owner_element
from objectcache_gateway.xml.xml_tree import malformed, root_of
from objectcache_schemas.accounts import USER_NAME_PATTERN
from objectcache_schemas.errors import InvalidRequest, Unsupported
from objectcache_schemas.limits import ACL_GRANTS_MAX
from objectcache_schemas.records import AclGrant, AclPermission

_XSI = "http://www.w3.org/2001/XMLSchema-instance"
_USER_NAME = re.compile(USER_NAME_PATTERN)


def parse_acl(body: bytes, owner: str) -> tuple[AclGrant, ...]:
    """Grants of an AccessControlPolicy, without the owner's own, who may do everything anyway.

    Raises `InvalidRequest` (also MalformedACLError) and `Unsupported` for a grantee by e-mail.
    """
    root = root_of(body, "AccessControlPolicy")
    lists = root.findall("AccessControlList")
    if len(lists) != 1:
        raise malformed("an AccessControlPolicy has one AccessControlList")
    grants = [_grant(node) for node in lists[0].iterfind("Grant")]
    if len(grants) > ACL_GRANTS_MAX:
        raise malformed(f"{len(grants)} grants are named, {ACL_GRANTS_MAX} may")
    return tuple(dict.fromkeys(grant for grant in grants if grant.grantee != owner))


def acl_document(owner: str, grants: Iterable[AclGrant]) -> bytes:
    """An AccessControlPolicy: groups, users, and the owner with everything."""
    ordered = sorted(grants, key=lambda grant: grant.grantee not in GROUPS)
    rendered = [_rendered(grant) for grant in ordered]
    everything = _rendered(AclGrant(owner, AclPermission.FULL_CONTROL))
    listed = parent("AccessControlList", *rendered, everything)
    return document("AccessControlPolicy", owner_element(owner), listed)


def _grant(node: Element) -> AclGrant:
    grantees = node.findall("Grantee")
    if len(grantees) != 1:
        raise malformed("a Grant has one Grantee")
    try:
        permission = AclPermission((node.findtext("Permission") or "").strip())
    except ValueError as error:
        known = ", ".join(permission.value for permission in AclPermission)
        raise malformed(f"a Permission is one of {known}") from error
    return AclGrant(_grantee(grantees[0]), permission)


def _grantee(node: Element) -> str:
    group, user = node.findtext("URI"), node.findtext("ID")
    if node.findtext("EmailAddress") is not None:
        raise Unsupported("a grantee by e-mail address is not implemented")
    if group is not None:
        if group not in GROUPS:
            raise InvalidRequest(f"a grantee's URI can only be {' or '.join(GROUPS)}")
        return group
    if user is None or not _USER_NAME.fullmatch(user):
        raise InvalidRequest("a grantee's ID must be the name of a user")
    return user


def _rendered(grant: AclGrant) -> str:
    if grant.grantee in GROUPS:
        kind, named = "Group", element("URI", grant.grantee)
    else:
        kind = "CanonicalUser"
        named = element("ID", grant.grantee) + element("DisplayName", grant.grantee)
    grantee = f'<Grantee xmlns:xsi="{escape(_XSI)}" xsi:type="{kind}">{named}</Grantee>'
    return parent("Grant", grantee, element("Permission", grant.permission.value))
