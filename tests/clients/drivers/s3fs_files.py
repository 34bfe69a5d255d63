"""s3fs, which is aiobotocore behind a file system's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import s3fs

from tests.clients.driver import PART_BYTES, REGION, Endpoint, S3Driver


class S3fs(S3Driver):
    """File system calls; nothing is cached, so that every answer is the server's."""

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        style = {"s3": {"addressing_style": endpoint.addressing_style}}
        self._files: Any = s3fs.S3FileSystem(
            key=endpoint.access_key,
            secret=endpoint.secret_key,
            endpoint_url=endpoint.url,
            use_listings_cache=False,
            skip_instance_cache=True,
            client_kwargs={"verify": endpoint.ca_file, "region_name": REGION},
            config_kwargs={"signature_version": "s3v4", **style},
        )

    def version(self) -> str:
        return f"s3fs {s3fs.__version__}"

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._files.pipe_file(f"{bucket}/{key}", data)

    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        self._files.pipe_file(f"{bucket}/{key}", data, chunksize=PART_BYTES)

    def get(self, bucket: str, key: str) -> bytes:
        data: bytes = self._files.cat_file(f"{bucket}/{key}")
        return data

    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        data: bytes = self._files.cat_file(f"{bucket}/{key}", start=first, end=end)
        return data

    def size_bytes(self, bucket: str, key: str) -> int | None:
        try:
            return int(self._files.info(f"{bucket}/{key}")["size"])
        except FileNotFoundError:
            return None

    def keys(self, bucket: str, prefix: str) -> list[str]:
        folder, _, start = prefix.rpartition("/")
        found = self._files.find(f"{bucket}/{folder}" if folder else bucket, prefix=start)
        return [name.removeprefix(f"{bucket}/") for name in found]

    def copy(self, bucket: str, source: str, target: str) -> None:
        self._files.cp_file(f"{bucket}/{source}", f"{bucket}/{target}")

    def delete(self, bucket: str, key: str) -> None:
        self._files.rm_file(f"{bucket}/{key}")
