"""s3cmd, which asks for the bucket's location first and signs for the region US."""

from __future__ import annotations

from pathlib import Path

from tests.clients.driver import Endpoint, NotOffered
from tests.clients.drivers.command import CommandDriver, CommandFailed


class S3cmd(CommandDriver):
    """Configured by file, as `s3cmd --configure` would write it."""

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        netloc = endpoint.netloc
        lines = {
            "access_key": endpoint.access_key,
            "secret_key": endpoint.secret_key,
            "host_base": netloc,
            "host_bucket": f"%(bucket)s.{netloc}" if endpoint.virtual_host else netloc,
            "use_https": str(endpoint.secure),
            "ca_certs_file": endpoint.ca_file or "",
            "multipart_chunk_size_mb": "5",
            "max_retries": "0",
        }
        text = "".join(f"{name} = {value}\n" for name, value in lines.items() if value)
        (workspace / ".s3cfg").write_text(f"[default]\n{text}")

    def version(self) -> str:
        return self._s3cmd("--version").decode().strip()

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._s3cmd("put", self.file_of(data), f"s3://{bucket}/{key}")

    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        self.put(bucket, key, data)

    def get(self, bucket: str, key: str) -> bytes:
        file = self.fresh_file()
        self._s3cmd("get", f"s3://{bucket}/{key}", str(file))
        return file.read_bytes()

    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        size_bytes = self.size_bytes(bucket, key)
        if size_bytes != end:
            raise NotOffered("s3cmd asks for ranges to the end alone, to go on with a download")
        begun = self.file_of(b"\0" * first)
        self._s3cmd("get", "--continue", f"s3://{bucket}/{key}", begun)
        return Path(begun).read_bytes()[first:]

    def size_bytes(self, bucket: str, key: str) -> int | None:
        try:
            answer = self._s3cmd("info", f"s3://{bucket}/{key}").decode()
        except CommandFailed as error:
            if "404" in str(error):
                return None
            raise
        sizes = [line for line in answer.splitlines() if "File size:" in line]
        return int(sizes[0].rpartition(":")[2])

    def keys(self, bucket: str, prefix: str) -> list[str]:
        lines = self._s3cmd("ls", "--recursive", f"s3://{bucket}/{prefix}").decode().splitlines()
        return [line.partition(f"s3://{bucket}/")[2] for line in lines]

    def copy(self, bucket: str, source: str, target: str) -> None:
        self._s3cmd("cp", f"s3://{bucket}/{source}", f"s3://{bucket}/{target}")

    def delete(self, bucket: str, key: str) -> None:
        self._s3cmd("del", f"s3://{bucket}/{key}")

    def _s3cmd(self, *arguments: str) -> bytes:
        return self.run("/usr/bin/s3cmd", "--no-progress", *arguments)
