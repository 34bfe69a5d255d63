from __future__ import annotations

import dataclasses
import hashlib
import hmac
import itertools
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.signing.canonical_request import (
    canonical_headers,
    canonical_paths,
    canonical_query,
)
from objectcache_gateway.signing.sigv4 import (
    Authenticated,
    FormerKey,
    Payload,
    SigningKeys,
    authenticate,
    derive_signing_key,
)
from objectcache_schemas.errors import AccessDenied, InvalidRequest, ObjectCacheError, Unsupported
from tests.unit.gateway.request_signing import (
    ACCESS_KEY,
    EMPTY_SHA256,
    EXAMPLE_NOW_S,
    SECRET_KEY,
    SEED,
    make_head,
    presign,
    secret_for,
    sign,
    signed_at_s,
)

SKEW_S = 900.0
URL = "http://127.0.0.1:9000/bucket/key"


def verify(
    head: RequestHead, now_s: float | None = None, region: str | None = None
) -> Authenticated:
    now_s = signed_at_s(head) if now_s is None else now_s
    return authenticate(head, secret_for, now_s, SKEW_S, region)


def refusal_code(head: RequestHead, now_s: float | None = None, region: str | None = None) -> str:
    with pytest.raises(ObjectCacheError) as refused:
        verify(head, signed_at_s(sign("GET", URL)) if now_s is None else now_s, region)
    assert isinstance(refused.value, AccessDenied | InvalidRequest | Unsupported)
    return refused.value.code


def with_header(head: RequestHead, name: str, value: str) -> RequestHead:
    kept = tuple(pair for pair in head.headers if pair[0] != name)
    return dataclasses.replace(head, headers=(*kept, (name, value)))


def without_header(head: RequestHead, name: str) -> RequestHead:
    return dataclasses.replace(head, headers=tuple(p for p in head.headers if p[0] != name))


# --- Amazon's published examples ---


def example_head(method: str, target: str, headers: dict[str, str], signature: str) -> RequestHead:
    headers = {"host": "examplebucket.s3.amazonaws.com", "x-amz-date": "20130524T000000Z"} | headers
    names = ";".join(sorted(headers))
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20130524/us-east-1/s3/aws4_request,"
        f"SignedHeaders={names},Signature={signature}"
    )
    return make_head(method, target, headers)


def test_amazons_example_of_a_ranged_get_is_accepted() -> None:
    head = example_head(
        "GET",
        "/test.txt",
        {"range": "bytes=0-9", "x-amz-content-sha256": EMPTY_SHA256},
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    )
    assert verify(head, EXAMPLE_NOW_S) == Authenticated(
        ACCESS_KEY, Payload.SIGNED, EMPTY_SHA256, None, False
    )


def test_amazons_example_of_a_put_is_accepted() -> None:
    digest = hashlib.sha256(b"Welcome to Amazon S3.").hexdigest()
    head = example_head(
        "PUT",
        "/test%24file.text",
        {
            "date": "Fri, 24 May 2013 00:00:00 GMT",
            "x-amz-storage-class": "REDUCED_REDUNDANCY",
            "x-amz-content-sha256": digest,
        },
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    )
    assert verify(head, EXAMPLE_NOW_S).payload_sha256 == digest


