"""The command line, without servers."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from objectcache.channel.credentials_file import read_credentials
from objectcache_laboratory.access import find_access
from objectcache_operations.console.app import app
from objectcache_operations.console.settings_table import settings_document
from objectcache_operations.supervisor import processes
from objectcache_schemas.errors import InvalidRequest

RUNNER = CliRunner()

METADATA = [
    "msgspec>=0.20",
    'aiohttp<4,>=3.14.2; extra == "gateway"',
    "xxhash>=3.5; extra == 'storage'",
    'objectcache[gateway,storage]; extra == "server"',
    'colorama; sys_platform == "win32" and extra == "gateway"',
]


def run_module(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """`python -m objectcache_operations` without any of our variables."""
    environment = {name: text for name, text in os.environ.items() if "OBJECTCACHE" not in name}
    return subprocess.run(
        [sys.executable, "-m", "objectcache_operations", *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("objectcache.cli", "objectcache_operations"),
        ("objectcache.demo", "objectcache_laboratory.demo"),
    ],
)
def test_a_program_runs_by_its_name_within_the_sdk(name: str, program: str) -> None:
    said, meant = (
        subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, timeout=60, check=False
        )
        for module in (name, program)
    )
    assert said.returncode == 0
    assert said.stdout == meant.stdout != b""


def test_help_names_every_command() -> None:
    result = RUNNER.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("serve", "gateway", "storage", "relay", "demo", "bench", "settings"):
        assert command in result.output


def test_help_imports_neither_a_server_nor_what_commands_need(tmp_path: Path) -> None:
    program = (
        "import sys; from typer.testing import CliRunner;"
        "from objectcache_operations.console.app import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "print([name for name in ('aiohttp', 'uvloop', 'botocore', 'objectcache_laboratory.replay',"
        " 'objectcache_gateway', 'objectcache_storage_server') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_version_is_that_of_the_distribution() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert result.output.startswith("objectcache 0.")


def test_settings_prints_the_document_exactly() -> None:
    assert RUNNER.invoke(app, ["settings"]).stdout == settings_document()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "server.data_dir is not set; give --data-dir DIR"),
        (["--data-dir", "d", "--set", "gateway.lissen=1"], "gateway.lissen"),
        (["--data-dir", "d", "--set", "storage.puts_max=0"], "storage.puts_max"),
        (["--data-dir", "d", "--config", "absent.toml"], "absent.toml: No such file"),
    ],
)
def test_wrong_settings_are_one_line_and_start_nothing(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    result = run_module("serve", *arguments, directory=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_answered_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: METADATA)
    monkeypatch.setattr(processes, "_is_installed", lambda name: name != "xxhash")
    result = RUNNER.invoke(app, ["serve", "--data-dir", "d"])
    assert result.exit_code == 2
    assert "not installed: xxhash" in result.stderr
    assert 'pip install "objectcache[server]"' in result.stderr


def test_the_requirements_of_an_extra_are_read_from_metadata() -> None:
    assert processes.required_by(METADATA, "gateway") == ["aiohttp", "colorama"]
    assert processes.required_by(METADATA, "storage") == ["xxhash"]
    assert processes.required_by(METADATA, "absent") == []


def test_nothing_is_missing_where_the_tests_run() -> None:
    assert processes.missing_distributions(["gateway", "storage"]) == []


def test_a_server_is_a_module_of_this_interpreter_and_ignores_the_current_directory() -> None:
    command = processes.module_command("objectcache_gateway", ["--data-dir", "d"])
    assert command == (sys.executable, "-P", "-m", "objectcache_gateway", "--data-dir", "d")


def test_the_servers_get_every_flag_that_serve_got() -> None:
    given = processes.server_arguments("f.toml", "d", ["a.b=c", "d.e=f g"])
    assert given == ("--config", "f.toml", "--data-dir", "d", "--set", "a.b=c", "--set", "d.e=f g")
    assert processes.server_arguments(None, None, []) == ()


def test_bench_replay_without_credentials_says_what_to_give(tmp_path: Path) -> None:
    result = run_module("bench", "replay", "--trace", "t", directory=tmp_path)
    assert result.returncode == 2
    assert "OBJECTCACHE_ACCESS_KEY is not set" in result.stderr
    assert "--credentials-file" in result.stderr


def test_credentials_come_from_the_file_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "root-credentials"
    file.write_text("[default]\naws_access_key_id = AK\naws_secret_access_key = s%/+cret\n")
    environment = {
        "OBJECTCACHE_ENDPOINT": "http://127.0.0.1:1",
        "OBJECTCACHE_ACCESS_KEY": "other",
        "OBJECTCACHE_SECRET_KEY": "other",
    }
    access = find_access(None, file, environment)
    assert (access.access_key, access.secret_key) == ("AK", "s%/+cret")
    assert access.endpoint == "http://127.0.0.1:1"
    assert find_access("http://127.0.0.1:2", None, environment).access_key == "other"
    assert "s%/+cret" not in repr(access)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[other]\n", "there is no default"),
        ("[default]\naws_access_key_id = AK\n", "there is no aws_secret_access_key"),
        ("very-secret", "not in the AWS shared-credentials format"),
    ],
)
def test_a_wrong_credentials_file_is_refused_without_quoting_it(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "root-credentials"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=words) as caught:
        read_credentials(file)
    assert "very-secret" not in str(caught.value)


def test_a_shared_store_is_made_by_its_url_and_once(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"
    assert "URL" in run_module("create-store", directory=tmp_path).stderr
    made, again = (run_module("create-store", address, directory=tmp_path) for _ in range(2))
    assert (made.returncode, made.stdout) == (0, f"made a store in {address}\n")
    assert made.stderr == ""
    assert again.returncode == 1
    assert again.stderr.startswith("objectcache create-store: there is a store in")
