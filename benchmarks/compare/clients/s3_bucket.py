"""A bucket on an S3 server, and its upkeep outside of what is measured."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import boto3
from botocore.config import Config

from benchmarks.compare.clients.store_client import Bytes, Prefix

REGION = "us-east-1"
AT_ONCE = 4  # requests of the upkeep


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where a server listens. Of the two names of this host one leaves the bucket to the path, and
    one names a bucket itself, for clients that know virtual hosts alone: few machines resolve
    names below localhost.
    """

    name: str
    port: int
    access_key: str
    secret_key: str = field(repr=False)
    path_host: str
    bucket_host: str
    bucket: str  # that `bucket_host` names

    @property
    def url(self) -> str:
        """Its endpoint; buckets are in the path."""
        return f"http://{self.path_host}:{self.port}"


class S3Bucket:
    """One bucket, through boto3."""

    def __init__(self, server: S3Server, name: str) -> None:
        self.name = name
        self._s3: Any = boto3.client(
            "s3",
            endpoint_url=server.url,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            region_name=REGION,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def create(self) -> None:
        """Make it; one's own again is a success."""
        self._s3.create_bucket(Bucket=self.name)

    def put(self, prefix: Prefix) -> None:
        """Store each chunk as an object under its key."""

        def put(item: tuple[str, Bytes]) -> None:
            self._s3.put_object(Bucket=self.name, Key=item[0], Body=item[1].tobytes())

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(put, prefix.chunks()):
                pass

    def empty(self) -> None:
        """Delete every object, one by one: old servers want a checksum for more at once."""

        def delete(entry: dict[str, Any]) -> None:
            self._s3.delete_object(Bucket=self.name, Key=entry["Key"])

        with ThreadPoolExecutor(AT_ONCE) as pool:
            while page := self._s3.list_objects_v2(Bucket=self.name).get("Contents"):
                for _ in pool.map(delete, page):
                    pass
