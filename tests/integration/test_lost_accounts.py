"""A storage server whose accounts.json was lost does not start as if there had been no users."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache_schemas.operators.account_changes import Directory, WatchDirectory
from tests.integration.served import wait_until
from tests.integration.tenants import new_tenant
from tests.s3_clients import call
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient


def user_names(server: RunningServer) -> list[str]:
    asked = WatchDirectory(known_version=0, known_buckets_version=0, timeout_s=0.0)
    with StorageClient(server.run_dir / "storage.sock") as storage:
        return [user.name for user in storage.ask(asked, Directory).users]


def test_lost_accounts_stop_the_start_until_somebody_says_that_they_are(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with start_server(data_dir) as server:
        assert user_names(server) == []
        server.restart_storage()  # without users there is a file all the same
        alice = new_tenant(server, "alice")
        # The gateway finds the storage server again by itself, and with it the new key.
        wait_until(lambda: alice.call("GET", "/").status == 200, "the gateway to know alice")
        bucket = alice.new_bucket()
        server.kill_storage()
        copy = (data_dir / "accounts.json").read_bytes()
        (data_dir / "accounts.json").unlink()
        with pytest.raises(AssertionError, match=r"master-key says that there was one: put back"):
            server.restart_storage()
        key = (data_dir / "master-key").read_bytes()
        (data_dir / "master-key").unlink()
        with pytest.raises(AssertionError, match=f"there are buckets of a user {alice.name}"):
            server.restart_storage()
        assert not (data_dir / "accounts.json").exists()
        (data_dir / "accounts.json").write_bytes(copy)
        (data_dir / "master-key").write_bytes(key)
        (data_dir / "master-key").chmod(0o600)
        server.restart_storage()
        assert user_names(server) == [alice.name]
        server.kill_storage()
        (data_dir / "accounts.json").unlink()
        server.restart_storage("storage.start_without_accounts=true")
        assert user_names(server) == []
        assert call(server, "HEAD", f"/{bucket}").status == 200  # root still has what is there
        server.restart_storage()
