"""curl, which knows nothing of S3, with URLs that boto3 presigned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree.ElementTree import Element, fromstring

from tests.clients.driver import PART_BYTES, Endpoint
from tests.clients.drivers.boto import boto_client
from tests.clients.drivers.command import CommandDriver, CommandFailed

_XMLNS = "{http://s3.amazonaws.com/doc/2006-03-01/}"
_NOT_FOUND_STATUS = "404"


class CurlPresigned(CommandDriver):
    """Every step is a presigned URL and a curl command."""

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        super().__init__(endpoint, workspace)
        self._signer = boto_client(endpoint)

    def version(self) -> str:
        return " ".join(self.run("/usr/bin/curl", "--version").decode().split()[:2])

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._curl("put_object", self._named(bucket, key), "--upload-file", self.file_of(data))

    def put_parts(self, bucket: str, key: str, data: bytes) -> None:
        named = self._named(bucket, key)
        begun = self._curl("create_multipart_upload", named, "--request", "POST")
        upload = {**named, "UploadId": _xml(begun).findtext(f"{_XMLNS}UploadId") or ""}
        parts = ""
        for number, start in enumerate(range(0, len(data), PART_BYTES), start=1):
            file = self.file_of(data[start : start + PART_BYTES])
            part = {**upload, "PartNumber": number}
            head = self._curl("upload_part", part, "--upload-file", file, "--dump-header", "-")
            etag = re.search(rb'(?i)^etag: "?([^"\r]+)', head, re.MULTILINE)
            assert etag is not None, head
            parts += (
                f"<Part><PartNumber>{number}</PartNumber><ETag>{etag[1].decode()}</ETag></Part>"
            )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>"
        self._curl("complete_multipart_upload", upload, "--data-binary", body)

    def get(self, bucket: str, key: str) -> bytes:
        return self._curl("get_object", self._named(bucket, key))

    def get_range(self, bucket: str, key: str, first: int, end: int) -> bytes:
        return self._curl("get_object", self._named(bucket, key), "--range", f"{first}-{end - 1}")

    def size_bytes(self, bucket: str, key: str) -> int | None:
        try:
            head = self._curl("head_object", self._named(bucket, key), "--head")
        except CommandFailed as error:
            if _NOT_FOUND_STATUS in str(error):
                return None
            raise
        length = re.search(rb"(?i)^content-length: (\d+)", head, re.MULTILINE)
        assert length is not None, head
        return int(length[1])

    def keys(self, bucket: str, prefix: str) -> list[str]:
        asked: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
        found: list[str] = []
        while True:
            page = _xml(self._curl("list_objects_v2", asked))
            # boto3 signs encoding-type=url in.
            found += [unquote(node.text or "") for node in page.iter(f"{_XMLNS}Key")]
            token = page.findtext(f"{_XMLNS}NextContinuationToken")
            if not token:
                return found
            asked["ContinuationToken"] = token

    def copy(self, bucket: str, source: str, target: str) -> None:
        # The source is a header, which the URL's signature covers.
        asked = {**self._named(bucket, target), "CopySource": {"Bucket": bucket, "Key": source}}
        url, headers = self._presigned_with_headers("copy_object", asked)
        self._run(url, "--request", "PUT", *headers)

    def delete(self, bucket: str, key: str) -> None:
        self._curl("delete_object", self._named(bucket, key), "--request", "DELETE")

    def _named(self, bucket: str, key: str) -> dict[str, Any]:
        return {"Bucket": bucket, "Key": key}

    def _presigned_with_headers(
        self, operation: str, asked: dict[str, Any]
    ) -> tuple[str, tuple[str, ...]]:
        sent: dict[str, str] = {}

        def note(request: Any, **_: Any) -> None:
            sent.update(
                (name, value.decode() if isinstance(value, bytes) else value)
                for name, value in request.headers.items()
                if name.lower().startswith("x-amz-copy")
            )

        events = self._signer.meta.events
        events.register("before-sign.s3.CopyObject", note)
        url: str = self._signer.generate_presigned_url(operation, Params=asked)
        events.unregister("before-sign.s3.CopyObject", note)
        return url, tuple(
            part for name, value in sent.items() for part in ("--header", f"{name}: {value}")
        )

    def _curl(self, operation: str, asked: dict[str, Any], *options: str) -> bytes:
        url: str = self._signer.generate_presigned_url(operation, Params=asked)
        return self._run(url, *options)

    def _run(self, url: str, *options: str) -> bytes:
        authority = ("--cacert", self.endpoint.ca_file) if self.endpoint.ca_file else ()
        first = ("/usr/bin/curl", "--silent", "--show-error", "--fail", "--path-as-is", "--globoff")
        return self.run(*first, *authority, *options, url)


def _xml(data: bytes) -> Element:
    return fromstring(data)
