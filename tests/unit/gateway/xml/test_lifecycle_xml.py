"""S3's lifecycle documents, and the header that follows from the rules."""

from __future__ import annotations

import pytest

from objectcache_gateway.request.expiration import expiration_headers
from objectcache_gateway.xml.lifecycle_xml import lifecycle_document, parse_lifecycle
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError, Unsupported
from objectcache_schemas.limits import LIFECYCLE_RULES_MAX, RULE_PREFIX_BYTES_MAX
from objectcache_schemas.records import LifecycleRule, ObjectInfo

DAYS = "<Expiration><Days>3</Days></Expiration>"
ABORT = (
    "<AbortIncompleteMultipartUpload><DaysAfterInitiation>2</DaysAfterInitiation>"
    "</AbortIncompleteMultipartUpload>"
)
FILTER = "<Filter><Prefix>logs/</Prefix></Filter>"
STATUS = "<Status>Enabled</Status>"


def document(*rules: str) -> bytes:
    body = "".join(f"<Rule>{rule}</Rule>" for rule in rules)
    return f"<LifecycleConfiguration>{body}</LifecycleConfiguration>".encode()


def error_of(*rules: str) -> ObjectCacheError:
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        parse_lifecycle(document(*rules))
    assert isinstance(caught.value, ObjectCacheError)
    return caught.value


def test_a_rule_has_a_prefix_days_and_a_status() -> None:
    (rule,) = parse_lifecycle(document(f"<ID>old</ID>{FILTER}{STATUS}{DAYS}{ABORT}"))
    assert rule == LifecycleRule(
        rule_id="old", prefix="logs/", expiration_days=3, abort_uploads_days=2
    )


def test_a_document_that_was_written_reads_the_same() -> None:
    rules = parse_lifecycle(
        document(
            f"<ID>a</ID>{FILTER}{STATUS}{DAYS}",
            f"<ID>b &amp; c</ID><Prefix></Prefix><Status>Disabled</Status>{ABORT}",
            f"<ID>d</ID><Filter/>{STATUS}{DAYS}",
        )
    )
    assert [rule.has_filter for rule in rules] == [True, False, True]
    assert [rule.enabled for rule in rules] == [True, False, True]
    assert parse_lifecycle(lifecycle_document(rules)) == rules
    assert b"<Prefix></Prefix><Status>Disabled" in lifecycle_document(rules)


def test_rules_without_an_id_get_one_each() -> None:
    first, second = parse_lifecycle(document(FILTER + STATUS + DAYS, FILTER + STATUS + DAYS))
    assert first.rule_id
    assert first.rule_id != second.rule_id


def test_a_prefix_is_no_longer_than_a_key_may_be() -> None:
    longest = "é" * (RULE_PREFIX_BYTES_MAX // 2)
    for shape in ("<Filter><Prefix>{}</Prefix></Filter>", "<Prefix>{}</Prefix>"):
        (rule,) = parse_lifecycle(document(shape.format(longest) + STATUS + DAYS))
        assert rule.prefix == longest
        error = error_of(shape.format(longest + "e") + STATUS + DAYS)
        assert (error.code, "1025 bytes" in error.message) == ("InvalidArgument", True)


@pytest.mark.parametrize(
    ("rule", "element"),
    [
        (f"{FILTER}{STATUS}<Expiration><Date>2030-01-01</Date></Expiration>", "Date"),
        (
            f"{FILTER}{STATUS}<Expiration><ExpiredObjectDeleteMarker>true"
            "</ExpiredObjectDeleteMarker></Expiration>",
            "ExpiredObjectDeleteMarker",
        ),
        (f"{FILTER}{STATUS}{DAYS}<Transition/>", "Transition"),
        (
            f"{FILTER}{STATUS}{DAYS}<NoncurrentVersionExpiration/>",
            "NoncurrentVersionExpiration",
        ),
        (f"<Filter><Tag/></Filter>{STATUS}{DAYS}", "Tag"),
        (f"<Filter><And><Prefix>a</Prefix></And></Filter>{STATUS}{DAYS}", "And"),
        (
            f"<Filter><ObjectSizeGreaterThan>1</ObjectSizeGreaterThan></Filter>{STATUS}{DAYS}",
            "ObjectSizeGreaterThan",
        ),
    ],
)
def test_what_is_not_carried_out_is_refused_by_name(rule: str, element: str) -> None:
    error = error_of(rule)
    assert error.code == "NotImplemented"
    assert error.message.startswith(f"{element} ")


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (f"{FILTER}{STATUS}", "MalformedXML"),
        (f"{STATUS}{DAYS}", "MalformedXML"),
        (f"{FILTER}<Prefix>a</Prefix>{STATUS}{DAYS}", "MalformedXML"),
        (f"{FILTER}{DAYS}", "MalformedXML"),
        (f"{FILTER}<Status>enabled</Status>{DAYS}", "MalformedXML"),
        (f"{FILTER}{STATUS}{DAYS}{DAYS}", "MalformedXML"),
        (f"{FILTER}{STATUS}{DAYS}<Surprise/>", "MalformedXML"),
        (f"{FILTER}{STATUS}<Expiration><Days>three</Days></Expiration>", "MalformedXML"),
        (f"{FILTER}{STATUS}<Expiration><Days>{'9' * 30}</Days></Expiration>", "MalformedXML"),
        (f"{FILTER}{STATUS}<Expiration><Days>0</Days></Expiration>", "InvalidArgument"),
        (f"{FILTER}{STATUS}<Expiration><Days>-1</Days></Expiration>", "InvalidArgument"),
        (f"<ID>{'a' * 256}</ID>{FILTER}{STATUS}{DAYS}", "InvalidArgument"),
    ],
)
def test_another_rule_is_refused(rule: str, code: str) -> None:
    assert error_of(rule).code == code


def test_ids_are_unique_and_rules_are_bounded() -> None:
    same = f"<ID>a</ID>{FILTER}{STATUS}{DAYS}"
    assert error_of(same, same).code == "InvalidArgument"
    plain = FILTER + STATUS + DAYS
    rules = parse_lifecycle(document(*[plain] * LIFECYCLE_RULES_MAX))
    assert len(rules) == LIFECYCLE_RULES_MAX
    assert error_of(*[plain] * (LIFECYCLE_RULES_MAX + 1)).code == "MalformedXML"
    assert error_of().code == "MalformedXML"


def stored(key: str, modified_s: float) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=1, etag="e", modified_s=modified_s)


def test_the_header_names_the_rule_that_expires_the_object_first() -> None:
    rules = [
        LifecycleRule(rule_id="all", expiration_days=9),
        LifecycleRule(rule_id="my logs", prefix="logs/", expiration_days=2),
        LifecycleRule(rule_id="off", prefix="logs/", enabled=False, expiration_days=1),
        LifecycleRule(rule_id="uploads", prefix="logs/", abort_uploads_days=1),
    ]
    named = expiration_headers(rules, stored("logs/a", 0.25), 86400.0)
    assert named == {
        "x-amz-expiration": 'expiry-date="Sat, 03 Jan 1970 00:00:01 GMT", rule-id="my%20logs"'
    }
    assert 'rule-id="all"' in expiration_headers(rules, stored("a", 0), 86400.0)["x-amz-expiration"]
    assert expiration_headers(rules[2:], stored("logs/a", 0), 86400.0) == {}


def test_a_date_beyond_the_calendar_is_its_last() -> None:
    rule = LifecycleRule(rule_id="never", expiration_days=2**31 - 1)
    assert "31 Dec 9999" in expiration_headers([rule], stored("a", 0), 86400.0)["x-amz-expiration"]