@pytest.mark.parametrize(
    ("query", "signature"),
    [
        ("?lifecycle", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        (
            "?prefix=J&max-keys=2",
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_amazons_examples_of_queries_are_accepted(query: str, signature: str) -> None:
    head = example_head("GET", "/" + query, {"x-amz-content-sha256": EMPTY_SHA256}, signature)
    assert verify(head, EXAMPLE_NOW_S).access_key == ACCESS_KEY


def test_amazons_example_of_a_presigned_url_is_accepted_until_it_expires() -> None:
    head = make_head(
        "GET",
        "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256"
        f"&X-Amz-Credential={ACCESS_KEY}%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
        "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
        "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404",
        {"Host": "examplebucket.s3.amazonaws.com"},
    )
    assert verify(head, EXAMPLE_NOW_S + 86400) == Authenticated(
        ACCESS_KEY, Payload.UNSIGNED, None, None, True
    )
    assert refusal_code(head, EXAMPLE_NOW_S + 86401) == "AccessDenied"


def test_amazons_example_of_a_chunked_upload_gives_its_seed_signature() -> None:
    head = example_head(
        "PUT",
        "/examplebucket/chunkObject.txt",
        {
            "host": "s3.amazonaws.com",
            "x-amz-storage-class": "REDUCED_REDUNDANCY",
            "x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
            "content-encoding": "aws-chunked",
            "x-amz-decoded-content-length": "66560",
            "content-length": "66824",
        },
        SEED,
    )
    result = verify(head, EXAMPLE_NOW_S)
    assert result.payload is Payload.STREAMING_SIGNED
    assert result.chunk_signing is not None
    assert result.chunk_signing.seed_signature == SEED
    assert (
        result.chunk_signing.chunk_signature(SEED, hashlib.sha256(b"a" * 65536).hexdigest())
        == "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648"
    )
    assert "signing_key" not in repr(result)


# --- botocore as the judge ---

ODD_TARGETS = [
    "/",
    "/bucket",
    "/bucket/",
    "/bucket/a//b/../c/./d",
    "/bucket/model%40rank%25%20%2B",
    "/bucket/%C3%A9%E2%82%AC%F0%9F%98%80~-_.",
    "/bucket/a%2Fb",
    "/bucket/100%25",
    "/bucket?delete",
    "/bucket?delete=",
    "/bucket?uploads&x-id=CreateMultipartUpload",
    "/bucket?list-type=2&prefix=a%2Fb%20c&delimiter=%2F&encoding-type=url",
    "/bucket/key?partNumber=10&uploadId=a%2Bb%3D%3D",
    "/bucket?b=2&a=2&a=1&B=3&a-b=1",
]


@pytest.mark.parametrize("target", ODD_TARGETS)
def test_botocores_signatures_of_odd_targets_are_accepted(target: str) -> None:
    base = "http://bucket.localhost:9000"
    assert verify(sign("GET", base + target)).payload is Payload.SIGNED
    assert verify(presign("GET", base + target)).presigned


def test_botocores_signature_of_odd_headers_is_accepted() -> None:
    headers = [
        ("X-Amz-Meta-Spaces", "  two  spaces   inside "),
        ("x-amz-meta-twice", "one"),
        ("x-amz-meta-twice", " two "),
        ("x-amz-meta-empty", ""),
        ("X-Amz-Meta-Unicode", "\u00e9\u20ac"),
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Expect", "100-continue"),
    ]
    assert verify(sign("PUT", URL, headers, b"body")).payload_sha256 == (
        hashlib.sha256(b"body").hexdigest()
    )
    assert verify(presign("PUT", URL, headers)).payload is Payload.UNSIGNED


def test_a_request_dated_only_by_the_date_header_is_accepted() -> None:
    head = sign("PUT", URL, [("Date", "Mon, 01 Jan 2024 00:00:00 GMT")])
    assert head.header("x-amz-date") is None
    assert verify(head, signed_at_s(sign("GET", URL))).access_key == ACCESS_KEY


@pytest.mark.parametrize("key", ["a+b=c,d@e.f-g_h", "x,Signature", "AKID"])
def test_access_keys_with_punctuation_are_read_whole(key: str) -> None:
    head = sign("GET", URL, access_key=key)
    result = authenticate(head, {key: SECRET_KEY}.get, signed_at_s(head), SKEW_S)
    assert result.access_key == key


@pytest.mark.parametrize(
    "order", list(itertools.permutations(("Credential", "SignedHeaders", "Signature")))
)
@pytest.mark.parametrize("separator", [",", ", ", " ,", "\t,  ", " "])
def test_the_fields_of_an_authorization_may_stand_in_any_order_and_spacing(
    order: tuple[str, ...], separator: str
) -> None:
    head = sign("GET", URL)
    authorization = head.header("authorization")
    assert authorization is not None
    algorithm, _, rest = authorization.partition(" ")
    fields = {part.partition("=")[0]: part for part in rest.split(", ")}
    spaced = f"{algorithm} {separator.join(fields[name] for name in order)}"
    changed = with_header(head, "authorization", spaced)
    assert verify(changed) == verify(head)


def test_any_region_is_accepted_unless_one_is_configured() -> None:
    for region in ("us-east-1", "US", "auto", "x"):
        assert verify(sign("GET", URL, region=region)).access_key == ACCESS_KEY
    assert verify(sign("GET", URL, region="eu-1"), region="eu-1").access_key == ACCESS_KEY
    assert refusal_code(sign("GET", URL), region="eu-1") == "AuthorizationHeaderMalformed"
    assert refusal_code(presign("GET", URL), region="eu-1") == "AuthorizationQueryParametersError"


@given(
    key=st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    query=st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        ),
        max_size=4,
    ),
)
def test_every_key_and_query_that_botocore_signs_is_accepted(
    key: str, query: list[tuple[str, str]]
) -> None:
    encoded = "&".join(f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in query)
    target = f"http://h/bucket/{quote(key, safe='/~')}?{encoded}"
    if not key.startswith("/"):
        assert verify(sign("PUT", target, [], b"x")).access_key == ACCESS_KEY


# --- what clients do in different ways ---


def sign_by_hand(path_sent: str, path_signed: str) -> RequestHead:
    canonical = (
        f"GET\n{path_signed}\n\nhost:h\nx-amz-content-sha256:UNSIGNED-PAYLOAD\n"
        "x-amz-date:20130524T000000Z\n\nhost;x-amz-content-sha256;x-amz-date\nUNSIGNED-PAYLOAD"
    )
    text = (
        "AWS4-HMAC-SHA256\n20130524T000000Z\n20130524/us-east-1/s3/aws4_request\n"
        + hashlib.sha256(canonical.encode("utf-8", "surrogateescape")).hexdigest()
    )
    key = derive_signing_key(SECRET_KEY, "20130524", "us-east-1")
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    headers = {"host": "h", "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
    return example_head("GET", path_sent, headers, signature)


@pytest.mark.parametrize(
    ("path_sent", "path_signed"),
    [
        ("/b/model@rank", "/b/model%40rank"),  # sent raw, signed encoded
        ("/b/model@rank", "/b/model@rank"),  # signed as sent
        ("/b/a%2fb", "/b/a%2Fb"),
        ("/b/a%2Fb", "/b/a/b"),  # signed by its key
        ("/b/\u00e9", "/b/%C3%A9"),
        ("/b/\udcff", "/b/%FF"),  # a byte that is not UTF-8
        ("/b/a+b", "/b/a%2Bb"),
        ("", "/"),
    ],
)
def test_a_path_may_be_signed_as_its_key_is_encoded_or_as_it_was_sent(
    path_sent: str, path_signed: str
) -> None:
    assert verify(sign_by_hand(path_sent, path_signed), EXAMPLE_NOW_S).access_key == ACCESS_KEY


def test_paths_are_not_normalised() -> None:
    assert canonical_paths("/b//a/../c") == ["/b//a/../c"]
    assert refusal_code(sign_by_hand("/b/a/../c", "/b/c"), EXAMPLE_NOW_S) == "SignatureDoesNotMatch"


def test_the_canonical_query_keeps_a_plus_and_completes_a_bare_name() -> None:
    assert canonical_query("delete") == canonical_query("delete=") == "delete="
    assert canonical_query("b=x+y&a=%7e%2f") == "a=~%2F&b=x%2By"
    assert canonical_query("X-Amz-Signature=abc&a=1") == "a=1"


def test_duplicate_headers_are_joined_in_order() -> None:
    head = make_head("GET", "/", [("x-amz-meta-a", " 1  2 "), ("host", "h"), ("x-amz-meta-a", "3")])
    assert canonical_headers(head, ("host", "x-amz-meta-a")) == "host:h\nx-amz-meta-a:1 2,3\n"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_the_first_canonical_path_of_an_encoded_key_is_that_encoding(key: str) -> None:
    path = "/bucket/" + quote(key, safe="/~")
    assert canonical_paths(path)[0] == path
    assert len(canonical_paths(path)) <= 2


# --- tampering ---


def tampered_heads(head: RequestHead) -> dict[str, RequestHead]:
    return {
        "method": dataclasses.replace(head, method="DELETE"),
        "path": dataclasses.replace(head, raw_path=head.raw_path + "2"),
        "encoded path": dataclasses.replace(head, raw_path=head.raw_path + "%2F"),
        "query value": dataclasses.replace(head, raw_query=head.raw_query.replace("=1", "=2")),
        "query name": dataclasses.replace(head, raw_query=head.raw_query + "&acl"),
        "host": with_header(head, "host", "other"),
        "signed header": with_header(head, "range", "bytes=0-1"),
        "lost header": without_header(head, "range"),
    }


def test_every_change_of_a_signed_request_is_refused() -> None:
    head = sign("PUT", URL + "?partNumber=1&uploadId=u", [("range", "bytes=0-9")], b"body")
    now_s = signed_at_s(head)
    heads = tampered_heads(head) | {
        "date": with_header(head, "x-amz-date", "20990101T000000Z"),
        "body hash": with_header(head, "x-amz-content-sha256", EMPTY_SHA256),
        "unsigned body": with_header(head, "x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
        "duplicate": dataclasses.replace(head, headers=(*head.headers, ("range", "bytes=0-1"))),
    }
    codes = {what: refusal_code(changed, now_s) for what, changed in heads.items()}
    assert codes.pop("date") == "AuthorizationHeaderMalformed"
    assert set(codes.values()) == {"SignatureDoesNotMatch"}, codes


def test_every_change_of_a_presigned_request_is_refused() -> None:
    head = presign("PUT", URL + "?partNumber=1&uploadId=u", [("range", "bytes=0-9")])
    now_s = signed_at_s(head)
    longer = dataclasses.replace(head, raw_query=head.raw_query.replace("=3600", "=7200"))
    heads = tampered_heads(head) | {"expiry": longer}
    codes = {what: refusal_code(changed, now_s) for what, changed in heads.items()}
    assert set(codes.values()) == {"SignatureDoesNotMatch"}, codes


@pytest.mark.parametrize(
    "name",
    [
        *("x-amz-acl", "x-amz-copy-source", "x-amz-meta-a"),
        *("x-objectcache-descriptor", "x-objectcache-path", "x-objectcache-later"),
    ],
)
def test_headers_that_must_be_signed_and_are_not_are_refused(name: str) -> None:
    for head in (sign("PUT", URL), presign("PUT", URL)):
        assert refusal_code(with_header(head, name, "x")) == "AccessDenied"


@pytest.mark.parametrize(
    "name", ["x-objectcache-request-id", "x-objectcache-client-seconds", "traceparent"]
)
def test_labels_may_be_added_to_a_signed_request(name: str) -> None:
    for head in (sign("GET", URL), presign("GET", URL)):
        assert verify(with_header(head, name, "x")).access_key == ACCESS_KEY


def test_a_label_that_is_signed_cannot_be_changed() -> None:
    head = sign("GET", URL, [("x-objectcache-request-id", "x")])
    changed = with_header(head, "x-objectcache-request-id", "y")
    assert refusal_code(changed) == "SignatureDoesNotMatch"


def test_a_request_whose_host_is_not_signed_is_refused() -> None:
    head = sign("GET", URL)
    authorization = head.header("authorization")
    assert authorization is not None
    changed = with_header(head, "authorization", authorization.replace("host;", ""))
    assert refusal_code(changed) == "AccessDenied"


# --- refusals ---


def test_an_unknown_access_key_and_a_wrong_secret_are_told_apart() -> None:
    assert refusal_code(sign("GET", URL, access_key="NOBODY")) == "InvalidAccessKeyId"
    assert refusal_code(sign("GET", URL, secret_key="wrong-secret")) == "SignatureDoesNotMatch"


def test_a_signature_for_another_service_is_refused_and_names_this_one() -> None:
    for_admin = sign("GET", URL, service="objectcache-admin")
    with pytest.raises(InvalidRequest, match="must end with /s3/aws4_request"):
        authenticate(for_admin, secret_for, signed_at_s(for_admin), SKEW_S)
    keys = SigningKeys(service="objectcache-admin")
    assert authenticate(
        for_admin, secret_for, signed_at_s(for_admin), SKEW_S, signing_keys=keys
    ).access_key
    for_s3 = sign("GET", URL)
    with pytest.raises(InvalidRequest, match="must end with /objectcache-admin/aws4_request"):
        authenticate(for_s3, secret_for, signed_at_s(for_s3), SKEW_S, signing_keys=keys)


def test_a_scope_that_was_changed_to_another_service_is_a_wrong_signature() -> None:
    head = sign("GET", URL)
    authorization = head.header("authorization")
    assert authorization is not None
    changed = with_header(
        head, "authorization", authorization.replace("/s3/", "/objectcache-admin/")
    )
    keys = SigningKeys(service="objectcache-admin")
    with pytest.raises(AccessDenied) as caught:
        authenticate(changed, secret_for, signed_at_s(head), SKEW_S, signing_keys=keys)
    assert caught.value.code == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    ("secret_key", "told"),
    [("the-former-one", "the access key is disabled"), ("a-guess", "does not exist")],
)
def test_only_whoever_has_the_secret_is_told_why_a_key_is_not_in_force(
    secret_key: str, told: str
) -> None:
    head = sign("GET", URL, access_key="FORMER", secret_key=secret_key)
    former = FormerKey("the-former-one", "the access key is disabled")
    with pytest.raises(AccessDenied, match=told) as caught:
        authenticate(
            head, secret_for, signed_at_s(head), SKEW_S, former_key_for={"FORMER": former}.get
        )
    assert caught.value.code == "InvalidAccessKeyId"


def test_the_secret_that_stands_in_for_unknown_keys_opens_nothing() -> None:
    head = sign("GET", URL, access_key="NOBODY", secret_key="0" * 40)
    assert refusal_code(head) == "InvalidAccessKeyId"


@pytest.mark.parametrize("offset_s", [-901, 901])
def test_a_date_beyond_the_skew_is_refused(offset_s: float) -> None:
    head = sign("GET", URL)
    now_s = signed_at_s(head)
    assert verify(head, now_s + offset_s * 900 / 901).access_key == ACCESS_KEY
    assert refusal_code(head, now_s + offset_s) == "RequestTimeTooSkewed"


def test_a_presigned_request_from_the_future_is_refused() -> None:
    head = presign("GET", URL)
    assert verify(head, signed_at_s(head) - 900).presigned
    assert refusal_code(head, signed_at_s(head) - 901) == "AccessDenied"


@pytest.mark.parametrize("expires_s", [0, -7, 604_801, 10**9])
def test_a_lifetime_out_of_bounds_is_denied(expires_s: int) -> None:
    head = presign("GET", URL, expires_s=expires_s)
    assert refusal_code(head) == "AccessDenied"


def test_an_anonymous_request_is_refused() -> None:
    assert refusal_code(make_head("GET", "/bucket/key", {"Host": "h"})) == "AccessDenied"


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        ("", "AccessDenied"),
        ("AWS HAHAHA", "InvalidArgument"),
        ("AWS AKIAIGR7ZNNBHC5BKSUB:FWeDfwojDSdS2Ztmpfeubhd9isU=", "InvalidRequest"),
        ("Bearer token", "InvalidArgument"),
        ("AWS4-ECDSA-P256-SHA256 Credential=a", "NotImplemented"),
        ("AWS4-HMAC-SHA256", "AuthorizationHeaderMalformed"),
        ("AWS4-HMAC-SHA256 Credential=a,SignedHeaders=host", "AuthorizationHeaderMalformed"),
        (
            "AWS4-HMAC-SHA256 Credential=a/20130524/r/s3/aws4_request,Credential=b,"
            "SignedHeaders=host,Signature=0",
            "AuthorizationHeaderMalformed",
        ),
        (
            "AWS4-HMAC-SHA256 Credential=a/20130524/r/ec2/aws4_request,"
            "SignedHeaders=host,Signature=0",
            "AuthorizationHeaderMalformed",
        ),
        (
            "AWS4-HMAC-SHA256 Credential=nothing,SignedHeaders=host,Signature=0",
            "AuthorizationHeaderMalformed",
        ),
        (
            f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20130524/r/s3/aws4_request,"
            "SignedHeaders=host;x-amz-content-sha256;x-amz-date,Signature=\udcff\u00e9",
            "SignatureDoesNotMatch",
        ),
    ],
)
def test_authorization_headers_that_cannot_be_read_say_why(authorization: str, code: str) -> None:
    headers = {
        "host": "h",
        "x-amz-date": "20130524T000000Z",
        "x-amz-content-sha256": EMPTY_SHA256,
        "authorization": authorization,
    }
    assert refusal_code(make_head("GET", "/", headers), EXAMPLE_NOW_S) == code


def test_a_long_hostile_authorization_header_is_refused_in_linear_time() -> None:
    begun_s = time.thread_time()  # the processor's, which others on the machine do not take
    for text in (", " * 16_000, "Credential=" * 3_000, "Signature=" + "/" * 32_000):
        head = make_head("GET", "/", {"authorization": "AWS4-HMAC-SHA256 " + text})
        assert refusal_code(head, 0.0) == "AuthorizationHeaderMalformed"
    assert time.thread_time() - begun_s < 5.0


def test_two_ways_of_signing_at_once_are_refused() -> None:
    head = presign("GET", URL)
    signed_twice = with_header(head, "authorization", "AWS4-HMAC-SHA256 Credential=a")
    assert refusal_code(signed_twice) == "InvalidArgument"
    v2 = make_head("GET", "/b?AWSAccessKeyId=a&Signature=b&Expires=1")
    assert refusal_code(v2) == "InvalidRequest"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("X-Amz-Algorithm=AWS4-HMAC-SHA256", "X-Amz-Algorithm=AWS4-HMAC-SHA1"),
        ("X-Amz-Expires=3600", "X-Amz-Expires=3600&X-Amz-Expires=3600"),
        ("X-Amz-Expires=3600", "X-Amz-Expires=forever"),
        ("X-Amz-Expires=3600", "a=b"),
        ("X-Amz-SignedHeaders=host", "a=b"),
        ("X-Amz-Date=2", "X-Amz-Date=x"),
        ("s3%2Faws4_request", "s3%2Faws5_request"),
    ],
)
def test_presigned_queries_that_cannot_be_read_are_refused(old: str, new: str) -> None:
    head = presign("GET", URL)
    assert old in head.raw_query
    changed = dataclasses.replace(head, raw_query=head.raw_query.replace(old, new))
    assert refusal_code(changed) == "AuthorizationQueryParametersError"


