"""S3's LifecycleConfiguration, in the form that this server carries out. Pure.

What it does not carry out (transitions, dates, tags, sizes, versions) is refused by name: a rule
that is accepted and ignored would keep, or lose, what its owner believes gone, or safe.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from objectcache_gateway.xml.xml_render import document, element, parent
from objectcache_gateway.xml.xml_tree import (
    malformed,
    root_of,
)
from objectcache_schemas.errors import InvalidRequest, Unsupported
from objectcache_schemas.limits import (
    LIFECYCLE_RULES_MAX,
    RULE_ID_CHARACTERS_MAX,
    RULE_PREFIX_BYTES_MAX,
)
from objectcache_schemas.records import LifecycleRule

LIFECYCLE_BYTES_MAX = 1 << 20  # of a document: 1,000 rules of S3's usual length are a third
DAYS_MAX = 2**31 - 1
_RULE_ID_BYTES = 12
_RULE_PARTS = frozenset(
    {"ID", "Prefix", "Filter", "Status", "Expiration", "AbortIncompleteMultipartUpload"}
)
# What S3 has and this server does not.
_REFUSED = frozenset(
    {
        "Transition",
        "NoncurrentVersionTransition",
        "NoncurrentVersionExpiration",
        "Date",
        "ExpiredObjectDeleteMarker",
        "Tag",
        "And",
        "ObjectSizeGreaterThan",
        "ObjectSizeLessThan",
    }
)


def parse_lifecycle(body: bytes) -> tuple[LifecycleRule, ...]:
    """The rules of a document, with an ID for those without.

    Raises `InvalidRequest` (MalformedXML, InvalidArgument), and `Unsupported` naming the element.
    """
    root = root_of(body, "LifecycleConfiguration")
    _check_parts(root, frozenset({"Rule"}))
    rules = tuple(_rule(child) for child in root.iterfind("Rule"))
    if not 1 <= len(rules) <= LIFECYCLE_RULES_MAX:
        raise malformed(f"{len(rules)} rules are given, from 1 to {LIFECYCLE_RULES_MAX} may")
    if len({rule.rule_id for rule in rules}) < len(rules):
        raise InvalidRequest("two rules have the same ID")
    return rules


def lifecycle_document(rules: Sequence[LifecycleRule]) -> bytes:
    """The document of `parse_lifecycle`."""
    return document("LifecycleConfiguration", *[_rule_element(rule) for rule in rules])


def _rule_element(rule: LifecycleRule) -> str:
    prefix = element("Prefix", rule.prefix)
    expiration = element("Days", rule.expiration_days)
    abort = element("DaysAfterInitiation", rule.abort_uploads_days)
    return parent(
        "Rule",
        parent("Expiration", expiration) if expiration else "",
        element("ID", rule.rule_id),
        parent("Filter", prefix) if rule.has_filter else prefix,
        element("Status", "Enabled" if rule.enabled else "Disabled"),
        parent("AbortIncompleteMultipartUpload", abort) if abort else "",
    )


def _rule(node: Element) -> LifecycleRule:
    _check_parts(node, _RULE_PARTS)
    prefix, has_filter = _prefix(node)
    _check_prefix(prefix)
    expiration_days = _days(node, "Expiration", "Days")
    abort_uploads_days = _days(node, "AbortIncompleteMultipartUpload", "DaysAfterInitiation")
    if expiration_days is None and abort_uploads_days is None:
        raise malformed("a Rule needs Expiration or AbortIncompleteMultipartUpload")
    status = (node.findtext("Status") or "").strip()
    if status not in ("Enabled", "Disabled"):
        raise malformed("Status must be Enabled or Disabled")
    return LifecycleRule(
        rule_id=_rule_id(node),
        prefix=prefix,
        has_filter=has_filter,
        enabled=status == "Enabled",
        expiration_days=expiration_days,
        abort_uploads_days=abort_uploads_days,
    )


def _rule_id(node: Element) -> str:
    rule_id = node.findtext("ID") or secrets.token_hex(_RULE_ID_BYTES)
    if len(rule_id) > RULE_ID_CHARACTERS_MAX:
        raise InvalidRequest(
            f"an ID has {len(rule_id)} characters, {RULE_ID_CHARACTERS_MAX} are allowed"
        )
    return rule_id


def _prefix(node: Element) -> tuple[str, bool]:
    """The prefix of a rule, and whether a Filter names it."""
    plain = node.findtext("Prefix")
    filters = node.findall("Filter")
    if len(filters) + (plain is not None) != 1:
        raise malformed("a Rule needs one Filter, or one Prefix without a Filter")
    if plain is not None:
        return plain, False
    _check_parts(filters[0], frozenset({"Prefix"}))
    return filters[0].findtext("Prefix") or "", True


def _check_prefix(prefix: str) -> None:
    prefix_bytes = len(prefix.encode())
    if prefix_bytes > RULE_PREFIX_BYTES_MAX:
        raise InvalidRequest(
            f"the Prefix of a Rule has {prefix_bytes} bytes, {RULE_PREFIX_BYTES_MAX} are allowed"
        )


def _days(node: Element, action: str, name: str) -> int | None:
    """Days of an action; None where the rule does not have it."""
    actions = node.findall(action)
    if not actions:
        return None
    if len(actions) > 1:
        raise malformed(f"a Rule has {action} more than once")
    _check_parts(actions[0], frozenset({name}))
    text = (actions[0].findtext(name) or "").strip()
    is_number = text.isascii() and text.removeprefix("-").isdigit()
    if not is_number or len(text) > len(str(DAYS_MAX)):
        raise malformed(f"{name} of {action} must be a whole number")
    if not 1 <= int(text) <= DAYS_MAX:
        raise InvalidRequest(f"{name} of {action} must be at least 1")
    return int(text)


def _check_parts(node: Element, known: frozenset[str]) -> None:
    for child in node:
        name = child.tag
        if name in _REFUSED:
            raise Unsupported(f"{name} in a lifecycle configuration is not implemented")
        if name not in known:
            raise malformed(f"{node.tag} holds {name[:64]!r}, which it does not have")
