"""boto3 with its defaults."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.clients.driver import PART_BYTES, REGION, Endpoint, S3Driver


def boto_client(endpoint: Endpoint) -> Any:
    """A client that differs from the default in the address alone."""
    make_client: Any = boto3.client
    style: Any = {"addressing_style": endpoint.addressing_style}
    return make_client(
        "s3",
        endpoint_url=endpoint.url,
        aws_access_key_id=endpoint.access_key,
        aws_secret_access_key=endpoint.secret_key,
        region_name=REGION,
        verify=endpoint.ca_file,
        config=Config(signature_version="s3v4", s3=style),
    )


class Boto3(S3Driver):
    """`upload_fileobj` and `download_fileobj`, which split what is large."""

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        self._s3 = boto_client(endpoint)

    def version(self) -> str:
        return f"boto3 {boto3.__version__}"

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._s3.put_object(Bucket=bucket, Key=key, Body=data)

    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        small_parts = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES)
        self._s3.upload_fileobj(io.BytesIO(data), bucket, key, Config=small_parts)

    def get(self, bucket: str, key: str) -> bytes:
        received = io.BytesIO()
        self._s3.download_fileobj(bucket, key, received)
        return received.getvalue()

    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        answer = self._s3.get_object(Bucket=bucket, Key=key, Range=f"bytes={first}-{end - 1}")
        body: bytes = answer["Body"].read()
        return body

    def size_bytes(self, bucket: str, key: str) -> int | None:
        try:
            return int(self._s3.head_object(Bucket=bucket, Key=key)["ContentLength"])
        except ClientError as error:
            if error.response["Error"]["Code"] == "404":
                return None
            raise

    def keys(self, bucket: str, prefix: str) -> list[str]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def copy(self, bucket: str, source: str, target: str) -> None:
        self._s3.copy({"Bucket": bucket, "Key": source}, bucket, target)

    def delete(self, bucket: str, key: str) -> None:
        self._s3.delete_object(Bucket=bucket, Key=key)
