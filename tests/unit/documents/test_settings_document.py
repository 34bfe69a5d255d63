"""docs/settings.md and the declarations that it is written from."""

from pathlib import Path

import pytest

from objectcache_operations.console.settings_table import (
    OTHER_VARIABLE_MEANINGS,
    default_text,
    description,
    settings_document,
)
from objectcache_runtime.settings import (
    OTHER_VARIABLES,
    SECTIONS,
    load_settings,
    setting_fields,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "settings.md"
SETTINGS = [(section, field) for section in SECTIONS for field in setting_fields(section)]


def test_the_committed_document_is_what_the_command_prints() -> None:
    assert DOCUMENT.read_text("utf-8") == settings_document(), (
        "run: objectcache settings > docs/settings.md"
    )


@pytest.mark.parametrize(
    ("section", "field"), SETTINGS, ids=[f"{section}.{field.name}" for section, field in SETTINGS]
)
def test_every_setting_says_what_it_means(section: str, field: object) -> None:
    assert description(getattr(field, "type")) != ""  # noqa: B009 - FieldInfo is untyped here


def test_every_variable_of_the_table_is_read() -> None:
    variables = [
        row.split("|")[2].strip(" `")
        for row in settings_document().splitlines()
        if row.startswith(tuple(f"| `{section}." for section in SECTIONS))
    ]
    assert len(variables) == len(SETTINGS)
    loaded = load_settings(None, {"OBJECTCACHE_GATEWAY_LISTEN": "127.0.0.1:1"})
    assert loaded.gateway.listen == "127.0.0.1:1"
    assert "OBJECTCACHE_GATEWAY_LISTEN" in variables


def test_every_variable_that_is_no_setting_is_documented() -> None:
    assert set(OTHER_VARIABLE_MEANINGS) == OTHER_VARIABLES


@pytest.mark.parametrize(
    ("name", "default", "text"),
    [
        ("object_bytes_max", 5 << 30, "`5368709120` (5 GiB)"),
        ("fragment_bytes", 2 << 20, "`2097152` (2 MiB)"),
        ("object_bytes_max", 1000, "`1000`"),
        ("puts_max", 1024, "`1024`"),
        ("drain_timeout_s", 20.0, "`20`"),
        ("drain_timeout_s", 0.25, "`0.25`"),
        ("body_handover", True, "`true`"),
        ("virtual_host_domains", ("localhost", "s3.lan"), "`localhost,s3.lan`"),
        ("virtual_host_domains", (), "none"),
        ("run_dir", "", "none"),
    ],
)
def test_a_default_is_written_as_in_a_flag(name: str, default: object, text: str) -> None:
    assert default_text(name, default) == text
