"""What the workers of a soak do, over and over, until they are told to stop.

Every byte that comes back is compared. A miss, an eviction and SlowDown are ordinary; anything else
that is raised ends the soak.
"""

from __future__ import annotations

import http.client
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import ClientError

import objectcache
from objectcache.errors import Busy, NotFound
from objectcache_laboratory.replay.kv_bytes import KvBytes
from tests.processes_http import ask

LAYOUT = objectcache.KvLayout(
    num_layers=8,
    chunk_tokens=16,
    per_layer_chunk_bytes=16 << 10,
    dtype="bfloat16",
    fingerprint="soak@1/tp0",
)
KV_BUCKET = "soak-kv"
S3_BUCKET = "soak-s3"
PROMPTS = 400  # more than the store holds, so that chunks are evicted all the time
PROMPT_CHUNKS_MAX = 24
OBJECT_KEYS = 12  # in each of four folders; they are never evicted
ORDINARY_CODES = frozenset({"NoSuchKey", "404", "SlowDown"})
PART_BYTES = 5 << 20
ABORTED_STATUSES = (200, 404)  # of a part whose upload was aborted meanwhile
TIMEOUT_S = 60.0
SCRAPE_EVERY_S = 0.25
STORAGE_METRIC = b"objectcache_puts_running"
STORAGE_LEFT_OUT = re.compile(rb'objectcache_process_up\{.*scraped="storage".*\} 0')


