"""A wrong value of any setting is told by its name, the value, and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from objectcache_runtime.setting_values import FORM, Form, allowed, declared
from objectcache_runtime.settings import ENVIRONMENT_PREFIX, each_setting, load_settings
from objectcache_schemas.errors import InvalidRequest

SETTINGS = dict(each_setting())
OF_A_PATTERN = re.compile(r"\\Z|\^\(|\$\.|\[\^|Expected `")  # what only a machine reads


def wrong_text(name: str) -> str | None:
    """What no such setting may be, as a flag gives it; None where every text is one."""
    form = declared(SETTINGS[name].type, FORM)
    if isinstance(form, Form):
        return "no such thing"
    return None if is_free_text(name) else "plenty"


def is_free_text(name: str) -> bool:
    return isinstance(SETTINGS[name].default, str | tuple)


def refusal(file: Path | None, environment: dict[str, str], assignments: list[str]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        load_settings(file, environment, assignments)
    return caught.value.message


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_value_says_the_setting_the_value_and_what_is_allowed(
    name: str, tmp_path: Path
) -> None:
    """In a flag and a variable where a text can be wrong, and in a file, where the type can."""
    text = wrong_text(name)
    section, _, key = name.partition(".")
    file = tmp_path / "settings.toml"
    file.write_text(f"[{section}]\n{key} = {{ a = 'table' }}\n")
    told = {f"in settings file {file}": refusal(file, {}, [])}
    if text is not None:
        variable = f"{ENVIRONMENT_PREFIX}{section}_{key}".upper()
        told["in a flag"] = refusal(None, {}, [f"{name}={text}"])
        told[f"in environment variable {variable}"] = refusal(None, {variable: text}, [])
    for source, message in told.items():
        assert message.startswith(f"{name} must be {allowed(name, SETTINGS[name].type)}"), message
        assert source in message
        assert (repr(text) if "file" not in source else "{'a': 'table'}") in message
        assert not OF_A_PATTERN.search(message), message


@pytest.mark.parametrize("name", SETTINGS)
def test_a_default_is_allowed_and_a_pattern_is_never_without_words(name: str) -> None:
    field = SETTINGS[name]
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    as_text = str(default).lower() if isinstance(default, bool) else str(default)
    load_settings(None, {}, [f"{name}={as_text}"])
    if "pattern=" in repr(field.type):
        assert isinstance(declared(field.type, FORM), Form)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scheduler.rates", "every_epoch or for_life"),
        ("scheduler.epoch_s", "a number of seconds from 0.001 to 10"),
        (
            "scheduler.cap_gbps",
            "0 for none, or a number of Gbps (10^9 bits a second) from 0.001 to 100000",
        ),
        ("gateway.drain_timeout_s", "a number of seconds above 0"),
        ("gateway.acls", "true or false"),
        ("storage.high_watermark", "a number above 0 and at most 1"),
        ("storage.fragment_bytes", "a whole number of bytes from 65536 (64 KiB) to"),
        (
            "storage.data_file_bytes",
            "a whole number of bytes of at least 4194304 (4 MiB), a multiple of 4096 (4 KiB)",
        ),
        ("storage.session_messages_per_s", "a whole number of at least 1"),
        ("storage.compaction_bytes_per_s", "a whole number of bytes a second of at least 0"),
        ("storage.target_socket_mode", "three octal digits, such as 600 or 660"),
        ("gateway.virtual_host_domains", "a list of texts"),
        ("admin.listen", "host:port, auto or off"),
        ("storage.listen", "host:port"),
    ],
)
def test_what_is_allowed_is_said_in_words_with_range_and_unit(name: str, words: str) -> None:
    assert allowed(name, SETTINGS[name].type).startswith(words)


@pytest.mark.parametrize("value", ["0", "10.5", "-1", "nan", "inf", "", "0.5s"])
def test_a_number_out_of_its_range_is_refused_with_the_range(value: str) -> None:
    message = refusal(None, {}, [f"scheduler.epoch_s={value}"])
    assert "a number of seconds from 0.001 to 10" in message
    assert repr(value) in message


def test_a_cap_that_would_hold_everything_back_is_no_cap() -> None:
    message = refusal(None, {}, ["scheduler.cap_gbps=1e-14"])
    assert "0 for none, or a number of Gbps (10^9 bits a second) from 0.001 to 100000" in message
    assert load_settings(None, {}, ["scheduler.cap_gbps=0.001"]).scheduler.cap_gbps == 0.001


@pytest.mark.parametrize("text", ["6GiB", "6 gib", str(6 << 30), "6291456KiB"])
def test_bytes_may_be_given_with_a_unit(text: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"[storage]\ncapacity_bytes = '{text}'\n")
    for settings in (
        load_settings(None, {}, [f"storage.capacity_bytes={text}"]),
        load_settings(None, {f"{ENVIRONMENT_PREFIX}STORAGE_CAPACITY_BYTES": text}, []),
        load_settings(file, {}, []),
    ):
        assert settings.storage.capacity_bytes == 6 << 30


@pytest.mark.parametrize("text", ["6Gi", "GiB", "-6GiB", "0x10", ""])
def test_what_are_no_bytes_is_answered_with_how_they_are_written(text: str) -> None:
    assert "as in 64MiB" in refusal(None, {}, [f"storage.capacity_bytes={text}"])


def test_a_count_and_a_rate_take_no_unit_of_bytes() -> None:
    assert "64MiB" not in refusal(None, {}, ["storage.sessions_max=6KiB"])
    refusal(None, {}, ["storage.compaction_bytes_per_s=6KiB"])


def test_no_time_is_infinite() -> None:
    message = refusal(None, {}, ["gateway.keepalive_timeout_s=inf"])
    assert "infinity is not a number here" in message


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("scheduler.rate", "is scheduler.rates meant?"),
        ("gatway.listen", "gateway.listen"),
        ("storage.processes", "is gateway.processes meant?"),
        ("gateway.listn", "is gateway.listen"),
        ("acls", "is gateway.acls meant?"),
        ("nothing.alike", "`objectcache settings` prints all"),
    ],
)
def test_a_name_of_no_setting_is_answered_with_the_nearest(wrong: str, meant: str) -> None:
    message = refusal(None, {}, [f"{wrong}=1"])
    assert f"no setting is called {wrong}" in message
    assert meant in message


def test_a_long_value_is_cut_in_the_error() -> None:
    assert len(refusal(None, {}, [f"scheduler.rates={'x' * 100_000}"])) < 400


def test_numbers_without_a_unit_in_their_name_have_none_in_the_error() -> None:
    assert allowed("made.up_count", Annotated[int, msgspec.Meta(ge=1, le=9)]) == (
        "a whole number from 1 to 9"
    )
