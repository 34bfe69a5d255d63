"""The OpenAPI document: every route is in it, and what it says is well formed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from objectcache_gateway.admin.api import ROUTES
from objectcache_gateway.admin.serving.media_types import JSON
from objectcache_gateway.admin.serving.openapi import openapi_document
from objectcache_gateway.admin.serving.read_requests import decode_body
from objectcache_gateway.admin.serving.routes import Nothing, Route
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.admin_api import (
    PATTERN_WORDS,
    LogLevel,
    NewUser,
    Problem,
    QuotaChange,
)

DOCUMENT = openapi_document(ROUTES)
NAMES = [f"{route.method} {route.path}" for route in ROUTES]
SCHEMA_KEYS = {
    *("$ref", "type", "title", "description", "properties", "required", "additionalProperties"),
    *("items", "minItems", "maxItems", "anyOf", "enum", "default", "pattern", "minLength"),
    *("maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "prefixItems"),
    "contentEncoding",
}


def operation_of(route: Route) -> Any:
    return DOCUMENT["paths"][route.path][route.method.lower()]


def every_value(value: Any) -> Iterator[Any]:
    yield value
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for child in children:
            yield from every_value(child)


def test_every_pattern_has_words_for_errors() -> None:
    patterns = {
        value["pattern"]
        for value in every_value(DOCUMENT)
        if isinstance(value, dict) and isinstance(value.get("pattern"), str)
    }
    assert patterns
    assert patterns <= set(PATTERN_WORDS) | {written(pattern) for pattern in PATTERN_WORDS}


def written(pattern: str) -> str:
    """As JSON Schema has it, whose patterns know no \\Z."""
    return pattern.replace(r"\Z", "$")


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b'{"name": "a", "access_key": "AK"}', NewUser, "3 to 128 letters, digits and any of"),
        (b'{"name": "a", "secret_key": "x"}', NewUser, "8 to 1,024 printable ASCII characters"),
        (b'{"level": "info", "process": "x"}', LogLevel, "all, admin, storage or gateway-NUMBER"),
    ],
)
def test_a_text_that_is_wrong_is_told_in_words(body: bytes, kind: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^body: Expected {words}.* - at `\$\.\w+`$") as told:
        decode_body(body, kind)
    assert "regex" not in told.value.message


@pytest.mark.parametrize("route", ROUTES, ids=NAMES)
def test_a_route_is_in_the_document_with_all_that_it_takes_and_answers(route: Route) -> None:
    operation = operation_of(route)
    assert operation["summary"]
    assert ("requestBody" in operation) is (route.body is not Nothing)
    in_path = [one["name"] for one in operation["parameters"] if one["in"] == "path"]
    assert in_path == re.findall(r"\{(\w+)\}", route.path)
    in_query = {one["name"] for one in operation["parameters"] if one["in"] == "query"}
    assert in_query == set(route.query.__struct_fields__)
    assert str(route.status) in operation["responses"]
    assert "default" in operation["responses"]
    if route.reply is not None and route.content_type == JSON:
        schema = operation["responses"][str(route.status)]["content"][JSON]["schema"]
        assert schema["$ref"].endswith(f"/{route.reply.__name__}")
    assert ("security" in operation) is (route.scope is None)
    if route.scope:
        assert f"`{route.scope}`" in operation["description"]


def test_the_document_holds_nothing_beside_the_routes() -> None:
    listed = {
        f"{method.upper()} {path}"
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
    }
    assert listed == set(NAMES)
    assert len(NAMES) == len(set(NAMES))


def test_patterns_are_such_as_every_language_reads() -> None:
    patterns = {
        value["pattern"]
        for value in every_value(DOCUMENT)
        if isinstance(value, dict) and isinstance(value.get("pattern"), str)
    }
    assert len(patterns) >= 3
    assert all(one.startswith("^") and one.endswith("$") for one in patterns), patterns
    assert not any("\\Z" in one for one in patterns), patterns


def test_every_reference_resolves_and_every_id_is_unique() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    references = {
        value["$ref"]
        for value in every_value(DOCUMENT)
        if isinstance(value, dict) and "$ref" in value
    }
    assert references
    assert {one.rpartition("/")[2] for one in references} <= set(schemas)
    ids = [operation_of(route)["operationId"] for route in ROUTES]
    assert len(ids) == len(set(ids))


def test_schemas_use_only_words_of_json_schema() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert set(schema) <= SCHEMA_KEYS, name
        for field in schema.get("properties", {}).values():
            assert set(field) <= SCHEMA_KEYS, (name, field)


def test_the_document_is_json_of_version_3_1() -> None:
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["security"] == [{"token": []}]


def test_what_the_schema_refuses_the_decoder_refuses() -> None:
    schema = DOCUMENT["components"]["schemas"]["NewUser"]
    assert schema["required"] == ["name"]
    assert schema["additionalProperties"] is False
    assert re.search(schema["properties"]["name"]["pattern"], "a b") is None
    with pytest.raises(msgspec.ValidationError, match="name"):
        msgspec.json.decode(b'{"name": "a b"}', type=NewUser)
    with pytest.raises(msgspec.ValidationError, match="stored_bytes"):
        msgspec.json.decode(b'{"stored_bytes": -1}', type=QuotaChange)
    assert set(DOCUMENT["components"]["schemas"]["Problem"]["properties"]) == set(
        Problem.__struct_fields__
    )


def test_the_documentation_lists_every_route_with_its_scope() -> None:
    text = (Path(__file__).parents[4] / "docs" / "admin_api.md").read_text("utf-8")
    listed = re.findall(r"^\| `(\w+) (\S+)` \| (\S+) \| (.*) \|$", text, re.M)
    named = {None: "none", "": "any"}
    assert listed == [
        (route.method, route.path, named.get(route.scope, f"`{route.scope}`"), route.summary)
        for route in ROUTES
    ]