class Tally:
    """How often each thing was done, by any worker, and the first thing that went wrong."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self._lock = threading.Lock()

    def count(self, what: str, times: int = 1) -> None:
        """So many more."""
        with self._lock:
            self.done[what] += times

    def fail(self, error: BaseException) -> None:
        """Keep the first failure, and end the load."""
        with self._lock:
            self.failure = self.failure or error
        self.stopping.set()


class KvWorker:
    """Prompts of a limited set: match, fetch layer by layer, check, put the rest."""

    def __init__(self, client: objectcache.Client, tally: Tally, seed: int) -> None:
        self._bucket = client.kv_bucket(KV_BUCKET, LAYOUT)
        self._bytes = KvBytes(LAYOUT)
        self._tally = tally
        self._random = random.Random(seed)

    def step(self) -> None:
        """One prompt."""
        prompt = self._random.randrange(PROMPTS)
        chunk_count = 1 + prompt % PROMPT_CHUNKS_MAX
        keys = self._bucket.chunk_keys([prompt] * (chunk_count * LAYOUT.chunk_tokens))
        matched = self._bucket.match(keys)
        self._tally.count("matches")
        if matched:
            with suppress(NotFound, Busy):  # evicted since, or too many at once
                self._fetch(keys[:matched])
        if matched < len(keys):
            rest = keys[matched:]
            with suppress(Busy):
                put = self._bucket.put(
                    rest,
                    self._bytes.chunks(rest),
                    parent_key=keys[matched - 1] if matched else None,
                )
                self._tally.count("puts")
                self._tally.count("chunks", put.stored)

    def _fetch(self, keys: list[str]) -> None:
        transport = self._random.choice(("auto", "body"))
        with self._bucket.fetch(keys, compute_window_s=0.001, transport=transport) as delivery:
            for layer in range(LAYOUT.num_layers):
                wrong = self._bytes.wrong_bytes(keys, layer, delivery.wait_layer(layer))
                assert not wrong, f"{wrong} wrong bytes in layer {layer}"
        self._tally.count("deliveries")


class S3Worker:
    """Plain objects, among few keys: put, get, range, list, delete, multipart."""

    def __init__(self, s3: Any, tally: Tally, seed: int) -> None:
        self._s3 = s3
        self._tally = tally
        self._random = random.Random(seed)

    def step(self) -> None:
        """One operation."""
        operation: Callable[[str], None] = self._random.choice(
            (
                *(self._put, self._get, self._range, self._list, self._delete),
                *(self._abandon, self._end_late),
            )
        )
        key = f"folder-{self._random.randrange(4)}/object-{self._random.randrange(OBJECT_KEYS)}"
        try:
            operation(key)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in ORDINARY_CODES:
                raise
        self._tally.count(operation.__name__.strip("_"))

    def _put(self, key: str) -> None:
        size_bytes = self._random.choice((0, 1, 4096, 70_000, 1 << 20))
        body = (key.encode() * (size_bytes // len(key) + 1))[:size_bytes]
        self._s3.put_object(Bucket=S3_BUCKET, Key=key, Body=body)

    def _get(self, key: str) -> None:
        body = self._s3.get_object(Bucket=S3_BUCKET, Key=key)["Body"].read()
        assert body == (key.encode() * (len(body) // len(key) + 1))[: len(body)], key

    def _range(self, key: str) -> None:
        with suppress(ClientError):  # of an empty object
            self._s3.get_object(Bucket=S3_BUCKET, Key=key, Range="bytes=0-99")["Body"].read()

    def _list(self, key: str) -> None:
        listing = self._s3.list_objects_v2(
            Bucket=S3_BUCKET, Prefix=key.partition("/")[0], Delimiter="/"
        )
        assert listing["KeyCount"] <= 1

    def _delete(self, key: str) -> None:
        self._s3.delete_object(Bucket=S3_BUCKET, Key=key)

    def _abandon(self, key: str) -> None:
        """A multipart upload that is aborted, or completed, by the toss of a coin."""
        upload: Any = self._s3.create_multipart_upload(Bucket=S3_BUCKET, Key=key)
        named = {"Bucket": S3_BUCKET, "Key": key, "UploadId": upload["UploadId"]}
        body = (key.encode() * (PART_BYTES // len(key) + 1))[:PART_BYTES]
        part = self._s3.upload_part(**named, PartNumber=1, Body=body)
        if self._random.random() < 0.5:
            self._s3.abort_multipart_upload(**named)
            return
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        self._s3.complete_multipart_upload(**named, MultipartUpload=parts)

    def _end_late(self, key: str) -> None:
        """An upload that is aborted while a part of it is under way."""
        upload: Any = self._s3.create_multipart_upload(Bucket=S3_BUCKET, Key=key)
        named = {"Bucket": S3_BUCKET, "Key": key, "UploadId": upload["UploadId"]}
        url = urlsplit(
            self._s3.generate_presigned_url("upload_part", {**named, "PartNumber": 1}, 3600)
        )
        connection = http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)
        try:
            connection.putrequest("PUT", f"{url.path}?{url.query}")
            connection.putheader("Content-Length", str(PART_BYTES))
            connection.endheaders(bytes(PART_BYTES // 2))
            self._s3.abort_multipart_upload(**named)
            # It may be refused before it ends: the abort may even have been first.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.send(bytes(PART_BYTES - PART_BYTES // 2))
            status = connection.getresponse().status
            assert status in (*ABORTED_STATUSES, 503), status
        finally:
            connection.close()


class AdminWorker:
    """Scrapes metrics, as a Prometheus that is in a hurry."""

    def __init__(self, admin_socket: Path, tally: Tally) -> None:
        self._socket = admin_socket
        self._tally = tally

    def step(self) -> None:
        """One scrape."""
        status, page = ask(self._socket, "GET", "/metrics")
        assert status == 200, status
        if STORAGE_METRIC in page:
            self._tally.count("scrapes")
        else:  # it took over a second, as it may on a busy machine
            assert STORAGE_LEFT_OUT.search(page), "the storage server's part is missing"
            self._tally.count("late scrapes")
        self._tally.stopping.wait(SCRAPE_EVERY_S)


def keep_working(worker: KvWorker | S3Worker | AdminWorker, tally: Tally) -> None:
    """Step until the tally says stop."""
    try:
        while not tally.stopping.is_set():
            worker.step()
    except BaseException as error:
        tally.fail(error)
