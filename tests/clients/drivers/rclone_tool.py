"""rclone: Debian's, and a current one that comes as a wheel."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tests.clients.driver import REGION, Endpoint
from tests.clients.drivers.command import CommandDriver, CommandFailed


class Rclone(CommandDriver):
    """A remote of type s3, provider Other, set up by the environment."""

    program = "/usr/bin/rclone"
    cannot_name: Mapping[str, str] = dict.fromkeys(
        ("/leading/slash", "a//b", "dots/../and/./more"),
        "rclone's paths have no empty parts, and none of dots alone",
    )

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        self._environment = {
            **os.environ,
            # The SDK inside of Debian's cannot join its own transport with a bundle.
            "AWS_CA_BUNDLE": "",
            "RCLONE_CONFIG_OC_TYPE": "s3",
            "RCLONE_CONFIG_OC_PROVIDER": "Other",
            "RCLONE_CONFIG_OC_ENDPOINT": endpoint.url,
            "RCLONE_CONFIG_OC_ACCESS_KEY_ID": endpoint.access_key,
            "RCLONE_CONFIG_OC_SECRET_ACCESS_KEY": endpoint.secret_key,
            "RCLONE_CONFIG_OC_REGION": REGION,
            "RCLONE_CONFIG_OC_FORCE_PATH_STYLE": str(not endpoint.virtual_host).lower(),
            "RCLONE_CONFIG": str(workspace / "rclone.conf"),
            "RCLONE_RETRIES": "1",
            "RCLONE_LOW_LEVEL_RETRIES": "1",
            "RCLONE_CA_CERT": endpoint.ca_file or "",
        }
        (workspace / "rclone.conf").touch()

    def version(self) -> str:
        return self._rclone("version").decode().splitlines()[0]

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._rclone("copyto", self.file_of(data), f"oc:{bucket}/{key}")

    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        parts = ("--s3-upload-cutoff", "5Mi", "--s3-chunk-size", "5Mi")
        self._rclone("copyto", *parts, self.file_of(data), f"oc:{bucket}/{key}")

    def get(self, bucket: str, key: str) -> bytes:
        file = self.fresh_file()
        self._rclone("copyto", f"oc:{bucket}/{key}", str(file))
        return file.read_bytes()

    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        asked = ("--offset", str(first), "--count", str(end - first))
        return self._rclone("cat", *asked, f"oc:{bucket}/{key}")

    def size_bytes(self, bucket: str, key: str) -> int | None:
        try:
            found = self._rclone("lsjson", "--stat", "--no-modtime", f"oc:{bucket}/{key}")
        except CommandFailed as error:
            if "not found" in str(error):
                return None
            raise
        entry = json.loads(found)
        return None if entry["IsDir"] else int(entry["Size"])  # what is not there is a directory

    def keys(self, bucket: str, prefix: str) -> list[str]:
        # A prefix that ends inside of a name is not said in paths: the rest is ours to leave out.
        folder, _, start = prefix.rpartition("/")
        found = self._rclone("lsf", "-R", "--files-only", f"oc:{bucket}/{folder}").decode()
        base = f"{folder}/" if folder else ""
        return [base + name for name in found.splitlines() if name.startswith(start)]

    def copy(self, bucket: str, source: str, target: str) -> None:
        self._rclone("copyto", f"oc:{bucket}/{source}", f"oc:{bucket}/{target}")

    def delete(self, bucket: str, key: str) -> None:
        self._rclone("deletefile", f"oc:{bucket}/{key}")

    def _rclone(self, *arguments: str) -> bytes:
        return self.run(self.program, *arguments, environment=self._environment)


class CurrentRclone(Rclone):
    """The one that `make clients` installs."""

    program = str(Path(__file__).parents[3] / ".venv-clients/python/bin/rclone")
