"""The aws command line: Debian's, and a current one of a virtual environment of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.clients.driver import REGION, Endpoint
from tests.clients.drivers.command import CommandDriver, CommandFailed


class AwsCli(CommandDriver):
    """`aws s3` where it has a word for the step, else `aws s3api`."""

    program = "/usr/bin/aws"

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        config = workspace / ".aws" / "config"
        config.parent.mkdir()
        config.write_text(
            f"[default]\nregion = {REGION}\ns3 =\n"
            f"    addressing_style = {endpoint.addressing_style}\n"
            "    multipart_threshold = 5MB\n    multipart_chunksize = 5MB\n"
        )
        self._environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": endpoint.access_key,
            "AWS_SECRET_ACCESS_KEY": endpoint.secret_key,
            "AWS_PAGER": "",
        }

    def version(self) -> str:
        return self._aws("--version").decode().split()[0]

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._aws("s3", "cp", "--quiet", self.file_of(data), f"s3://{bucket}/{key}")

    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        self.put(bucket, key, data)

    def get(self, bucket: str, key: str) -> bytes:
        file = self.fresh_file()
        self._aws("s3", "cp", "--quiet", f"s3://{bucket}/{key}", str(file))
        return file.read_bytes()

    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        file = self.fresh_file()
        asked = ("--range", f"bytes={first}-{end - 1}", str(file))
        self._aws("s3api", "get-object", "--bucket", bucket, "--key", key, *asked)
        return file.read_bytes()

    def size_bytes(self, bucket: str, key: str) -> int | None:
        try:
            answer = self._aws("s3api", "head-object", "--bucket", bucket, "--key", key)
        except CommandFailed as error:
            if "(404)" in str(error):
                return None
            raise
        return int(json.loads(answer)["ContentLength"])

    def keys(self, bucket: str, prefix: str) -> list[str]:
        asked = ("--prefix", prefix, "--query", "Contents[].Key", "--output", "json")
        answer = self._aws("s3api", "list-objects-v2", "--bucket", bucket, *asked)
        return json.loads(answer) or []

    def copy(self, bucket: str, source: str, target: str) -> None:
        self._aws("s3", "cp", "--quiet", f"s3://{bucket}/{source}", f"s3://{bucket}/{target}")

    def delete(self, bucket: str, key: str) -> None:
        self._aws("s3", "rm", "--quiet", f"s3://{bucket}/{key}")

    def _aws(self, *arguments: str) -> bytes:
        address = ("--endpoint-url", self.endpoint.url, "--output", "json")
        return self.run(self.program, *address, *arguments, environment=self._environment)


class CurrentAwsCli(AwsCli):
    """The one that `make clients` installs."""

    program = str(Path(__file__).parents[3] / ".venv-clients/aws/bin/aws")
