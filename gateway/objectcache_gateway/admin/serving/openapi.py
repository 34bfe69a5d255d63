"""The OpenAPI 3.1 document of the admin API, made from its routes. Pure."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from objectcache_gateway.admin.serving.media_types import JSON, TEXT
from objectcache_gateway.admin.serving.routes import Nothing, Route
from objectcache_schemas.operators.admin_api import Problem

REF = "#/components/schemas/{name}"
REFUSALS = {
    "400": "The request is malformed; the message names the field",
    "401": "There are no credentials, or they are not good",
    "403": "The credentials do not allow this",
    "404": "What the request names does not exist",
    "409": "The request contradicts what is there",
    "503": "The storage server cannot be reached, or is at a limit",
    "default": "Any other refusal; docs/errors.md lists the codes",
}
DESCRIPTION = (
    "Users, access keys, tokens, buckets, quotas, the schedule and the processes of one "
    "ObjectCache server. Bodies are JSON; a field that is not known is refused. In a PATCH an "
    "absent field stays and null is none."
)


def openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document, ready for JSON."""
    listed = list(routes)
    types = _types(listed)
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, refs, components)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "ObjectCache admin API",
            "version": importlib.metadata.version("objectcache"),
            "description": DESCRIPTION,
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of POST /v1/tokens. The root key may sign requests "
                    "instead, by AWS Signature Version 4 for the service s3.",
                }
            },
        },
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))
    _say_patterns_as_json_schema_does(plain)
    return plain


def _say_patterns_as_json_schema_does(value: object) -> None:
    """Its patterns are ECMAScript's, which has no \\Z; the $ there matches at the end alone."""
    if isinstance(value, dict):
        pattern = value.get("pattern")
        if isinstance(pattern, str):
            value["pattern"] = re.sub(r"\\Z\Z", "$", pattern)
        for part in value.values():
            _say_patterns_as_json_schema_does(part)
    elif isinstance(value, list):
        for part in value:
            _say_patterns_as_json_schema_does(part)


def _types(routes: list[Route]) -> list[type[msgspec.Struct]]:
    """Every type that a schema is made of, once."""
    named: dict[type[msgspec.Struct], None] = {Problem: None}
    for route in routes:
        for one in (route.reply, route.body, route.query):
            if one is not None and one is not Nothing:
                named[one] = None
    return list(named)


def _operation(
    route: Route, refs: dict[type[msgspec.Struct], Any], components: dict[str, Any]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "tags": [route.path.split("/")[2] if route.path.startswith("/v1/") else "server"],
        "parameters": [*_path_parameters(route), *_query_parameters(route, components)],
        "responses": _responses(route, refs),
    }
    if route.scope is None:
        operation["security"] = []
    elif route.scope:
        operation["description"] = f"Needs the scope `{route.scope}`, or one that covers it."
    if route.body is not Nothing:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": refs[route.body]}},
        }
    return operation


def _operation_id(route: Route) -> str:
    """Unique: the method and the path's words, such as "get_users_name_quota"."""
    words = re.findall(r"[A-Za-z]+", route.path.removeprefix("/v1"))
    return "_".join([route.method.lower(), *words])


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
        for name in route.parameter_names
    ]


def _query_parameters(route: Route, components: dict[str, Any]) -> list[dict[str, Any]]:
    if route.query is Nothing:
        return []
    schema = components[route.query.__name__]
    return [
        {"name": name, "in": "query", "required": name in schema["required"], "schema": value}
        for name, value in schema["properties"].items()
    ]


def _responses(route: Route, refs: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    problem = {JSON: {"schema": refs[Problem]}}
    responses: dict[str, Any] = {str(route.status): _success(route, refs)}
    for status, meaning in REFUSALS.items():
        if route.scope is not None or status == "default":
            responses[status] = {"description": meaning, "content": problem}
    return responses


def _success(route: Route, refs: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": route.summary}
    if route.content_type == TEXT or (route.reply is None and route.status != 204):
        answer["content"] = {route.content_type: {"schema": {"type": "string"}}}
    elif route.reply is not None:
        answer["content"] = {route.content_type: {"schema": refs[route.reply]}}
    return answer
