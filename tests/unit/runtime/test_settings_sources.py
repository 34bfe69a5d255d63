"""Where settings come from, which source wins, and what is refused."""

from pathlib import Path

import pytest

from objectcache_runtime.settings import load_settings, parse_command_line
from objectcache_schemas.errors import InvalidRequest


def written(directory: Path, text: str) -> Path:
    file = directory / "settings.toml"
    file.write_text(text)
    return file


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, '[gateway]\nlisten = "h:1"\nregion = "file"\nlog_level = "error"')
    environment = {"OBJECTCACHE_GATEWAY_LISTEN": "h:2", "OBJECTCACHE_GATEWAY_REGION": "variable"}
    gateway = load_settings(file, environment, ["gateway.listen=h:3"]).gateway
    assert (gateway.listen, gateway.region, gateway.log_level) == ("h:3", "variable", "error")
    assert gateway.connections_max == 4096


def test_text_becomes_the_type_of_its_setting() -> None:
    settings = load_settings(
        None,
        {"OBJECTCACHE_GATEWAY_BODY_HANDOVER": "false"},
        [
            "storage.fragment_bytes=65536",
            "gateway.drain_timeout_s=0.5",
            "gateway.virtual_host_domains=a.example,b.example",
        ],
    )
    assert settings.gateway.body_handover is False
    assert settings.storage.fragment_bytes == 65536
    assert settings.gateway.drain_timeout_s == 0.5
    assert settings.gateway.virtual_host_domains == ("a.example", "b.example")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gatway]\nlisten = 'x'", "'gatway' is not one of"),
        ("gateway = 3", "'gateway' is not one of"),
        ("[gateway]\nlissen = 'x'", "lissen"),
        ("[storage]\nputs_max = 0", "storage.puts_max"),
        ("[storage]\nputs_max = 'many'", "storage.puts_max"),
        ("[limits]\nput_chunks_max = -1", "limits.put_chunks_max"),
        ("[storage", "settings.toml"),
    ],
)
def test_a_wrong_file_is_refused_naming_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_settings(written(tmp_path, text), {})
    assert words in caught.value.message
    assert "settings.toml" in caught.value.message


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"absent\.toml: No such file"):
        load_settings(tmp_path / "absent.toml", {})


def test_an_unknown_variable_of_a_section_is_refused_and_others_are_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load_settings(None, {"PATH": "/bin", "OBJECTCACHE_ENDPOINT": "http://127.0.0.1:1"})
    with pytest.raises(InvalidRequest, match="OBJECTCACHE_GATEWAY_LISSEN"):
        load_settings(None, {"OBJECTCACHE_GATEWAY_LISSEN": "x"})
    with pytest.raises(InvalidRequest, match=r"puts_max.*environment variable OBJ"):
        load_settings(None, {"OBJECTCACHE_STORAGE_PUTS_MAX": "0"})
    assert not caplog.records
    load_settings(None, {"OBJECTCACHE_SERVICE_HOST": "10.0.0.1"})
    assert "OBJECTCACHE_SERVICE_HOST sets nothing" in caplog.text


@pytest.mark.parametrize(
    "variable",
    [
        "OBJECTCACHE_ADMIN_SERVICE_HOST",
        "OBJECTCACHE_GATEWAY_SERVICE_PORT_S3",
        "OBJECTCACHE_STORAGE_PORT",
        "OBJECTCACHE_ADMIN_PORT_9001_TCP_ADDR",
    ],
)
def test_what_kubernetes_sets_for_a_service_of_a_sections_name_is_ignored(
    variable: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_settings(None, {variable: "tcp://10.0.0.1:9001"}) == load_settings(None, {})
    assert variable in caplog.text


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("gateway.listen", "write section.key=value"),
        ("listen=x", r"no setting is called listen, "),
        ("gateway.nothing=x", r"no setting is called gateway\.nothing"),
        ("storage.reader_threads=-1", "reader_threads"),
    ],
)
def test_a_wrong_flag_is_refused(assignment: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        load_settings(None, {}, [assignment])


def test_a_process_without_a_data_directory_is_told_which_flag_to_give() -> None:
    with pytest.raises(InvalidRequest, match="--data-dir DIR"):
        _ = load_settings(None, {}).data_dir


def test_the_sockets_lie_in_the_data_directory_unless_a_run_directory_is_given() -> None:
    beside = load_settings(None, {}, ["server.data_dir=/data"])
    apart = load_settings(None, {}, ["server.data_dir=/data", "server.run_dir=/run/oc"])
    assert beside.storage_socket == Path("/data/run/storage.sock")
    assert apart.target_socket == Path("/run/oc/targets.sock")


def test_the_command_line_names_a_file_which_flags_override(tmp_path: Path) -> None:
    file = written(tmp_path, '[server]\ndata_dir = "/from-file"\n[storage]\nputs_max = 3')
    arguments = ["--config", str(file), "--data-dir", "/from-flag", "--exit-with-stdin"]
    settings, namespace = parse_command_line("program", "words", arguments, {})
    assert settings.data_dir == Path("/from-flag")
    assert settings.storage.puts_max == 3
    assert namespace.exit_with_stdin is True


def test_a_file_named_by_the_environment_is_read(tmp_path: Path) -> None:
    file = written(tmp_path, "[storage]\nputs_max = 3")
    settings, _ = parse_command_line("program", "words", [], {"OBJECTCACHE_CONFIG": str(file)})
    assert settings.storage.puts_max == 3


@pytest.mark.parametrize("mode", ["6", "60", "0600", "0o6", "888", "rw-", "-60", " 600"])
def test_a_target_socket_mode_is_three_octal_digits(mode: str) -> None:
    with pytest.raises(InvalidRequest, match=r"storage\.target_socket_mode"):
        load_settings(None, {}, [f"storage.target_socket_mode={mode}"])
    storage = load_settings(None, {}, ["storage.target_socket_mode=660"]).storage
    assert storage.target_socket_mode == "660"
