"""s5cmd, built on the AWS SDK for Go, version 1."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.clients.driver import Endpoint, NotOffered
from tests.clients.drivers.command import CommandDriver, CommandFailed


class S5cmd(CommandDriver):
    """Its gets are always ranged, several at a time for what is large."""

    program = str(Path(__file__).parents[3] / ".venv-clients/python/bin/s5cmd")

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        self._environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": endpoint.access_key,
            "AWS_SECRET_ACCESS_KEY": endpoint.secret_key,
        }

    def version(self) -> str:
        return f"s5cmd {self._s5cmd('version').decode().strip()}"

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._s5cmd("cp", "--raw", self.file_of(data), f"s3://{bucket}/{key}")

    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        self._s5cmd("cp", "--part-size", "5", self.file_of(data), f"s3://{bucket}/{key}")

    def get(self, bucket: str, key: str) -> bytes:
        file = self.fresh_file()
        self._s5cmd("cp", "--raw", "--part-size", "5", f"s3://{bucket}/{key}", str(file))
        return file.read_bytes()

    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        raise NotOffered("s5cmd has no option for a range; its gets of whole objects are ranged")

    def size_bytes(self, bucket: str, key: str) -> int | None:
        try:
            found = self._lines("head", f"s3://{bucket}/{key}")
        except CommandFailed as error:
            if "not found" in str(error):
                return None
            raise
        return int(found[0].get("size", 0))

    def keys(self, bucket: str, prefix: str) -> list[str]:
        found = self._lines("ls", f"s3://{bucket}/{prefix}*")
        return [entry["key"].removeprefix(f"s3://{bucket}/") for entry in found]

    def copy(self, bucket: str, source: str, target: str) -> None:
        self._s5cmd("cp", "--raw", f"s3://{bucket}/{source}", f"s3://{bucket}/{target}")

    def delete(self, bucket: str, key: str) -> None:
        self._s5cmd("rm", "--raw", f"s3://{bucket}/{key}")

    def _lines(self, *arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._s5cmd("--json", *arguments).splitlines()]

    def _s5cmd(self, *arguments: str) -> bytes:
        first = (self.program, "--endpoint-url", self.endpoint.url, "--retry-count", "0")
        return self.run(*first, *arguments, environment=self._environment)