def test_a_session_token_is_refused() -> None:
    assert refusal_code(sign("GET", URL, [("x-amz-security-token", "t")])) == "InvalidToken"
    assert refusal_code(presign("GET", URL + "?X-Amz-Security-Token=t")) == "InvalidToken"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("nonsense", "InvalidArgument"),
        (EMPTY_SHA256.upper(), "InvalidArgument"),
        ("STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD", "NotImplemented"),
    ],
)
def test_an_unknown_payload_hash_is_refused(value: str, code: str) -> None:
    assert refusal_code(with_header(sign("GET", URL), "x-amz-content-sha256", value)) == code


def test_a_signed_request_needs_a_payload_hash_and_a_date() -> None:
    head = sign("GET", URL)
    assert refusal_code(without_header(head, "x-amz-content-sha256")) == "InvalidRequest"
    assert refusal_code(without_header(head, "x-amz-date")) == "AccessDenied"
    assert refusal_code(with_header(head, "x-amz-date", "yesterday")) == "AccessDenied"
    assert refusal_code(with_header(head, "x-amz-date", "")) == "AccessDenied"


def test_a_date_that_does_not_exist_is_refused() -> None:
    head = sign_by_hand("/", "/")
    impossible = tuple(
        (name, value.replace("20130524", "20130532")) for name, value in head.headers
    )
    changed = dataclasses.replace(head, headers=impossible)
    assert refusal_code(changed, EXAMPLE_NOW_S) == "AccessDenied"


