"""obstore: Rust's object_store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from tests.clients.driver import PART_BYTES, REGION, Endpoint, S3Driver


class Obstore(S3Driver):
    """One store a bucket, as its users have it."""

    cannot_name: Mapping[str, str] = dict.fromkeys(
        ("/leading/slash", "a//b", "dots/../and/./more"),
        "object_store's paths have no empty parts, and none of dots alone",
    )

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        self._stores: dict[str, Any] = {}

    def version(self) -> str:
        return f"obstore {obstore.__version__}"

    def put(self, bucket: str, key: str, data: bytes) -> None:
        obstore.put(self._store(bucket), key, data, use_multipart=False)

    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        obstore.put(self._store(bucket), key, data, use_multipart=True, chunk_size=PART_BYTES)

    def get(self, bucket: str, key: str) -> bytes:
        return bytes(obstore.get(self._store(bucket), key).bytes())

    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        return bytes(obstore.get_range(self._store(bucket), key, start=first, end=end))

    def size_bytes(self, bucket: str, key: str) -> int | None:
        try:
            return int(obstore.head(self._store(bucket), key)["size"])
        except FileNotFoundError:
            return None

    def keys(self, bucket: str, prefix: str) -> list[str]:
        pages = obstore.list(self._store(bucket), prefix or None)
        return [entry["path"] for page in pages for entry in page]

    def copy(self, bucket: str, source: str, target: str) -> None:
        obstore.copy(self._store(bucket), source, target)

    def delete(self, bucket: str, key: str) -> None:
        obstore.delete(self._store(bucket), key)

    def _store(self, bucket: str) -> Any:
        if bucket not in self._stores:
            self._stores[bucket] = self._open(bucket)
        return self._stores[bucket]

    def _open(self, bucket: str) -> Any:
        endpoint = self.endpoint
        scheme = urlsplit(endpoint.url).scheme
        make_store: Any = S3Store
        options: dict[str, Any] = {"allow_http": True}
        if endpoint.ca_file:
            options["root_certificate"] = Path(endpoint.ca_file).read_bytes()
        return make_store(
            bucket,
            endpoint=f"{scheme}://{endpoint.bucket_netloc(bucket)}",
            access_key_id=endpoint.access_key,
            secret_access_key=endpoint.secret_key,
            region=REGION,
            virtual_hosted_style_request=endpoint.virtual_host,
            client_options=options,
            retry_config={"max_retries": 0},
        )
