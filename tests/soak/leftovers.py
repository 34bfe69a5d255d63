"""What is left in the servers when everything that was stored is deleted: nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.processes_http import ask

SETTLE_S = 20.0


def delete_everything(s3: Any, buckets: Iterable[str]) -> None:
    """Delete all objects and abort all uploads; the load has ended."""
    for bucket in buckets:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            keys = [{"Key": entry["Key"]} for entry in page.get("Contents", [])]
            if keys:
                deleted = s3.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
                assert not deleted.get("Errors"), deleted
        for upload in s3.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
            s3.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


def leftovers(s3: Any, admin_socket: Path, buckets: Sequence[str]) -> list[str]:
    """What there is all the same, in words: open uploads, usage, and whatever the engine keeps.
    What is ending when this is asked has time to.
    """
    deadline_s = time.monotonic() + SETTLE_S
    pause = threading.Event()
    while (found := _left_now(s3, admin_socket, buckets)) and time.monotonic() < deadline_s:
        pause.wait(0.1)
    return found


def _left_now(s3: Any, admin_socket: Path, buckets: Sequence[str]) -> list[str]:
    found = [
        f"{bucket} has open uploads"
        for bucket in buckets
        if s3.list_multipart_uploads(Bucket=bucket).get("Uploads")
    ]
    usage = _asked(admin_socket, "/v1/usage")
    for what in (*usage["buckets"], *usage["users"]):
        counts = ("object_count", "stored_bytes", "in_flight_bytes", "deliveries")
        left = {name: what[name] for name in counts if what.get(name)}
        if left:
            found.append(f"{what.get('bucket') or what['user']} has {left}")
    engine = _asked(admin_socket, "/v1/engine")
    left = {name: engine[name] for name in ("objects", "live_bytes", "damaged") if engine[name]}
    if left:
        found.append(f"the engine has {left}")
    return found


def _asked(admin_socket: Path, path: str) -> Any:
    status, body = ask(admin_socket, "GET", path)
    assert status == 200, (path, status, body)
    return json.loads(body)
