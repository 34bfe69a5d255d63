"""Which secrets are read, by who owns their files and who else may read them."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from objectcache_runtime.private_files import read_private
from objectcache_schemas.errors import InvalidRequest

SECRET = b"the secret"
NOBODY = 65534
READ = """
import os, sys
from pathlib import Path
from objectcache_runtime.private_files import read_private
os.setgroups([])
os.setresgid(*3 * [int(sys.argv[2])])
os.setresuid(*3 * [int(sys.argv[2])])
sys.stdout.buffer.write(read_private(Path(sys.argv[1]), 100))
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """One that others could reach."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    return secret


def give_to(file: Path, user: int) -> None:
    """As systemd's LoadCredential does: mode 400 of root, and an access list with the user."""
    file.chmod(0o400)
    nobody = 0xFFFFFFFF
    # tag, permissions and id of: owner, user, group, mask, others
    entries = [(1, 4, nobody), (2, 4, user), (4, 0, nobody), (16, 4, nobody), (32, 0, nobody)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(file, "system.posix_acl_access", packed)
    except OSError as error:
        pytest.skip(f"no access lists here: {error}")


@pytest.mark.parametrize("mode", [0o400, 0o600])
def test_a_file_that_its_user_alone_may_read_is_read(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert read_private(file, 100) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o440, 0o604, 0o602, 0o610])
def test_an_own_file_that_others_may_read_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        read_private(file, 100)


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_private(tmp_path / "absent", 100) is None


@as_root
def test_a_credential_that_systemd_hands_to_a_service_with_a_user_of_its_own_is_read(
    file: Path,
) -> None:
    give_to(file, NOBODY)
    assert file.stat().st_mode & 0o777 == 0o440
    command = [sys.executable, "-c", READ, str(file), str(NOBODY)]
    read = subprocess.run(command, capture_output=True, check=False)
    assert (read.returncode, read.stdout) == (0, SECRET), read.stderr.decode()


@as_root
@pytest.mark.parametrize("mode", [0o444, 0o460])
def test_anothers_file_that_everybody_may_read_or_its_group_write_is_refused(
    file: Path, mode: int
) -> None:
    os.chown(file, NOBODY, NOBODY)
    file.chmod(mode)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        read_private(file, 100)
    file.chmod(0o440)
    assert read_private(file, 100) == SECRET


def test_a_folder_in_its_place_is_refused_and_not_kept_open(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(IsADirectoryError):
        read_private(tmp_path, 100)
    links = Path("/proc/self/fd").iterdir()
    assert str(tmp_path) not in {os.path.realpath(link) for link in links}