def test_a_query_that_is_not_utf8_is_refused() -> None:
    assert refusal_code(make_head("GET", "/b?a=%FF")) == "InvalidArgument"


# --- the payload modes ---


def test_a_presigned_url_may_fix_the_hash_of_its_body() -> None:
    digest = hashlib.sha256(b"body").hexdigest()
    head = presign("PUT", URL, [("x-amz-content-sha256", digest)])
    assert verify(head).payload is Payload.SIGNED
    assert verify(head).payload_sha256 == digest
    unsigned = with_header(head, "x-amz-content-sha256", "UNSIGNED-PAYLOAD")
    assert refusal_code(unsigned) == "SignatureDoesNotMatch"


@pytest.mark.parametrize("payload", [p for p in Payload if p is not Payload.SIGNED])
def test_each_payload_mode_is_recognised(payload: Payload) -> None:
    headers = {"host": "h", "x-amz-content-sha256": payload.value}
    canonical = (
        f"PUT\n/b\n\nhost:h\nx-amz-content-sha256:{payload.value}\nx-amz-date:20130524T000000Z\n\n"
        f"host;x-amz-content-sha256;x-amz-date\n{payload.value}"
    )
    text = (
        "AWS4-HMAC-SHA256\n20130524T000000Z\n20130524/us-east-1/s3/aws4_request\n"
        + hashlib.sha256(canonical.encode()).hexdigest()
    )
    key = derive_signing_key(SECRET_KEY, "20130524", "us-east-1")
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    result = verify(example_head("PUT", "/b", headers, signature), EXAMPLE_NOW_S)
    assert result.payload is payload
    assert (result.chunk_signing is not None) == (b"AWS4" in payload.value.encode())


# --- the cache of signing keys ---


def test_signing_keys_are_kept_only_for_valid_signatures_and_within_their_bound() -> None:
    keys = SigningKeys(keys_max=2)
    bad = sign("GET", URL, secret_key="wrong-secret")
    with pytest.raises(AccessDenied):
        authenticate(bad, secret_for, signed_at_s(bad), SKEW_S, None, keys)
    assert repr(keys) == "<SigningKeys 0/2>"
    for region in ("a", "b", "c", "a"):
        head = sign("GET", URL, region=region)
        authenticate(head, secret_for, signed_at_s(head), SKEW_S, None, keys)
    assert repr(keys) == "<SigningKeys 2/2>"


def test_a_kept_key_is_not_used_for_another_secret() -> None:
    keys = SigningKeys()
    head = sign("GET", URL)
    authenticate(head, secret_for, signed_at_s(head), SKEW_S, None, keys)
    with pytest.raises(AccessDenied):
        authenticate(head, lambda _: "another-secret", signed_at_s(head), SKEW_S, None, keys)
