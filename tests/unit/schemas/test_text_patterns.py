"""Patterns of names and settings: a last newline is let through nowhere."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest

from objectcache_runtime import settings
from objectcache_runtime.settings import load_settings
from objectcache_schemas import accounts, messages, records
from objectcache_schemas.accounts import AccessKey, User
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators import admin_api
from objectcache_schemas.operators.admin_api import LogLevel, NewKey, NewToken, NewUser

MODULES = (accounts, admin_api, messages, records, settings)


def structs_of(module: ModuleType) -> list[type[msgspec.Struct]]:
    return [
        found
        for _, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, msgspec.Struct) and found.__module__ == module.__name__
    ]


def patterns_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("pattern"), str):
            yield value["pattern"]
        for part in value.values():
            yield from patterns_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from patterns_of(part)


def test_every_pattern_holds_from_the_first_to_the_last_character() -> None:
    structs = [struct for module in MODULES for struct in structs_of(module)]
    _, components = msgspec.json.schema_components(structs)
    patterns = set(patterns_of(components))
    assert accounts.USER_NAME_PATTERN in patterns
    loose = {one for one in patterns if not (one.startswith("^") and one.endswith(r"\Z"))}
    assert not loose, "$ also matches before a last newline"


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        (User, {"created_s": 1.0}, "name"),
        (AccessKey, {"secret_key": "x" * 8, "user": "alice", "created_s": 1.0}, "access_key"),
        (AccessKey, {"access_key": "AKIA", "user": "alice", "created_s": 1.0}, "secret_key"),
        (AccessKey, {"access_key": "AKIA", "secret_key": "x" * 8, "created_s": 1.0}, "user"),
        (NewUser, {"name": "alice"}, "access_key"),
        (NewUser, {"name": "alice"}, "secret_key"),
        (NewKey, {}, "user"),
        (LogLevel, {"level": "info"}, "process"),
    ],
)
def test_a_name_with_a_last_newline_is_refused_by_its_field(
    kind: type[msgspec.Struct], fields: dict[str, Any], name: str
) -> None:
    good = "gateway-1" if name == "process" else "long-enough"
    assert getattr(msgspec.convert({**fields, name: good}, kind), name) == good
    for wrong in (f"{good}\n", f"{good}\n\n", f"\n{good}"):
        with pytest.raises(msgspec.ValidationError, match=rf"\$\.{name}"):
            msgspec.convert({**fields, name: wrong}, kind)


@pytest.mark.parametrize(("kind", "more"), [(NewUser, {}), (NewToken, {"scopes": ["read"]})])
def test_a_name_that_is_made_is_refused_in_words(
    kind: type[msgspec.Struct], more: dict[str, Any]
) -> None:
    msgspec.convert({"name": "ci=bob,+@x.y", **more}, kind)
    for wrong in ("", "bad name", "alice\n", "a" * 65, "\u00e9t\u00e9"):
        with pytest.raises(msgspec.ValidationError, match="name has 1 to 64 letters, digits"):
            msgspec.convert({"name": wrong, **more}, kind)


@pytest.mark.parametrize("name", ["..", "-", "=", ".hidden", "-rf", "_x", "@host"])
def test_a_users_name_begins_with_a_letter_or_a_digit(name: str) -> None:
    with pytest.raises(ValueError, match="begins with a letter or a digit"):
        NewUser(name=name)
    assert NewUser(name=f"0{name}").name == f"0{name}"


@pytest.mark.parametrize("name", ["root", "Root", "anonymous", "other", "none", "nobody"])
def test_a_word_that_means_something_is_no_users_name(name: str) -> None:
    with pytest.raises(ValueError, match="no user can be called"):
        NewUser(name=name)
    assert NewUser(name=f"{name}s").name == f"{name}s"


@pytest.mark.parametrize(
    ("setting", "value"),
    [("server.log_format", "json"), ("gateway.log_level", "info"), ("storage.direct_io", "auto")],
)
def test_a_setting_with_a_last_newline_is_refused_by_its_name(setting: str, value: str) -> None:
    load_settings(None, {}, [f"{setting}={value}"])
    with pytest.raises(InvalidRequest, match=setting.rpartition(".")[2]):
        load_settings(None, {}, [f"{setting}={value}\n"])
