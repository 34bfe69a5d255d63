"""MinIO's Python client."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import minio
import urllib3
from minio.commonconfig import CopySource
from minio.error import S3Error

from tests.clients.driver import PART_BYTES, REGION, Endpoint, S3Driver


class MinioPy(S3Driver):
    """Its own signer, and multipart uploads from the part size up."""

    cannot_name: Mapping[str, str] = {
        "dots/../and/./more": "minio-py refuses names with a part of dots alone"
    }

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        self._s3: Any = minio.Minio(
            endpoint.netloc,
            access_key=endpoint.access_key,
            secret_key=endpoint.secret_key,
            secure=endpoint.secure,
            region=REGION,
            http_client=urllib3.PoolManager(ca_certs=endpoint.ca_file, retries=False),
        )
        if endpoint.virtual_host:
            self._s3.enable_virtual_style_endpoint()

    def version(self) -> str:
        return f"minio {minio.__version__}"

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._s3.put_object(bucket, key, io.BytesIO(data), len(data))

    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        self._s3.put_object(bucket, key, io.BytesIO(data), -1, part_size=PART_BYTES)

    def get(self, bucket: str, key: str) -> bytes:
        return _read(self._s3.get_object(bucket, key))

    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        return _read(self._s3.get_object(bucket, key, offset=first, length=end - first))

    def size_bytes(self, bucket: str, key: str) -> int | None:
        try:
            return int(self._s3.stat_object(bucket, key).size)
        except S3Error as error:
            if error.code == "NoSuchKey":
                return None
            raise

    def keys(self, bucket: str, prefix: str) -> list[str]:
        found = self._s3.list_objects(bucket, prefix=prefix, recursive=True)
        return [entry.object_name for entry in found]

    def copy(self, bucket: str, source: str, target: str) -> None:
        self._s3.copy_object(bucket, target, CopySource(bucket, source))

    def delete(self, bucket: str, key: str) -> None:
        self._s3.remove_object(bucket, key)


def _read(answer: Any) -> bytes:
    try:
        data: bytes = answer.read()
        return data
    finally:
        answer.close()
        answer.release_conn()
