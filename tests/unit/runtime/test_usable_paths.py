"""A path that cannot be used is told by its setting, what is there, and the remedy."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from objectcache_runtime.setting_values import declared
from objectcache_runtime.settings import check_paths, each_setting, load_settings
from objectcache_runtime.usable_paths import PATH_USE, FileUse, check_path
from objectcache_schemas.errors import InvalidRequest

USES = {
    name: use
    for name, field in each_setting()
    if isinstance(use := declared(field.type, PATH_USE), FileUse)
}
ANOTHER_USER = 65_534
DIRECTORIES = (FileUse.KEPT_DIRECTORY, FileUse.READ_DIRECTORY)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A directory that other users reach, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def as_another_user() -> Iterator[None]:
    own = os.geteuid()
    if own == 0:
        os.seteuid(ANOTHER_USER)
    try:
        yield
    finally:
        os.seteuid(own)


def fault(path: Path, use: FileUse) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_path("a.setting", str(path), use)
    assert caught.value.message.startswith(f"a.setting is {path}: ")
    return caught.value.message.removeprefix(f"a.setting is {path}: ")


def test_every_path_of_the_settings_is_looked_at() -> None:
    words = ("PEM file", "file of", "directory of")
    docs = {name: str(field.type) for name, field in each_setting()}
    assert {name for name, doc in docs.items() if any(word in doc for word in words)} == set(USES)


@pytest.mark.parametrize("use", DIRECTORIES)
def test_a_file_is_no_directory_and_nothing_lies_below_it(use: FileUse, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert fault(file, use) == "it is a file; name a directory, or move what is there away"
    below = fault(file / "a" / "b", use)
    assert below == f"{file} is a file, and nothing can lie below it; name another path"


@pytest.mark.parametrize("use", FileUse)
def test_a_link_to_nothing_is_told_with_its_target(use: FileUse, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    assert "is a link to nowhere, which is not there" in fault(link, use)
    assert "is a link to nowhere, which is not there" in fault(link / "below", use)


@pytest.mark.parametrize("use", [FileUse.APPENDED_FILE, FileUse.READ_FILE])
def test_a_directory_is_no_file(use: FileUse, tmp_path: Path) -> None:
    assert "it is a directory; name a file" in fault(tmp_path, use)


def test_what_is_read_must_be_there_and_what_is_appended_to_must_have_a_directory(
    tmp_path: Path,
) -> None:
    assert fault(tmp_path / "absent.pem", FileUse.READ_FILE) == "there is no such file"
    words = fault(tmp_path / "no" / "log", FileUse.APPENDED_FILE)
    assert words == f"there is no directory {tmp_path / 'no'}; make it, or name a file elsewhere"


def test_a_file_system_that_is_mounted_read_only_is_told_with_the_remedy(
    shared_folder: Path,
) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "none", str(shared_folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr.strip()}")
    try:
        assert fault(shared_folder / "new", FileUse.KEPT_DIRECTORY) == (
            f"the file system of {shared_folder} is mounted read-only; mount it for writing, or "
            "name another path"
        )
    finally:
        subprocess.run(["umount", "--lazy", str(shared_folder)], check=True)


def test_what_another_user_owns_is_told_with_the_remedy(shared_folder: Path) -> None:
    closed, file, ours = shared_folder / "closed", shared_folder / "file", shared_folder / "ours"
    closed.mkdir(mode=0o000)
    ours.mkdir(mode=0o555)
    file.touch(mode=0o000)
    with as_another_user():
        user = f"user {os.geteuid()} may not"
        own = "change its owner or its mode, or name another path"
        assert fault(closed, FileUse.KEPT_DIRECTORY) == (
            f"{user} read or write or enter {closed}; {own}"
        )
        assert fault(ours, FileUse.KEPT_DIRECTORY) == f"{user} write {ours}; {own}"
        assert fault(ours / "new", FileUse.KEPT_DIRECTORY) == f"{user} write {ours}; {own}"
        assert fault(ours / "log", FileUse.APPENDED_FILE) == f"{user} write {ours}; {own}"
        assert fault(file, FileUse.READ_FILE) == f"{user} read {file}; {own}"
        assert fault(file, FileUse.APPENDED_FILE) == f"{user} write {file}; {own}"
        assert "it cannot be looked at: Permission denied" in fault(
            closed / "a" / "b", FileUse.READ_DIRECTORY
        )
    for one in (closed, ours, file):
        one.chmod(0o700)


def test_what_can_be_used_or_made_is_left_alone(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path)
    for path, use in (
        (tmp_path, FileUse.KEPT_DIRECTORY),
        (link, FileUse.KEPT_DIRECTORY),
        (tmp_path / "a" / "b", FileUse.KEPT_DIRECTORY),
        (tmp_path / "profiles", FileUse.READ_DIRECTORY),
        (tmp_path / "log", FileUse.APPENDED_FILE),
        (file, FileUse.APPENDED_FILE),
        (Path("/dev/null"), FileUse.APPENDED_FILE),
        (file, FileUse.READ_FILE),
    ):
        check_path("a.setting", str(path), use)
    assert sorted(tmp_path.iterdir()) == [file, link]


@pytest.mark.parametrize("name", USES)
def test_a_setting_whose_path_cannot_be_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    settings = load_settings(None, {}, [f"{name}={file}/below"])
    section = name.partition(".")[0]
    with pytest.raises(InvalidRequest, match=rf"^{name} is .*file/below: .*nothing can lie below"):
        check_paths(settings, section)
    check_paths(settings, *({"server", "gateway", "storage", "admin", "scheduler"} - {section}))
