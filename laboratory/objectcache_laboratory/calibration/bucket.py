"""A bucket that exists as long as a calibration, whatever ends it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from objectcache.client import DEFAULT_REGION, Client
from objectcache_laboratory.access import StoreAccess

PREFIX = "objectcache-calibration-"

logger = logging.getLogger("objectcache.calibration")


@contextmanager
def calibration_bucket(client: Client, access: StoreAccess) -> Generator[str]:
    """The name of a bucket of our own, which is deleted at the end with all that it holds.

    Where that fails, its name is logged and nothing is raised: what was measured still counts.
    """
    name = PREFIX + secrets.token_hex(8)
    client.create_bucket(name)
    try:
        yield name
    finally:
        try:
            _delete(_s3(access), name)
        except (BotoCoreError, ClientError) as error:
            logger.warning("bucket %s was not deleted, do it by hand: %s", name, error)


def _s3(access: StoreAccess) -> Any:
    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=access.endpoint,
        verify=access.ca_file,  # None: what botocore finds itself
        aws_access_key_id=access.access_key,
        aws_secret_access_key=access.secret_key,
        region_name=DEFAULT_REGION,
        config=Config(s3={"addressing_style": "path"}),
    )


def _delete(s3: Any, name: str) -> None:
    try:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=name):
            objects = [{"Key": stored["Key"]} for stored in page.get("Contents", ())]
            if objects:
                s3.delete_objects(Bucket=name, Delete={"Objects": objects, "Quiet": True})
        s3.delete_bucket(Bucket=name)
    finally:
        s3.close()
